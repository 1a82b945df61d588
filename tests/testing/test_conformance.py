"""The conformance suite: every built-in plugin passes, and broken plugins do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import optuna
import pytest
import torch
from heliograph.plugins import discover
from heliograph.testing import check_plugin

RULES = {
    "controller_metrics": [{"name": "loss", "class": "HistoryBasedMetric", "arguments": {"window_size": 2}}],
    "controllers": [
        {
            "name": "save",
            "triggers": ["on_log", "step_end"],
            "rule": "len(loss.training_loss.loss) >= 0",
            "operations": ["hfcontrols.should_save"],
            "patience": {"patience_threshold": 1},
        }
    ],
}


@functools.cache
def trial() -> optuna.Trial:
    """Return the same trial at every call: the checkpoint of another is refused."""
    return optuna.create_study(pruner=optuna.pruners.NopPruner()).ask()


BUILT_INS: dict[str, Callable[[Path], h.Plugin]] = {
    "checkpoint": lambda folder: h.Checkpoint(folder, keep_best=1, monitor="validation/loss"),
    "compile": lambda folder: h.Compile(backend="eager"),
    "early_stopping": lambda folder: h.EarlyStopping(patience=1, min_delta=0.5),
    "ema": lambda folder: h.EMA(0.9),
    "exception_pass_through": lambda folder: h.ExceptionPassThrough(),
    "file_log": lambda folder: h.FileLog(folder),
    "gradient_accumulation": lambda folder: h.GradientAccumulation(2),
    "gradient_clipping": lambda folder: h.GradientClipping(1.0, value=0.5),
    "gradient_norm": lambda folder: h.GradientNorm(per_module=True),
    "handler_times": lambda folder: h.HandlerTimes(),
    "jsonl_log": lambda folder: h.JsonlLog(folder / "log.jsonl"),
    "learning_rate": lambda folder: h.LearningRate("plateau", monitor="validation/loss"),
    "log_schedule": lambda folder: h.LogSchedule(h.Every(steps=2), at_start=True, at_end=True),
    "nan_guard": lambda folder: h.NaNGuard("skip"),
    "optuna": lambda folder: h.Optuna(trial()),
    "preemption": lambda folder: h.Preemption(deadline=600),
    "profile": lambda folder: h.Profile(folder, wait=1, warmup=1, active=1),
    "progress": lambda folder: h.ProgressBar(plain=False, interval=0),
    "ray_report": lambda folder: h.RayReport(),
    "recorder": lambda folder: h.Recorder(folder),
    "rng_capture": lambda folder: h.RNGCapture(),
    "roll_back": lambda folder: h.RollBack(),
    "rule_controller": lambda folder: h.RuleController(RULES),
    "save_schedule": lambda folder: h.SaveSchedule(h.Every(batches=1), at_start=True, at_end=True),
    "tensorboard": lambda folder: h.TensorBoard(folder / "tensorboard"),
    "validation_schedule": lambda folder: h.ValidationSchedule(h.Every(samples=3), at_start=True, at_end=True),
}


def test_every_built_in_is_in_the_list() -> None:
    assert {each.name for each in discover() if each.package == "heliograph"} == BUILT_INS.keys()


@pytest.mark.parametrize("name", BUILT_INS)
def test_a_built_in_conforms(name: str, tmp_path: Path) -> None:
    if name == "learning_rate":
        check_plugin(lambda: BUILT_INS[name](tmp_path), make_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    else:
        check_plugin(lambda: BUILT_INS[name](tmp_path))
    assert BUILT_INS[name](tmp_path).name == name


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_the_other_learning_rates_conform(per: Any) -> None:
    check_plugin(lambda: h.LearningRate(per))


class Counting(h.Plugin):
    """A correct plugin."""

    def __init__(self) -> None:
        self.batches = 0

    @h.on(h.TrainStart)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        self.batches = 0

    @h.on(h.BatchEnd)
    def count(self, run: h.Run, event: h.BatchEnd) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]


def test_a_third_party_plugin_conforms_in_one_line() -> None:
    check_plugin(Counting)


def test_finds_a_state_that_is_not_plain() -> None:
    class Bad(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"batches": {1, 2}}

    with pytest.raises(AssertionError, match="plain types"):
        check_plugin(Bad)


def test_finds_a_plugin_that_keeps_the_state_of_the_former_run() -> None:
    class Bad(h.Plugin):
        def __init__(self) -> None:
            self.seen = 0

        @h.on(h.BatchEnd)
        def count(self, run: h.Run, event: h.BatchEnd) -> None:
            self.seen += 1
            if self.seen == 10:
                run.control.stop("ten batches")

    with pytest.raises(AssertionError, match="second fit's status differs"):
        check_plugin(Bad)


def test_finds_a_close_that_works_only_once() -> None:
    class Bad(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.file: list[int] | None = []

        def close(self) -> None:
            assert self.file is not None, "closed already"
            self.file = None

    with pytest.raises(AssertionError):
        check_plugin(Bad)


def test_finds_an_object_that_is_no_plugin() -> None:
    with pytest.raises(AssertionError, match="is not a plugin"):
        check_plugin(object)


def test_finds_a_state_that_is_loaded_wrongly() -> None:
    class Bad(Counting):
        def load_state_dict(self, state: Any) -> None:
            self.batches = state["batches"] + 1

    with pytest.raises(AssertionError, match="The state that 'bad' loaded is not the one that it saved"):
        check_plugin(Bad)


def test_finds_a_plugin_that_cannot_load_its_empty_state() -> None:
    class Bad(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches} if self.batches else {}

    with pytest.raises(AssertionError, match=r"rolls back to a checkpoint, .* It raised ValueError: Plugin 'bad' "):
        check_plugin(Bad)


def test_finds_a_plugin_that_ignores_its_empty_state() -> None:
    class Bad(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches} if self.batches else {}

        def load_state_dict(self, state: Any) -> None:
            if state:
                self.batches = state["batches"]

    with pytest.raises(AssertionError, match=r"^'bad' rolled back to {}, but has \[{'batches': 4}\]"):
        check_plugin(Bad)


class Renamed(Counting):
    """The second version of a correct plugin."""

    state_version = 2

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["count"]

    def migrate_state(self, state: dict[str, Any], version: int) -> dict[str, Any]:
        return {"count": state["batches"]}


def test_states_of_older_versions_are_loaded() -> None:
    check_plugin(Renamed, old_states={1: {"batches": 3}})
    with pytest.raises(AssertionError, match=r"^Give check_plugin a state of each older version, .* none of \[1\]\.$"):
        check_plugin(Renamed)
    with pytest.raises(
        AssertionError, match=r"every older version\. It raised ValueError: .* raised KeyError: 'batches'"
    ):
        check_plugin(Renamed, old_states={1: {"seen": 3}})
