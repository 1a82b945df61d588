"""What is told of an attempt when it begins."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from uuid import uuid4

import torch

from ...events import Bus, Event, Run, RunClosed, RunFailed
from ...events.catalogue import Phase
from ...events.errors import describe_error
from .format.plain import NAME, plain, plain_metrics, short
from .format.records import Attempt

OWNERS = 500  # of one event, in the plan
NOTES = 200


def attempt_of(run: Run, *, losses: bool) -> Attempt:
    """Return what a run is, without entries."""
    phase: Phase = "train" if run.optimizers else run.phase
    return Attempt(
        name=uuid4().hex[:12],
        phase=phase,
        began=datetime.now(UTC).isoformat(),
        run=short(run.name, NAME),
        world_size=run.engine.world_size,
        max_epochs=run.max_epochs,
        max_steps=run.max_steps,
        validation_sets=tuple(run.validation_sets),
        optimizers=tuple(run.optimizers),
        hyper_parameters=plain(run.hyper_parameters),
        versions={
            "heliograph": version("heliograph"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        losses=losses,
        plan=plan_of(run.bus),
        entries=(),
    )


def plan_of(bus: Bus) -> dict[str, tuple[str, ...]]:
    """Return who hears each event, in the order in which they run."""
    plan: dict[str, tuple[str, ...]] = {}
    for signal in bus.signals():
        subscriptions = sorted(signal.subscriptions.values(), key=lambda seat: seat.position)
        if owners := [short(str(seat.owner), NAME) for seat in subscriptions[:OWNERS] if not seat.paused]:
            plan[signal.event.name] = tuple(owners)
    return plan


def fields_of(event: Event) -> dict[str, Any]:
    """Return an event's fields as plain data."""
    data: dict[str, Any] = plain({each.name: getattr(event, each.name) for each in fields(event)})  # type: ignore[arg-type]  # subclasses are dataclasses
    return data


def metrics_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as an entry's data, and how many were left out."""
    kept, left_out = plain_metrics(metrics)
    return {"metrics": kept, **({"left_out": left_out} if left_out else {})}


def failure_of(run: Run, event: RunFailed, *, losses: bool) -> dict[str, Any]:
    """Return a failure as an entry's data, with what had come about of the batch in hand."""
    place = {"phase": event.phase, "plugin": event.plugin, "event": event.event}
    in_hand = run.in_hand
    loss = _last_loss(run) if losses and in_hand else None
    batch = {"in_hand": in_hand, "is_last": run.is_last_batch, "window": run.window, "loss": loss}
    return {"error": type(event.error).__name__, "text": short(describe_error(event.error)), **place, **batch}


def _last_loss(run: Run) -> float | None:
    try:
        return None if run.loss is None else float(run.loss.detach())
    except RuntimeError:  # of a device that failed, nobody reads a number any more
        return None


def ending_of(run: Run, event: RunClosed, error: BaseException | None) -> dict[str, Any]:
    """Return how a run ended as an entry's data."""
    asked = run.control.stop_request if event.status == "stopped" else None
    notes = [short(note) for note in run.notes[:NOTES]]
    return {
        "status": event.status,
        "reason": short(run.reason(error)),
        "by": None if asked is None else short(asked.by, NAME),
        "rank": None if asked is None else asked.rank,
        **metrics_of(run.metrics),
        "best": None if run.best_checkpoint is None else str(run.best_checkpoint),
        "last": None if run.last_checkpoint is None else str(run.last_checkpoint),
        "notes": notes + [f"(+{len(run.notes) - NOTES} notes)"] * (len(run.notes) > NOTES),
    }
