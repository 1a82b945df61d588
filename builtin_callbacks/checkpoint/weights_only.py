"""What is different for a `Checkpoint` that saves only weights: nothing is resumed from it, and it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...events import Run
from .repeated.proof import Proof

OF_A_RESUME: dict[str, Any] = {
    "resume": None,
    "batch_change": "refuse",
    "restore_attributes": True,
    "on_difference": "note",
}


class NoProof(Proof):
    """Keeps no losses, as there is no resume that could do a step again."""

    def begin(self, run: Run, folder: Path) -> None:
        """Do nothing."""

    def continue_from(self, run: Run) -> None:
        """Do nothing."""

    def save(self, run: Run) -> None:
        """Do nothing."""

    def finish(self, run: Run) -> None:
        """Do nothing."""


def check_options(
    load_best: str | None, sharded: bool | None, of_a_resume: dict[str, Any], *, weights_only: bool
) -> None:
    """Raise ValueError for options that are about a resume, or about more than weights, where only these are saved.

    Args:
        load_best: what is loaded back at the end.
        sharded: whether every rank writes its shards.
        of_a_resume: the other options that matter at a resume only, by name.
        weights_only: whether only weights are saved.
    """
    given = [f"{name}={value!r}" for name, value in of_a_resume.items() if value != OF_A_RESUME[name]]
    given += ["load_best='everything'"] * (load_best == "everything") + ["sharded=True"] * bool(sharded)
    if given and weights_only:
        raise ValueError(
            f"weights_only=True saves no optimizer, no shards, and nothing to resume, so {', '.join(given)} has no "
            f"meaning there: give that to another Checkpoint, in another folder."
        )


def full_ones(run: Run, kind: type[Any]) -> list[Any]:
    """Return the plugins of a kind that save what a run can resume, and are switched on."""
    found = (each for each in run.plugins if isinstance(each, kind) and run.plugins.is_enabled(each))
    return [each for each in found if not each.weights_only]


def warn_at_start(run: Run, name: str, *, is_alone: bool) -> None:
    """Say, where nothing else saves this run, that it cannot be resumed."""
    if not is_alone:
        return
    run.data.doubt("not exact", "only weights are saved, which cannot be resumed: Checkpoint(weights_only=True)")
    if "preemption" in run.plugins.declared("exclusive"):
        run.warn(
            f"When this process is taken away, its training is lost: plugin {name!r} saves only weights. Add another "
            f"Checkpoint, in another folder, for what can be resumed."
        )


def lost(path: Path | None, step: int | None) -> str:
    """Return what a run that ended early leaves: weights, and nothing to resume."""
    if path is None or step is None:
        return "no weights were saved yet, and nothing that could be resumed"
    return f"the newest weights are {path}, of step {step}; only weights are saved, so the run cannot be resumed"
