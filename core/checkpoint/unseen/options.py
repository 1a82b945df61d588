"""Options that a checkpoint overrides: of optimizers and schedulers, as the program makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ....events import Run
from .values import encode, equal, shown_apart

PARAMETERS: Final = ("params", "param_names")


def options_of(run: Run) -> dict[str, dict[str, Any]]:
    """Return the options of a run's optimizers and schedulers, before the training or a checkpoint changes them."""
    found: dict[str, Any] = {}
    for name, optimizer in run.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            place = name if len(optimizer.param_groups) == 1 else f"group {number} of {name}"
            found.update({f"{key} of {place}": each for key, each in group.items() if key not in PARAMETERS})
    for name, scheduler in run.schedulers.items():
        found.update({f"{key} of the scheduler of {name}": each for key, each in scheduler.state_dict().items()})
    return {where: encode(each) for where, each in found.items()}


def overridden(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence on each option that the program makes otherwise than the one that wrote a checkpoint.

    Args:
        before: the options of that program.
        now: those of this one.
    """
    for where in now.keys() & before.keys():
        if not equal(before[where], now[where]):
            was, value = shown_apart(before[where], now[where])
            yield f"{where} was {was} in the program, and is {value}: what the checkpoint holds is used"
