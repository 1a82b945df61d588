"""Engines that take one loss per step."""

from __future__ import annotations

from collections.abc import Collection
from inspect import isgeneratorfunction
from typing import Any, NoReturn


def refuse_several_losses(engine: Any, task: Any, optimizers: Collection[str]) -> None:
    """Raise ValueError where a training step yields several losses, each with the name of its optimizer."""
    if set(optimizers) - {"optimizer"} or isgeneratorfunction(getattr(task, "training_step", None)):
        refuse_several(engine)


def refuse_several(engine: Any) -> NoReturn:
    """Raise ValueError: several losses are for another engine."""
    name = type(engine).__name__
    raise ValueError(
        f"{name} takes one loss per step, the training step yields several: their gradients would have to be exchanged "
        f"one by one. DDPEngine does that, and DeviceEngine in one process."
    )
