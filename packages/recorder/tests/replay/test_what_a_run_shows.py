"""Whatever a plugin reads of a replayed run is as it was, or raises `NotRecorded`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core.system.errors import NotRecorded
from heliograph.events import CATALOGUE, Control, Event, Progress
from heliograph.events import Run as Protocol
from heliograph.events.run import RunCheckpoints, RunData, RunHooks, RunLength, RunReport, RunStepping
from heliograph.packages.recorder.tests.recordings import fit
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder import Recorder
from heliograph_recorder.replays.replay import replay

PARTS = {
    "length": RunLength, "data": RunData, "stepping": RunStepping, "checkpoints": RunCheckpoints, "hooks": RunHooks,
    "report": RunReport,
}  # fmt: skip
OTHERWISE = {"bus", "report.is_replay", "report.tracks"}  # what a replay is, and nobody reads what is tracked in it
ASKED = [
    "should_stop", "should_log", "should_save", "should_validate", "should_end_epoch", "skips_batch",
    "drops_step", "is_rolling_back", "vetoed", "is_evaluating", "pending", "leaving", "stopped",
]  # fmt: skip
UNRECORDED = "not recorded"


def facts_of(protocol: type) -> list[str]:
    """Return the names of the attributes and properties of a protocol."""
    properties = [name for name, value in vars(protocol).items() if isinstance(value, property)]
    return [*getattr(protocol, "__annotations__", ()), *properties]


NAMES = sorted(
    ({*facts_of(Protocol)} | {f"{part}.{name}" for part, protocol in PARTS.items() for name in facts_of(protocol)})
    - OTHERWISE
    - PARTS.keys()
)


class Reads(h.Plugin):
    """Reads everything on every event."""

    name = "reads"

    def __init__(self) -> None:
        self.read: list[tuple[str, dict[str, Any]]] = []

    @h.on(*CATALOGUE, lane=h.Lane.REPORT)
    def read_all(self, run: h.Run, event: Event) -> None:
        self.read.append((event.name, {name: _plain(_value(run, name)) for name in NAMES}))


def _value(thing: Any, name: str) -> Any:
    try:
        return attrgetter(name)(thing)
    except NotRecorded:
        return UNRECORDED


def _plain(value: Any) -> Any:
    """Return a value as one that can be compared; of what is as large as a model, only its type."""
    match value:
        case Progress():
            return {name: count for name, count in value.state_dict().items() if name != "earlier_seconds"}
        case torch.Tensor():
            return value.tolist()
        case Mapping():
            return {name: _plain(each) for name, each in value.items()}
        case Control():
            return {name: _value(value, name) for name in ASKED}
        case None | int() | str() | float() | tuple() | Path():
            return value
    return "something"


@pytest.mark.parametrize("more", [[], [h.GradientAccumulation(2)]], ids=["plain", "accumulating"])
def test_it_is_what_it_was_or_it_is_not_recorded(more: list[Any], tmp_path: Path) -> None:
    live, replayed = Reads(), Reads()
    plugins = [
        h.LogSchedule(h.Every(steps=2)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.SaveSchedule(h.Every(steps=4)),
        h.Checkpoint(tmp_path / "saved", keep_last=2),
        h.HandlerTimes(),
        *more,
        Recorder(tmp_path, losses=True),
        live,
    ]
    fit(plugins, batches=5)
    report = replay(tmp_path, [replayed])
    assert not report.unheld
    assert not report.failed
    assert [name for name, _ in replayed.read] == [name for name, _ in live.read]
    unrecorded = set()
    for (event, was), (_, shown) in zip(live.read, replayed.read, strict=True):
        for name, value in shown.items():
            if value == UNRECORDED:
                unrecorded.add(name)
            elif name == "control":
                assert {**was[name], **{k: v for k, v in value.items() if v == UNRECORDED}} == value, (event, name)
            elif (event, name) != ("train_start", "report.recording"):  # which is named only then
                assert value == was[name], (event, name)
    assert unrecorded == {
        "batch", "checkpoints.batch_note", "checkpoints.difference", "checkpoints.forked_from",
        "checkpoints.resumed_at", "checkpoints.resumed_from", "checkpoints.source", "checkpoints.training_id",
        "checkpoints.unverified", "checkpoints.verified_before", "checkpoints.verified_steps", "collected",
        "data.batch_size", "data.layouts",
        "data.phase", "data.seed", "data.stream", "data.train_loader", "data.validation_loaders",
        "length.scheduler_steps", "modules", "outputs", "plugins", "report.has_left_group", "report.plugin_seconds",
        "report.ranks_meet", "scheduler", "schedulers",
        "stepping.batch_losses", "stepping.forward", "stepping.window_count",
        "task",
    }  # fmt: skip


@pytest.mark.parametrize("event", [h.GradientsReady, h.StepEnd])
def test_a_window_counts_its_batch_whoever_listens(event: type[Event], tmp_path: Path) -> None:
    class Reads(h.Plugin):
        def __init__(self) -> None:
            self.read: list[int] = []

        @h.on(event)
        def see(self, run: h.Run, event: Event) -> None:
            self.read.append(run.stepping.window)

    live, again = Reads(), Reads()
    fit([live, Recorder(tmp_path)], batches=2, epochs=1, validation=None)
    replay(tmp_path, [again])
    assert live.read == again.read == [1, 1]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda each: each.zero_grad(set_to_none=True), "of the optimizer"),
        (lambda each: each.step(lambda: 0.0), "of the optimizer"),
        (lambda each: each.add_param_group({}), "of the optimizer"),
        (lambda each: each.param_groups[0]["params"], "of the optimizer"),
    ],
    ids=["zero_grad", "step", "add_param_group", "params"],
)
def test_an_optimizer_raises_not_recorded(act: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    class Acts(h.Plugin):
        @h.on(h.BatchEnd)
        def act(self, run: h.Run, event: h.BatchEnd) -> None:
            act(run.optimizer)

    fit([Recorder(tmp_path)], batches=1, epochs=1, validation=None)
    report = replay(tmp_path, [Acts()])
    (text,) = report.unheld["acts"]
    assert message in text
    assert_facts(text, "(batch_end, attempt 1", "epoch 0 batch 1", "step 1)")
    assert not report.failed
