"""The usual set: a bar, a log every 50 steps, TensorBoard, early stopping, validation and a save every 1,000 steps.

And exact, so that a resumed run equals one that was not interrupted: with `RNGCapture` and `resume="auto"`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any, TextIO

import heliograph as h
import torch
from heliograph.packages.tests.benchmarks.harness import (
    EPOCH,
    SIZE,
    STEPS,
    Batch,
    Seconds,
    Turns,
    batches_of,
    race,
    sgd,
    shuffled,
    tiny_model,
)
from heliograph.packages.tests.benchmarks.lean import CONTROL, HAND
from heliograph_recorder import Recorder
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, EarlyStopping, ProgressBar, global_step_from_engine
from ignite.handlers.checkpoint import BaseSaveHandler
from ignite.handlers.tensorboard_logger import TensorboardLogger
from ignite.metrics import Loss, RunningAverage
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

EPOCHS = 2
LOG, SAVE = 50, 1_000
PATIENCE = 1_000_000
VALIDATION = batches_of(10)
OURS, IGNITE, RECORDED = "heliograph", "ignite", "heliograph, and a Recorder"
EXACT, EXACT_RECORDED = "heliograph, RNGCapture", "heliograph, RNGCapture and a Recorder"
# Each of the four runs a fourth of the time: with this they redraw as often per step as a lone run at 0.1 s does.
INTERVAL = 0.1 * 4


def write_synced(path: Path, state: Mapping[str, Any]) -> None:
    """Save so that a crash leaves the former file or the whole new one; two fsyncs, as heliograph does."""
    aside = path.with_name("aside.tmp")
    with aside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


@torch.no_grad()
def validate(model: nn.Module) -> float:
    """Return the mean loss of the validation batches."""
    model.eval()
    total = torch.zeros(())
    for inputs, targets in VALIDATION:
        total += mse_loss(model(inputs), targets)
    model.train()
    return total.item() / len(VALIDATION)


class Log:
    """What a hand-written loop writes every 50 steps: the three scalars that heliograph's TensorBoard writes."""

    def __init__(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self.writer = SummaryWriter(str(folder))
        self.optimizer = optimizer
        self.since = perf_counter()

    def write(self, loss: float, steps: int) -> None:
        """Write the loss, the throughput and the learning rate."""
        now = perf_counter()
        self.writer.add_scalar("train/loss", loss, steps)
        self.writer.add_scalar("train/samples_per_second", LOG * SIZE / (now - self.since), steps)
        self.writer.add_scalar("train/learning_rate", self.optimizer.param_groups[0]["lr"], steps)
        self.since = now


def by_hand(
    folder: Path,
    quiet: TextIO,
    turns: Turns,
    epochs: int,
    loader: Iterable[Batch] | None = None,
    *,
    exact: bool = False,
) -> None:
    """Train as one does without a framework who knows not to wait for the device in every step.

    Args:
        folder: of the logs and checkpoints.
        quiet: where the bar is drawn.
        turns: the batches, in turns.
        epochs: how many.
        loader: read instead, in turns of the same length.
        exact: whether torch's random state is saved, and restored from a checkpoint if there is one.
    """
    model = tiny_model()
    optimizer = sgd(model.parameters())
    log = Log(folder, optimizer)
    total, steps, due, best, failed = torch.zeros(()), 0, 0.0, math.inf, 0
    if exact and (folder / "last.pth").exists():
        saved = torch.load(folder / "last.pth", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        steps = saved["step"]
    bar = tqdm(total=epochs * EPOCH, file=quiet, mininterval=INTERVAL)
    if loader is not None:
        turns.wait_for_turn()
    for _ in range(epochs):
        for inputs, targets in turns if loader is None else loader:
            loss = mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            steps += 1
            if (now := monotonic()) >= due:  # cheaper than bar.update(1), which counts and compares more
                bar.update(steps - bar.n)
                due = now + INTERVAL
            if steps % LOG == 0:
                mean = total.item() / LOG
                total.zero_()
                log.write(mean, steps)
                bar.set_postfix(loss=mean, refresh=False)
                if loader is not None and steps % STEPS == 0 and steps < epochs * EPOCH:
                    turns.wait_for_turn()
            if steps % SAVE == 0:
                value = validate(model)
                log.writer.add_scalar("validation/loss", value, steps)
                best, failed = (value, 0) if value < best else (best, failed + 1)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}
                if exact:
                    state["rng"] = torch.get_rng_state()
                write_synced(folder / "last.pth", state)
                if failed >= PATIENCE:
                    return
    log.writer.close()


class TakesTurns(h.Plugin):
    """Waits for its turn every 100 steps, at a log, so that the loader is one that heliograph knows."""

    affects_training = False  # else each save compares all the batches that the turns hold

    def __init__(self, turns: Turns, steps: int) -> None:
        self.turns, self.steps = turns, steps

    @h.on(h.Log, lane=h.Lane.REPORT)
    def wait(self, run: h.Run, event: h.Log) -> None:
        """Wait."""
        if run.progress.steps % STEPS == 0 and run.progress.steps < self.steps:
            self.turns.wait_for_turn()


def fit(
    folder: Path,
    quiet: TextIO,
    turns: Turns,
    epochs: int,
    loader: Iterable[Batch] | None = None,
    *,
    exact: bool = False,
    records: bool = False,
) -> None:
    """Train with the built-in plugins; see `by_hand`. Exact is: a resumed run equals one that was not interrupted."""
    plugins = [
        h.ProgressBar(interval=INTERVAL, plain=False, file=quiet),
        h.LogSchedule(h.Every(steps=LOG)),
        h.TensorBoard(folder),
        h.EarlyStopping(patience=PATIENCE),
        h.ValidationSchedule(h.Every(steps=SAVE)),
        h.SaveSchedule(h.Every(steps=SAVE)),
        h.Checkpoint(folder, keep_last=1, resume="auto" if exact else None),
    ]
    if exact:
        plugins.insert(0, h.RNGCapture())
    if records:
        plugins.insert(0, Recorder(folder))
    if loader is not None:
        plugins.append(TakesTurns(turns, epochs * EPOCH))
        turns.wait_for_turn()
    task = h.Supervised(tiny_model(), mse_loss)
    data = turns if loader is None else loader
    h.Trainer(plugins, device="cpu").fit(task, data, validation=VALIDATION, optimizer=sgd, epochs=epochs)


class Synced(BaseSaveHandler):
    """Ignite's own DiskSaver does not sync: with this all three do the same work on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, checkpoint: Mapping[str, Any], filename: str, metadata: Any = None) -> None:
        """Save."""
        write_synced(self.folder / filename, checkpoint)

    def remove(self, filename: str) -> None:
        """Remove a former file."""
        (self.folder / filename).unlink()


def ignite(folder: Path, quiet: TextIO, loader: Turns, epochs: int) -> None:
    """Train with Ignite's handlers; its loss is a running average, and it writes no throughput."""
    model = tiny_model()
    optimizer = sgd(model.parameters())

    def step(engine: Engine, batch: Batch) -> Tensor:
        inputs, targets = batch
        loss = mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    trainer = Engine(step)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    evaluator = ignite_evaluator(model)
    logger = TensorboardLogger(str(folder))
    often, seldom = Events.ITERATION_COMPLETED(every=LOG), Events.ITERATION_COMPLETED(every=SAVE)
    # Every 50 steps only: it redraws whenever it is called, by default at every step.
    ProgressBar(file=quiet, mininterval=INTERVAL).attach(trainer, event_name=often)
    logger.attach_output_handler(trainer, often, tag="train", metric_names=["loss"])
    logger.attach_opt_params_handler(trainer, often, optimizer=optimizer)
    logger.attach_output_handler(
        evaluator,
        Events.COMPLETED,
        tag="validation",
        metric_names=["loss"],
        global_step_transform=global_step_from_engine(trainer, Events.ITERATION_COMPLETED),
    )
    evaluator.add_event_handler(
        Events.COMPLETED, EarlyStopping(PATIENCE, lambda engine: -engine.state.metrics["loss"], trainer)
    )
    trainer.add_event_handler(seldom, lambda: evaluator.run(VALIDATION))
    saved = {"model": model, "optimizer": optimizer, "trainer": trainer}
    trainer.add_event_handler(seldom, Checkpoint(saved, Synced(folder), n_saved=1))
    trainer.run(loader, max_epochs=epochs)
    logger.close()


def ignite_evaluator(model: nn.Module) -> Engine:
    """Return Ignite's validation."""

    @torch.no_grad()
    def step(engine: Engine, batch: Batch) -> tuple[Tensor, Tensor]:
        model.eval()
        inputs, targets = batch
        return model(inputs), targets

    evaluator = Engine(step)
    evaluator.add_event_handler(Events.COMPLETED, lambda: model.train())
    Loss(mse_loss).attach(evaluator, "loss")
    return evaluator


def race_list(seed: int) -> Seconds:
    """Time the usual set, then with `RNGCapture`, then with a `Recorder`, over a list of batches."""
    return _race_over(seed, lambda: batches_of(EPOCH))


def race_loader(seed: int) -> Seconds:
    """Time the same over a shuffled `DataLoader` of a user's dataset, without workers."""
    return _race_over(seed, shuffled)


def race_workers(seed: int) -> Seconds:
    """Time the same with two workers."""
    return _race_over(seed, partial(shuffled, num_workers=2))


def _race_over(seed: int, make: Callable[[], Iterable[Batch]]) -> Seconds:
    exact = partial(fit, exact=True)
    trains: dict[str, Callable[..., None]] = {
        HAND: by_hand,
        CONTROL: by_hand,
        OURS: fit,
        EXACT: exact,
        EXACT_RECORDED: partial(exact, records=True),
    }
    with TemporaryDirectory() as place, Path(os.devnull).open("w") as quiet:
        variants = {}
        for number, (name, train) in enumerate(trains.items()):
            (folder := Path(place) / str(number)).mkdir()
            variants[name] = partial(train, folder, quiet, loader=make())
        return race(variants, EPOCHS, seed)


def race_usual(seed: int) -> tuple[Seconds, dict[str, list[int]]]:
    """Time the loops; also return the bytes of the checkpoints that each leaves."""
    recorded = partial(fit, records=True)
    trains: dict[str, Callable[..., None]] = {
        HAND: by_hand,
        CONTROL: by_hand,
        OURS: fit,
        RECORDED: recorded,
        IGNITE: ignite,
    }
    with TemporaryDirectory() as place, Path(os.devnull).open("w") as quiet:
        folders = {name: Path(place) / str(index) for index, name in enumerate(trains)}
        for folder in folders.values():
            folder.mkdir()
        variants = {name: partial(train, folders[name], quiet) for name, train in trains.items()}
        seconds = race(variants, EPOCHS, seed)
        left = {name: [each.stat().st_size for each in folder.glob("*.pt*")] for name, folder in folders.items()}
    return seconds, left
