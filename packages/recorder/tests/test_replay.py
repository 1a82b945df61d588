"""Replayed plugins make exactly the requests that they made in the run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.recorder.tests.replay_scenarios import (
    Action,
    End,
    Replays,
    Scenario,
    Spec,
    plugin_class,
    train,
)
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st

NAN, INF = float("nan"), float("inf")
UNITS = st.sampled_from(["steps", "epochs", "samples", "batches", "seconds", "skipped_steps", "validations"])
ANYWHERE = (h.BatchEnd, h.EpochStart, h.EpochEnd, h.Log, h.ValidationEnd, h.SavePoint, h.CheckpointSaved)
VERBS = ("stop", "end_epoch", "request_log", "request_save", "disable", "enable", "request_validation")


@st.composite
def filters(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    unit = draw(UNITS)
    number = draw(st.sampled_from([0.002, 0.01])) if unit == "seconds" else draw(st.integers(1, 5))
    if draw(st.booleans()):
        return "Every", {unit: number}
    return "At", {unit: [number, 2 * number]}


@st.composite
def schedules(draw: st.DrawFn) -> Mapping[str, Any]:
    return {"when": draw(filters()), "at_start": draw(st.booleans()), "at_end": draw(st.booleans())}


@st.composite
def plugins(draw: st.DrawFn, sets: Mapping[str, int] | None) -> tuple[Spec, ...]:
    chosen: list[Spec] = [("SaveSchedule", draw(schedules()))]
    if draw(st.booleans()):
        chosen.append(("GradientAccumulation", {"n": draw(st.sampled_from([2, 3, {0: 1, 1: 2}]))}))
    has_log = draw(st.booleans())
    if has_log:
        chosen.append(("LogSchedule", draw(schedules())))
    if sets is not None:
        chosen.append(("ValidationSchedule", draw(schedules())))
    monitors = ["train/loss"] * has_log + [f"validation/{name}/loss".replace("//", "/") for name in sets or ()]
    if monitors:
        options = {"monitor": draw(st.sampled_from(monitors)), "patience": draw(st.integers(1, 3))}
        chosen.append(("EarlyStopping", {**options, "nan": draw(st.sampled_from(["worse", "stop"]))}))
    guard = draw(st.sampled_from(["", "skip", "stop", "back"]))
    if guard == "back":
        chosen.append(("RollBack", {"max_times": draw(st.integers(1, 3))}))
    elif guard:
        chosen.append(("NaNGuard", {"action": guard, "max_skips": draw(st.integers(1, 3))}))
    if draw(st.booleans()):
        chosen.append(("RuleController", {"source": draw(rules(has_log))}))
    return tuple(draw(st.permutations(chosen)))


@st.composite
def rules(draw: st.DrawFn, has_log: bool) -> Mapping[str, Any]:
    texts = ['state["global_step"] > 2', 'state["epoch"] >= 1']
    metrics = [{"name": "state", "class": "TrainingState"}]
    if has_log:
        texts.append('loss["loss"] > 0.5')
        metrics.append({"name": "loss", "class": "Loss"})
    names = ["on_step_end", "on_substep_end", "on_epoch_end", "on_train_begin", "on_save", *["on_log"] * has_log]
    triggers = st.sampled_from(names)
    words = ["should_training_stop", "should_epoch_stop", "should_save"]
    controller: dict[str, Any] = {
        "name": "rule",
        "triggers": draw(st.lists(triggers, min_size=1, max_size=2, unique=True)),
        "rule": draw(st.sampled_from(texts)),
        "operations": [f"hfcontrols.{draw(st.sampled_from(words))}"],
    }
    if draw(st.booleans()):
        controller["patience"] = {"patience_threshold": draw(st.integers(1, 3))}
    return {"controller_metrics": metrics, "controllers": [controller]}


@st.composite
def actions(draw: st.DrawFn, names: list[str]) -> Action:
    kind = draw(st.sampled_from(["batch", "gradients", "veto", "cut", "other"]))
    nth = draw(st.integers(1, 8))
    match kind:
        case "batch":
            return Action(h.BatchStart, nth, draw(st.sampled_from(["skip_batch", "hold_step", "scale_loss"])))
        case "gradients":
            return Action(h.GradientsReady, nth, "skip_step")
        case "veto":
            return Action(h.ShouldStop, nth, "veto_stop")
        case "cut":
            return Action(h.ValidationBatchEnd, nth, "cut_validation")
        case _:
            return Action(
                draw(st.sampled_from(ANYWHERE)), nth, draw(st.sampled_from(VERBS)), draw(st.sampled_from(names))
            )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    sets = draw(st.sampled_from([None, {"": 1}, {"": 2}, {"a": 1, "b": 2}]))
    chosen = draw(plugins(sets))
    names = [plugin_class(kind).name for kind, _ in chosen]
    numbers = st.floats(0, 2, width=16)
    return Scenario(
        sizes=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))),
        sized=draw(st.booleans()),
        epochs=draw(st.integers(1, 3)),
        steps=draw(st.none() | st.integers(1, 8)),
        losses=tuple(draw(st.lists(numbers | st.sampled_from([NAN, INF]), min_size=1, max_size=9))),
        sets=sets,
        metrics=tuple(draw(st.lists(numbers | st.just(NAN), min_size=1, max_size=5))),
        plugins=chosen,
        actions=tuple(draw(st.lists(actions(names), max_size=4))),
        ends=tuple(
            draw(
                st.lists(
                    st.builds(End, st.just("kill"), st.sampled_from(ANYWHERE), st.integers(1, 8)),
                    max_size=2,
                )
            )
        ),
        first=draw(st.booleans()),
    )


def check(scenario: Scenario) -> None:
    names = [plugin_class(kind).name for kind, _ in scenario.plugins]
    with tempfile.TemporaryDirectory() as folder:
        attempts = train(scenario, Path(folder))
        replays = Replays(Path(folder))
    replays.check(attempts, scenario.make_plugins, names)
    for index, name in enumerate(names):
        replays.check(attempts, partial(_one, scenario, index), [name])


def check_events(scenario: Scenario) -> None:
    with tempfile.TemporaryDirectory() as folder:
        attempts = train(replace(scenario, listens=True), Path(folder))
        assume(all(attempt.error is None for attempt in attempts))  # the last batch of a failed run is not replayed
        replays = Replays(Path(folder))
    assert replays.events() == [event for attempt in attempts for event in attempt.events]


def _one(scenario: Scenario, index: int) -> list[Any]:
    return [scenario.make_plugins()[index]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(6))
def test_a_replay_makes_the_requests_of_the_run(part: int) -> None:
    @seed(part)
    @settings(max_examples=25, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(scenario=scenarios())
    def requests_the_same(scenario: Scenario) -> None:
        # The save during which a run was killed is not recorded, so the states that the next attempt had are unknown.
        assume(not any(end.kind == "kill" and end.event is h.SavePoint for end in scenario.ends))
        check(scenario)

    requests_the_same()


@settings(
    max_examples=min(60, settings().max_examples),  # 25 without --whole
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(scenario=scenarios())
def test_a_replay_emits_the_events_of_the_run(scenario: Scenario) -> None:
    events = [each.event for each in scenario.ends] + [each.event for each in scenario.actions]
    fails = h.CheckpointSaved in events  # during the emission of another event
    is_killed = any(end.kind == "kill" for end in scenario.ends)  # its last moment is not recorded
    assume(not fails and not is_killed)
    check_events(scenario)
