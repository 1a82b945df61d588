"""When rules are asked: every name of a moment, in a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.events import CATALOGUE
from heliograph.packages.rules.tests.scripted import Fired, Scripted, controller, data, rules, train
from heliograph_rules.controller import RuleController
from heliograph_rules.errors import RuleKeyError
from heliograph_rules.files.triggers import ANCESTOR, find_trigger

QUIET = [{"name": "quiet", "class": "LogControl", "arguments": {"log_format": "", "log_level": "debug"}}]


def always(*triggers: str) -> dict[str, Any]:
    return rules(controller(True, triggers=triggers, operations=["quiet.should_log"]), metrics=[], operations=QUIET)


@pytest.mark.parametrize(
    ("trigger", "batches"),
    [
        ("on_init_end", [0]),
        ("on_train_begin", [0]),
        ("on_epoch_begin", [0, 3]),
        ("on_step_begin", [0, 2, 3, 5]),
        ("on_substep_end", [1, 4]),
        ("on_pre_optimizer_step", [1, 2, 4, 5]),
        ("on_optimizer_step", [1, 2, 4, 5]),
        ("on_step_end", [1, 2, 4, 5]),
        ("on_log", [2, 3, 5, 6]),
        ("on_evaluate", [3, 6]),
        ("on_prediction_step", [3, 6]),
        ("on_save", [3, 6]),
        ("on_epoch_end", [3, 6]),
        ("on_train_end", [6]),
        ("on_predict", []),
    ],
)
def test_the_ancestors_names_of_moments(trigger: str, batches: list[int], tmp_path: Path) -> None:
    """Two epochs of three batches, of which two are a window: the last window of an epoch is of one."""
    fired = Fired()
    saving = [h.SaveSchedule(h.Every(epochs=1)), h.Checkpoint(tmp_path)]
    plugins = [h.GradientAccumulation(2), h.LogSchedule(h.Every(steps=1)), *saving, fired]
    train(always(trigger), *plugins, validation=[1.0], batches=3, logs=None)
    assert [each[3] for each in fired.acts if each[1] == trigger] == batches


@pytest.mark.parametrize("trigger", ["on_predict", "TestEnd", "on_prediction_step"])
def test_a_test_on_its_own_asks_its_rules(trigger: str) -> None:
    fired = Fired()
    trainer = h.Trainer([RuleController(always(trigger)), fired], device="cpu")
    trainer.test(Scripted(), data(1))
    assert [each[1] for each in fired.acts] == [trigger]


@pytest.mark.parametrize("event", CATALOGUE, ids=lambda event: event.name)
def test_every_event_is_a_trigger_by_both_of_its_names(event: type[h.Event]) -> None:
    assert find_trigger(event.name, "x").events == find_trigger(event.__name__, "x").events == (event,)


@pytest.mark.parametrize(
    ("trigger", "batches"),
    [
        ("epoch_start", [0, 3]),
        ("BatchEnd", [1, 2, 3, 4, 5, 6]),
        ("should_stop", [1, 2, 3, 3, 4, 5, 6, 6]),
        ("train_end", [6]),
    ],
)
def test_our_names_of_events(trigger: str, batches: list[int]) -> None:
    fired = Fired()
    train(always(trigger), fired, batches=3, logs=None)
    assert [each[3] for each in fired.acts] == batches


def test_a_step_has_two_names_and_each_is_asked() -> None:
    fired = Fired()
    train(always("on_optimizer_step", "on_step_end"), fired, batches=1, epochs=1)
    assert [each[1] for each in fired.acts] == ["on_optimizer_step", "on_step_end"]


def test_a_batch_that_is_skipped_during_a_window_is_no_substep() -> None:
    source = rules(
        controller(True, triggers=["on_substep_end"], operations=["quiet.should_log"]),
        controller(
            'trainer_state["batch"] == 1',
            name="skips",
            triggers=["batch_start"],
            operations=["control.should_skip_batch"],
        ),
        metrics=[{"name": "trainer_state", "class": "TrainingState"}],
        operations=QUIET,
    )
    fired = Fired()
    train(source, h.GradientAccumulation(4), fired, batches=4, epochs=1)
    assert [each[3] for each in fired.acts if each[0] == "it"] == [1, 3]


@pytest.mark.parametrize(
    ("name", "near"),
    [("on_epoch_ends", "on_epoch_end"), ("batch_ends", "batch_end"), ("OnLog", None), ("on_push_begin", None)],
)
def test_an_unknown_moment_is_refused(name: str, near: str | None) -> None:
    with pytest.raises(RuleKeyError, match=rf"invalid event \({name}\)\.") as caught:
        find_trigger(name, "mine")
    assert near is None or f"Did you mean {near!r}?" in str(caught.value)
    assert all(known in str(caught.value) for known in (*ANCESTOR, "step_end", "validation_end"))
