"""A save may be asked for at every event, and a run may be stopped there: each resumes to what it would have been."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.events import CATALOGUE
from heliograph.tests import kit
from heliograph.tests.kit import adam
from heliograph_rules import RuleController
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LATE = (h.SavePoint, h.CheckpointSaved, h.ShouldStop)  # after a boundary's requests were served
ABOUT_FILES = (h.CheckpointLoaded, h.CheckpointSaved, h.CheckpointPruned)
OF_AN_ATTEMPT = (h.TrainStart, h.LastBoundary, h.TrainEnd, h.RunClosed, h.RunFailed)  # each process has these once more
EVENTS = [
    h.TrainStart, h.EpochStart, h.BatchStart, h.GradientsReady, h.StepEnd, h.BatchEnd, h.Log, h.ValidationStart,
    h.ValidationBatchStart, h.ValidationBatchEnd, h.ValidationEnd, h.SavePoint, h.CheckpointSaved, h.ShouldStop,
    h.EpochEnd, h.TrainEnd,
]  # fmt: skip
RULES = {
    "controllers": [
        {
            "name": "slower",
            "triggers": ["on_epoch_begin"],
            "rule": "True",
            "operations": ["halve.should_scale"],
        }
    ],
    "operations": [{"name": "halve", "class": "ScaleLearningRate", "arguments": {"factor": 0.5}}],
}


def draw() -> float:
    """Draw from every global generator."""
    return random.gauss(0, 1) + float(np.random.randn()) + torch.rand(()).item()


class Witness(h.Plugin):
    """Counts and draws at every event; what it counts of files and of attempts is not the training's."""

    affects_training = False  # else what it keeps for a validation's end would be named

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"counts": {}, "places": [], "drawn": 0.0}
        self.before_validation: dict[str, Any] = {}

    @h.on(*CATALOGUE)
    def look(self, run: h.Run, event: h.Event) -> None:
        drawn, place, seen = draw(), run.progress, self.seen
        if isinstance(event, h.ValidationStart):
            self.before_validation = deepcopy(seen)
        if isinstance(event, h.ValidationCut):  # it did not happen
            self.seen = self.before_validation
        if isinstance(event, (*ABOUT_FILES, *OF_AN_ATTEMPT, h.ValidationCut)) or getattr(event, "resumed", False):
            return
        seen["counts"][event.name] = seen["counts"].get(event.name, 0) + 1
        if not isinstance(event, h.SavePoint):  # its draws are taken back
            seen["drawn"] += drawn
        if isinstance(event, h.Log | h.ValidationEnd | h.SavePoint | h.ShouldStop | h.EpochStart | h.EpochEnd):
            seen["places"].append([event.name, place.epoch, place.batch, place.steps])

    def state_dict(self) -> dict[str, Any]:
        return deepcopy(self.seen)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = deepcopy(dict(state))


class Asker(h.Plugin):
    """Asks for a save at one emission of an event, and in one attempt for a stop, too."""

    affects_training = False  # else its options, which differ from attempt to attempt, would be named
    asks: tuple[str, ...] = ("save", "stop")

    def __init__(self, kind: type[h.Event], occurrence: int, *, stops: bool = False) -> None:
        self.kind, self.occurrence, self.stops, self.count = kind, occurrence, stops, 0
        self.path: Path | None = None

    @h.on(*EVENTS)
    def ask(self, run: h.Run, event: h.Event) -> None:
        if type(event) is not self.kind or getattr(event, "resumed", False):
            return
        self.count += 1
        if self.count == self.occurrence:
            self.act(run)

    @h.on(h.CheckpointSaved, lane=h.Lane.TRANSFORM)
    def remember(self, run: h.Run, event: h.CheckpointSaved) -> None:
        if self.count >= self.occurrence and (self.path is None or self.path.name == event.path.name):
            kept = event.path.parent.with_suffix(".kept")  # the end of the epoch replaces it
            kept.mkdir(exist_ok=True)
            copy(event.path, kept)
            self.path = kept / event.path.name

    def act(self, run: h.Run) -> None:
        run.control.request_save("the test")
        if self.stops:
            run.control.stop("the test")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Signals(Asker):
    """Sends this process a signal there, as a cluster does."""

    name, asks = "asker", ()

    def act(self, run: h.Run) -> None:
        if self.stops:
            signal.raise_signal(signal.SIGTERM)


class Net(nn.Module):
    """Dropout, whose draws are the training's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]  # a module returns Any


@dataclass
class Attempt:
    """How one fit of the program went: what must be equal in the end, and the checkpoint that was asked for."""

    result: h.RunResult
    path: Path | None
    end: dict[str, Any]


def fit(folder: Path, asker: Asker, resume: Path | None = None, *, seed: int = 0) -> Attempt:
    torch.manual_seed(1)
    task = h.Supervised(Net(), nn.functional.mse_loss)
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(seed)  # what a process happens to stand at
    data = TensorDataset(torch.linspace(-1, 1, 30).reshape(10, 3), torch.linspace(0, 1, 10).reshape(10, 1))
    witness = Witness()
    plugins = [
        h.RNGCapture(6691),
        asker,
        h.GradientAccumulation(2),
        h.LearningRate("epoch"),
        RuleController(RULES),
        h.LogSchedule(h.Every(steps=1)),
        h.ValidationSchedule(h.Every(steps=2), at_start=True),
        *([h.SaveSchedule(h.Every(batches=4))] if asker.kind in ABOUT_FILES or asker.kind is h.SavePoint else []),
        witness,
        h.Checkpoint(folder, keep_last=None, resume=resume),
        *([h.Preemption()] if isinstance(asker, Signals) else []),
    ]
    result = h.Trainer(plugins, device="cpu").fit(
        task,
        DataLoader(data, 2, shuffle=True),
        validation=DataLoader(data, 5),
        optimizer=adam(0.05),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        epochs=2,
        name="cut",
        on_interrupt="return",
    )
    counters = {name: value for name, value in result.progress.state_dict().items() if name != "earlier_seconds"}
    weights = {name: value.numpy().tobytes() for name, value in task.model.state_dict().items()}
    return Attempt(result, asker.path, {**witness.state_dict(), "weights": weights, **counters, "next draw": draw()})


def check(whole: Attempt, resumed: Attempt, where: str, *, but: str = "") -> None:
    """Compare a run that was resumed with one that was not, but for what bears a name."""
    assert resumed.result.resume is not None
    assert resumed.result.resume.reasons == (), resumed.result.resume.reasons
    for attempt in (whole, resumed):
        attempt.end["counts"].pop(but, None)
        attempt.end["places"] = [place for place in attempt.end["places"] if place[0] != but]
    for name in whole.end.keys() - {but}:
        assert resumed.end[name] == whole.end[name], f"{name} differs, {where}"


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    """Leave the generators as they were."""
    with kit.kept_generators():
        yield


def often(kind: type[h.Event]) -> int:
    """Return how often an event is emitted in an attempt that nobody stops."""
    count = Asker(kind, 0)
    with TemporaryDirectory() as folder:
        fit(Path(folder), count)
    return count.count


@pytest.mark.sample(4)
@pytest.mark.parametrize("stops", [False, True], ids=["save", "save and stop"])
@pytest.mark.parametrize("kind", EVENTS, ids=lambda each: each.name)
def test_a_save_that_is_asked_for_at_any_event_resumes_exactly(
    kind: type[h.Event], stops: bool, tmp_path: Path
) -> None:
    for number in range(1, often(kind) + 1):
        folder, where = tmp_path / str(number), f"saved from {kind.__name__} number {number}"
        # Where a stop is asked for after the requests were served, its save is not at the next boundary: there is none.
        is_late = stops and kind in LATE
        whole = fit(folder / "whole", Asker(kind, -1 if is_late else number))
        first = fit(folder / "first", Asker(kind, number, stops=stops))
        assert first.path is not None, where
        later = Asker(kind, -1 if kind is h.TrainStart else number)  # its state comes after TrainStart only
        resumed = fit(folder / "resumed", later, first.path, seed=7)

        check(whole, resumed, where, but="save_point" if is_late else "")


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [each for each in EVENTS if each is not h.TrainEnd], ids=lambda each: each.name)
def test_a_signal_at_any_event_ends_in_a_checkpoint_that_resumes_exactly(kind: type[h.Event], tmp_path: Path) -> None:
    for number in range(1, often(kind) + 1):
        folder, where = tmp_path / str(number), f"SIGTERM at {kind.__name__} number {number}"
        whole = fit(folder / "whole", Signals(kind, number))
        first = fit(folder / "first", Signals(kind, number, stops=True))
        assert first.result.exit_status == 128 + signal.SIGTERM, where
        resumed = fit(folder / "resumed", Signals(kind, number), first.result.last_checkpoint, seed=7)

        check(whole, resumed, where, but="save_point")
