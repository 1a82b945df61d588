"""Every test of the ancestor's trainer controller, by its name there, against ours: in real, small trainings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.rules.tests.scripted import EVAL, LOSS, STATE, Fired, controller, lines, rules, train
from heliograph.packages.tests.facts import assert_facts
from heliograph_rules.base import RuleFiring, RuleMetric, RuleOperation
from heliograph_rules.controller import RuleController

ONE = {"name": "window", "class": "HistoryBasedMetric", "arguments": {"window_size": 1}}
TWO = ONE | {"arguments": {"window_size": 2}}
FALLING = [2.0, 1.5, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1]


class CustomMetric(RuleMetric):
    """True at every event."""

    when_read = True

    def compute(self, run: h.Run, event: h.Event) -> bool:
        return True


class CustomOperation(RuleOperation):
    """Stops the run."""

    def should_perform_action_xyz(self, run: h.Run, firing: RuleFiring) -> None:
        run.control.stop(firing.reason)

    def should_(self, run: h.Run, firing: RuleFiring) -> None:
        raise AssertionError("a method with this name is not an action")


def stops_at(source: Any, *plugins: Any, **options: Any) -> int | None:
    result = train(source, *plugins, **options)
    assert result.stopped_by == ("rule_controller" if result.status == "stopped" else None)
    return result.progress.steps if result.status == "stopped" else None


def test_loss_on_threshold() -> None:
    assert stops_at(rules(controller("training_loss['loss'] < 1.0")), losses=FALLING) == 3


def test_thresholded_training_loss() -> None:
    assert stops_at(rules(controller("window['training_loss']['loss'][-1] < 1"), metrics=[ONE]), losses=FALLING) == 3


def test_thresholded_training_loss_on_save(tmp_path: Path) -> None:
    saving = [h.SaveSchedule(h.Every(steps=1)), h.Checkpoint(tmp_path)]
    source = rules(controller("trainer_state['epoch'] >= 0.5", triggers=["on_save"]))
    assert stops_at(source, *saving) == 2


def test_log_controller(caplog: pytest.LogCaptureFixture) -> None:
    arguments = {"log_format": "[{event_name}] => {trainer_state}", "log_level": "warning"}
    reporter = {"name": "reporter", "class": "LogControl", "arguments": arguments}
    source = rules(
        controller("True", triggers=["on_step_end"], operations=["reporter.should_log"]), operations=[reporter]
    )
    train(source, epochs=1)
    reported = [line for line in lines(caplog.records) if "[on_step_end] =>" in line]
    assert len(reported) == 4
    assert_facts(reported[0], "[on_step_end] => {'epoch': ")


def test_non_decreasing_training_loss() -> None:
    """Theirs asserts nothing. Ours: it stops where the newer loss is higher, and not before the window is full."""
    rule = (
        "window['training_loss']['loss'][0] < window['training_loss']['loss'][-1] "
        "and len(window['training_loss']['loss']) == window['window_size']"
    )
    assert stops_at(rules(controller(rule), metrics=[TWO]), losses=[2.0, 1.0, 0.5, 0.75]) == 4
    assert stops_at(rules(controller(rule), metrics=[TWO]), losses=FALLING) is None


def test_epoch_level_training_loss() -> None:
    rule = "window['training_loss']['loss'][-1] < 1 and trainer_state['epoch'] >= 0.5"
    source = rules(controller(rule, triggers=["on_epoch_end"]), metrics=[STATE, ONE])
    assert stops_at(source, losses=FALLING) == 4


def test_epoch_level_eval_loss() -> None:
    rule = "window['metrics']['eval_loss'][-1] > 2 and trainer_state['epoch'] > 0.1"
    source = rules(controller(rule, triggers=["on_epoch_end"]), metrics=[STATE, ONE])
    assert stops_at(source, validation=[1.0, 2.2], epochs=3) == 8


def test_epoch_level_eval_loss_patience() -> None:
    rule = "window['metrics']['eval_loss'][-1] > 2"
    for trigger in ("on_epoch_end", "on_evaluate"):
        source = rules(controller(rule, triggers=[trigger], patience={"patience_threshold": 2}), metrics=[TWO])
        assert stops_at(source, validation=[2.2], epochs=5, batches=1) == 3


def test_loss_on_threshold_with_trainer_state() -> None:
    source = rules(controller("training_loss['loss'] < 1.0 and trainer_state['epoch'] >= 0.5"))
    assert stops_at(source, losses=[0.9]) == 2


def test_exposed_metrics() -> None:
    source = rules(controller("evalmetric['eval_loss'] < 2.5", triggers=["on_evaluate"]))
    assert stops_at(source, validation=[2.6, 2.2], epochs=3) == 8


def test_incorrect_source_event_exposed_metrics() -> None:
    wrong = EVAL | {"arguments": {"source_event": "on_incorrect_event"}}
    with pytest.raises(ValueError, match="on_incorrect_event"):
        RuleController(rules(controller("evalmetric['eval_loss'] < 2.5"), metrics=[wrong]))


def test_custom_metric_handler() -> None:
    source = rules(controller("custom"), metrics=[{"name": "custom", "class": "CustomMetric"}])
    assert stops_at(source, given={"metrics": [CustomMetric]}) == 1


def test_custom_operation_handler() -> None:
    source = rules(
        controller("training_loss['loss'] < 1.0", operations=["custom_operation.should_perform_action_xyz"]),
        operations=[{"name": "custom_operation", "class": "CustomOperation"}],
    )
    assert stops_at(source, losses=FALLING, given={"operations": [CustomOperation]}) == 3


def test_custom_operation_invalid_action_handler() -> None:
    source = rules(
        controller("True", name="loss_controller", operations=["custom_operation.should_"]),
        operations=[{"name": "custom_operation", "class": "CustomOperation"}],
    )
    with pytest.raises(KeyError, match=r"custom_operation\.should_ for control loss_controller"):
        RuleController(source, operations=[CustomOperation])


def test_invalid_type_rule() -> None:
    """Theirs is found when the file is loaded, ours when the rule is evaluated."""
    result = train(rules(controller("2+2")))
    assert any("incorrect type usage" in note for note in result.notes)


def test_malicious_os_rule() -> None:
    source = rules(controller("__import__('os').system('clear')", name="loss_controller"))
    with pytest.raises(ValueError, match="controller 'loss_controller', column 1 of its rule"):
        RuleController(source)


def test_malicious_input_rule() -> None:
    """Theirs fails with simpleeval's own FunctionNotDefined, when it is evaluated; ours is a NameError, at load."""
    with pytest.raises(NameError, match="Unknown function 'input':"):
        RuleController(rules(controller("input('Please enter your password:') == ''")))


def test_invalid_trigger() -> None:
    source = rules(controller("True", name="loss_controller", triggers=["log_it_all_incorrect_trigger_name"]))
    match = r"loss_controller .*invalid event \(log_it_all_incorrect_trigger_name\)"
    with pytest.raises(KeyError, match=match):
        RuleController(source)


def test_invalid_operation() -> None:
    source = rules(controller("True", name="loss_controller", operations=["missingop.should_training_stop"]))
    match = r"missingop\.should_training_stop for control loss_controller"
    with pytest.raises(KeyError, match=match):
        RuleController(source)


def test_invalid_operation_action() -> None:
    source = rules(controller("True", name="loss_controller", operations=["hfcontrols.missingaction"]))
    with pytest.raises(KeyError, match=r"hfcontrols\.missingaction for control loss_controller"):
        RuleController(source)


def test_invalid_metric() -> None:
    with pytest.raises(KeyError, match="Undefined metric handler MissingMetricClass"):
        RuleController(rules(controller("True"), metrics=[{"name": "loss", "class": "MissingMetricClass"}]))


def test_unavailable_metric() -> None:
    source = rules(controller("training_loss['loss'] < 1.0", triggers=["on_step_end"]))
    assert stops_at(source, losses=[0.9], logs=None) is None


# What the ancestor's tests do not cover.


def test_an_unknown_operation_class() -> None:
    with pytest.raises(KeyError, match="Undefined operation handler Missing"):
        RuleController(rules(controller("True"), operations=[{"name": "x", "class": "Missing"}]))


@pytest.mark.parametrize("key", ["name", "triggers", "rule", "operations"])
def test_a_controller_that_lacks_a_key(key: str) -> None:
    source = rules({name: value for name, value in controller("True").items() if name != key})
    with pytest.raises(KeyError, match=f"lacks the key '{key}'"):
        RuleController(source)


@pytest.mark.parametrize(
    "name", ["args", "state", "control", "metrics", "kwargs", "run", "event", "event_name", "self"]
)
def test_a_metric_is_called_like_a_keyword(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """F-OP-4: an operation there took all metrics as keywords, beside those of its own."""
    caplog.set_level(logging.INFO, logger="heliograph")
    reporter = {"name": "reporter", "class": "LogControl", "arguments": {"log_format": f"it is {{{name}[loss]:.1f}}"}}
    source = rules(
        controller(f"{name}['loss'] < 1.0", operations=["reporter.should_log", "own.should_perform_action_xyz"]),
        metrics=[LOSS | {"name": name}],
        operations=[reporter, {"name": "own", "class": CustomOperation}],
    )
    assert stops_at(source, losses=FALLING) == 3
    assert "it is 0.9" in lines(caplog.records)


def test_a_result_that_is_a_numpy_boolean() -> None:
    import numpy as np

    class Flag(CustomMetric):
        def compute(self, run: h.Run, event: h.Event) -> Any:
            return np.bool_(run.progress.steps >= 2)

    assert stops_at(rules(controller("flag"), metrics=[{"name": "flag", "class": Flag}])) == 2


def test_two_triggers_with_patience() -> None:
    """Each has its own count: the second log and the second epoch, not the second of both."""
    fired = Fired()
    source = rules(
        controller("True", triggers=["on_log", "on_epoch_end"], patience={}, operations=["control.should_log"]),
        metrics=[],
    )
    train(source, fired, logs=2, epochs=4, batches=2)
    epochs = [epoch for _, trigger, epoch, *_ in fired.acts if trigger == "on_epoch_end"]
    assert epochs == [2, 4]
