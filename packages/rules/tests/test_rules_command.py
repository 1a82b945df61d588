"""`python -m heliograph rules check` and `rules dry-run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.__main__ import main
from heliograph.packages.rules.tests.scripted import EVAL, LOSS, STOP, Fired, controller, rules, train, written
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_recorder.format.reader import read
from heliograph_recorder.plugin import Recorder
from heliograph_recorder.replays.replay import replay
from heliograph_rules.base import RuleMetric
from heliograph_rules.controller import RuleController
from heliograph_rules.dry_run import dry_run

Captured = pytest.CaptureFixture[str]


def command(*arguments: Any) -> int:
    return main(["rules", *map(str, arguments)])


def test_a_good_file_is_described(tmp_path: Path, capsys: Captured) -> None:
    source = rules(
        controller("training_loss.loss < 1", name="first", triggers=["on_log", "on_epoch_end"]),
        controller("True", name="second", triggers=["StepEnd"], operations=["control.should_save", STOP]),
    )
    assert command("check", written(tmp_path, source)) == 0
    assert_each(
        capsys.readouterr().out.splitlines(),
        ("first: on_log (Log)", "on_epoch_end (EpochEnd)", "hfcontrols.should_training_stop"),
        ("second: StepEnd", "control.should_save, hfcontrols.should_training_stop"),
    )


UNKNOWN_NAMES = """\
controller_metrics:
  - name: training_loss
    class: Losss
controllers:
  - name: a
    triggers: [on_logs]
    rule: training_loss["loss"] < maximum
    operations:
      - hfcontrols.should_halt
      - missing.should_stop
  - name: b
    triggers: [on_log]
    rule: training_loss["loss"] <
    operations: [hfcontrols.should_save]
"""


def test_every_error_is_reported_with_its_line(tmp_path: Path, capsys: Captured) -> None:
    path = written(tmp_path, UNKNOWN_NAMES)
    assert command("check", path) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    reported = captured.err.splitlines()
    assert_each(
        reported,
        ("line 2: ",),
        ("line 6, controller 'a': ",),
        ("line 13, controller 'b'", "column 24"),
    )
    assert "Did you mean 'Loss'?" in reported[0]


def test_an_operation_that_cannot_be_made_is_reported_once(tmp_path: Path, capsys: Captured) -> None:
    report = {"name": "report", "class": "LogControl", "arguments": {"log_format": "", "log_level": "loud"}}
    path = written(tmp_path, rules(controller("True", operations=["report.should_log"]), operations=[report]))
    assert command("check", path) == 1
    (reported,) = capsys.readouterr().err.splitlines()
    assert "log_level 'loud'" in reported


BAD_FORM = """\
controller_metrics:
  - {name: training_loss, clas: Loss}
operations:
  - {name: report, class: LogControl, argument: {}}
controllers:
  - name: a
  - 5
  - name: b
    triggers: [on_logs]
    rule: training_loss.loss < 1 and lost > 1
    operations: [report.should_log, repor.should_log]
  - name: c
    triggers: on_log
    rule: training_loss.loss <
    patience: {patience_threshold: -1, mode: never}
    on_error: panic
    config: {trigger_log_level: 5}
    operations: [control.should_save, control.should_save]
  - name: b
    triggers: [on_log]
    rule: training_loss.loss <
    operations: [control.should_save]
"""


def test_errors_of_form_hide_no_others(tmp_path: Path, capsys: Captured) -> None:
    assert command("check", written(tmp_path, BAD_FORM)) == 1
    reported = [line.partition(", line ")[2] for line in capsys.readouterr().err.splitlines()]
    expected = [
        ("2", "no key 'clas'"),
        ("4", "no key 'argument'"),
        ("6, controller 'a'", "keys 'triggers', 'rule', 'operations'"),
        ("7", "must be a mapping"),
        ("9, controller 'b'", "invalid event (on_logs)"),
        ("13, controller 'c'", "a list of names"),
        ("19", "named 'b'"),
        ("21, controller 'b', column 21", "invalid syntax"),
    ]
    for line, (place, problem) in zip(reported, expected, strict=True):
        assert line.startswith((f"{place}: ", f"{place} "))
        assert problem in line


def test_errors_of_form_are_all_reported(tmp_path: Path, capsys: Captured) -> None:
    source = rules({"name": "a", "triggers": ["on_log"], "rule": "True"}, {"name": "b", "trigger": ["on_log"]})
    assert command("check", written(tmp_path, source)) == 1
    reported = capsys.readouterr().err
    assert "lacks the key 'operations'." in reported
    assert "key 'trigger'. Did" in reported
    assert command("check", written(tmp_path, "controllers: [")) == 1
    assert "YAML that can" in capsys.readouterr().err


def test_what_cannot_be_read_is_distinguished(tmp_path: Path, capsys: Captured) -> None:
    assert command("check", tmp_path / "nowhere.yaml") == 2
    assert "heliograph rules: No rule" in capsys.readouterr().err
    path = written(tmp_path, rules(controller("True")))
    assert command("dry-run", path, tmp_path / "nowhere.recording") == 2
    assert "There is no recording" in capsys.readouterr().err
    assert command("check", path, "--import", "no_such_module_of_rules") == 2
    assert "No module named 'no_such_module_of_rules'" in capsys.readouterr().err
    assert command("check", tmp_path) == 2
    assert "Is a directory" in capsys.readouterr().err
    assert command("dry-run", written(tmp_path, rules(controller("lost"))), tmp_path) == 1


OWN_METRIC = """\
from heliograph_rules.base import RuleMetric
from heliograph_rules.registry import register_metric


@register_metric
class MyOwnMetric(RuleMetric):
    when_read = True

    def compute(self, run, event):
        return 1
"""


def test_a_module_of_ones_own_is_imported(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    from heliograph_rules import registry

    monkeypatch.setattr(registry, "_METRICS", dict(registry._METRICS))
    (tmp_path / "rules_of_my_own.py").write_text(
        OWN_METRIC,
        encoding="utf-8",
    )
    source = rules(controller("mine == 1"), metrics=[{"name": "mine", "class": "MyOwnMetric"}])
    path = written(tmp_path, source)
    assert command("check", path) == 1
    assert command("check", path, "--import", "rules_of_my_own") == 0
    assert_facts(capsys.readouterr().out, "it: on_log (Log)", "hfcontrols.should_training_stop\n")
    sys.modules.pop("rules_of_my_own")


@pytest.mark.parametrize(
    ("module", "content", "problem"),
    [
        (
            "rules_broken_1",
            "import no_such_module_at_all",
            "No module named 'no_such_module_at_all'",
        ),
        ("rules_broken_2", "x = = 1", "SyntaxError: invalid syntax (rules_broken_2.py, line 1)"),
        ("rules_broken_3", "raise ValueError('a reason')", "ValueError: a reason"),
        ("rules_broken_4", "raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_with_its_error(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, module: str, content: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"{module}.py").write_text(content, encoding="utf-8")
    assert command("check", written(tmp_path, rules(controller("True"))), "--import", module) == 2
    assert_facts(capsys.readouterr().err, "heliograph rules: ", repr(module), problem)


def recorded(folder: Path, *plugins: Any, **options: Any) -> Path:
    """Record a run of two batches an epoch, logged and validated, without rules that act."""
    quiet = rules(controller("False", triggers=["on_train_end"]))
    plugin = RuleController(quiet).named("quiet")
    result = train(plugin, Recorder(folder), *plugins, batches=2, **options)
    assert result.recording is not None
    return result.recording


def test_a_dry_run_reports_when_rules_would_have_acted(tmp_path: Path, capsys: Captured) -> None:
    recording = recorded(tmp_path, losses=[3.0, 2.0, 0.5, 0.4, 0.3, 0.2], validation=[0.9, 0.4, 0.3], epochs=3)
    source = rules(
        controller("training_loss.loss < 1", name="low", patience={"patience_threshold": 1}),
        controller("evalmetric.eval_loss < 0.5", name="evaluated", triggers=["on_epoch_end"]),
        controller("training_loss.loss > 100", name="never", operations=["control.should_save"]),
    )
    path = written(tmp_path, source)
    assert command("dry-run", path, recording) == 0
    reported = capsys.readouterr().out.splitlines()
    assert reported[0] == f"dry run of {path} on {recording}"
    assert_each(
        reported[1:5],
        ("low: ", "2 times"),
        (
            "attempt 1, epoch 1",
            "batch 2 step 4",
            "on_log: hfcontrols.should_training_stop",
            f"training_loss = { {'epoch': 2.0, 'loss': 0.4000000059604645, 'step': 4} }",
        ),
        (
            "attempt 1, epoch 2",
            "batch 2 step 6",
            "on_log (after a stop)",
            "hfcontrols.should_training_stop",
            f"training_loss = { {'epoch': 3.0, 'loss': 0.20000000298023224, 'step': 6} }",
        ),
        ("evaluated: ", "2 times"),
    )
    assert_each(
        reported[5:8],
        ("attempt 1, epoch 2", "batch 0 step 4", "on_epoch_end: "),
        ("attempt 1, epoch 3", "batch 0 step 6", "on_epoch_end (after a", "stop)"),
        ("never: ",),
    )


def test_a_dry_run_acts_where_the_run_itself_would_have(tmp_path: Path) -> None:
    """Up to the first stop, it reports what a run with these rules does."""
    third = "trainer_state.step % 3 == 0"
    source = rules(
        controller("training_loss.loss < 1", name="low", operations=["control.should_log"], patience={}),
        controller("evalmetric.eval_loss < 0.5", name="late", triggers=["on_epoch_end"]),
        controller(third, name="third", triggers=["on_step_end"], operations=["control.should_save"]),
        controller(third, name="batch", triggers=["batch_end"], operations=["control.should_save"]),
    )
    options: dict[str, Any] = {"losses": [3.0, 2.0, 0.5, 0.4], "validation": [0.9, 0.4], "epochs": 3}
    found = dry_run(RuleController(source), read(recorded(tmp_path, **options)))
    fired = Fired()
    train(RuleController(source), fired, batches=2, **options)
    acts = [act for acts in found.rules.values() for act in acts if not act.is_after_end]
    assert len(acts) == 4
    assert sorted((act.fired.controller, act.fired.trigger, act.epoch, act.step) for act in acts) == sorted(
        (name, trigger, epoch, steps) for name, trigger, epoch, _, steps in fired.acts
    )


def test_a_dry_run_reports_what_the_recording_does_not_hold_and_does_nothing(tmp_path: Path) -> None:
    called: list[Any] = []
    recording = recorded(tmp_path, epochs=1)
    rate = {"name": "rate", "class": "LearningRate"}
    call = {"name": "call", "class": "CallFunction", "arguments": {"function": "report"}}
    source = rules(
        controller("training_loss.loss > 0", name="calls", operations=["call.should_call", "control.should_save"]),
        controller("rate > 0", name="rates", triggers=["on_step_end"]),
        controller("training_loss.loss / 0 > 1", name="broken"),
        metrics=[LOSS, EVAL, rate],
        operations=[call],
    )
    plugin = RuleController(source, functions={"report": lambda run, firing: called.append(firing)})
    found = dry_run(plugin, read(recording))
    assert called == []
    assert [len(acts) for acts in found.rules.values()] == [2, 0, 0]
    assert list(found.unavailable) == ["rate"]
    assert "available: A recording" in str(found)
    assert "ZeroDivisionError" in str(found)


def test_a_dry_run_names_the_metric_that_fails(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heliograph_rules import registry

    class Gap(RuleMetric):
        events = (h.ValidationEnd,)

        def compute(self, run: h.Run, event: h.Event) -> float:
            raise KeyError("nope")

    monkeypatch.setattr(registry, "_METRICS", registry._METRICS | {"Gap": Gap})
    source = rules(controller("gap > 1"), metrics=[{"name": "gap", "class": "Gap"}])
    assert command("dry-run", written(tmp_path, source), recorded(tmp_path, validation=[1.0])) == 1
    reported = capsys.readouterr().out.splitlines()[1:]
    assert_each(
        reported,
        ("it: ", "not have acted"),
        (
            "RuleError",
            "metric 'gap' (Gap)",
            "KeyError: 'nope'",
            "validation_end, attempt 1",
            "epoch 1 batch 0",
            "step 2",
        ),
    )


def test_a_dry_run_reports_a_rule_that_fails_once(
    tmp_path: Path, capsys: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    recording = recorded(tmp_path)
    caplog.clear()
    path = written(tmp_path, rules(controller("training_loss.loss / 0 > 1")))
    assert command("dry-run", path, recording) == 0
    assert capsys.readouterr().out.count("ZeroDivisionError: float division") == 1
    assert caplog.messages == []


def test_a_dry_run_of_the_rules_that_were_in_the_run_repeats_them(tmp_path: Path) -> None:
    """What the run's own rules asked stands, though those of the dry run do nothing."""
    source = rules(controller("training_loss.loss < 1", name="low"))
    fired = Fired()
    result = train(RuleController(source), Recorder(tmp_path), fired, losses=[3.0, 2.0, 0.5])
    assert result.recording is not None
    found = dry_run(RuleController(source), read(result.recording))
    assert [act.step for act in found.rules["low"]] == fired.steps() == [3]
    assert found.notes == ()


def test_a_dry_run_leaves_the_rules_as_they_are(tmp_path: Path) -> None:
    plugin = RuleController(rules(controller("rand() < 2", triggers=["on_step_end"]), metrics=[]))
    recording, before = read(recorded(tmp_path)), plugin.state_dict()
    assert len(dry_run(plugin, recording).rules["it"]) == 4
    assert plugin.state_dict() == before


def test_a_replay_of_rules_asks_what_they_asked(tmp_path: Path) -> None:
    """Rules that act alter what they see later: with their operations, a replay asks the very same."""
    source = rules(
        controller("training_loss.loss < 1", name="a", patience={}, operations=["control.should_save"]),
        controller(
            "evalmetric.eval_loss < 0.5", name="b", triggers=["on_epoch_end"], operations=["control.should_log"]
        ),
        controller("rand() < 0.3", name="c", triggers=["on_step_begin"], operations=["control.should_validate"]),
        controller(
            "trainer_state.batches == 3", name="d", triggers=["batch_start"], operations=["control.should_skip_batch"]
        ),
        controller("trainer_state.epoch > 2.2", name="e", triggers=["on_log"]),
    )
    losses = [3.0, 2.0, 0.5, 0.4, 0.3, 2.0]
    result = train(RuleController(source), Recorder(tmp_path), losses=losses, validation=[0.9, 0.4, 0.3, 0.6], epochs=4)
    assert result.recording is not None
    live = [str(each) for each in result.history if each.by == "rule_controller"]
    assert len({each.verb for each in result.history if each.by == "rule_controller"}) == 5
    replayed = replay(result.recording, [RuleController(source)])
    assert [str(each) for each in replayed.requests("rule_controller")] == live


def test_a_long_dry_run_is_cut_short(tmp_path: Path) -> None:
    recording = recorded(tmp_path, epochs=15)
    found = str(dry_run(RuleController(rules(controller("True", operations=["control.should_log"]))), read(recording)))
    assert_facts(found, "it: ", "30 times")
    assert_facts(found, "and 10 more")


def test_a_dry_run_of_a_run_that_was_resumed_goes_through_its_attempts(tmp_path: Path) -> None:
    class Crash(BaseException):
        pass

    class Crasher(h.Plugin):
        @h.on(h.BatchStart, when=h.At(batches=5))
        def crash(self, run: h.Run, event: h.BatchStart) -> None:
            raise Crash

    def saving() -> list[Any]:
        return [h.SaveSchedule(h.Every(batches=2)), h.Checkpoint(tmp_path / "checkpoints", resume="auto")]

    source = rules(controller("True", patience={"patience_threshold": 2}, operations=["control.should_log"]))
    with pytest.raises(Crash):
        recorded(tmp_path, *saving(), Crasher(), epochs=4)
    recording = recorded(tmp_path, *saving(), epochs=4)
    found = dry_run(RuleController(source), read(recording))
    assert [(act.attempt, act.step) for act in found.rules["it"]] == [(1, 3), (2, 6)]
