"""Measure what Ray costs, each figure beside the alternative in the same run.

Run `python packages/tests/benchmarks/bench_ray.py`, about three minutes. Figures are medians; on a shared machine
they are not tests.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, cast

import heliograph as h
import numpy as np
import ray
import torch
from heliograph.core.data.loaders import training_loaders
from heliograph.core.data.training_data import TrainingData
from heliograph.core.engines.engine_choice import choose_engine
from heliograph.core.host import hosted_by
from heliograph.events import Progress
from heliograph.packages.tests.benchmarks.harness import (
    EPOCH,
    Turns,
    batches_of,
    differences,
    per_step,
    race,
    sgd,
    tiny_model,
)
from heliograph_ray import RayLauncher, RayReport
from heliograph_ray.session import current_session
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STARTS = 3
REPORTS = 8
STEPS_PER_REPORT = 50
TUNED = 0.2  # seconds between two looks of Ray's at its workers
ROWS, FEATURES, BATCH = 40_000, 256, 100
ROUNDS = 3
DATA: Any = import_module("ray.data")

Row = tuple[str, float, str, str, float]  # what, its figure, the unit, what it is beside, that one's figure


def main() -> None:
    """Measure, and print a table."""
    began, rows = perf_counter(), [quiet_step()]
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    DATA.DataContext.get_current().enable_progress_bars = False
    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        try:
            rows += [start_up(folder), *reports(folder), *reading_alone(), *reading_together(folder)]
        finally:
            ray.shutdown()
    print(f"\n{'what':<56} {'figure':>9}  {'beside':<44} {'figure':>9}  ratio")
    for what, figure, unit, beside, other in rows:
        print(f"{what:<56} {figure:>9.3g} {unit:<2} {beside:<43} {other:>9.3g} {unit:<2} {figure / other:>5.2f}")
    print(f"\n{perf_counter() - began:.0f} s in all")


class Silent:
    """A session, and the host that has it, that keeps all to itself."""

    is_restart, exit_notice = False, None

    def __init__(self) -> None:
        self.session = self

    def prepare(self, plugins: h.Plugins) -> None:
        """Add nothing."""

    def ended(self, result: h.RunResult) -> None:
        """Keep nothing."""

    def report(self, metrics: dict[str, float], folder: Path | None) -> None:
        """Report nothing."""

    def notice(self) -> None:
        """Give no notice."""

    def update_progress(self, run: str, progress: Progress) -> None:
        """Report nothing."""

    def record_start(self, run: str, progress: Progress, path: Path | None) -> None:
        """Report nothing."""


def quiet_step() -> Row:
    """Return what a step costs in which nothing is reported."""

    def training(*plugins: h.Plugin) -> Callable[[Turns, int], object]:
        def train(batches: Turns, epochs: int) -> object:
            model = tiny_model()
            task = h.Supervised(model, nn.functional.mse_loss)
            trainer = h.Trainer(plugins, device="cpu")
            return trainer.fit(task, batches, optimizer=sgd(model.parameters()), epochs=epochs)

        return train

    with hosted_by(Silent()):
        variants = {"without": training(), "with": training(RayReport())}
        seconds = race(variants, 1, seed=0, batches=batches_of(EPOCH))
    bare = per_step(seconds["without"])
    return "a step with RayReport", bare + median(differences(seconds, "with", "without")), "µs", "without it", bare


def nothing() -> None:
    """Be a worker that has nothing to do."""


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = perf_counter()
    call()
    return perf_counter() - began


def start_up(folder: str) -> Row:
    """Return how long two workers take that do nothing, on a cluster that runs."""
    launcher = RayLauncher(2, storage_path=folder)
    ours = median(timed(lambda: launcher.run(nothing)) for _ in range(STARTS))
    plain = median(timed(lambda: h.launch(nothing, nprocs=2)) for _ in range(STARTS))
    return "RayLauncher(2).run(nothing)", ours, "s", "launch(nothing, nprocs=2)", plain


def reports(folder: str) -> Iterator[Row]:
    """Yield what reports add to the steps between them, and how long one waits, at two intervals of Ray's."""
    waits = {}
    for name, interval in (("default interval", None), (f"check_interval={TUNED}", TUNED)):
        launcher = RayLauncher(2, storage_path=folder, check_interval=interval)
        found: Reports = launcher.run(report_times)[0]
        waits[interval] = found["metrics"].waits
        for what in ("metrics", "checkpoint"):
            beside = f"{STEPS_PER_REPORT} steps"
            yield f"{beside}, a report of {what}, {name}", found[what].seconds, "s", beside, found["nothing"].seconds
    yield "the wait for a report, default interval", waits[None], "s", f"check_interval={TUNED}", waits[TUNED]


class Reporting(NamedTuple):
    """Steps with a report at their end.

    Attributes:
        seconds: that they take together.
        waits: seconds of the report alone.
    """

    seconds: float
    waits: float


Reports = dict[str, Reporting]


def report_times() -> Reports:
    """Train on a worker, with a report of metrics, of a checkpoint and without any."""
    every = h.Every(steps=STEPS_PER_REPORT)
    with tempfile.TemporaryDirectory() as folder:
        return {
            "nothing": reported(RayReport()),
            "metrics": reported(h.LogSchedule(every), RayReport(interval=0.0)),
            "checkpoint": reported(h.SaveSchedule(every), h.Checkpoint(folder), RayReport()),
        }


def reported(*plugins: h.Plugin) -> Reporting:
    """Train a tiny model on several ranks."""
    model = tiny_model()
    trainer, task = h.Trainer(plugins, device="cpu"), h.Supervised(model, nn.functional.mse_loss)
    optimizer, batches = sgd(model.parameters()), batches_of(STEPS_PER_REPORT * REPORTS)
    with recorded() as waits:
        seconds = timed(lambda: trainer.fit(task, batches, optimizer=optimizer, steps=STEPS_PER_REPORT * REPORTS))
    return Reporting(seconds / REPORTS, median(waits or [0.0]))


@contextmanager
def recorded() -> Iterator[list[float]]:
    """Note how long each report of this process's session takes."""
    session, seconds = cast("Any", current_session()), list[float]()
    report = session.report

    def note(*args: Any) -> Any:
        began = perf_counter()
        try:
            return report(*args)
        finally:
            seconds.append(perf_counter() - began)

    session.report = note
    yield seconds
    del session.report


def columns(ids: dict[str, Any]) -> dict[str, Any]:
    """Return features of numbered rows."""
    return {"x": np.repeat(ids["id"].astype(np.float32)[:, None], FEATURES, axis=1)}


def numbered() -> Any:
    """Return a dataset that is executed as it is read."""
    return DATA.range(ROWS, override_num_blocks=20).map_batches(columns)


def per_batch(open_: Callable[[], Iterable[Any]], ranks: int = 1) -> float:
    """Return the milliseconds of a batch; the start of an epoch is spread over its batches."""
    return median(timed(lambda: sum(1 for _ in open_())) for _ in range(ROUNDS)) / (ROWS / BATCH / ranks) * 1e3


def opened(dataset: Any, engine: Any = None) -> Callable[[], Iterable[Any]]:
    """Return what reads a dataset as `fit` does, an epoch each time."""
    data = TrainingData(training_loaders(dataset, {"batch_size": BATCH}), engine)
    data.key(0)
    return lambda: data.open(Progress(), lambda done, batches: None)


def reading_alone() -> Iterator[Row]:
    """Yield what a batch costs in one process."""
    stream, kept = numbered(), numbered().materialize()
    tensors = TensorDataset(torch.from_numpy(columns({"id": np.arange(ROWS)})["x"]))
    ours, its = per_batch(opened(stream)), per_batch(lambda: stream.iter_torch_batches(batch_size=BATCH))
    yield f"a batch of {BATCH} rows as a stream", ours, "ms", "ds.iter_torch_batches", its
    ours = per_batch(opened(kept))
    yield (
        "the same, materialized",
        ours,
        "ms",
        "ds.iter_torch_batches",
        per_batch(lambda: kept.iter_torch_batches(batch_size=BATCH)),
    )
    yield (
        "the same, materialized",
        ours,
        "ms",
        "DataLoader(TensorDataset)",
        per_batch(lambda: DataLoader(tensors, BATCH)),
    )


def reading_together(folder: str) -> Iterator[Row]:
    """Yield what a batch costs on each of two ranks."""
    dataset = numbered()
    split = dataset.streaming_split(2, equal=True)
    ours, its = RayLauncher(2, storage_path=folder).run(read_together, dataset, split)[0]
    yield "a batch as a stream, on each of 2 workers", ours, "ms", "ds.streaming_split(2)", its


def read_together(dataset: Any, split: list[Any]) -> tuple[float, float]:
    """Return the milliseconds of a batch on a worker, read as `fit` does and as Ray Train does."""
    engine = choose_engine()
    with engine.process():
        ours = per_batch(opened(dataset, engine), ranks=2)
        return ours, per_batch(lambda: split[engine.rank].iter_torch_batches(batch_size=BATCH), ranks=2)


if __name__ == "__main__":
    main()
