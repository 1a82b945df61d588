"""What is asked of a trial of Optuna's."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from heliograph.spi import clean

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

AnyTrial: TypeAlias = "Trial | FrozenTrial"

SAME_MOMENT = timedelta(seconds=1)  # some databases round the moment at which a trial began


def live(trial: AnyTrial) -> Trial | None:
    """Return a trial of a study; None for one that is over, of which only the values are there."""
    return cast("Trial", trial) if hasattr(trial, "study") else None


def run_name(base: str, trial: AnyTrial) -> str:
    """Return the name of a trial's run, by which it finds its own checkpoints.

    Raises:
        ValueError: file names would lose the number.
    """
    suffix = f"_trial-{trial.number}"
    if not clean(base + suffix).endswith(suffix):
        raise ValueError(f"name= is too long for file names that end in {suffix}: shorten {base!r}.")
    return base + suffix


def mode_of(trial: AnyTrial) -> Literal["min", "max"]:
    """Return which way is better; one that has ended takes no reports."""
    running = live(trial)
    return "max" if running is not None and running.study.direction.name == "MAXIMIZE" else "min"


def values_of(trial: AnyTrial) -> dict[str, float]:
    """Return the parameters as the storage holds them: of a categorical one, the index of the choice."""
    return {name: float(trial.distributions[name].to_internal_repr(value)) for name, value in trial.params.items()}


def identity(trial: AnyTrial) -> dict[str, Any]:
    """Return what distinguishes a trial from one of the same number in another study."""
    assert trial.datetime_start is not None
    return {"number": trial.number, "began": trial.datetime_start.isoformat(), "parameters": values_of(trial)}


def check_identity(trial: AnyTrial, saved: Mapping[str, Any]) -> None:
    """Raise ValueError where a checkpoint is another trial's."""
    mine = identity(trial)
    apart = abs(datetime.fromisoformat(saved["began"]) - datetime.fromisoformat(mine["began"]))
    if apart > SAME_MOMENT or (saved["number"], saved["parameters"]) != (mine["number"], mine["parameters"]):
        raise ValueError(
            f"The checkpoint is of {_words(saved)}, another one than {_words(mine)}: give fit another name=, "
            f"Checkpoint another folder, or remove what is in it."
        )


def _words(known: Mapping[str, Any]) -> str:
    return f"trial {known['number']} of {known['began']} with {known['parameters']}"
