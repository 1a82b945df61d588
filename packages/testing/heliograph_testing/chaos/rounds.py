"""Trainings with faults: the reference, the verdict of each training, and the report of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heliograph.spi import UsageError
from heliograph_recorder import diverge

from .attempts import ChaosAttempt, ChaosTraining
from .comparison import AT_THE_END, RankStory, first_difference, is_of_end, story_of
from .faults.fault import KINDS, Fault
from .journal import refusal_in
from .report import ChaosReport, FaultOutcome, Verdict


def read_reference(training: ChaosTraining) -> list[RankStory]:
    (attempt,) = training.attempts
    if refused := refusal_in(training.journals):
        raise UsageError(refused)
    if not attempt.completed:
        raise UsageError(f"The training fails without faults: {describe_failure(attempt, [attempt])}")
    stories = [story_of(path) for path in training.journals]
    if outside := next((path for story in stories for path in story.outside), ""):
        raise UsageError(
            f"The training writes outside its folder, so its runs would share files: {outside}. Use a path that is "
            f"relative to the current folder."
        )
    if any(story.resumed for story in stories):
        raise UsageError(
            "The training resumed from a checkpoint that existed before: exclude its folder, for example --leave-out "
            "runs."
        )
    if not any(story.done for story in stories):
        raise UsageError("The script trained no batch with a `heliograph.Trainer`.")
    for story in stories:
        if story.lost:
            raise UsageError(f"The training loses work without faults: {story.lost}.")
    return stories


def check_saves(plan: Sequence[Fault], counts: Mapping[str, int]) -> None:
    ending = sorted({fault.kind for fault in plan if KINDS[fault.kind].ends})
    if ending and not counts.get("save_point"):
        raise UsageError(
            f"The training has no save point, so it cannot resume after a fault that ends it ({', '.join(ending)}): "
            f"add Checkpoint('runs/x', every=Every(epochs=1), resume='auto'), or choose other kinds."
        )


def describe_failure(attempt: ChaosAttempt, attempts: Sequence[ChaosAttempt]) -> str:
    status = ", ".join(map(str, attempt.statuses))
    lines = attempt.output.read_text(encoding="utf-8", errors="backslashreplace").strip().splitlines()
    how = "was ended by the watchdog" if attempt.hung else f"ended with status {status}"
    faults = ", ".join(attempt.faults) or "none"
    return (
        f"attempt {len(attempts)} {how}; faults: {faults}; its output ends with: {' | '.join(lines[-3:]) or 'nothing'}"
    )


Aside = frozenset[tuple[str, str]]
OTHER_SAVES = frozenset({"preempt", "lost-notice", "lost-request"})  # faults that change when checkpoints are written
MILD = frozenset({"preempt", "lost-request", "slow", "slow-disk", "clock-jump"})  # no attempt may fail after these


@dataclass(frozen=True, slots=True)
class ChaosRound:
    """One training with a plan of faults, with all its attempts.

    Attributes:
        training: the training.
        stories: the story of each rank.
        met: the faults of the plan with their outcomes.
        verdict: the verdict of the training.
        difference: the first difference, or the failure; empty if there is none.
    """

    training: ChaosTraining
    stories: Sequence[RankStory]
    met: tuple[FaultOutcome, ...]
    verdict: Verdict
    difference: str

    @property
    def missed(self) -> list[Fault]:
        return [outcome.fault for outcome in self.met if not outcome.where]

    @property
    def changes_numbers(self) -> bool:
        return any(KINDS[outcome.fault.kind].changes_numbers for outcome in self.met if outcome.where)


def close_round(
    training: ChaosTraining, plan: Sequence[Fault], expected: Sequence[RankStory], aside: Sequence[Aside]
) -> ChaosRound:
    stories = [story_of(path) for path in training.journals]
    outcomes = _outcomes(plan, stories)
    kinds = {outcome.fault.kind for outcome in outcomes if outcome.where}
    verdict, difference = _judge(training, stories, kinds, expected, aside)
    return ChaosRound(training, stories, outcomes, verdict, difference)


def first_difference_of_ranks(
    expected: Sequence[RankStory],
    stories: Sequence[RankStory],
    aside: Sequence[Aside],
    *,
    only_last: bool = False,
) -> str | None:
    for rank, (reference, story, names) in enumerate(zip(expected, stories, aside, strict=True)):
        if difference := first_difference(reference, story, names, only_last=only_last):
            return f"on rank {rank} {difference}" if rank else difference
    return None


def _judge(
    training: ChaosTraining,
    stories: Sequence[RankStory],
    kinds: set[str],
    expected: Sequence[RankStory],
    aside: Sequence[Aside],
) -> tuple[Verdict, str]:
    if not training.attempts[-1].completed:
        return "did not end", describe_failure(training.attempts[-1], training.attempts)
    if kinds & OTHER_SAVES or not any(story.resumed for story in stories):
        saves = _names_of_saves(expected)
        aside = [names | saves for names in aside]
    changed = any(KINDS[kind].changes_numbers for kind in kinds)
    if difference := first_difference_of_ranks(expected, stories, aside, only_last=changed):
        return "differs", difference + _recorded_difference(expected[0], stories[0])
    lost = next((story.lost for story in stories if story.lost), "") or _needless_failure(training)
    return ("lost work", lost) if lost else ("equal", "")


def _names_of_saves(expected: Sequence[RankStory]) -> Aside:
    # Facts that depend on when checkpoints were saved.
    ends = [
        {
            kind: facts[-1]
            for (training, kind, when), facts in story.facts.items()
            if (training, when) == (number, AT_THE_END)
        }
        for story in expected
        for number in story.ends
    ]
    return frozenset({("checkpoints", ""), ("last_checkpoint", "name" if all(map(is_of_end, ends)) else "")})


def _needless_failure(training: ChaosTraining) -> str:
    # An attempt that failed or hung without a fault that explains it.
    for number, attempt in enumerate(training.attempts):
        if (attempt.failed or attempt.hung) and MILD.issuperset(attempt.faults):
            return describe_failure(attempt, training.attempts[: number + 1])
    return ""


def _recorded_difference(expected: RankStory, story: RankStory) -> str:
    if expected.recording is None or story.recording is None:
        return ""
    try:
        first = diverge(expected.recording, story.recording).first
    except ValueError as error:
        return f"; their recordings cannot be compared: {error}"
    return "" if first is None else f"; first difference of their recordings: {first}"


def _outcomes(plan: Sequence[Fault], stories: Sequence[RankStory]) -> tuple[FaultOutcome, ...]:
    acted = {entry["number"]: entry for story in stories for entry in story.faults}
    counts = [story.counts for story in stories]
    return tuple(
        FaultOutcome(fault, entry["where"], entry["text"], entry.get("by", ""), entry.get("answer", ""))
        if (entry := acted.get(number))
        else FaultOutcome(fault, why_not=_why_not(fault, counts))
        for number, fault in enumerate(plan)
    )


def _why_not(fault: Fault, counts: Sequence[Counter[str]]) -> str:
    emitted = counts[fault.rank][fault.at] if fault.rank < len(counts) else 0
    if emitted < fault.count:
        return f"the event was emitted {emitted} times"
    if fault.is_at_operation:
        return "its process made too few file operations in the folder after the event"
    if fault.kind == "lost-request":
        return "no save was requested after it"
    return "another fault ended the process at this event"


MILDEST_FIRST: tuple[Verdict, ...] = ("equal", "lost work", "differs", "did not end")


def report_of(rounds: Sequence[ChaosRound], expected: RankStory, seed: int, seconds: float) -> ChaosReport:
    attempts = [attempt for part in rounds for attempt in part.training.attempts]
    stories = [part.stories[0] for part in rounds if part.stories]  # no story if no training started
    worst = max(rounds, key=lambda part: MILDEST_FIRST.index(part.verdict))
    earlier = [outcome for part in rounds[:-1] for outcome in part.met if outcome.where]
    return ChaosReport(
        verdict=worst.verdict,
        difference=worst.difference,
        seed=seed,
        met=(*earlier, *rounds[-1].met),
        trainings=len(rounds),
        attempts=len(attempts),
        hung=sum(attempt.hung for attempt in attempts),
        resumed=sum(story.resumed for story in stories),
        restarted=sum(story.restarted for story in stories),
        batches=len(expected.done),
        batches_done=sum(story.batches_done for story in stories),
        seconds=seconds,
        seconds_spent=sum(attempt.seconds for attempt in attempts),
    )
