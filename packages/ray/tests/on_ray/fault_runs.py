"""A training with injected faults: every rank logs the samples that it reads, and dies or hangs on request."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from threading import Event as Flag
from threading import Timer
from typing import Any

import heliograph as h
import torch
from heliograph.tests.kit import sgd
from heliograph_ray.session import current_session
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SAMPLES, BATCH_SIZE, RANKS = 96, 4, 2
STEPS_PER_EPOCH = SAMPLES // (BATCH_SIZE * RANKS)
MORE_STEPS = 8  # that a rank may still take before its delayed death


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, which happens once.

    Attributes:
        rank: the rank.
        step: the first optimizer step at which it may happen.
        event: it happens at the first event of this name from this step on.
        seconds: the delay of a death, during which the rank continues to train.
        how: `die`, `hang`, or `tear`: die when a part of the next checkpoint is uploaded.
    """

    rank: int
    step: int
    event: str = "batch_end"
    seconds: float = 0.0
    how: str = "die"


@dataclass(frozen=True)
class Scenario:
    """A training and its faults.

    Attributes:
        folder: for the logs of the ranks.
        epochs: the number of epochs.
        save_every: steps between two saves; None saves nothing.
        faults: in their order.
        dropout: whether ranks draw random numbers; then only runs with the same number of ranks are equal.
        resume: the `resume=` of the `Checkpoint`.
        holds: (step, number of ranks): so many ranks wait after that step until the folder has the file `open`, or a
            machine is to be taken away.
        timeout: seconds that the ranks wait for each other in a collective.
    """

    folder: Path
    epochs: int = 4
    save_every: int | None = 8
    faults: tuple[Fault, ...] = ()
    dropout: bool = False
    resume: str | None = None
    holds: tuple[tuple[int, int], ...] = ()
    timeout: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """The result of a rank: equal for equal runs."""

    status: str
    steps: int
    weights: list[Any]
    loss: float


class TrainLog(h.Plugin):
    """Logs the samples of each step and the rank that reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder

    @h.on(h.TrainStart, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        self.path = self.folder / f"{count_faults(self.folder)}-{os.getpid()}.log"

    @h.on(h.BatchStart, lane=h.Lane.REPORT)
    def write(self, run: h.Run, event: h.BatchStart) -> None:
        line = [run.progress.steps, run.engine.rank, run.batch[2].tolist(), run.engine.world_size]
        with self.path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


class FaultInjector(h.Plugin):
    """Injects the first fault that has not happened yet, one in each start of the ranks."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.fault: Fault | None = None
        self.last_step: int | None = None

    @h.on(h.TrainStart, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        """Choose the fault. All ranks do so before the first of them continues, because resuming is a collective."""
        engine = run.engine
        if isinstance(engine, h.DDPEngine) and engine.watch is not None:
            engine.watch.limits.grace = 1.0
        pending = self.scenario.faults[count_faults(self.scenario.folder) :]
        if pending and pending[0].rank == engine.rank:
            self.fault = pending[0]

    @h.on(
        *[h.TrainStart, h.BatchStart, h.GradientsReady, h.StepEnd, h.BatchEnd, h.SavePoint, h.CheckpointSaved],
        lane=h.Lane.MEASURE,
    )
    def inject(self, run: h.Run, event: h.Event) -> None:
        fault = self.fault
        if fault is not None and event.name == fault.event and run.progress.steps >= fault.step:
            self.fault, self.last_step = None, run.progress.steps + MORE_STEPS
            (self.scenario.folder / f"{self.scenario.faults.index(fault)}.fault").touch()
            if fault.how == "hang":
                wait_forever()
            elif fault.how == "tear":
                die_in_upload()
            else:
                die_later(fault.seconds) if fault.seconds else die()

    @h.on(h.StepEnd, lane=h.Lane.REPORT)
    def wait(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == self.last_step:
            wait_forever()  # for the delayed death
        if (run.progress.steps, run.engine.world_size) in self.scenario.holds:
            (self.scenario.folder / f"{os.getpid()}.held").write_text(f"{run.progress.steps} {run.engine.world_size}")
            wait_until(lambda: (self.scenario.folder / "open").exists() or is_noticed())


class Net(nn.Module):
    """Two layers, optionally with dropout."""

    def __init__(self, *, dropout: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3 if dropout else 0.0), nn.Linear(16, 1))

    def training_step(self, run: h.Run, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        run.track("error", loss.detach(), len(batch[0]))
        return loss


def train(scenario: Scenario) -> Outcome:
    """Train on one process or two, with the same global batch.

    Each process has a folder of its own for its checkpoints, so that it cannot see those of another one.
    """
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, 4, generator=generator)
    data = TensorDataset(features, features.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))
    saving: list[h.Plugin] = []
    if scenario.save_every is not None:
        folder = tempfile.mkdtemp(prefix="checkpoints-", dir=scenario.folder)
        saving = [h.SaveSchedule(h.Every(steps=scenario.save_every)), h.Checkpoint(folder, resume=scenario.resume)]
    plugins = [
        h.RNGCapture(),
        h.LearningRate("epoch"),
        h.LogSchedule(h.Every(epochs=1)),
        *saving,
        TrainLog(scenario.folder),
        FaultInjector(scenario),
    ]
    model = Net(dropout=scenario.dropout)
    result = h.Trainer(plugins, engine=h.DDPEngine(device="cpu", timeout=scenario.timeout)).fit(
        model,
        data,
        loader_params={"global_batch_size": BATCH_SIZE * RANKS, "shuffle": True},
        optimizer=sgd(0.05, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, STEPS_PER_EPOCH),
        epochs=scenario.epochs,
    )
    weights = [each.tolist() for each in model.parameters()]
    return Outcome(result.status, result.progress.steps, weights, result.metrics["train/loss"])


def train_after_others_exited(scenario: Scenario) -> Outcome:
    """Train after all processes have exited that trained before the last fault."""
    for number in range(count_faults(scenario.folder)):
        for path in scenario.folder.glob(f"{number}-*.log"):
            pid = int(path.stem.partition("-")[2])
            wait_until(lambda: has_exited(pid))  # noqa: B023  # called here and now
    return train(scenario)


def read_samples(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Return the samples that all processes read, by step and rank.

    Raises:
        AssertionError: a repeated step read other samples.
    """
    read: dict[tuple[int, int], list[int]] = {}
    for step, rank, samples, _ in read_lines(folder):
        assert read.setdefault((step, rank), samples) == samples, f"step {step} was repeated with other samples"
    return read


def read_lines(folder: Path, of: str = "*") -> Iterator[tuple[int, int, list[int], int]]:
    """Yield step, rank, samples and world size of each logged line, without lines that a death has truncated.

    Args:
        folder: of the logs.
        of: the number of faults before; `*` for all logs.
    """
    for path in sorted(folder.glob(f"{of}-*.log")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, rank, samples, size = json.loads(line)
                yield step, rank, samples, size


def count_repeated_steps(folder: Path) -> dict[int, int]:
    """Return how many steps were repeated after each fault, except for faults before the first step."""
    spans = {}
    for number in range(count_faults(folder) + 1):
        if steps := [step for step, *_ in read_lines(folder, str(number))]:
            spans[number] = (min(steps), max(steps))
    found = list(spans.items())
    return {number: last - first + 1 for (number, (_, last)), (_, (first, _)) in itertools.pairwise(found)}


def count_faults(folder: Path) -> int:
    """Return how many faults have happened."""
    return len(list(folder.glob("*.fault")))


def count_batches(epochs: int) -> int:
    """Return how many batches the two ranks of a run without faults read."""
    return epochs * STEPS_PER_EPOCH * RANKS


def random_faults(seed: int, number: int, last: int) -> tuple[Fault, ...]:
    """Return deaths at random steps, events and moments.

    Args:
        seed: draws them.
        number: how many.
        last: the step after the last possible one.
    """
    random = Random(seed)
    events = ["batch_start", "gradients_ready", "step_end", "batch_end", "save_point", "checkpoint_saved"]
    steps = sorted(random.sample(range(1, last), number))
    return tuple(Fault(random.randrange(RANKS), step, random.choice(events), random.uniform(0, 0.01)) for step in steps)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_later(seconds: float) -> None:
    timer = Timer(seconds, die)
    timer.daemon = True
    timer.start()


def die_in_upload() -> None:
    """Make the next upload of a checkpoint to Ray's storage die before its end."""

    def tear(source: str, destination: str, **_: Any) -> None:
        for path in Path(source).iterdir():
            (Path(destination) / path.name).write_bytes(path.read_bytes()[:-9])
        die()

    vars(import_module("ray.train.v2._internal.execution.storage"))["_pyarrow_fs_copy_files"] = tear


def wait_forever() -> None:
    Flag().wait()


def is_noticed() -> bool:
    """Return whether this worker has a notice of Ray."""
    session = current_session()
    return session is not None and session.notice() is not None


def wait_for_held(folder: Path, step: int, ranks: int) -> list[int]:
    """Wait until so many ranks are held at a step; return their process ids."""
    found: list[int] = []

    def look() -> bool:
        text = f"{step} {ranks}"
        found[:] = [int(path.stem) for path in folder.glob("*.held") if path.read_text() == text]
        return len(found) == ranks

    wait_until(look)
    return found


def has_exited(pid: int) -> bool:
    """Return whether a process has exited."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(condition: Callable[[], object], seconds: float = 100.0) -> None:
    """Wait until a condition is true; fail after a timeout."""
    ended = Flag()
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        ended.wait(0.05)
    raise AssertionError(f"timeout after {seconds:g} s")
