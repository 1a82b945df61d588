"""The report of all trainings that met faults."""

from __future__ import annotations

from collections.abc import Sequence

from .comparison import Story
from .report import ChaosReport, Verdict
from .rounds import Round

MILDEST_FIRST: tuple[Verdict, ...] = ("equal", "lost work", "differs", "did not end")


def report_of(rounds: Sequence[Round], expected: Story, seed: int, seconds: float) -> ChaosReport:
    """Return the report.

    Args:
        rounds: at least one; each after the first has other faults for those of the one before that did not act.
        expected: what the training without faults did.
        seed: of the faults.
        seconds: how long that took.
    """
    attempts = [attempt for each in rounds for attempt in each.training.attempts]
    stories = [each.stories[0] for each in rounds if each.stories]  # none where nothing had begun
    worst = max(rounds, key=lambda each: MILDEST_FIRST.index(each.verdict))
    former = [met for each in rounds[:-1] for met in each.met if met.where]
    return ChaosReport(
        verdict=worst.verdict,
        difference=worst.difference,
        seed=seed,
        met=(*former, *rounds[-1].met),
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
