"""A resumed run with rules equals an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.rules.tests.scripted import EVAL, LOSS, STATE, Fired, Scripted, asked, controller, data, rules
from heliograph.packages.tests.facts import assert_each
from heliograph.tests.kit import adam
from heliograph_rules.controller import RuleController
from heliograph_testing import assert_resume_exact
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WINDOW = {"name": "window", "class": "HistoryBasedMetric", "arguments": {"window_size": 3}}
QUIET = {"name": "quiet", "class": "LogControl", "arguments": {"log_format": "{window}", "log_level": "debug"}}
SLOWER = {"name": "slower", "class": "ScaleLearningRate", "arguments": {"factor": 0.9}}


class Crash(BaseException):
    """What a kill looks like from within."""


class Crasher(h.Plugin):
    """Kills a run after a batch, when everything else has learned of it."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    @h.on(h.BatchStart, lane=h.Lane.REPORT)
    def crash(self, run: h.Run, event: h.BatchStart) -> None:
        if run.progress.batches == self.batches:
            raise Crash


def many() -> dict[str, Any]:
    """Return rules with every kind of state."""
    last = "window['training_loss']['loss'][-1]"
    return rules(
        controller("rand() < 0.4", name="random", triggers=["on_step_end"], operations=["slower.should_scale"]),
        controller(
            f"{last} > 0",
            name="patient",
            triggers=["on_log", "on_epoch_end"],
            patience={"patience_threshold": 2, "mode": "no_reset_on_failure"},
            operations=["slower.should_scale", "quiet.should_log"],
        ),
        controller(
            f"len(window['training_loss']['loss']) == 3 and {last} < window['training_loss']['loss'][0]",
            name="window_rule",
            triggers=["batch_end"],
            patience={"patience_threshold": 1},
            operations=["slower.should_scale"],
        ),
        controller(
            "evalmetric['eval_loss'] < 100",
            name="evaluated",
            triggers=["on_step_end"],
            operations=["control.should_log"],
        ),
        controller(
            "evalmetric['eval_loss'] > 0",
            name="at_the_end",
            triggers=["on_epoch_end"],
            patience={"patience_threshold": 1},
            operations=["slower.should_scale"],
        ),
        controller("1 / 0 > 1", name="broken", on_error="disable", triggers=["on_step_end"]),
        controller("training_loss['absent'] > 1", name="warned"),
        metrics=[LOSS, STATE, EVAL, WINDOW],
        operations=[QUIET, SLOWER],
    )


def training(*plugins: Any) -> tuple[h.Trainer, dict[str, Any]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(26, 4, generator=generator), torch.randint(0, 2, (26,), generator=generator))
    usual = [h.LogSchedule(h.Every(steps=2)), h.ValidationSchedule(h.Every(epochs=1)), h.RNGCapture()]
    return h.Trainer([*usual, *plugins, RuleController(many())], device="cpu"), {
        "task": h.Supervised(
            nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)), nn.functional.cross_entropy
        ),
        "train": DataLoader(samples, batch_size=4, shuffle=True),
        "validation": DataLoader(samples, batch_size=13),
        "optimizer": adam(1e-2),
        "epochs": 3,
    }


def test_killed_anywhere_it_continues_as_if_nothing_had_happened() -> None:
    assert_resume_exact(training, resumes=4)


def attempts(
    folder: Path, source: Callable[[], dict[str, Any]], kill: int | None, *, epochs: int = 4
) -> tuple[list[Any], h.RunResult | None, RuleController]:
    """Train four batches an epoch, saved after every second; return the acts, the result, and the rules."""
    plugin, fired, task = (
        RuleController(source()),
        Fired(),
        Scripted([float(n) for n in range(20, 0, -1)], [0.9, 0.6, 0.3]),
    )
    plugins: list[Any] = [
        h.LogSchedule(h.Every(batches=1)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.SaveSchedule(h.Every(batches=2)),
        h.Checkpoint(folder, resume="auto"),
        fired,
        plugin,
    ]
    if kill is not None:
        plugins.append(Crasher(kill))
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    trainer = h.Trainer(plugins, device="cpu")
    try:
        result = trainer.fit(task, data(4), validation=data(1), optimizer=optimizer, epochs=epochs)
    except Crash:
        return fired.acts, None, plugin
    return fired.acts, result, plugin


def on_saves() -> dict[str, Any]:
    return rules(
        controller("True", triggers=["on_save"], patience={"patience_threshold": 1}, operations=["control.should_log"])
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("kill", [2, 3, 5, 8, 9, 13])
@pytest.mark.parametrize("source", [many, on_saves], ids=["many", "on_save"])
def test_its_rules_act_where_they_would_have(source: Callable[[], dict[str, Any]], kill: int, tmp_path: Path) -> None:
    """A rule on a save is counted after the state that is saved: it is asked again when that is loaded."""
    whole, result, plugin = attempts(tmp_path / "whole", source, None)
    attempts(tmp_path / "parts", source, kill)
    acts, resumed, other = attempts(tmp_path / "parts", source, None)
    assert result is not None
    assert resumed is not None
    place = kill // 2 * 2
    assert len([each for each in whole if each[3] > place]) > 0
    assert [each for each in acts if each[3] > place] == [each for each in whole if each[3] > place]
    assert other.state_dict() == plugin.state_dict()
    assert resumed.progress.steps == result.progress.steps


@pytest.mark.parametrize("trigger", ["on_log", "on_save", "on_epoch_end"])
def test_a_run_that_a_rule_had_stopped_does_nothing_more_when_it_is_resumed(trigger: str, tmp_path: Path) -> None:
    """Section 6, row 8: resumed finished runs elsewhere did extra work."""

    def source() -> dict[str, Any]:
        return rules(controller("trainer_state['step'] >= 4", triggers=[trigger]))

    _, first, _ = attempts(tmp_path, source, None)
    _, second, _ = attempts(tmp_path, source, None)
    assert first is not None
    assert second is not None
    assert (first.status, second.status) == ("stopped", "stopped")
    assert second.progress.steps == first.progress.steps == 4
    assert (second.reason, second.stopped_by) == (first.reason, first.stopped_by)


def test_a_rule_that_was_changed_lets_a_stopped_run_continue(tmp_path: Path) -> None:
    def until(step: int) -> Callable[[], dict[str, Any]]:
        return lambda: rules(controller(f"trainer_state['step'] >= {step}"))

    attempts(tmp_path, until(4), None)
    _, second, _ = attempts(tmp_path, until(7), None)
    assert second is not None
    assert second.progress.steps == 7
    assert any("checkpoint: rule 'it'" in line for line in second.notes)


def test_what_has_changed_in_the_file_is_noted_and_no_crash(tmp_path: Path) -> None:
    def before() -> dict[str, Any]:
        return rules(
            controller("False", name="a"),
            controller("False", name="b", triggers=["on_step_end"]),
            metrics=[LOSS, STATE, {"name": "x", "class": "Loss"}],
            operations=[QUIET | {"arguments": {"log_format": ""}}],
        )

    def after() -> dict[str, Any]:
        return rules(
            controller("False", name="a", triggers=["on_step_end"]),
            controller("False", name="c"),
            metrics=[LOSS, EVAL, {"name": "x", "class": "EvalMetrics"}],
            operations=[SLOWER],
        )

    attempts(tmp_path, before, 9)
    _, result, _ = attempts(tmp_path, after, None)
    assert result is not None
    (note,) = [note for note in result.notes if "differ from the checkpoint" in note]
    assert_each(
        note.split("; "),
        ("rule_controller: ", "metric 'trainer_state' is gone"),
        ("metric 'evalmetric' is new",),
        ("metric 'x' has changed",),
        ("operation 'quiet' is gone",),
        ("operation 'slower' is new",),
        ("rule 'b' is gone",),
        ("rule 'c' is new",),
        ("rule 'a' has changed",),
    )


def test_a_rule_that_waits_for_a_validation_that_is_cut_is_asked_after_the_one_that_makes_up_for_it(
    tmp_path: Path,
) -> None:
    class Cutter(h.Plugin):
        """Has no time."""

        asks = ("stop",)

        @h.on(h.ValidationStart)
        def cut(self, run: h.Run, event: h.ValidationStart) -> None:
            run.control.stop("no time")
            run.control.cut_validation("no time")

    def fit(*plugins: Any) -> h.RunResult:
        source = rules(controller("evalmetric['eval_loss'] < 0.5", triggers=["on_epoch_end"]))
        saving = [h.SaveSchedule(h.Every(epochs=1)), h.Checkpoint(tmp_path, resume="auto")]
        schedule = h.ValidationSchedule(h.Every(epochs=1))
        trainer = h.Trainer([schedule, *saving, RuleController(source), *plugins], device="cpu")
        task = Scripted(validation=[0.4])
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
        return trainer.fit(task, data(2), validation=data(1), optimizer=optimizer, epochs=3)

    assert fit(Cutter()).reason == "no time"
    result = fit()
    assert (result.progress.epoch, result.progress.steps, asked(result)) == (1, 2, [("stop", 1, 2)])


def test_a_run_that_continues_from_its_final_save_knows_that_it_was_the_final_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit() -> list[str]:
        caplog.clear()
        report = {
            "name": "report",
            "class": "LogControl",
            "arguments": {"log_format": "final {is_final}", "log_level": "error"},
        }
        source = rules(
            controller("trainer_state.is_final", triggers=["on_save"], operations=["report.should_log"]),
            operations=[report],
        )
        saving = [h.SaveSchedule(h.At(batches=1), at_end=True), h.Checkpoint(tmp_path, resume="auto")]
        task = Scripted()
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
        h.Trainer([*saving, RuleController(source)], device="cpu").fit(task, data(2), optimizer=optimizer, epochs=1)
        return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]

    assert fit() == fit() == ["final True"]
