"""Rules in a run: asked in order, with fresh values, patient, and reported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.packages.rules.tests.scripted import (
    EVAL,
    STOP,
    Fired,
    Scripted,
    asked,
    controller,
    data,
    lines,
    rules,
    train,
)
from heliograph.packages.tests.facts import assert_each, assert_facts, has_facts
from heliograph_rules.base import RuleFired, RuleFiring, RuleMetric, RuleOperation
from heliograph_rules.controller import RuleController
from heliograph_rules.errors import RuleError, RuleEvaluationError
from heliograph_rules.files.specs import RulePart, RuleSet, RuleSpec
from heliograph_testing import check_plugin

WINDOW = {"name": "window", "class": "HistoryBasedMetric", "arguments": {"window_size": 2}}


class Steps(RuleMetric):
    """Counts how often it is computed; may be read at any time."""

    when_read = True
    computed = 0

    def compute(self, run: h.Run, event: h.Event) -> int:
        type(self).computed += 1
        return run.progress.steps


class Stale(RuleMetric):
    """A value that comes at logs only."""

    events = (h.Log,)

    def compute(self, run: h.Run, event: h.Event) -> Any:
        return {"steps": run.progress.steps, "number": np.float64(0.5), "flag": np.bool_(True)}


class Tensors(RuleMetric):
    events = (h.StepEnd,)

    def compute(self, run: h.Run, event: h.Event) -> Any:
        return {"flag": torch.tensor(run.progress.steps == 3), "vector": torch.ones(2)}


class Notes(RuleOperation):
    """Keeps what is reported to it."""

    reported: ClassVar[list[RuleFiring]] = []
    read: ClassVar[list[dict[str, Any]]] = []
    phases: ClassVar[list[str]] = []

    def should_read(self, run: h.Run, firing: RuleFiring) -> None:
        assert len(firing.metrics) == 1
        self.read.append(dict(firing.metrics))

    def should_note(self, run: h.Run, firing: RuleFiring) -> None:
        self.reported.append(firing)
        self.phases.append(run.phase)

    def should_fail(self, run: h.Run, firing: RuleFiring) -> None:
        raise RuleEvaluationError("The printer is out of paper.")

    def should_crash(self, run: h.Run, firing: RuleFiring) -> None:
        raise OSError("disk full")


NOTES = [{"name": "notes", "class": Notes}]


@pytest.fixture(autouse=True)
def _fresh(caplog: pytest.LogCaptureFixture) -> None:
    Steps.computed, Notes.reported, Notes.read, Notes.phases = 0, [], [], []
    caplog.set_level(logging.DEBUG, logger="heliograph")


@pytest.mark.parametrize("kind", ["file", "text", "mapping", "objects", "list"])
def test_a_run_is_stopped_by_a_rule(kind: str, tmp_path: Path) -> None:
    mapping = rules(controller("training_loss['loss'] < 1.0"), metrics=[{"name": "training_loss", "class": "Loss"}])
    path = tmp_path / "rules.yaml"
    path.write_text(str(mapping), encoding="utf-8")  # a mapping of Python's is YAML, too
    one = RuleSpec("it", ["on_log"], "training_loss['loss'] < 1.0", [STOP])
    whole = RuleSet([one], metrics=[RulePart("training_loss", "Loss")])
    without = [RuleSpec("it", ["on_step_end"], True, [STOP])]
    sources = {"file": path, "text": str(path), "mapping": mapping, "objects": whole, "list": without}
    result = train(sources[kind], losses=[3.0, 2.0, 0.9, 0.5])
    assert (result.status, result.stopped_by) == ("stopped", "rule_controller")
    assert result.progress.steps == (1 if kind == "list" else 3)
    if kind != "list":
        assert_facts(result.reason, "rule 'it'", "on_log", "training_loss['loss'] < 1.0")


def test_rules_are_asked_in_the_order_of_the_file_and_do_what_they_say_in_order() -> None:
    source = rules(
        controller(True, name="second", operations=["control.should_next_phase", "control.should_save"]),
        controller(True, name="first", operations=["control.should_end_epoch"]),
        metrics=[],
    )
    source["controllers"].append(controller(True, name="third", operations=["control.should_stop"]))
    verbs = [verb for verb, *_ in asked(train(source, epochs=1))]
    assert verbs[:4] == ["next_phase", "save", "end_epoch", "stop"]


def test_a_rule_may_be_a_boolean_of_yaml(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    text = "controllers: [{name: it, triggers: [on_step_end], rule: %s, operations: [hfcontrols.should_training_stop]}]"
    for word, steps in (("true", 1), ("false", 8)):
        path.write_text(text % word, encoding="utf-8")
        assert train(path).progress.steps == steps


def test_two_controllers_with_names_of_their_own_work_together() -> None:
    first = RuleController(rules(controller('trainer_state["step"] == 2', operations=["control.should_save"])))
    second = RuleController(rules(controller('trainer_state["step"] == 3'))).named("stopper")
    result = train(first, second)
    assert asked(result) == [("save", 0, 2)]
    assert asked(result, "stopper") == [("stop", 0, 3)]
    assert result.stopped_by == "stopper"


def test_each_trigger_of_a_rule_has_a_patience_of_its_own() -> None:
    """Counted per controller and trigger: the log and the step of one batch do not add up."""
    source = rules(
        controller(
            True,
            triggers=["on_step_end", "on_log"],
            patience={"patience_threshold": 2},
            operations=["notes.should_note"],
        ),
        metrics=[],
        operations=NOTES,
    )
    train(source, epochs=2)
    assert [firing.trigger for firing in Notes.reported] == ["on_step_end", "on_log"] * 2


def test_a_skip_for_an_unavailable_metric_leaves_the_patience_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Validations after the fourth and eighth step: the rule is skipped at the first three, reported once."""
    source = rules(
        controller('evalmetric["eval_loss"] > 0', triggers=["on_step_end"], patience={"patience_threshold": 1}),
        metrics=[EVAL],
    )
    fired = Fired()
    train(source, fired, validation=[1.0], epochs=2)
    assert fired.steps() == [6]
    reported = [line for line in lines(caplog.records) if "is skipped" in line]
    assert_each(reported, ("rule 'it' is skipped", "not available yet: evalmetric"))


def test_what_can_be_read_at_any_time_is_fresh_and_computed_once_an_event() -> None:
    source = rules(
        controller("now == 3", name="a", triggers=["batch_end"], operations=["notes.should_note"]),
        controller("now >= 3", name="b", triggers=["batch_end"]),
        metrics=[{"name": "now", "class": Steps}],
        operations=NOTES,
    )
    result = train(source)
    assert result.progress.steps == 3
    assert [firing.metrics["now"] for firing in Notes.reported] == [3]
    assert Steps.computed == 3


def test_a_metric_that_no_rule_reads_is_computed_when_an_operation_reads_it() -> None:
    source = rules(
        controller("True", operations=["notes.should_note"]),
        controller("True", name="reads", triggers=["on_epoch_end"], operations=["notes.should_read"]),
        metrics=[{"name": "now", "class": Steps}],
        operations=NOTES,
    )
    train(source, batches=2, epochs=1)
    assert (Notes.read, Steps.computed) == ([{"now": 2}], 1)


def test_a_metric_of_one_event_keeps_its_value_at_others() -> None:
    source = rules(
        controller("seen['steps'] == 2 and seen.flag and seen.number < 1", triggers=["on_step_end"]),
        metrics=[{"name": "seen", "class": Stale}],
    )
    assert train(source, logs=2).progress.steps == 3


def test_numbers_and_booleans_of_tensors_are_values() -> None:
    source = rules(controller("own['flag']", triggers=["on_step_end"]), metrics=[{"name": "own", "class": Tensors}])
    assert train(source).progress.steps == 3


def test_an_error_of_a_metric_says_whose_it_is() -> None:
    class Failing(Steps):
        def compute(self, run: h.Run, event: h.Event) -> int:
            raise KeyError("sensor")

    source = rules(controller("own > 1"), metrics=[{"name": "own", "class": Failing}])
    with pytest.raises(KeyError, match="sensor") as caught:
        train(source)
    assert any("heliograph: in metric 'own'" in line for line in caught.value.__notes__)


ON_ERROR = rules(controller("1 / (trainer_state['step'] - 2) > 0.9"))  # fails at step 2, and is true at step 3


@pytest.mark.parametrize("own", [True, False])
def test_on_error_raise_fails_the_run(own: bool) -> None:
    source = rules(ON_ERROR["controllers"][0] | ({"on_error": "raise"} if own else {}))
    with pytest.raises(RuleEvaluationError, match="ZeroDivisionError") as caught:
        train(source, given={"on_error": "disable" if own else "raise"})
    assert caught.value.controller == "it"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_on_error_warn_is_reported_once_and_counts_as_false(caplog: pytest.LogCaptureFixture) -> None:
    source = rules(
        controller("1 / (trainer_state['step'] - trainer_state['step']) > 0", name="never"),
        controller("training_loss['nothing'] > 0", name="neither"),
        *ON_ERROR["controllers"],
    )
    result = train(source, logs=1)
    assert result.progress.steps == 3
    reported = [line for line in lines(caplog.records) if "counts as false" in line]
    assert_each(
        [line.split(":")[0] for line in reported],
        ("controller 'never'", "column 1"),
        ("controller 'neither'", "column 1"),
        ("controller 'it'", "column 1"),
    )
    assert sum(note in reported for note in result.notes) == 3


def test_a_failure_resets_the_patience_as_a_false_outcome_does() -> None:
    rule = "1 / (trainer_state['step'] - 2) != 0"
    fired = Fired()
    source = rules(controller(rule, patience={"patience_threshold": 1}, operations=["control.should_log"]))
    train(source, fired, epochs=1)
    assert fired.steps() == [4]
    again = Fired()
    patience = {"patience_threshold": 1, "mode": "no_reset_on_failure"}
    train(rules(controller(rule, patience=patience, operations=["control.should_log"])), again, epochs=1)
    assert again.steps() == [3]


def test_on_error_disable_switches_the_rule_off(caplog: pytest.LogCaptureFixture) -> None:
    result = train(ON_ERROR, given={"on_error": "disable"})
    assert result.status == "completed"
    assert any("off for the rest" in note for note in result.notes)
    assert len([line for line in lines(caplog.records) if "is off" in line]) == 1


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_an_operation_that_fails_as_a_rule_does_is_treated_alike(on_error: str) -> None:
    source = rules(controller(True, operations=["notes.should_fail"], on_error=on_error), operations=NOTES)
    if on_error == "raise":
        with pytest.raises(RuleError, match="controller 'it': The printer"):
            train(source)
    else:
        reported = ("controller 'it'", "The printer", "counts as false")
        assert any(has_facts(note, *reported) for note in train(source).notes)


def test_an_act_that_fails_midway_reports_what_was_done_before() -> None:
    reported: list[tuple[str, ...]] = []

    class Listener(h.Plugin):
        @h.on(RuleFired)
        def receive(self, run: h.Run, event: RuleFired) -> None:
            reported.append(event.operations)

    operations = ["notes.should_note", "notes.should_fail", "control.should_stop"]
    source = rules(controller(True, operations=operations), operations=NOTES)
    assert train(source, Listener(), batches=2, epochs=1).status == "completed"
    assert reported == [("notes.should_note",)] * 2


def test_any_other_error_of_an_operation_fails_the_run() -> None:
    with pytest.raises(OSError, match="disk full"):
        train(rules(controller(True, operations=["notes.should_crash"]), operations=NOTES))


@pytest.mark.parametrize(
    ("level", "number"), [(None, logging.DEBUG), ("WARNING", logging.WARNING), ("info", logging.INFO)]
)
def test_taking_action_is_logged_at_its_level(level: str | None, number: int, caplog: pytest.LogCaptureFixture) -> None:
    more: dict[str, Any] = {} if level is None else {"config": {"trigger_log_level": level}}
    train(rules(controller("trainer_state['step'] == 2", **more), controller("False", name="quiet")))
    (record,) = [record for record in caplog.records if "taking action" in record.getMessage()]
    assert record.levelno == number
    assert_facts(
        record.getMessage(),
        "controller 'it'",
        "on_log",
        f"action {STOP}",
        "trainer_state['step'] == 2",
        "trainer_state = {",
    )
    assert len(record.getMessage()) < 1000


def test_an_act_is_reported_by_an_event() -> None:
    seen: list[Any] = []
    fired = Fired()
    source = rules(controller("trainer_state['step'] == 2", operations=["control.should_log", "control.should_save"]))
    plugin = RuleController(source)

    class Listener(h.Plugin):
        @h.on(RuleFired)
        def receive(self, run: h.Run, event: RuleFired) -> None:
            seen.append(
                (event.controller, event.trigger, event.rule, event.operations, event.metrics["trainer_state"]["step"])
            )

    train(plugin, fired, Listener(), epochs=1)
    assert seen == [("it", "on_log", "trainer_state['step'] == 2", ("control.should_log", "control.should_save"), 2)]
    assert fired.acts == [("it", "on_log", 0, 2, 2)]


AFTER_VALIDATION = "evalmetric['eval_loss'] < 0.5"


@pytest.mark.parametrize("trigger", ["on_epoch_end", "epoch_end"])
@pytest.mark.parametrize(
    ("metrics", "rule"),
    [
        ([EVAL], AFTER_VALIDATION),
        ([WINDOW], "window['metrics']['eval_loss'][-1] < 0.5"),
        ([{"name": "now", "class": "Metrics"}], "now['validation/loss'] < 0.5"),
        ([{"name": "now", "class": "Metrics"}], "any([now[name] < 0.5 for name in now])"),
        ([{"name": "state", "class": "TrainingState"}], "state['log_history'][-1]['eval_loss'] < 0.5"),
    ],
    ids=["EvalMetrics", "HistoryBasedMetric", "Metrics", "all_Metrics", "TrainingState"],
)
def test_at_an_epochs_end_a_rule_sees_the_validation_that_is_due(trigger: str, metrics: Any, rule: str) -> None:
    """F-LC-8: the ancestor's rules saw the one before."""
    source = rules(controller(rule, triggers=[trigger]), metrics=metrics)
    result = train(source, validation=[0.9, 0.4, 0.9, 0.9], epochs=4, logs=None)
    assert (result.progress.epoch, result.progress.validations) == (2, 2)
    assert "on " + trigger in result.reason


def test_at_an_epochs_end_a_rule_sees_the_log_that_is_due() -> None:
    losses = [3.0, 3.0, 1.0, 1.0, 3.0, 3.0]
    source = rules(controller("training_loss['loss'] < 2", triggers=["on_epoch_end"]))
    result = train(source, h.LogSchedule(h.Every(epochs=1)), losses=losses, batches=2, epochs=3, logs=None)
    assert result.progress.epoch == 2


def test_a_rule_that_reads_both_waits_for_both() -> None:
    rule = "training_loss['loss'] < 2 and evalmetric['eval_loss'] < 0.5"
    source = rules(controller(rule, triggers=["on_epoch_end"]))
    logging = h.LogSchedule(h.Every(epochs=1))
    losses = [3.0, 3.0, 1.0, 1.0, 3.0, 3.0]
    result = train(source, logging, losses=losses, validation=[0.9, 0.4, 0.9], batches=2, epochs=3, logs=None)
    assert result.progress.epoch == 2


def test_at_an_epochs_end_a_rule_is_asked_at_once_where_it_reads_nothing_that_is_due() -> None:
    source = rules(
        controller(
            "window['training_loss']['loss'][-1] < 2",
            name="a",
            triggers=["on_epoch_end"],
            operations=["notes.should_note"],
        ),
        controller(
            "trainer_state['epoch'] == 1", name="b", triggers=["on_epoch_end"], operations=["notes.should_note"]
        ),
        controller(
            "window['metrics']['eval_loss'][-1] < 2",
            name="c",
            triggers=["on_epoch_end"],
            operations=["notes.should_note"],
        ),
        metrics=[WINDOW, {"name": "trainer_state", "class": "TrainingState"}],
        operations=NOTES,
    )
    train(source, validation=[1.0], epochs=1)
    assert [(firing.controller, firing.event) for firing in Notes.reported] == [
        (name, h.EpochEnd(0)) for name in ("a", "b", "c")
    ]
    assert Notes.phases == ["train", "train", "validation"]


def test_a_validation_that_a_rule_before_it_asks_for_counts_too() -> None:
    source = rules(
        controller(
            "trainer_state['epoch'] == 2",
            name="asks",
            triggers=["on_epoch_end"],
            operations=["control.should_validate"],
        ),
        controller(AFTER_VALIDATION, triggers=["on_epoch_end"]),
    )
    task = Scripted(validation=[0.4])
    trainer = h.Trainer([RuleController(source)], device="cpu")
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    stopped = trainer.fit(task, data(2), validation=data(1), optimizer=optimizer, epochs=4)
    assert (stopped.progress.epoch, stopped.progress.validations) == (2, 1)


def test_at_the_trainings_end_a_rule_sees_the_validation_that_is_due() -> None:
    source = rules(
        controller(AFTER_VALIDATION, triggers=["on_train_end"], operations=["notes.should_note"]), operations=NOTES
    )
    schedule = h.ValidationSchedule(h.At(batches=1), at_end=True).named("last")
    task = Scripted(validation=[0.9, 0.4])
    trainer = h.Trainer([schedule, RuleController(source)], device="cpu")
    trainer.fit(task, data(2), validation=data(1), optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1), epochs=1)
    assert [(firing.trigger, firing.metrics["evalmetric"]["eval_loss"]) for firing in Notes.reported] == [
        ("on_train_end", 0.4)
    ]


def test_a_checkpoint_at_the_same_boundary_is_written_before_the_stop_takes_effect(tmp_path: Path) -> None:
    saving = [h.SaveSchedule(h.Every(epochs=1)), h.Checkpoint(tmp_path)]
    result = train(rules(controller(AFTER_VALIDATION, triggers=["on_epoch_end"])), *saving, validation=[0.4], epochs=3)
    assert result.progress.epoch == 1
    assert result.last_checkpoint is not None
    assert result.last_checkpoint.name == "run_epoch_1_iter_4.pth"


def test_a_rule_can_skip_batches_and_drop_steps() -> None:
    source = rules(
        controller(
            "trainer_state['batch'] == 1",
            name="a",
            triggers=["on_step_begin"],
            operations=["control.should_skip_batch"],
        ),
        controller(
            "trainer_state['batch'] == 2",
            name="b",
            triggers=["on_pre_optimizer_step"],
            operations=["control.should_skip_step"],
        ),
    )
    progress = train(source, epochs=1).progress
    assert (progress.skipped_batches, progress.skipped_steps, progress.steps) == (1, 1, 2)


def test_a_run_without_an_end_may_be_left_to_a_rule_that_stops_it() -> None:
    source = rules(controller("trainer_state['step'] == 5"))
    task = Scripted()
    trainer = h.Trainer([h.LogSchedule(h.Every(steps=1)), RuleController(source)], device="cpu")
    result = trainer.fit(task, data(2), optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1))
    assert result.progress.steps == 5


def test_a_rule_that_would_wait_for_ever_is_refused_when_the_run_begins() -> None:
    with pytest.raises(ValueError, match="'rule_controller' would never act:"):
        train(rules(controller("True")), logs=None)
    with pytest.raises(ValueError, match="never act without validation"):
        train(rules(controller("True", triggers=["on_evaluate"])))


def test_a_second_fit_knows_nothing_of_the_first() -> None:
    source = rules(controller("training_loss['loss'] < 1.0", patience={"patience_threshold": 2}))
    plugin = RuleController(source)
    assert [train(plugin, losses=[0.5]).progress.steps for _ in range(2)] == [3, 3]


def test_a_test_after_a_training_is_a_run_of_its_own() -> None:
    plugin = RuleController(rules(controller("training_loss['loss'] < 1.0", triggers=["on_predict", "on_log"])))
    trainer = h.Trainer([h.LogSchedule(h.Every(steps=1)), plugin], device="cpu")
    task = Scripted([0.5])
    trainer.fit(task, data(2), optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1), epochs=1)
    result = trainer.test(task, data(1))
    assert (result.status, asked(result)) == ("completed", [])


def make_conforming() -> RuleController:
    return RuleController(
        rules(
            controller("training_loss['loss'] < 0", name="a", patience={"patience_threshold": 1}),
            controller("evalmetric['eval_loss'] > 100", name="b", triggers=["on_epoch_end", "on_evaluate"]),
            controller(
                "window['metrics'].eval_loss[-1] > 0",
                name="c",
                triggers=["on_save", "step_end"],
                operations=["quiet.should_log"],
            ),
            controller(
                "rand() < 0.5 and seen['flag']", name="d", triggers=["batch_end"], operations=["quiet.should_log"]
            ),
            controller("1 / 0 > 1", name="e", triggers=["on_epoch_end"], on_error="disable"),
            metrics=[{"name": "training_loss", "class": "Loss"}, EVAL, WINDOW, {"name": "seen", "class": Stale}],
            operations=[
                {"name": "quiet", "class": "LogControl", "arguments": {"log_format": "", "log_level": "debug"}}
            ],
        )
    )


def test_it_keeps_every_rule_of_plugins() -> None:
    check_plugin(make_conforming)


@pytest.mark.parametrize("make", [make_conforming], ids=["all"])
def test_its_parts_are_in_the_plan(make: Callable[[], RuleController]) -> None:
    plan = h.Trainer([h.Checkpoint("x"), make()], device="cpu").plan()
    saving = plan[plan.index("save_point") :].split("\n", 1)[1]
    assert_facts(saving, "DECIDE", "rule_controller", "PERSIST", "checkpoint")
