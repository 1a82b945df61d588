"""`Verdicts` in a training: on one rank and on several, in a recording, over a kill."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.events import progress
from heliograph.packages.tests.facts import assert_each
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, linear_classifier
from heliograph.tests.ranks_pool import Pool
from heliograph_recorder import Recorder, Verdicts, attempt_facts, attempt_recorder, fork
from heliograph_recorder.explain.attempt_summary import summarize_attempts
from heliograph_recorder.explain.efficiency import efficiency
from heliograph_recorder.explain.judge import Measured
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import EventEntry
from heliograph_recorder.verdicts import plugin as module
from heliograph_rules import RuleController


class Clock:
    """Seconds, which pass only where a part of the training says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Loader:
    """Batches that take some time to load each."""

    def __init__(self, clock: Clock, seconds: float, count: int = 40) -> None:
        self.clock, self.seconds, self.batches = clock, seconds, class_batches(count)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.clock.now += self.seconds
            yield batch


class Forward(h.Plugin):
    """Lets a batch take a second."""

    affects_training = False

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    @h.on(h.TrainStart, h.CheckpointLoaded, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart | h.CheckpointLoaded) -> None:
        run.progress._since = self.clock.now  # it was made with that of the system

    @h.on(h.BatchEnd, lane=h.Lane.TRANSFORM)
    def advance(self, run: h.Run, event: h.BatchEnd) -> None:
        self.clock.now += 1.0


class Seen(h.Plugin):
    """Keeps what was emitted."""

    affects_training = False

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.verdicts: list[tuple[int, str, bool]] = []
        self.goodput: list[float | None] = []

    @h.on(Measured)
    def keep(self, run: h.Run, event: Measured) -> None:
        self.measured.append(event)

    @h.on(h.Verdict, optional=True)
    def keep_verdict(self, run: h.Run, event: h.Verdict) -> None:
        self.verdicts.append((run.progress.steps, event.kind, event.holds))

    @h.on(h.Log, optional=True)
    def log(self, run: h.Run, event: h.Log) -> None:
        self.goodput.append(event.metrics.get("train/goodput"))


@pytest.fixture
def recorded_by(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a recorder and the run have the same clock."""
    for each in (progress, attempt_recorder):
        monkeypatch.setattr(each, "monotonic", clock)
    moments = SimpleNamespace(now=lambda zone: datetime.fromtimestamp(clock.now, zone))
    monkeypatch.setattr(attempt_facts, "datetime", moments)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "perf_counter", made)
    monkeypatch.setattr(module, "time", made)
    return made


def fit(clock: Clock, *plugins: Any, load: float, **options: Any) -> tuple[Seen, h.RunResult]:
    seen = Seen()
    always = [Verdicts(every=20.0), Forward(clock), seen]
    return seen, kit.fit(*always, *plugins, train=Loader(clock, load), task=linear_classifier(), **options)


def test_a_training_that_waits_for_data(clock: Clock, tmp_path: Path) -> None:
    seen, result = fit(clock, h.LogSchedule(h.Every(steps=20)), Recorder(tmp_path), load=1.0, epochs=2)
    assert [(each.seconds, each.batches) for each in seen.measured] == [
        (32.0, 16),
        (20.0, 10),
        (20.0, 10),
        (20.0, 10),
        (20.0, 10),
        (20.0, 10),
        (20.0, 10),
        (8.0, 4),
    ]
    assert {each.batch for each in seen.measured} == {(2.0,)}
    assert {each.load_share for each in seen.measured} == {0.5}
    assert seen.verdicts == [(26, "input_bound", True)]
    assert seen.goodput == [0.5] * 4
    assert result.recording is not None
    entries = read(result.recording).attempts[0].entries
    found = [each for each in entries if getattr(each, "event", "") == "verdict"]
    assert_each([each.data["text"] for each in found], ("1.00 s of", "2.00 s", "50.0 %"))  # type: ignore[union-attr]
    story = result.explain()
    assert "input_bound: waits for data" in story
    assert "custom events" not in story


def test_the_first_stretch_is_recorded_although_nobody_else_receives_it(tmp_path: Path) -> None:
    result = kit.fit(Verdicts(), Recorder(tmp_path))
    assert result.recording is not None
    entries = [each for each in read(result.recording).attempts[0].entries if isinstance(each, EventEntry)]
    assert [each.data["batches"] for each in entries if each.event == "measured"] == [result.progress.batches]
    assert "time went: goodput" in result.explain()


def test_a_training_that_does_not_has_no_verdict(clock: Clock) -> None:
    seen, _ = fit(clock, load=0.0, epochs=2)
    assert seen.verdicts == []
    assert {each.load_share for each in seen.measured} == {0.0}


def test_batches_of_one_window_are_timed_too(clock: Clock) -> None:
    seen, _ = fit(clock, h.GradientAccumulation(4), load=1.0, epochs=4)
    assert [(each.batches, each.sampled) for each in seen.measured] == [(64, 63), (40, 40), (40, 40), (16, 16)]
    assert seen.verdicts == [(26, "input_bound", True)]


def test_a_rule_may_wait_for_a_verdict(clock: Clock) -> None:
    rules = {
        "controller_metrics": [{"name": "state", "class": "TrainingState"}],
        "controllers": [
            {
                "name": "input",
                "triggers": ["verdict"],
                "rule": 'state["global_step"] > 0',
                "operations": ["hfcontrols.should_training_stop"],
            }
        ],
    }
    _, result = fit(clock, RuleController(rules), load=1.0, epochs=2)
    assert (result.status, result.progress.steps) == ("stopped", 26)


def test_goodput_counts_what_a_kill_has_lost(clock: Clock, tmp_path: Path) -> None:
    class Kill(h.Plugin):
        affects_training = False

        @h.on(h.StepEnd)
        def kill(self, run: h.Run, event: h.StepEnd) -> None:
            if run.progress.steps == 60 and clock.now < 2000.0:
                clock.now = 2000.0  # until it is started again
                raise KeyboardInterrupt

    def attempt(resume: str | None) -> Seen:
        plugins = [
            h.SaveSchedule(h.Every(steps=40)),
            h.Checkpoint(tmp_path, resume=resume),
            h.LogSchedule(h.Every(steps=80)),
            Kill(),
        ]
        return fit(clock, *plugins, load=0.0, epochs=2)[0]

    with pytest.raises(KeyboardInterrupt):
        attempt(None)
    (goodput,) = attempt("auto").goodput
    # The training began at 1000; 40 seconds were of use at the save, and 36 more at the last look before the log.
    assert goodput == pytest.approx(76 / (2036 - 1000), abs=0.001)


class Kills(h.Plugin):
    """Ends attempts at steps, and lets time pass until the next one begins."""

    affects_training = False

    def __init__(self, clock: Clock, *steps: int) -> None:
        self.clock, self.steps = clock, list(steps)

    @h.on(h.StepEnd)
    def kill(self, run: h.Run, event: h.StepEnd) -> None:
        if self.steps and run.progress.steps == self.steps[0]:
            del self.steps[0]
            self.clock.now += 50.0
            raise KeyboardInterrupt


def goodputs(seen: Seen, recording: Path) -> tuple[float, float]:
    """Return the goodput in the last log, and that of `explain`."""
    found, logged = read(recording), seen.goodput[-1]
    assert logged is not None
    return logged, efficiency(found, summarize_attempts(found)).goodput


def test_a_log_and_explain_have_the_same_goodput_after_kills_and_in_a_fork(
    clock: Clock, recorded_by: None, tmp_path: Path
) -> None:
    def program(folder: Path, *more: Any) -> tuple[h.Trainer, dict[str, Any]]:
        schedules = h.SaveSchedule(steps=10), h.LogSchedule(steps=8)
        checkpoint = h.Checkpoint(folder, keep_last=None, resume="auto")
        plugins = [Verdicts(every=2.0), Forward(clock), Recorder(folder, digests=True), *schedules, checkpoint]
        options = {"task": linear_classifier(), "train": Loader(clock, 0.25), "optimizer": kit.sgd(), "epochs": 2}
        return h.Trainer([h.RNGCapture(1), *plugins, *more], device="cpu"), options

    def train(*more: Any) -> h.RunResult:
        trainer, options = program(tmp_path / "x", *more)
        return trainer.fit(**options)

    seen, kills = Seen(), Kills(clock, 14, 28)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(kills)
    result = train(seen)
    assert result.recording is not None
    logged, explained = goodputs(seen, result.recording)
    assert explained == pytest.approx(82.5 / 220.5)
    assert logged == pytest.approx(explained, abs=0.025)  # it is of the last look; an attempt ended before its first

    clock.now += 5000.0
    seen = Seen()
    forked = fork(tmp_path / "x", lambda folder: program(folder, seen), at=20, into=tmp_path / "y", exact=False)
    assert forked.recording is not None
    logged, explained = goodputs(seen, forked.recording)
    assert explained == pytest.approx(60 / 80)  # 60 batches of a second and a quarter, and 20 that are read again
    assert logged == pytest.approx(explained, abs=0.02)


def on_ranks(every: float) -> list[Any]:
    seen = Seen()

    class Late(h.Task):
        def __init__(self) -> None:
            self.model = torch.nn.Linear(4, 2)

        def training_step(self, run: h.Run, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            if run.engine.rank == 1:  # works longer: no sleep, which a busy machine would hide
                torch.randn(300, 300) @ torch.randn(300, 300)
            return torch.nn.functional.cross_entropy(self.model(inputs), targets)

    trainer = h.Trainer([Verdicts(every=every), seen], engine=h.DDPEngine())
    trainer.fit(Late(), class_batches(60), optimizer=torch.optim.SGD, epochs=2)
    return [seen.measured, seen.verdicts]


def test_all_ranks_measure_and_judge_the_same(ranks: Pool) -> None:
    first, second = ranks(2).run(on_ranks, 0.05)
    assert first == second
    assert first[0]
    assert all(len(each.batch) == len(each.memory) == 2 for each in first[0])
    assert all(each.memory[0] > 0 for each in first[0])
    assert sum(each.batches for each in first[0]) == 60


def test_options_and_a_system_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every"):
        Verdicts(every=0)
    monkeypatch.setattr(module, "STATM", tmp_path / "none")
    assert module.resident_bytes() == 0
    assert module.device_bytes(SimpleNamespace(type="cpu")) == 0
