"""A training without faults, as what others are compared with; how an attempt has failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heliograph.spi import UsageError

from .attempts import Attempt, Training
from .comparison import Story, story_of
from .faults.fault import KINDS, Fault
from .journal import refusal_in


def read_reference(training: Training) -> list[Story]:
    """Return what each rank of a training without faults did.

    Raises:
        UsageError: it is of no use as a reference.
    """
    (attempt,) = training.attempts
    if refused := refusal_in(training.journals):
        raise UsageError(refused)
    if not attempt.completed:
        raise UsageError(f"The training fails without any fault: {describe_failure(attempt, [attempt])}")
    stories = [story_of(path) for path in training.journals]
    if outside := next((path for story in stories for path in story.outside), ""):
        raise UsageError(
            f"The training writes outside of its folder, where the runs would meet: {outside}. Let it write to a path "
            f"that is relative to the current folder."
        )
    if any(story.resumed for story in stories):
        raise UsageError(
            "The training continued from a checkpoint that was there before: leave its folder out, as in --leave-out "
            "runs."
        )
    if not any(story.done for story in stories):
        raise UsageError("The training has no batch: no `heliograph.Trainer` has trained in it.")
    for story in stories:
        if story.lost:
            raise UsageError(f"Work is lost without any fault: {story.lost}.")
    return stories


def check_saves(plan: Sequence[Fault], counts: Mapping[str, int]) -> None:
    """Raise UsageError where faults are to end a training that has no save point.

    Args:
        plan: the faults.
        counts: how often the training has emitted each event, by name.
    """
    ending = sorted({fault.kind for fault in plan if KINDS[fault.kind].ends})
    if ending and not counts.get("save_point"):
        raise UsageError(
            f"The training has no save point, so after a fault that ends it ({', '.join(ending)}) it can only begin "
            f"again: give it Checkpoint('runs/x', every=Every(epochs=1), resume='auto'), or choose other kinds."
        )


def describe_failure(attempt: Attempt, attempts: Sequence[Attempt]) -> str:
    """Return how the last attempt ended, with the end of its output."""
    status = ", ".join(map(str, attempt.statuses))
    lines = attempt.output.read_text(encoding="utf-8", errors="backslashreplace").strip().splitlines()
    how = "was ended by the watchdog" if attempt.hung else f"ended with status {status}"
    met = ", with these faults: " + ", ".join(attempt.faults) if attempt.faults else ", though no fault had acted in it"
    return f"attempt {len(attempts)} {how}{met}; its output ends with: {' | '.join(lines[-3:]) or 'nothing'}"
