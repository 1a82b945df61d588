"""What only one rank has to warn of is in the result of every rank."""

from __future__ import annotations

from typing import Any

from heliograph import DDPEngine, Plugin, Run, StepEnd, StrictError, Trainer, on
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph.tests.ranks_pool import Pool

LOST = "Plugin 'draws' failed, and the run continued: step_end at step 1: OSError: no display."


class Draws(Plugin):
    """An observer that fails on the second rank."""

    policy = "observer"

    @on(StepEnd)
    def draw(self, run: Run, event: StepEnd) -> None:
        """Fail once."""
        if run.engine.rank == 1 and run.progress.steps == 1:
            raise OSError("no display")


def fit(strict: bool) -> Any:
    """Return the warnings, and whether they were raised."""
    trainer = Trainer([Draws()], engine=DDPEngine(device="cpu"), strict=strict)
    try:
        return trainer.fit(linear_classifier(), class_batches(4), optimizer=sgd(), epochs=1).warnings, False
    except StrictError as error:
        return error.warnings, True


def test_every_rank_has_the_warnings_of_all(ranks: Pool) -> None:
    assert ranks(2).run(fit, False) == [((f"On rank 1: {LOST}",), False), ((LOST,), False)]


def test_all_ranks_are_strict_about_them(ranks: Pool) -> None:
    assert ranks(2).run(fit, True) == [((f"On rank 1: {LOST}",), True), ((LOST,), True)]
