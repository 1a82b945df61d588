"""What cannot run here, and why."""

from __future__ import annotations

import os
from inspect import signature
from typing import Any

BARS = "draws its own bar, and expects to be the only one: add ProgressBar() to the plugins"
REPLACED = {
    "DefaultFlowCallback": (
        "decides when the Trainer logs, evaluates and saves: add LogSchedule, ValidationSchedule and SaveSchedule to "
        "the plugins"
    ),
    "ProgressCallback": BARS,
    "NotebookProgressCallback": BARS,
    "RichProgressCallback": BARS,
    "PrinterCallback": "prints the logs as a bar of its own: add ProgressBar() or FileLog() to the plugins",
    "JITCheckpointCallback": "saves with the Trainer's own method: add Preemption() and a Checkpoint to the plugins",
}
UPLOADS = {  # the class, and the values of a variable with which it uploads the Trainer's files
    "WandbCallback": ("WANDB_LOG_MODEL", ("end", "checkpoint")),
    "MLflowCallback": ("HF_MLFLOW_LOG_ARTIFACTS", ("1", "on", "yes", "true")),
}


def check(callback: Any, args: Any, base: type) -> None:
    """Raise where a callback cannot be served.

    Raises:
        TypeError: it is not a `TrainerCallback`.
        ValueError: it needs what there is not here; says what, and what does it here.
    """
    if not isinstance(callback, base):
        raise TypeError(
            f"from_huggingface takes a transformers.TrainerCallback, got {callback!r}. An object with methods marked "
            f"@on is registered as it is, as in Trainer([...])."
        )
    kind = type(callback)
    for name in (each.__name__ for each in kind.__mro__):
        if name in REPLACED:
            raise ValueError(f"{kind.__name__} cannot run in a Heliograph training: it {REPLACED[name]}.")
        if name in UPLOADS:
            _check_uploads(kind.__name__, *UPLOADS[name])
    if _needs_trainer(callback):
        raise ValueError(
            f"{kind.__name__} cannot run in a Heliograph training: it calls methods of a transformers.Trainer, and "
            f"there is none here. Write what it does as a plugin, a class with methods marked @on."
        )
    if getattr(args, "push_to_hub", False):
        raise ValueError(
            "args has push_to_hub=True, and nothing is pushed to a hub here, so on_push_begin would never be called. "
            "Set it to False, and push after the training."
        )


def _check_uploads(kind: str, variable: str, values: tuple[str, ...]) -> None:
    value = os.environ.get(variable, "")
    if value.lower() in values:
        raise ValueError(
            f"{kind} cannot run in a Heliograph training with {variable}={value}: it uploads the folders that a "
            f"transformers.Trainer saves, and Checkpoint writes other files. Unset the variable."
        )


def _needs_trainer(callback: Any) -> bool:
    """Return whether a callback is made for a trainer, is given one, or holds one."""
    kind = type(callback)
    takes = "trainer" in signature(kind.__init__).parameters or hasattr(callback, "set_trainer")
    holds = any(type(value).__name__.endswith("Trainer") for value in vars(callback).values())
    return takes or holds
