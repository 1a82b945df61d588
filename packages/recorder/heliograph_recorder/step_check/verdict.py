"""Whether a repeated step differs, in what, and what that means."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .operators import OperatorDifference, first_difference
from .outcome import Outcome, differences

if TYPE_CHECKING:
    from heliograph import Run

    from .repetition import Repetition

MOST_NAMED = 2


class Diagnosis(NamedTuple):
    """What came of comparing the repetitions of a step.

    Attributes:
        text: what differs and why; empty where all bits are equal.
        causes: the same sentences for the same cause at another step, one of each rank that differs.
        operator: which operator makes the difference on this rank; None where none was seen to.
    """

    text: str = ""
    causes: tuple[str, ...] = ()
    operator: OperatorDifference | None = None


def diagnose(
    run: Run, repetition: Repetition, *, known: OperatorDifference | None = None, names_operator: bool = True
) -> Diagnosis:
    """Repeat the passes of a batch; return what differs and why.

    On several ranks a collective: all of them repeat as often as any must.

    Args:
        run: the run.
        repetition: what the passes began with.
        known: the operator that made the difference at an earlier step on this rank.
        names_operator: whether to look for the operator that makes the difference; the same on all ranks.
    """
    own = repetition.outcome()
    own = own if run.engine.world_size == 1 else _kept(own)  # DDP may write to the memory of the gradients again
    with repetition.repeating() as repeat:
        found = differences(own, repeat_kept := _kept(repeat()))
        if not run.engine.vote([float(bool(found))])[0]:
            return Diagnosis()
        third = _kept(repeat())
        operator = first_difference(repeat) if names_operator else known
        cause, kind = _cause(own, repeat_kept, third, operator) if found else ("", "")
    earlier = " (seen at an earlier step)" if operator is not None and not names_operator else ""
    text = f"{_named(found)}; {cause}{earlier}" if found else ""
    if run.engine.world_size == 1:
        return Diagnosis(text, (kind,), operator)
    ranks = [(rank, *each) for rank, each in enumerate(run.engine.gather_objects((text, kind))) if each[0]]
    causes = tuple(f"on rank {rank}: {each}" for rank, _, each in ranks)
    return Diagnosis("; ".join(f"on rank {rank}: {each}" for rank, each, _ in ranks), causes, operator)


def _cause(own: Outcome, second: Outcome, third: Outcome, operator: OperatorDifference | None) -> tuple[str, str]:
    """Return why a step differs, and the same words for the same cause at another step."""
    if operator is None:
        text = _cause_by_outcomes(own, second, third)
        return text, text
    what = "not deterministic, with this first difference between two repetitions:"
    limit = " (if a generator that the task does not hold makes it, repetitions change the training)"
    return f"{what} {operator.text}{limit * operator.comes_from_outside}", f"{what} {operator.kind}"


def _cause_by_outcomes(own: Outcome, second: Outcome, third: Outcome) -> str:
    if not differences(second, third):
        return "repetitions agree with each other: the step of the training was computed wrongly (data corruption)"
    if not differences(own, third):
        return (
            "another repetition equals the step of the training: the repetition was computed wrongly (data corruption)"
        )
    return "not deterministic: three repetitions differ, and no operator was seen to"


def _named(found: list[str]) -> str:
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more


def _kept(outcome: Outcome) -> Outcome:
    """Return an outcome whose gradients no later backward pass writes to."""
    copies = {name: None if each is None else each.clone() for name, each in outcome.gradients.items()}
    return Outcome(outcome.loss.clone(), copies)
