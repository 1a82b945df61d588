"""Whether a repeated step differs, in what, and what that means."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .operators import OperatorDifference, first_difference

if TYPE_CHECKING:
    from heliograph import Run

    from .repetition import Outcome, Repetition

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
    with repetition.repeating() as repeat:
        second = repeat()
        found = [name for name, value in own.items() if second[name] != value]
        if not run.engine.vote([float(bool(found))])[0]:
            return Diagnosis()
        third = repeat()
        operator = first_difference(repeat) if names_operator else known
        cause, kind = _cause(own, second, third, operator) if found else ("", "")
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
    if second == third:
        return "repetitions agree with each other: the step of the training was computed wrongly (data corruption)"
    if own == third:
        return (
            "another repetition equals the step of the training: the repetition was computed wrongly (data corruption)"
        )
    return "not deterministic: three repetitions differ, and no operator was seen to"


def _named(found: list[str]) -> str:
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more
