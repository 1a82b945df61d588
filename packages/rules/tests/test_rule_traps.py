"""The traps of the ancestor's trainer controller, by their rows: what went wrong there must not go wrong here."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.rules.tests.scripted import (
    EVAL,
    LOSS,
    STATE,
    Fired,
    Scripted,
    controller,
    data,
    lines,
    rules,
    train,
)
from heliograph.packages.tests.facts import assert_each
from heliograph_rules.base import RuleMetric
from heliograph_rules.controller import RuleController
from heliograph_rules.errors import RuleError, RuleKeyError, RuleSyntaxError


class Taking(RuleMetric):
    """Takes arguments of any name."""

    when_read = True

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(name)
        self.arguments = arguments

    def compute(self, run: h.Run, event: h.Event) -> dict[str, Any]:
        return self.arguments


def test_f_cfg_1_a_mapping_that_is_given_is_not_changed() -> None:
    source = rules(controller("training_loss['loss'] < 1", config={"trigger_log_level": "info"}))
    before = deepcopy(source)
    train(source)
    assert source == before


def test_f_cfg_2_metrics_with_a_dash_are_read_and_unknown_keys_refused() -> None:
    source = rules(controller("training_loss['loss'] < 1"))
    source["controller-metrics"] = source.pop("controller_metrics")
    assert train(source, losses=[0.5]).progress.steps == 1
    with pytest.raises(RuleKeyError, match=r"key 'controller_metric'\. Did"):
        RuleController({"controller_metric": [LOSS], "controllers": [controller("True")]})


def test_f_cfg_3_arguments_of_a_metric_may_have_any_name() -> None:
    arguments = {"args": 1, "state": 2, "control": 3, "run": 4, "event": 5, "kwargs": 6, "metrics": 7}
    metric = {"name": "taking", "class": Taking, "arguments": arguments}
    assert train(rules(controller(f"taking == {arguments}"), metrics=[metric])).progress.steps == 1


def test_f_cfg_4_hfcontrols_is_there_beside_operations_of_the_file_and_instead_of_none() -> None:
    quiet = {"name": "quiet", "class": "LogControl", "arguments": {"log_format": ""}}
    assert train(rules(controller("True"), operations=[quiet])).status == "stopped"
    assert train({"controllers": [controller("True")]}).status == "stopped"


@pytest.mark.parametrize("key", ["name", "triggers", "rule", "operations"])
def test_f_cfg_5_a_key_that_a_controller_lacks_is_reported_with_the_controller_and_the_line(
    key: str, tmp_path: Path
) -> None:
    values = {
        "name": "stopper", "triggers": "[on_log]", "rule": "true", "operations": "[hfcontrols.should_save]",
    }  # fmt: skip
    entry = "\n    ".join(f"{name}: {value}" for name, value in values.items() if name != key)
    path = tmp_path / "rules.yaml"
    path.write_text(f"controllers:\n  - {entry}\n", encoding="utf-8")
    with pytest.raises(RuleKeyError, match=f"lacks the key '{key}'") as caught:
        RuleController(path)
    assert (caught.value.line, caught.value.controller) == (2, None if key == "name" else "stopper")


def test_f_cfg_6_an_unknown_mode_or_key_of_patience_is_refused() -> None:
    for patience in ({"mode": "reset_on_success"}, {"patience_treshold": 3}):
        with pytest.raises(RuleError, match=r"reset_on_failure|Did you mean 'patience_threshold'"):
            RuleController(rules(controller("True", patience=patience)))


def test_f_cfg_7_a_level_is_a_rules_own_and_a_wrong_one_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """There, all controllers without a config shared one, which was written to."""
    caplog.set_level(logging.DEBUG, logger="heliograph")
    loud = controller("True", name="loud", config={"trigger_log_level": "Error"})
    train(rules(controller("True", name="a"), loud, controller("True", name="b")), batches=1, epochs=1)
    levels = {record.getMessage().split("'")[1]: record.levelname for record in caplog.records if "taking action" in record.getMessage()}  # fmt: skip  # noqa: E501
    assert levels == {"a": "DEBUG", "loud": "ERROR", "b": "DEBUG"}
    with pytest.raises(RuleError, match="'trigger_log_level' of the config must"):
        RuleController(rules(controller("True", config={"trigger_log_level": "shout"})))


def test_f_cfg_8_one_that_is_registered_during_a_run_works_at_once() -> None:
    """There, one that came late never received the event at which it was built."""

    class Late(h.Plugin):
        @h.on(h.StepEnd, when=h.At(steps=2))
        def add(self, run: h.Run, event: h.StepEnd) -> None:
            trainer.plugins.register(
                RuleController(rules(controller("trainer_state.step >= 1", triggers=["on_step_end"])))
            )

    trainer = h.Trainer([Late()], device="cpu")
    import torch

    task = Scripted()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    assert trainer.fit(task, data(4), optimizer=optimizer, epochs=2).progress.steps == 3


def test_f_lc_1_a_second_class_of_a_name_is_refused() -> None:
    class Loss(Taking):
        """Shares a name."""

    with pytest.raises(ValueError, match="Loss is registered already"):
        RuleController(rules(controller("True")), metrics=[Loss])


def test_f_lc_2_bad_syntax_is_reported_with_its_place() -> None:
    with pytest.raises(RuleSyntaxError, match="controller 'it', column 14 of its rule") as caught:
        RuleController(rules(controller("training_loss['loss' < 1")))
    assert caught.value.column == 14


@pytest.mark.parametrize("trigger", ["on_step_begin", "on_substep_end", "on_optimizer_step", "on_pre_optimizer_step"])
def test_f_lc_3_the_state_of_the_training_is_never_stale(trigger: str) -> None:
    """There, it was not computed at these events, and rules read what it was at the last other one."""
    place = "trainer_state.batch == 2" if trigger in ("on_step_begin", "on_substep_end") else "trainer_state.step == 1"
    fired = Fired()
    source = rules(controller(place, triggers=[trigger], operations=["control.should_log"]))
    train(source, h.GradientAccumulation(4 if trigger == "on_substep_end" else 1), fired, epochs=1)
    expected = {"on_step_begin": 2, "on_substep_end": 2, "on_optimizer_step": 0, "on_pre_optimizer_step": 1}
    assert [batches for *_, batches, _ in fired.acts] == [expected[trigger]]


def test_f_lc_4_every_trigger_that_is_accepted_comes() -> None:
    dropped = controller("True", triggers=["on_pre_optimizer_step"], operations=["control.should_skip_step"])
    assert train(rules(dropped)).progress.skipped_steps == 8
    with pytest.raises(RuleKeyError, match=r"invalid event \(on_push_begin\)"):
        RuleController(rules(controller("True", triggers=["on_push_begin"])))


def test_f_lc_5_a_save_reports_its_path_and_whether_it_is_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="heliograph")
    reporter = {"name": "reporter", "class": "LogControl", "arguments": {"log_format": "{path} {hf_path} {is_final}"}}
    saving = [h.SaveSchedule(h.At(steps=2), at_end=True), h.Checkpoint(tmp_path, keep_last=None)]
    source = rules(controller("True", triggers=["on_save"], operations=["reporter.should_log"]), operations=[reporter])
    train(source, *saving, epochs=1)
    first, last = tmp_path / "run_epoch_0_iter_2.pth", tmp_path / "run_epoch_1_iter_4.pth"
    assert [line for line in lines(caplog.records) if line.startswith(str(tmp_path))] == [
        f"{first} {first} False", f"{last} {last} True",
    ]  # fmt: skip


def test_f_lc_6_an_event_that_no_rule_needs_is_not_received() -> None:
    plugin = RuleController(rules(controller("training_loss['loss'] < 1"), metrics=[LOSS]))
    plan = h.Trainer([plugin], device="cpu").plan()
    for event in ("batch_start", "batch_end", "step_end", "gradients_ready", "should_stop", "epoch_end"):
        assert f"{event}\n" not in plan


def test_f_lc_7_windows_and_patience_are_saved() -> None:
    """`test_rules_resume.py` proves it; here is what is in the state."""
    window = {"name": "window", "class": "HistoryBasedMetric", "arguments": {"window_size": 2}}
    plugin = RuleController(rules(controller("True", patience={"patience_threshold": 9}), metrics=[window]))
    train(plugin, losses=[1.0, 2.0, 3.0], batches=3, epochs=1)
    state = plugin.state_dict()
    assert state["controllers"]["it"]["counts"] == {"on_log": 3}
    assert state["metrics"]["window"]["state"]["training_loss"]["loss"] == [2.0, 3.0]


def test_f_lc_8_at_an_epochs_end_a_rule_sees_the_metrics_of_this_epoch() -> None:
    source = rules(controller("evalmetric['eval_loss'] < 0.5", triggers=["on_epoch_end"]))
    result = train(source, validation=[0.4, 0.9, 0.9], epochs=3)
    assert (result.progress.epoch, result.progress.steps) == (1, 4)


def test_f_op_5_two_operations_of_one_name_are_refused() -> None:
    quiet = {"name": "quiet", "class": "LogControl", "arguments": {"log_format": ""}}
    with pytest.raises(RuleError, match="operations are named 'quiet'"):
        RuleController(rules(controller("True"), operations=[quiet, quiet]))


def test_f_ru_6_a_guarded_rule_runs_before_its_metric_is_there() -> None:
    for guarded in ("evalmetric == None", "evalmetric is None", "not (evalmetric != None)"):
        assert train(rules(controller(guarded), metrics=[EVAL])).progress.steps == 1
    unguarded = rules(controller("evalmetric['eval_loss'] > 0 or True"), metrics=[EVAL])
    assert train(unguarded).status == "completed"


@pytest.mark.parametrize("rule", ["None + norm == 1", "1 + norm > 0", "[1][norm] == 1"])
def test_f_ru_7_a_metric_that_is_not_there_ends_no_run_wherever_it_stands(
    rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    norm = {"name": "norm", "class": "GradientNorm"}  # which no plugin measures
    assert train(rules(controller(rule, on_error="raise"), metrics=[norm])).status == "completed"
    assert len([line for line in lines(caplog.records) if "is skipped until" in line]) == 1


@pytest.mark.parametrize(
    "rule", ["training_loss < 1.0", "1 + training_loss > 0", "training_loss", "abs(evalmetric) < 1"]
)
def test_3_3_a_dict_that_is_used_as_a_number_is_reported(rule: str) -> None:
    """The ancestor's first examples say `loss < 1.0`, of when a loss was a number."""
    triggers = ["on_evaluate"] if "evalmetric" in rule else ["on_log"]
    result = train(rules(controller(rule, triggers=triggers)), losses=[3.0], validation=[2.0])
    (note,) = [note for note in result.notes if "counts as false" in note]
    assert "controller 'it'" in note
    assert "Read a dict by key" in note or "got dict" in note
    assert f"The expression is '{rule.removesuffix(' > 0').removesuffix(' < 1')}" in note


def test_6_15_a_rule_mistake_does_not_kill_a_long_run() -> None:
    mistakes = [
        "training_loss['eval_loss'] < 1",
        "trainer_state.log_history[99].loss < 1",
        "training_loss.loss / 0 > 1",
    ]
    source = rules(*(controller(rule, name=f"mistake {number}") for number, rule in enumerate(mistakes)))
    result = train(source)
    assert result.status == "completed"
    assert sum("counts as false" in note for note in result.notes) == 3


def test_8_6_who_asked_and_why_can_be_reported() -> None:
    result = train(rules(controller("training_loss['loss'] < 1", name="plenty"), metrics=[LOSS, STATE]), losses=[0.5])
    asked = [each for each in result.history if each.verb == "stop"]
    assert_each(
        [(each.by, each.reason, each.step) for each in asked],
        ("rule_controller", "rule 'plenty'", "on_log: training_loss['loss'] < 1", ", 1)"),
    )


def test_8_14_a_loss_that_is_no_number_is_seen() -> None:
    """A comparison with NaN is false, so a limit alone would never be reached."""
    source = rules(controller("training_loss.loss > 10 or training_loss.loss != training_loss.loss"))
    assert train(source, losses=[3.0, float("nan")]).progress.steps == 2


def test_8_19_after_a_validation_a_rule_sees_its_metrics_whatever_asked_for_it() -> None:
    source = rules(
        controller("trainer_state.step == 2", name="asks", operations=["control.should_validate"]),
        controller("evalmetric.eval_loss < 0.5 and evalmetric.step == 2", triggers=["on_evaluate"]),
    )
    assert train(source, validation=[0.4]).progress.steps == 2


def test_3_6_two_triggers_are_counted_apart() -> None:
    fired = Fired()
    triggers = ["on_step_end", "on_epoch_end"]
    patient = controller(
        "True", triggers=triggers, patience={"patience_threshold": 1}, operations=["control.should_log"]
    )
    train(rules(patient), fired, epochs=2, batches=3)
    assert [(trigger, steps) for _, trigger, *_, steps in fired.acts] == [
        ("on_step_end", 2), ("on_step_end", 4), ("on_step_end", 6), ("on_epoch_end", 6),
    ]  # fmt: skip
