"""A training that has met a plan of faults, beside one without: what acted, what differs, what was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from heliograph_recorder import diverge

from .attempts import Training
from .checkpoint_facts import AT_THE_END, is_of_end
from .comparison import Story, first_difference, story_of
from .faults.fault import KINDS, Fault
from .reference import describe_failure
from .report import Met, Verdict

Aside = frozenset[tuple[str, str]]
OTHER_SAVES = frozenset({"preempt", "lost-notice", "lost-request"})  # faults by which other checkpoints are written
MILD = frozenset({"preempt", "lost-request", "slow", "slow-disk", "clock-jump"})  # by which nothing need fail


@dataclass(frozen=True, slots=True)
class Round:
    """One training, from its first attempt to its last.

    Attributes:
        training: with its attempts.
        stories: of each rank.
        met: the faults of the plan, and what became of each.
        verdict: what came of the training.
        difference: the first one, or how it failed; empty where there is none.
    """

    training: Training
    stories: Sequence[Story]
    met: tuple[Met, ...]
    verdict: Verdict
    difference: str

    @property
    def missed(self) -> list[Fault]:
        """The faults that did not act."""
        return [each.fault for each in self.met if not each.where]

    @property
    def changes_numbers(self) -> bool:
        """Whether a fault that changes numbers has acted."""
        return any(KINDS[each.fault.kind].changes_numbers for each in self.met if each.where)


def close_round(training: Training, plan: Sequence[Fault], expected: Sequence[Story], aside: Sequence[Aside]) -> Round:
    """Read what a training did, and compare it.

    Args:
        training: which has ended.
        plan: the faults that it was to meet.
        expected: what each rank of a training without faults did.
        aside: for each rank, the values that are not compared.
    """
    stories = [story_of(path) for path in training.journals]
    met = _met(plan, stories)
    kinds = {each.fault.kind for each in met if each.where}
    verdict, difference = _judge(training, stories, kinds, expected, aside)
    return Round(training, stories, met, verdict, difference)


def first_difference_of_ranks(
    expected: Sequence[Story], others: Sequence[Story], aside: Sequence[Aside], *, only_last: bool = False
) -> str | None:
    """Return the first difference of any rank; see `first_difference`."""
    for rank, (one, other, names) in enumerate(zip(expected, others, aside, strict=True)):
        if found := first_difference(one, other, names, only_last=only_last):
            return f"on rank {rank} {found}" if rank else found
    return None


def _judge(
    training: Training,
    stories: Sequence[Story],
    kinds: set[str],
    expected: Sequence[Story],
    aside: Sequence[Aside],
) -> tuple[Verdict, str]:
    if not training.attempts[-1].completed:
        return "did not end", describe_failure(training.attempts[-1], training.attempts)
    if kinds & OTHER_SAVES or not any(story.resumed for story in stories):
        other = _names_of_saves(expected)
        aside = [one | other for one in aside]
    changed = any(KINDS[kind].changes_numbers for kind in kinds)
    if difference := first_difference_of_ranks(expected, stories, aside, only_last=changed):
        return "differs", difference + _meaning(expected[0], stories[0])
    lost = next((story.lost for story in stories if story.lost), "") or _needless_failure(training)
    return ("lost work", lost) if lost else ("equal", "")


def _names_of_saves(expected: Sequence[Story]) -> Aside:
    """Return what is another one where saves were at other places."""
    ends = [
        {what: facts[-1] for (which, what, when), facts in story.facts.items() if (which, when) == (number, AT_THE_END)}
        for story in expected
        for number in story.ends
    ]
    return frozenset({("checkpoints", ""), ("last_checkpoint", "name" if all(map(is_of_end, ends)) else "")})


def _needless_failure(training: Training) -> str:
    """Return which attempt has failed or hung, though nothing had happened by which it must; empty for none."""
    for number, attempt in enumerate(training.attempts):
        if (attempt.failed or attempt.hung) and MILD.issuperset(attempt.faults):
            return describe_failure(attempt, training.attempts[: number + 1])
    return ""


def _meaning(expected: Story, other: Story) -> str:
    """Return what the recordings of two trainings say of their first difference, if there are any."""
    if expected.recording is None or other.recording is None:
        return ""
    try:
        first = diverge(expected.recording, other.recording).first
    except ValueError as error:
        return f"; their recordings cannot be compared: {error}"
    return "" if first is None else f"; by their recordings: {first}"


def _met(plan: Sequence[Fault], stories: Sequence[Story]) -> tuple[Met, ...]:
    acted = {entry["number"]: entry for story in stories for entry in story.faults}
    counts = [story.counts for story in stories]
    return tuple(
        Met(fault, each["where"], each["text"], each.get("by", ""), each.get("answer", ""))
        if (each := acted.get(number))
        else Met(fault, why_not=_why_not(fault, counts))
        for number, fault in enumerate(plan)
    )


def _why_not(fault: Fault, counts: Sequence[Counter[str]]) -> str:
    """Return why a fault has not acted."""
    emitted = counts[fault.rank][fault.at] if fault.rank < len(counts) else 0
    if emitted < fault.count:
        return f"there were {emitted} of these events"
    if fault.is_at_operation:
        return "too few operations on files of the folder came after it in its process"
    if fault.kind == "lost-request":
        return "no save was requested after it"
    return "another fault ended the process at this event"
