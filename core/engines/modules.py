"""The modules of a task."""

from __future__ import annotations

from typing import Any

from torch import nn


def modules_of(task: Any) -> dict[str, nn.Module]:
    """Return the modules of a task by attribute name; the task itself where it is one."""
    if isinstance(task, nn.Module):
        return {"task": task}
    return {name: value for name, value in vars(task).items() if isinstance(value, nn.Module)}
