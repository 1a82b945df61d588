"""Where a run is, in the `State` of an engine of Ignite."""

from __future__ import annotations

from math import ceil
from time import perf_counter
from typing import Any

from heliograph import Run
from ignite.engine import Events

from ...absent import Absent
from .engine import RunEngine

PHASES = {"trainer": "train/", "evaluator": "validation/"}


def begin_training(engine: RunEngine, run: Run) -> None:
    """Set what holds for the whole training: its length and its data."""
    engine.run_in_hand, state = run, engine.state
    state.max_epochs = None if run.length.max_epochs is None else ceil(run.length.max_epochs)
    state.max_iters = None
    state.epoch_length, state.metrics = run.length.batches_per_epoch, {}
    state.dataloader = Absent("the loader") if run.report.is_replay else run.data.train_loader
    state.seed = None if run.report.is_replay else run.data.seed
    begin_timing(engine)
    go_to(engine, run)


def begin_evaluation(engine: RunEngine, run: Run) -> None:
    """Set what holds for a validation: one epoch, from iteration 0."""
    engine.run_in_hand, state = run, engine.state
    state.epoch, state.iteration, state.max_epochs, state.max_iters = 0, 0, 1, None
    state.epoch_length, state.metrics, state.output = run.data.evaluation_batches, {}, None
    engine.should_terminate = False
    begin_timing(engine)


def go_to(engine: RunEngine, run: Run) -> None:
    """Set the counters of a trainer between two batches."""
    progress = run.progress
    engine.state.iteration = progress.batches
    engine.state.epoch = progress.epoch + (progress.batch > 0)


def begin_epoch(engine: RunEngine, run: Run) -> None:
    """Set the counters of a trainer in an epoch, whose number is from 1."""
    engine.state.iteration, engine.state.epoch = run.progress.batches, run.progress.epoch + 1


def batch_of(run: Run) -> Any:
    """Return the batch in hand; in a replay, what raises `NotRecorded` where it is used."""
    return Absent("the batches themselves") if run.report.is_replay else run.batch


def leave(engine: RunEngine) -> None:
    """Let the run go, and its data."""
    engine.run_in_hand, state = None, engine.state
    state.dataloader = state.batch = state.output = None


def begin_timing(engine: RunEngine) -> None:
    """Let the times of the run and of its epoch begin."""
    engine.started = engine.epoch_started = perf_counter()


def begin_epoch_timing(engine: RunEngine) -> None:
    """Let the time of an epoch begin."""
    engine.epoch_started = perf_counter()


def take_time(engine: RunEngine, event: Any) -> None:
    """Put into `state.times` how long the epoch, or all, has taken."""
    since = engine.epoch_started if event == Events.EPOCH_COMPLETED else engine.started
    engine.state.times[event.name] = perf_counter() - since


def take_metrics(engine: RunEngine, metrics: dict[str, float]) -> None:
    """Put metrics into the state under their names there: `loss` for `validation/loss`."""
    prefix = PHASES[engine.role]
    for name, value in metrics.items():
        if name.startswith(prefix):
            engine.state.metrics[name.removeprefix(prefix)] = value


def give_metrics(engine: RunEngine, metrics: dict[str, float]) -> None:
    """Add what metrics of Ignite have computed to the metrics of the run, where it is a number."""
    prefix = PHASES[engine.role]
    for name, value in engine.state.metrics.items():
        if isinstance(value, int | float):
            metrics.setdefault(prefix + name, float(value))
