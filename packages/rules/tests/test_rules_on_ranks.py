"""Rules on several ranks: what one of them finds true, all do, at the same step."""

from __future__ import annotations

from typing import Any, ClassVar

import heliograph as h
import pytest
import torch
from heliograph.packages.rules.tests.scripted import EVAL, STOP, Fired, Scripted, controller, data, rules
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.ranks_pool import Pool
from heliograph_rules.base import RuleFiring, RuleOperation
from heliograph_rules.controller import RuleController
from heliograph_rules.errors import RuleEvaluationError

RANK = {"name": "process", "class": "PerProcessState"}
NOW = {"name": "now", "class": "TrainingState"}
SLOWER = {"name": "slower", "class": "ScaleLearningRate", "arguments": {"factor": 0.5}}
LATER = "process.rank == 1 and now.step == 3"


class Together(RuleOperation):
    """Keeps where it acts; of several ranks all do."""

    shared = True
    places: ClassVar[list[tuple[int, str]]] = []

    def should_note(self, run: h.Run, firing: RuleFiring) -> None:
        self.places.append((run.progress.steps, firing.trigger))


def fit(source: dict[str, Any], *plugins: Any, validation: list[float] | None = None, epochs: int = 2) -> Any:
    """Train 4 batches an epoch on this rank; return what came of it."""
    Together.places = []
    fired, task = Fired(), Scripted(validation=validation or [1.0])
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1.0)
    schedules: list[Any] = [h.LogSchedule(h.Every(batches=1))]
    options: dict[str, Any] = {}
    if validation is not None:
        schedules.append(h.ValidationSchedule(h.Every(epochs=1)))
        options["validation"] = data(2)
    plugin = RuleController(source)
    trainer = h.Trainer([*schedules, *plugins, plugin, fired], use_cpu=True)
    result = trainer.fit(task, data(8), optimizer=optimizer, epochs=epochs, **options)
    counts = {name: each["counts"] for name, each in plugin.state_dict()["controllers"].items()}
    rate = optimizer.param_groups[0]["lr"]
    return result.progress.steps, fired.acts, str(result).split("\n")[0], rate, counts, Together.places


def stop_from_one() -> Any:
    return fit(rules(controller(LATER, triggers=["on_step_end"]), metrics=[RANK, NOW]))


def test_a_rule_that_is_true_on_one_rank_stops_all_at_the_same_step(ranks: Pool) -> None:
    first, second = ranks(2).run(stop_from_one)
    assert first[0] == second[0] == 3
    assert [len(first[1]), len(second[1])] == [0, 1]
    assert first[2] == second[2]
    assert_facts(first[2], "rule_controller on rank 1", "rule 'it'", f"on_step_end: {LATER}")


def scale_from_one(rule: str, **more: Any) -> Any:
    slower = controller(rule, triggers=["on_step_end"], operations=["slower.should_scale"], **more)
    return fit(rules(slower, metrics=[RANK, NOW, EVAL], operations=[SLOWER]))


def test_what_changes_the_training_is_done_by_all_ranks_alike(ranks: Pool) -> None:
    first, second = ranks(2).run(scale_from_one, LATER)
    assert first[1] == second[1]
    assert [step for *_, step in first[1]] == [3]
    assert first[3] == second[3] == 0.5


def test_patience_counts_what_was_agreed(ranks: Pool) -> None:
    """Rank 0 finds it true at even steps, rank 1 at odd ones: together always."""
    rule = "now.step % 2 == process.rank"
    first, second = ranks(2).run(scale_from_one, rule, patience={"patience_threshold": 2})
    assert first[1] == second[1]
    assert [step for *_, step in first[1]] == [3, 6]
    assert first[4] == second[4] == {"it": {"on_step_end": 2}}


def test_a_rank_whose_rule_is_skipped_fails_or_is_off_acts_with_the_others(ranks: Pool) -> None:
    """None of them leaves the others waiting for its vote."""
    unavailable = "now.step == 3 if process.rank == 1 else evalmetric.loss > 0"
    failing = "now.step == 3 if process.rank == 1 else 1 / (now.step - now.step) > 0"
    for rule, on_error in ((unavailable, "warn"), (failing, "warn"), (failing, "disable")):
        first, second = ranks(2).run(scale_from_one, rule, on_error=on_error)
        assert first[1] == second[1]
        assert [step for *_, step in first[1]] == [3]
        assert first[3] == second[3] == 0.5


def test_a_rule_that_fails_on_one_rank_fails_the_run_on_all(ranks: Pool) -> None:
    rule = "True if process.rank == 1 else 1 / (now.step - 2) > 0"
    with pytest.raises(RuleEvaluationError, match="ZeroDivisionError") as caught:
        ranks(2).run(scale_from_one, rule, on_error="raise")
    assert caught.value.controller == "it"


class AskOnOne(h.Plugin):
    """Asks for the validation of an epoch on rank 1 only."""

    asks = ("validation",)

    @h.on(h.EpochEnd)
    def ask(self, run: h.Run, event: h.EpochEnd) -> None:
        if run.engine.rank == 1:
            run.control.request_validation("rank 1 wants it")


def at_the_end() -> Any:
    source = rules(
        controller("evalmetric.eval_loss < 0.5", triggers=["on_epoch_end"], operations=["together.should_note", STOP]),
        metrics=[EVAL],
        operations=[{"name": "together", "class": Together}],
    )
    return fit(source, AskOnOne(), validation=[0.9, 0.4, 0.4], epochs=3)


def test_all_ranks_wait_for_a_validation_that_one_asked_for(ranks: Pool) -> None:
    first, second = ranks(2).run(at_the_end)
    assert first == second
    assert (first[0], first[1]) == (8, [("it", "on_epoch_end", 2, 8, 8)])
    assert first[5] == [(8, "on_epoch_end")]


def skip_on_one() -> Any:
    source = rules(
        controller(
            "process.rank == 1 and now.batch == 1", triggers=["on_step_begin"], operations=["control.should_skip_batch"]
        ),
        metrics=[RANK, NOW],
    )
    return fit(source)


def test_a_batch_that_one_rank_skips_all_skip(ranks: Pool) -> None:
    first, second = ranks(2).run(skip_on_one)
    assert first[0] == second[0] == 6
