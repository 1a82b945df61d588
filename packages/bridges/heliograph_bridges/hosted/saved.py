"""The state of a hosted run in the host's checkpoint: plugins, counters, requests and metrics, but no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from heliograph.core.checkpoint.ranks import gather_rank_parts, select_rank_part
from heliograph.spi import as_plain

from .run import HostedRun

VERSION = 1


class Position(NamedTuple):
    """The host's position in a training.

    Attributes:
        epoch: the number of the epoch, from 0.
        batch: the completed micro-batches of the epoch.
        step: the completed optimizer steps of the training; None if the host does not count them.
    """

    epoch: int = 0
    batch: int = 0
    step: int | None = 0


def capture(run: HostedRun) -> dict[str, Any]:
    """Return the state of this rank, as plain types and tensors. Not a collective."""
    loop = run.loop_state()
    loop["control"]["due"] = [verb for verb in loop["control"]["due"] if verb != "save"]  # it is being served
    state = {
        **loop,
        "version": VERSION,
        "training_id": run.checkpoints.training_id,
        "progress": run.progress.state_dict(),
        "in_boundary": run.boundary_is_open and not run.report.finished,
        "metrics": dict(run.metrics),
        "totals": {name: list(pair) for name, pair in run.means.totals.items()},
    }
    state, types = as_plain(state, "state")
    return {**state, "number_types": types} if types else state


def with_ranks(run: HostedRun, state: Mapping[str, Any]) -> dict[str, Any]:
    """Add the differences of the other ranks to the state of this rank. A collective."""
    return {**state, "ranks": gather_rank_parts(run.engine, state)}


def restore(run: HostedRun, saved: Mapping[str, Any], path: Path | None) -> None:
    if saved["version"] > VERSION:
        raise ValueError(
            f"The state of the plugins in {path or 'the checkpoint'} has version {saved['version']}, but this "
            f"heliograph reads versions up to {VERSION}: update it."
        )
    state = select_rank_part({"ranks": [], **saved}, run.engine.rank, run.engine.world_size)
    checkpoints, progress = run.checkpoints, run.progress
    checkpoints.training_id, checkpoints.in_boundary = state["training_id"], state["in_boundary"]
    checkpoints.path = path
    progress.load_state_dict(state["progress"])
    place = f"epoch {progress.epoch}, batch {progress.batch}, step {progress.steps}"
    run.load_loop_state(state, f"{run.host.name} resumed at {place} from {path or 'a checkpoint'}")
    run.means.totals = {name: (value, weight) for name, (value, weight) in state["totals"].items()}
    checkpoints.resumed_from, checkpoints.resumed_at = path, run.origin


def begin_at(run: HostedRun, position: Position, path: Path | None) -> None:
    """Begin at the position of a checkpoint that has no state of plugins."""
    run.progress.steps = position.step or 0
    run.progress.epoch, run.progress.batch = position.epoch, position.batch
    run.work.has_begun = position.batch > 0
    run.origin = run.progress.copy()
    run.checkpoints.resumed_from, run.checkpoints.resumed_at = path, run.origin
    run.note(f"{run.host.name} resumes {path or 'a checkpoint'} without states of plugins: they start fresh")
    if position.step is None:
        run.note(f"steps are counted from here: {run.host.name} counts iterations, and a step may need several")


def move_to(run: HostedRun, position: Position) -> None:
    """Continue at the position of the host, which may count differently, for example epochs that ended early."""
    progress = run.progress
    place = f"epoch {progress.epoch}, batch {progress.batch}"
    if (progress.epoch, progress.batch) == (position.epoch, position.batch):
        return
    run.note(f"{run.host.name} continues in epoch {position.epoch}, batch {position.batch}, after {place}")
    progress.earlier_batches = max(0, progress.batches - position.batch)
    progress.epoch, progress.batch = position.epoch, position.batch
    run.work.has_begun = position.batch > 0
    run.origin = run.progress.copy()
    run.checkpoints.resumed_at = run.origin
