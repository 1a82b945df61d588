"""The modules of a task: found by name, and switched to eval mode for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def modules_of(task: Any) -> dict[str, nn.Module]:
    """Return the modules of a task by attribute name; the task itself where it is one."""
    if isinstance(task, nn.Module):
        return {"task": task}
    return {name: value for name, value in vars(task).items() if isinstance(value, nn.Module)}


@contextmanager
def eval_mode(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Switch modules to eval mode, and every submodule back to the mode that it had."""
    modes = [(module, module.training) for root in modules.values() for module in root.modules()]
    for root in modules.values():
        root.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
