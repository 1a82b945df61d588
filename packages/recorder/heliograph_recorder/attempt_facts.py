"""Collect facts of a run as plain data, at its beginning, at an event and at its end."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import torch
from heliograph import Bus, Run, RunClosed, RunFailed
from heliograph.events import Event, Phase
from heliograph.spi import describe_error, version

from .format.plain import NAME, shorten, to_plain, to_plain_metrics
from .format.records import AttemptRecord

MAX_OWNERS = 500  # of the handlers of one event
MAX_NOTES = 200  # and the same number of warnings


def attempt_of(run: Run, *, losses: bool) -> AttemptRecord:
    phase: Phase = "train" if run.optimizers else run.phase
    return AttemptRecord(
        name=uuid4().hex[:12],
        phase=phase,
        began=datetime.now(UTC).isoformat(),
        run=shorten(run.name, NAME),
        world_size=run.engine.world_size,
        max_epochs=run.length.max_epochs,
        max_steps=run.length.max_steps,
        validation_sets=tuple(run.data.validation_sets),
        optimizers=tuple(run.optimizers),
        hyper_parameters=to_plain(run.hyper_parameters),
        versions={"heliograph": version(), "torch": str(torch.__version__), "python": platform.python_version()},
        losses=losses,
        plan=plan_of(run.bus),
        entries=(),
        planned_steps=run.length.planned_steps,
    )


def plan_of(bus: Bus) -> dict[str, tuple[str, ...]]:
    plan: dict[str, tuple[str, ...]] = {}
    for signal in bus.signals():
        subscriptions = sorted(signal.subscriptions.values(), key=lambda subscription: subscription.position)
        active = [subscription for subscription in subscriptions[:MAX_OWNERS] if not subscription.paused]
        if active:
            plan[signal.event.name] = tuple(shorten(str(subscription.owner), NAME) for subscription in active)
    return plan


def fields_of(event: Event) -> dict[str, Any]:
    names = [field.name for field in fields(event)]
    return {**to_plain({name: getattr(event, name) for name in names})}


def metrics_of(metrics: Mapping[str, Any], of_loop: Collection[str] | None = None) -> dict[str, Any]:
    """Return metrics as an entry's data; metrics that are not `of_loop` were added by plugins."""
    plain, omitted = to_plain_metrics(metrics)
    added = [] if of_loop is None else [name for name in plain if name not in of_loop]
    return {"metrics": plain, **({"left_out": omitted} if omitted else {}), **({"added": added} if added else {})}


def failure_of(event: RunFailed) -> dict[str, Any]:
    return {
        "error": type(event.error).__name__,
        "text": shorten(describe_error(event.error)),
        "phase": event.phase,
        "plugin": event.plugin,
        "event": event.event,
    }


def ending_of(run: Run, event: RunClosed, error: BaseException | None) -> dict[str, Any]:
    stop = run.control.stop_request if event.status == "stopped" else None
    return {
        "status": event.status,
        "reason": shorten(run.report.reason(error)),
        "by": None if stop is None else shorten(stop.by, NAME),
        "rank": None if stop is None else stop.rank,
        **metrics_of(run.metrics),
        "best": None if run.checkpoints.best is None else str(run.checkpoints.best),
        "last": None if run.checkpoints.last is None else str(run.checkpoints.last),
        "notes": _first(run.report.notes, "notes"),
        "warnings": _first(run.report.warnings, "warnings"),
    }


def _first(texts: Sequence[str], noun: str) -> list[str]:
    first = [shorten(text) for text in texts[:MAX_NOTES]]
    return first + [f"(+{len(texts) - MAX_NOTES} {noun})"] * (len(texts) > MAX_NOTES)
