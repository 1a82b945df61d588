"""Resumed equals uninterrupted, bit for bit: runs killed anywhere, again and again, against runs left alone."""

from __future__ import annotations

import gc
import json
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph import tuning
from heliograph.core.checkpoint.storage import Files
from heliograph.core.task import Loss
from heliograph.tests import kit
from heliograph.tests.kit import adam
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

Mode = Literal["cycle", "min", "max", "weighted"]
Kind = Literal[
    "cycle", "min", "max", "weighted", "map", "torch", "phases", "iterable", "unsized iterable",
    "foreign", "unsized foreign", "stateful", "unsized stateful", "list",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
MODES: tuple[Mode, ...] = get_args(Mode)
IN_WORKERS = KINDS[:9]
Poison = Literal["skip", "roll back"]
Steps = Literal["step", "epoch", "plateau", "warmup"]


# What is run, and where it is killed.


@dataclass(frozen=True)
class Kill:
    """Ends an attempt: at the n-th emission of an event within it, or at its end where that never comes.

    `how` is `raise`, a BaseException as an out-of-memory killer's closest relative, or `stop`, as a preemption does it.
    """

    event: type[h.Event]
    nth: int = 1
    lane: h.Lane = h.Lane.REPORT
    first: bool = False
    how: Literal["raise", "stop"] = "raise"

    def __repr__(self) -> str:
        place = f"{'before' if self.first else 'after'} all of {self.lane.name}"
        return f"Kill({self.how} at {self.event.__name__} number {self.nth}, {place})"


@dataclass(frozen=True)
class Scenario:
    """A run and how it is interrupted. `workers` has a number for each attempt, in turn; the rest says itself.

    With `asks` the `Checkpoint` asks for saves by itself, with `counts` losses are sums over what is counted. With
    `rehearses` the first attempt is rehearsed before, which the uninterrupted run is not.
    """

    kind: Kind = "map"
    shuffled: bool = True
    samples: int = 16
    batch_size: int = 4
    epochs: float | None = 2
    steps: int | None = None
    accumulation: int = 1
    scheduler: Steps | None = None
    save: Mapping[str, float] = field(default_factory=lambda: {"batches": 2})
    validate: Mapping[str, float] | None = None
    log: Mapping[str, float] = field(default_factory=lambda: {"steps": 2})
    asks: bool = False
    ends: bool = False
    patience: int | None = None
    poison: Poison | None = None
    nudges: bool = False
    meddles: bool = False
    background: bool = False
    counts: bool = False
    rehearses: bool = False
    workers: tuple[int, ...] = (0,)
    kills: tuple[Kill, ...] = ()

    def __str__(self) -> str:
        """Return the settings that are not the usual ones, a line each."""
        usual = type(self)()
        return "\n".join(f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(usual, name))

    @property
    def attempts(self) -> list[tuple[int, Kill | None]]:
        """The workers and the kill of each attempt, the one that ends well last."""
        kills = [*self.kills, None]
        return [(self.workers[attempt % len(self.workers)], kill) for attempt, kill in enumerate(kills)]


# The training, which draws from every generator wherever user code runs.


def draw() -> float:
    """Draw from every global generator, from two of them in a way that leaves a normal number cached."""
    return float(random.gauss(0, 1) + np.random.randn() + torch.rand(()).item())


def draw_unseeded() -> float:
    """The same, and from a generator that nobody gave a seed."""
    return draw() + float(np.random.default_rng().random())


def sample(index: int, *, poisoned: bool = False) -> Tensor:
    return torch.full((3,), float("nan") if poisoned else index / 10) + torch.rand(3) / 10 + draw_unseeded() / 10


def collate(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + draw_unseeded() / 10


class Samples(Dataset[Tensor]):
    """Map-style, with augmentation."""

    def __init__(self, size: int, poisoned: int | None = None) -> None:
        self.size, self.poisoned = size, poisoned

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return sample(index, poisoned=index == self.poisoned)


class Stream(IterableDataset[Tensor]):
    """Iterable, with augmentation and an order that is drawn; workers share it."""

    def __init__(self, size: int, poisoned: int | None, *, shuffled: bool) -> None:
        self.size, self.poisoned, self.shuffled = size, poisoned, shuffled

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        own = list(range(self.size) if worker is None else range(worker.id, self.size, worker.num_workers))
        if self.shuffled:
            random.shuffle(own)
        return (sample(index, poisoned=index == self.poisoned) for index in own)


class Unseen(Samples):
    """For validation, whose loading is not keyed."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), index / 10) + draw() / 10


class SizedStream(Stream):
    """The same with a length."""

    def __len__(self) -> int:
        return self.size


class Reader:
    """No loader of torch's: yields batches."""

    def __init__(self, stream: Stream, batch_size: int) -> None:
        self.stream, self.batch_size = stream, batch_size

    def __iter__(self) -> Iterator[Tensor]:
        samples = list(self.stream)
        for start in range(0, len(samples), self.batch_size):
            yield collate(samples[start : start + self.batch_size])


class SizedReader(Reader):
    """The same with a length."""

    def __len__(self) -> int:
        return ceil(self.stream.size / self.batch_size)


class Cursor:
    """A loader that keeps its own position, as torchdata's does."""

    def __init__(self, stream: Stream, batch_size: int) -> None:
        self.stream, self.batch_size, self.position, self.following = stream, batch_size, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.position, self.following = self.following, 0
        while self.position < self.stream.size:
            indices = range(self.position, min(self.position + self.batch_size, self.stream.size))
            self.position += self.batch_size
            yield collate([sample(index, poisoned=index == self.stream.poisoned) for index in indices])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.following = state["position"]


class SizedCursor(Cursor):
    """The same with a length."""

    def __len__(self) -> int:
        return ceil(self.stream.size / self.batch_size)


def streams_of(scenario: Scenario, mode: Mode, poisoned: int | None) -> h.Streams:
    """Return two datasets and a loader that is read again; without a length where that may be."""
    size, batch_size = scenario.samples, scenario.batch_size
    more: dict[str, Any] = {"length": ceil(size / batch_size)} if mode == "weighted" else {}
    made = SizedReader if mode == "cycle" else Reader
    foreign = made(SizedStream(size + 2 if mode == "min" else size // 3, None, shuffled=scenario.shuffled), batch_size)
    weights = {"long": 2.0, "short": 1, "foreign": 1.5} if mode == "weighted" else None
    streams = {"long": Samples(size, poisoned), "short": Samples(size - 5), "foreign": foreign}
    return h.Streams(streams, mode=mode, weights=weights, **more)


def data_of(scenario: Scenario, workers: int) -> dict[str, Any]:
    """Return the training data, with how to read it."""
    kind, size, batch_size, shuffled = scenario.kind, scenario.samples, scenario.batch_size, scenario.shuffled
    poisoned = size // 2 if scenario.poison else None
    if kind in MODES:
        params: Any = {"batch_size": batch_size, "shuffle": shuffled, "collate_fn": collate}
        params |= {"num_workers": workers, "short": {"num_workers": 0, "drop_last": True}}
        return {"train": streams_of(scenario, kind, poisoned), "loader_params": params}
    if kind in ("map", "phases"):
        params = {"batch_size": batch_size, "shuffle": shuffled, "num_workers": workers, "collate_fn": collate}
        data = Samples(size, poisoned)
        return {"train": data if kind == "map" else h.Phases(data, Samples(size + 3)), "loader_params": params}
    if kind == "torch":
        return {
            "train": DataLoader(
                Samples(size, poisoned), batch_size, shuffle=shuffled, num_workers=workers, collate_fn=collate
            )
        }
    if kind == "list":
        numbers = torch.arange(size * 3.0).reshape(size, 3) / size
        return {"train": list(torch.split(numbers, batch_size))}
    stream = (Stream if "unsized" in kind else SizedStream)(size, poisoned, shuffled=shuffled)
    if "stateful" in kind:
        return {"train": (Cursor if "unsized" in kind else SizedCursor)(stream, batch_size)}
    if "foreign" in kind:
        return {"train": (Reader if "unsized" in kind else SizedReader)(stream, batch_size)}
    return {"train": DataLoader(stream, batch_size, num_workers=workers, collate_fn=collate)}


def joined(batch: Any) -> Tensor:
    """Return a batch; of several streams, all in one."""
    return torch.cat([part for part in batch.values() if part is not None]) if isinstance(batch, dict) else batch


class Net(nn.Module):
    """Dropout, and a buffer that counts."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += self.training
        outputs: Tensor = self.layers(inputs)
        return outputs


def loss_of(outputs: Tensor, batch: Tensor, *, counts: bool) -> Loss:
    """Return a mean over samples; or a sum with its count, in which a sample counts once or twice."""
    errors = (outputs - batch.sum(1, keepdim=True)).square()
    if not counts:
        return errors.mean()
    times = 1 + (batch[:, :1] > 0.5).int()
    return (times * errors).sum(), times.sum()


class Drawing(h.Task):
    """A task whose steps draw, too."""

    def __init__(self, *, counts: bool = False) -> None:
        self.model, self.counts = Net(), counts

    def training_step(self, run: h.Run, given: Any) -> Loss:
        batch = joined(given)
        run.track("mean", batch.mean(), len(batch))
        outputs: Tensor = self.model(batch + draw() / 10)
        return loss_of(outputs, batch, counts=self.counts)

    def validation_step(self, run: h.Run, batch: Tensor) -> dict[str, Tensor | float]:
        outputs = self.model(batch)
        return {"loss": (outputs - batch.sum(1, keepdim=True)).square().mean(), "draw": draw()}


class Nudge(h.Plugin):
    """Changes weights now and then, at moments that filters count."""

    @h.on(h.StepEnd, when=h.Every(emissions=3))
    def often(self, run: h.Run, event: h.StepEnd) -> None:
        self.nudge(run, 1.01)

    @h.on(h.EpochEnd, when=h.Every(steps=3))
    def late(self, run: h.Run, event: h.EpochEnd) -> None:
        self.nudge(run, 1.02)

    @h.on(h.StepEnd, when=h.Once())
    def once(self, run: h.Run, event: h.StepEnd) -> None:
        self.nudge(run, 1.05 + draw() / 100)

    def nudge(self, run: h.Run, factor: float) -> None:
        for parameter in run.modules["model"].parameters():
            parameter.data.mul_(factor)


class Meddle(h.Plugin):
    """Asks the loop for whatever may be asked for, at places that depend on the progress alone."""

    @h.on(h.BatchStart)
    def leave_out(self, run: h.Run, event: h.BatchStart) -> None:
        if run.progress.batches % 6 == 3:
            run.control.skip_batch("every sixth")

    @h.on(h.GradientsReady)
    def drop(self, run: h.Run, event: h.GradientsReady) -> None:
        if run.progress.batches % 5 == 2:
            run.control.skip_step("some batches")

    @h.on(h.BatchEnd)
    def end(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.batches % 9 == 8:
            run.control.end_epoch("every ninth")
        if run.progress.batches == 5:
            run.control.next_phase("the fifth batch")
        if run.progress.batches % 7 == 4:
            run.control.set_learning_rate(0.001 * (1 + run.progress.batches % 3), "every seventh")


class Quarrel(h.Plugin):
    """Fails now and then, and is switched off and on, at places that depend on the progress alone."""

    policy, max_errors = "observer", 1_000_000

    @h.on(h.BatchEnd)
    def fail(self, run: h.Run, event: h.BatchEnd) -> None:
        raise ArithmeticError("at every batch")

    @h.on(h.StepEnd)
    def go(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps % 3 == 1:
            assert isinstance(run, h.TrainRun)
            with run.plugins.disabled(self):
                pass


def scheduler_of(scenario: Scenario) -> Callable[..., Any] | None:
    kinds: dict[str, Callable[..., Any]] = {
        "warmup": h.warmup_cosine(0.3),
        "step": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
        "epoch": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.7),
        "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    }
    return None if scenario.scheduler is None else kinds[scenario.scheduler]


def plugins_of(scenario: Scenario, folder: Path) -> list[Any]:
    """Return the plugins of a run, all but those that watch and kill."""
    monitor = "train/loss" if scenario.validate is None else "validation/loss"
    ends = scenario.ends
    plugins: list[Any] = [h.RNGCapture(6691), h.GradientAccumulation(scenario.accumulation)]
    plugins.append(h.RollBack(9) if scenario.poison == "roll back" else h.NaNGuard("skip"))
    if scenario.scheduler is not None:
        plateau = scenario.scheduler == "plateau"
        per = "step" if scenario.scheduler == "warmup" else scenario.scheduler
        plugins.append(h.LearningRate(per, monitor=monitor if plateau else None))
    if scenario.validate is not None:
        plugins.append(h.ValidationSchedule(h.Every(**scenario.validate), at_start=ends, at_end=ends))
    if scenario.patience is not None:
        plugins.append(h.EarlyStopping(monitor, patience=scenario.patience))
    plugins += [Nudge()] * scenario.nudges + ([Meddle(), Quarrel()] if scenario.meddles else [])
    every = h.Every(**scenario.save) if scenario.asks else None
    return [
        *plugins,
        h.LogSchedule(h.Every(**scenario.log), at_start=ends, at_end=ends),
        *([] if scenario.asks else [h.SaveSchedule(h.Every(**scenario.save), at_start=ends, at_end=ends)]),
        h.Checkpoint(folder, every=every, resume="auto", background=scenario.background),
        h.JsonlLog(folder / "log.jsonl"),
    ]


# Watching and killing.


class Killed(BaseException):
    """As abrupt an end as there is within a process."""


WATCHED: list[type[h.Event]] = [h.BatchStart, h.BatchEnd, h.Log, h.ValidationEnd, h.RunClosed]


class Watch(h.Plugin):
    """Notes what is to be compared, by what it is and where: `("loss", epoch, batch)`."""

    affects_training = False

    def __init__(self) -> None:
        self.facts: dict[tuple[Any, ...], set[Any]] = defaultdict(set)
        self.final: dict[str, Any] = {}
        self.hits: set[type[h.Event]] = set()

    @h.on(*WATCHED, lane=h.Lane.REPORT)
    def receive(self, run: h.Run, event: h.Event) -> None:
        place = run.progress
        if isinstance(event, h.BatchStart):
            self.note(run, "batch", run.batch)
        elif isinstance(event, h.BatchEnd):
            generators = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
            if not run.control.skips_batch:
                self.facts["loss", place.epoch, place.batch - 1].add(frozen(run.loss))
            self.facts["generators", place.epoch, place.batch - 1].add(hash(frozen(generators)))
        elif isinstance(event, h.Log | h.ValidationEnd):
            self.note(run, event.name, event.metrics)
        elif isinstance(event, h.RunClosed):
            self.final = final_state(run, event.status)

    def note(self, run: h.Run, what: str, value: Any) -> None:
        self.facts[what, run.progress.epoch, run.progress.batch].add(frozen(value))


def final_state(run: h.Run, status: str) -> dict[str, Any]:
    """Return what must be equal in the end, by path."""
    state = run.state_dict()
    of_the_process = ("saved_at", "training_id", "versions", "checkpoint", "jsonl_log", "earlier_seconds", "objects")
    leaves = {path: leaf for path, leaf in walk(state) if not set(of_the_process) & set(path.split("."))}
    return {**leaves, "status": status, "learning rate": run.optimizer.param_groups[0]["lr"]}


def reported(folder: Path) -> list[Any]:
    """Return what a log holds of metrics."""
    records = [json.loads(line) for line in kit.newest_log(folder).read_text().splitlines()]
    return [(each["event"], each["epoch"], each["step"], each["metrics"]) for each in records if "metrics" in each]


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in a state with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from walk(item, f"{path}.{key}".lstrip("."))
    if not isinstance(value, dict | list | tuple):
        yield path, frozen(value)


def frozen(value: Any) -> Any:
    """Return a value so that equal means equal to the last bit, NaN and the sign of zero included."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return tuple(sorted((key, frozen(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    return repr(value)


class Killer(h.Plugin):
    """Ends an attempt."""

    affects_training = False
    asks = ("stop", "save")

    def __init__(self, kill: Kill) -> None:
        self.kill, self.count = kill, 0
        self.counted = h.BatchEnd if kill.event is h.RunFailed else kill.event  # it comes after another death only
        self.hits: set[type[h.Event]] = set()

    def count_down(self, run: h.Run, event: h.Event) -> None:
        if isinstance(event, h.SavePoint) and h.TrainEnd in self.hits:  # it is the one that a late strike asked for
            return
        self.count += isinstance(event, self.counted)
        if self.count >= self.kill.nth or isinstance(event, h.TrainEnd):
            self.hits.add(type(event))
            self.strike(run, event)

    def strike(self, run: h.Run, event: h.Event) -> None:
        if self.kill.how == "raise":
            raise Killed
        if not run.control.should_stop:
            run.control.stop("the cluster says so")
            run.control.request_save("the cluster says so")
            if run.phase == "validation" and not isinstance(event, h.ValidationEnd):
                run.control.cut_validation("the cluster says so")


def killer(kill: Kill | None) -> list[Killer]:
    """Return the plugin that kills, if any; it receives what it waits for, in its lane, and the end of the training."""
    if kill is None:
        return []

    def receive(self: Killer, run: h.Run, event: h.Event) -> None:
        self.count_down(run, event)

    events: set[type[h.Event]] = {kill.event, h.TrainEnd} | ({h.BatchEnd} if kill.event is h.RunFailed else set())
    return [type("Killer", (Killer,), {"receive": h.on(*events, lane=kill.lane)(receive)})(kill)]


# One attempt, all attempts, and the comparison.


def run_attempt(
    scenario: Scenario,
    folder: Path,
    workers: int = 0,
    kill: Kill | None = None,
    others: Iterable[Any] = (),
    *,
    rehearse: bool = False,
) -> Watch:
    """Train until the end or until killed, in a process that drew all sorts of numbers before."""
    watch, killers = Watch(), killer(kill)
    trained_with = [*plugins_of(scenario, folder), *others]
    plugins = [*trained_with, watch]
    plugins = [*killers, *plugins] if kill is not None and kill.first else [*plugins, *killers]
    torch.manual_seed(1)
    task = Drawing(counts=scenario.counts)
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(hash(kill) % 2**32)
    arguments: dict[str, Any] = {
        **data_of(scenario, workers),
        "validation": DataLoader(Unseen(5), 2) if scenario.validate else None,
        "optimizer": adam(0.05),
        "scheduler": scheduler_of(scenario),
        "epochs": scenario.epochs,
        "steps": scenario.steps,
    }
    if rehearse:
        tuning.rehearse(h.Trainer(trained_with, device="cpu"), task, **arguments)
    try:
        h.Trainer(plugins, device="cpu").fit(task, **arguments)
    except Killed:
        watch.final = {}
    watch.hits = killers[0].hits if killers else set()
    if workers:
        gc.collect()  # a killed run lies in cycles, and with it its workers
    return watch


def check(scenario: Scenario) -> set[type[h.Event]]:
    """Interrupt a run as the scenario says, compare it with one left alone, and return the events at which it was."""
    with TemporaryDirectory() as folder:
        whole = run_attempt(scenario, Path(folder, "whole"), scenario.workers[0])
        facts: dict[tuple[Any, ...], set[Any]] = defaultdict(set)
        hits = set()
        for number, (workers, kill) in enumerate(scenario.attempts):
            if "iterable" in scenario.kind and not any(Path(folder).glob("killed/*.json")):
                workers = scenario.workers[0]  # which its order depends on, and nothing yet says so
            rehearse = scenario.rehearses and not number
            attempt = run_attempt(scenario, Path(folder, "killed"), workers, kill, rehearse=rehearse)
            compare(f"attempt {number}, {kill or 'left alone'}", attempt.facts, whole.facts)
            hits |= attempt.hits
            for key, values in attempt.facts.items():
                facts[key] |= values
        assert reported(Path(folder, "killed")) == reported(Path(folder, "whole"))
        missing = [key for key in whole.facts if key not in facts]
        assert not missing, f"never happened in any attempt: {missing[0]}"
        of_the_kills = {"plugins.save_schedule.last"} if any(kill.how == "stop" for kill in scenario.kills) else set()
        paths = [path for path in differing(whole, attempt) if path not in of_the_kills]
        assert not paths, "\n".join(
            f"{path}: {whole.final[path]} uninterrupted, {attempt.final[path]} in the end" for path in paths[:5]
        )
    return hits


def differing(whole: Watch, attempt: Watch) -> list[str]:
    """Return the paths in the final state of a run that was left alone at which another one has something else."""
    assert whole.final
    assert attempt.final.keys() >= whole.final.keys()
    return [path for path, value in whole.final.items() if attempt.final[path] != value]


def compare(
    where: str, facts: Mapping[tuple[Any, ...], set[Any]], expected: Mapping[tuple[Any, ...], set[Any]]
) -> None:
    """Name the first thing in an attempt that the uninterrupted run had otherwise."""
    for (what, epoch, batch), values in facts.items():
        known = expected.get((what, epoch, batch), set())
        assert values <= known, (
            f"{where}: the first difference is {what} of epoch {epoch}, batch {batch}: {values - known} "
            f"instead of {known or 'nothing at all'}"
        )


# The matrix.

# These do not come in a run that nobody cuts short or resumes, or they depend on the time.
RARE = (h.ValidationCut, h.ResumeVerified, h.Verdict, h.LateResult)
EVENTS = [each for each in h.events.CATALOGUE if not each.__name__.startswith(("Test", "Predict")) and each not in RARE]


def kills(how: Literal["raise", "stop"]) -> st.SearchStrategy[tuple[Kill, ...]]:
    one = st.builds(
        Kill, st.sampled_from(EVENTS), st.integers(1, 6), st.sampled_from(list(h.Lane)), st.booleans(), st.just(how)
    )
    return st.lists(one, min_size=3, max_size=5).map(tuple)


@st.composite
def scenarios(draw: st.DrawFn, kinds: tuple[Kind, ...] = KINDS, *, parallel: bool = False) -> Scenario:
    """Draw any run that makes sense."""
    kind, batch_size = draw(st.sampled_from(kinds)), draw(st.integers(2, 5))
    samples = draw(st.integers(10, 20))
    if "iterable" in kind and parallel:
        samples -= samples % (2 * batch_size)  # the same length for any number of workers
    accumulation = draw(st.sampled_from((1, 3)))
    how: Literal["raise", "stop"] = "raise" if draw(st.booleans()) else "stop"
    steps = draw(st.one_of(st.none(), st.integers(2, 8)))
    windows = ceil(ceil(samples / batch_size) / accumulation)
    batches = st.integers(1, 5).map(lambda each: {"batches": each})
    each_epoch = st.just({"epochs": 1})
    validate = draw(st.one_of(st.none(), batches, each_epoch))
    ends = how == "raise" and draw(st.booleans())  # a stop is an end: what is done there is done once more
    background = draw(st.booleans())
    is_unsized = "unsized" in kind or kind in ("min", "max")  # which have a stream without a length
    has_length = kind != "phases" and (not is_unsized or steps is not None)  # one that is known before the run
    later = st.builds(lambda each, after: {"batches": each, "after": after}, st.integers(1, 3), st.integers(1, 9))
    parts = st.sampled_from(({"fraction": 0.3}, {"fraction": 0.2, "after": 0.5})) if has_length else later
    # Where to roll back to is certain only with a save at the start, and with none under way.
    poisons: tuple[Poison | None, ...] = (None, "skip", "roll back") if ends and not background else (None, "skip")
    poison: Poison | None = draw(st.sampled_from(poisons)) if windows > 1 else None
    return Scenario(
        kind=kind,
        shuffled=draw(st.booleans()),
        samples=samples,
        batch_size=batch_size,
        epochs=draw(st.sampled_from((2, 3, *([1.4, 2.5] if has_length else [])))) if steps is None else None,
        steps=steps,
        accumulation=accumulation,
        scheduler=draw(st.sampled_from((None, "step", "epoch", "plateau", *(["warmup"] if has_length else [])))),
        save=draw(st.one_of(batches, each_epoch, parts, later)),
        validate=validate,
        log=draw(st.one_of(st.builds(lambda each: {"steps": each}, st.integers(1, 3)), parts)),
        ends=ends,
        asks=poison != "roll back" and draw(st.booleans()),
        patience=draw(st.sampled_from((None, 2, 4))),
        poison=poison,
        nudges=draw(st.booleans()),
        meddles=windows > 2 and draw(st.booleans()),
        background=background,
        counts=draw(st.booleans()),
        rehearses=draw(st.booleans()),
        workers=tuple(draw(st.lists(st.sampled_from((0, 2)), min_size=2, max_size=4))) if parallel else (0,),
        kills=draw(kills(how)),
    )


HARD = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    print_blob=False,
)


@pytest.fixture(autouse=True)
def _undisturbed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Leave the generators as they were, and keep hundreds of runs from filling the report of a failure."""
    caplog.set_level(logging.CRITICAL, "heliograph")
    with kit.kept_generators():
        yield


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(25))
def test_a_run_that_is_killed_anywhere_ends_where_an_uninterrupted_one_ends(part: int) -> None:
    @seed(part)
    @settings(HARD, derandomize=False, max_examples=8)
    @given(scenarios())
    def ends_alike(scenario: Scenario) -> None:
        note(f"{scenario}")
        check(scenario)

    ends_alike()


@pytest.mark.whole
@pytest.mark.parametrize("part", range(6))
def test_so_it_does_with_another_number_of_workers_after_each_resume(part: int) -> None:
    @seed(part)
    @settings(HARD, derandomize=False, max_examples=5)
    @given(scenarios(IN_WORKERS, parallel=True))
    def ends_alike(scenario: Scenario) -> None:
        note(f"{scenario}")
        check(scenario)

    ends_alike()


CUT_SHORT = Kill(h.ValidationStart, how="stop")
FOUND = {
    "a validation that was postponed ran on other draws": Scenario(validate={"batches": 3}, kills=(CUT_SHORT,) * 3),
    "and after the end of its epoch": Scenario(save={"epochs": 1}, validate={"batches": 4}, kills=(CUT_SHORT,) * 3),
    "the epoch of the last step was not ended": Scenario(
        "unsized foreign", epochs=None, steps=8, scheduler="epoch", kills=(Kill(h.EpochEnd, 2),) * 3
    ),
    "what was done at the start was done again": Scenario(
        validate={"batches": 3}, ends=True, kills=(Kill(h.BatchStart),) * 3
    ),
    "what is due at the end was not done": Scenario(
        validate={"batches": 3}, epochs=None, steps=5, save={"batches": 1}, ends=True, kills=(Kill(h.TrainEnd),) * 3
    ),
    "filters of handlers started again": Scenario(save={"batches": 1}, nudges=True, kills=(Kill(h.BatchEnd, 2),) * 3),
    "an epoch that was ended early continued": Scenario(
        "stateful", True, 40, 4, save={"batches": 1}, meddles=True, kills=(Kill(h.EpochEnd),) * 3
    ),
    "a window whose first batch was skipped had no size": Scenario(
        samples=20, batch_size=2, accumulation=3, save={"batches": 1}, meddles=True, kills=(Kill(h.BatchStart, 5),) * 3
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("scenario", FOUND.values(), ids=FOUND)
def test_what_went_wrong_once(scenario: Scenario) -> None:
    check(scenario)


RICH = Scenario(
    kind="unsized foreign",
    accumulation=2,
    samples=20,
    batch_size=2,
    scheduler="epoch",
    validate={"batches": 4},
    log={"steps": 1},
    ends=True,
    patience=4,
    poison="skip",
    nudges=True,
    meddles=True,
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("event", EVENTS, ids=lambda each: each.name)
def test_every_event_is_a_point_to_be_killed_at(event: type[h.Event]) -> None:
    first, last = Kill(event, 2, h.Lane.TRANSFORM, first=True), Kill(event, 1)
    assert event in check(replace(RICH, kills=(Kill(h.BatchEnd, 6), first, last, first)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("event", [each for each in EVENTS if each is not h.RunFailed], ids=lambda each: each.name)
def test_every_event_is_a_point_to_be_stopped_at(event: type[h.Event]) -> None:
    at = Kill(event, how="stop")
    assert event in check(
        replace(RICH, ends=False, kills=(Kill(h.BatchEnd, 6, how="stop"), at, replace(at, nth=2), at))
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("operation", ["create", "sync", "rename", "sync_folder"])
def test_a_run_that_is_killed_during_its_saves(
    operation: str, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step of writing a checkpoint in turn; the attempts before were killed at others."""
    original = getattr(Files, operation)
    calls = {"now": 0, "last": 0}

    def dying(self: Files, *arguments: Any) -> Any:
        calls["now"] += 1
        if calls["now"] == calls["last"]:
            raise Killed
        return original(self, *arguments)

    monkeypatch.setattr(Files, operation, dying)
    scenario = Scenario(background=background, validate={"epochs": 1})
    with TemporaryDirectory() as name:
        folder = Path(name)
        whole = run_attempt(scenario, folder / "whole")
        for last in (1, 2, 3, 4, 5, 7, 0):
            calls.update(now=0, last=last)
            attempt = run_attempt(scenario, folder / "killed")
            compare(f"killed at {operation} number {last}", attempt.facts, whole.facts)
        assert differing(whole, attempt) == []


# Two laws.


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["map", "torch", "phases"])
def test_the_number_of_workers_changes_nothing_at_all(kind: Kind, tmp_path: Path) -> None:
    scenario = replace(RICH, kind=kind)
    none, *some = (run_attempt(scenario, tmp_path / str(workers), workers) for workers in (0, 1, 2))
    for attempt in some:
        assert attempt.facts == none.facts
        assert differing(none, attempt) == []


def test_observers_change_nothing_at_all(tmp_path: Path) -> None:
    class Curious(h.Plugin):
        policy = "observer"

        @h.on(*h.events.CATALOGUE)
        def look(self, run: h.Run, event: h.Event) -> None:
            for _ in range(3):
                draw_unseeded()
            run.state_dict()

    others = [Curious(), h.FileLog(tmp_path), h.ProgressBar(plain=True), h.HandlerTimes()]
    alone, watched = run_attempt(RICH, tmp_path / "alone"), run_attempt(RICH, tmp_path / "watched", others=others)

    assert watched.facts == alone.facts
    assert differing(alone, watched) == []
    assert reported(tmp_path / "watched") == reported(tmp_path / "alone")
