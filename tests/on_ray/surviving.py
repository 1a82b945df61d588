"""A training that is to survive: every rank writes down what it reads, and dies where it is told to."""

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
from heliograph.builtin_callbacks.ray.session import current_session
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SAMPLES, BATCH_SIZE, RANKS = 96, 4, 2
STEPS_PER_EPOCH = SAMPLES // (BATCH_SIZE * RANKS)
MORE_STEPS = 8  # that a rank may take which is to die


@dataclass(frozen=True)
class Blow:
    """What befalls a rank, once.

    Attributes:
        rank: which one.
        step: from which optimizer step on.
        event: the first event of this name strikes.
        seconds: how much later it dies, from another thread, while it trains on for some steps at most.
        how: `die`, `hang`, or `tear`: die when half of what is uploaded next is there.
    """

    rank: int
    step: int
    event: str = "batch_end"
    seconds: float = 0.0
    how: str = "die"


@dataclass(frozen=True)
class Story:
    """What is trained, and what happens meanwhile.

    Attributes:
        folder: where the ranks write what they read.
        epochs: how many.
        save_every: steps between two saves; None for none at all.
        blows: what befalls them.
        dropout: whether each rank draws, too; then only the same number of ranks trains alike.
        resume: what `Checkpoint` is told.
        holds: (step, number of ranks): so many wait behind that step, until the folder holds the file `open` or a
            machine is to be taken away.
        timeout: seconds that the ranks wait for each other in an exchange.
        ranks: how many share a global batch.
    """

    folder: Path
    epochs: int = 4
    save_every: int | None = 8
    blows: tuple[Blow, ...] = ()
    dropout: bool = False
    resume: str | None = None
    holds: tuple[tuple[int, int], ...] = ()
    timeout: float = 60.0
    ranks: int = RANKS


@dataclass(frozen=True)
class Outcome:
    """How a rank came out of it: equal for runs that are equal."""

    status: str
    steps: int
    weights: list[Any]
    loss: float


class Diary(h.Plugin):
    """Writes down which samples each step reads, and who reads them: a line for each micro-batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder

    @h.on(h.TrainStart, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        self.path = self.folder / f"{fallen(self.folder)}-{os.getpid()}.diary"

    @h.on(h.BatchStart, lane=h.Lane.REPORT)
    def write(self, run: h.Run, event: h.BatchStart) -> None:
        place = run.engine.rank if run.engine.world_size == RANKS else run.progress.batch % RANKS
        line = [run.progress.steps, place, run.batch[2].tolist(), run.engine.world_size]
        with self.path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


class Fate(h.Plugin):
    """Deals the first blow that has not fallen yet; one to each start of the ranks."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.blow: Blow | None = None
        self.last_step: int | None = None

    @h.on(h.TrainStart, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        """All ranks look before the first of them goes on: what reads the checkpoints is an exchange."""
        engine = run.engine
        if isinstance(engine, h.DDPEngine) and engine.watch is not None:
            engine.watch.limits.grace = 1.0
        left = self.story.blows[fallen(self.story.folder) :]
        if left and left[0].rank == engine.rank:
            self.blow = left[0]

    @h.on(
        *[h.TrainStart, h.BatchStart, h.GradientsReady, h.StepEnd, h.BatchEnd, h.SavePoint, h.CheckpointSaved],
        lane=h.Lane.MEASURE,
    )
    def strike(self, run: h.Run, event: h.Event) -> None:
        blow = self.blow
        if blow is not None and event.name == blow.event and run.progress.steps >= blow.step:
            self.blow, self.last_step = None, run.progress.steps + MORE_STEPS
            (self.story.folder / f"{self.story.blows.index(blow)}.blow").touch()
            if blow.how == "hang":
                wait_for_ever()
            elif blow.how == "tear":
                die_in_upload()
            else:
                die_later(blow.seconds) if blow.seconds else die()

    @h.on(h.StepEnd, lane=h.Lane.REPORT)
    def wait(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == self.last_step:
            wait_for_ever()  # for the death that is to come
        if (run.progress.steps, run.engine.world_size) in self.story.holds:
            (self.story.folder / f"{os.getpid()}.held").write_text(f"{run.progress.steps} {run.engine.world_size}")
            wait_until(lambda: (self.story.folder / "open").exists() or is_noticed())


class Net(nn.Module):
    """A layer or two; with dropout if so told."""

    def __init__(self, *, dropout: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3 if dropout else 0.0), nn.Linear(16, 1))

    def training_step(self, run: h.Run, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        run.track("loss", loss.detach(), len(batch[0]))
        return loss


def train(story: Story) -> Outcome:
    """Train on however many processes there are, with the global batch of the story's ranks.

    Each process has a folder of its own for its checkpoints: what another left is out of its sight.
    """
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, 4, generator=generator)
    data = TensorDataset(features, features.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))
    saving: list[h.Plugin] = []
    if story.save_every is not None:
        folder = tempfile.mkdtemp(prefix="checkpoints-", dir=story.folder)
        saving = [h.SaveSchedule(h.Every(steps=story.save_every)), h.Checkpoint(folder, resume=story.resume)]
    accumulation = h.GradientAccumulation(story.ranks, as_ranks=story.ranks)
    plugins = [
        h.RNGCapture(),
        h.LearningRate("epoch"),
        h.LogSchedule(h.Every(epochs=1)),
        accumulation,
        *saving,
        Diary(story.folder),
        Fate(story),
    ]
    model = Net(dropout=story.dropout)
    result = h.Trainer(plugins, engine=h.DDPEngine(device="cpu", timeout=story.timeout)).fit(
        model,
        data,
        loader_params={"batch_size": BATCH_SIZE, "shuffle": True, "as_ranks": story.ranks},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, STEPS_PER_EPOCH),
        epochs=story.epochs,
    )
    weights = [each.tolist() for each in model.parameters()]
    return Outcome(result.status, result.progress.steps, weights, result.metrics["train/loss"])


def train_when_the_others_are_gone(story: Story) -> Outcome:
    """Train when all processes are gone that trained before the last blow fell."""
    for number in range(fallen(story.folder)):
        for path in story.folder.glob(f"{number}-*.diary"):
            pid = int(path.stem.partition("-")[2])
            wait_until(lambda: is_gone(pid))  # noqa: B023  # called here and now
    return train(story)


def order(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Return which samples each step read, by step and place in the global batch, over all processes that wrote.

    Raises:
        AssertionError: what was repeated was not the same.
    """
    read: dict[tuple[int, int], list[int]] = {}
    for step, place, samples, _ in lines(folder):
        assert read.setdefault((step, place), samples) == samples, f"step {step} was repeated with other samples"
    return read


def lines(folder: Path, of: str = "*") -> Iterator[tuple[int, int, list[int], int]]:
    """Yield step, place, samples and world size of everything that was read; not the line that a death cut off.

    Args:
        folder: where it was written.
        of: the number of blows that had fallen before; `*` for all that was read.
    """
    for path in sorted(folder.glob(f"{of}-*.diary")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, place, samples, size = json.loads(line)
                yield step, place, samples, size


def repeated(folder: Path) -> dict[int, int]:
    """Return how many steps were begun again behind each blow, but for those behind which no step had been begun."""
    spans = {}
    for number in range(fallen(folder) + 1):
        if steps := [step for step, *_ in lines(folder, str(number))]:
            spans[number] = (min(steps), max(steps))
    found = list(spans.items())
    return {number: last - begun + 1 for (number, (_, last)), (_, (begun, _)) in itertools.pairwise(found)}


def fallen(folder: Path) -> int:
    """Return how many blows have fallen."""
    return len(list(folder.glob("*.blow")))


def whole_order(epochs: int) -> int:
    """Return how many micro-batches a run that is not disturbed reads."""
    return epochs * STEPS_PER_EPOCH * RANKS


def at_random(seed: int, number: int, last: int) -> tuple[Blow, ...]:
    """Return deaths at random steps, events and moments.

    Args:
        seed: draws them.
        number: how many.
        last: step until which they fall.
    """
    random = Random(seed)
    events = ["batch_start", "gradients_ready", "step_end", "batch_end", "save_point", "checkpoint_saved"]
    steps = sorted(random.sample(range(1, last), number))
    return tuple(Blow(random.randrange(RANKS), step, random.choice(events), random.uniform(0, 0.01)) for step in steps)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_later(seconds: float) -> None:
    timer = Timer(seconds, die)
    timer.daemon = True
    timer.start()


def die_in_upload() -> None:
    """Let the next checkpoint that this process copies into Ray's storage be cut off."""

    def tear(source: str, destination: str, **_: Any) -> None:
        for path in Path(source).iterdir():
            (Path(destination) / path.name).write_bytes(path.read_bytes()[:-9])
        die()

    vars(import_module("ray.train.v2._internal.execution.storage"))["_pyarrow_fs_copy_files"] = tear


def wait_for_ever() -> None:
    Flag().wait()


def is_noticed() -> bool:
    """Return whether Ray has told this worker that a machine is to be taken away."""
    session = current_session()
    return session is not None and session.notice() is not None


def held(folder: Path, step: int, ranks: int) -> list[int]:
    """Wait until so many ranks are held at a step; return the numbers of their processes."""
    found: list[int] = []

    def look() -> bool:
        told = f"{step} {ranks}"
        found[:] = [int(path.stem) for path in folder.glob("*.held") if path.read_text() == told]
        return len(found) == ranks

    wait_until(look)
    return found


def is_gone(pid: int) -> bool:
    """Return whether a process is no more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(is_so: Callable[[], object], seconds: float = 100.0) -> None:
    """Wait until something is so, and look often; fail when that takes too long."""
    ended = Flag()
    for _ in range(int(seconds / 0.05)):
        if is_so():
            return
        ended.wait(0.05)
    raise AssertionError(f"waited {seconds:g} s in vain")
