"""What of Ignite cannot run here, and why."""

from __future__ import annotations

from typing import Any

EVENTS = {
    "GET_BATCH_STARTED": "no event precedes the loading of a batch: take GET_BATCH_COMPLETED or ITERATION_STARTED",
    "DATALOADER_STOP_ITERATION": "an epoch ends with its loader: take EPOCH_COMPLETED",
    "INTERRUPT": "a training is not interrupted: it saves, stops and is resumed",
}
HANDLERS = {
    "Checkpoint": "saves the state of an Ignite engine: add Checkpoint('runs/x', every=Every(epochs=1)) to the plugins",
    "FastaiLRFinder": "runs the trainer itself: call heliograph.tuning.find_learning_rate(trainer, task, data)",
}


def check_event(event: Any) -> None:
    """Raise ValueError where an event of Ignite has no moment here."""
    if (reason := EVENTS.get(getattr(event, "name", ""))) is not None:
        raise ValueError(f"Events.{event.name} is not fired in a Heliograph training: {reason}.")


def check_handler(handler: Any) -> None:
    """Raise ValueError where a handler of Ignite cannot do its work here."""
    for kind in type(handler).__mro__:
        if kind.__name__ in HANDLERS and kind.__module__.startswith("ignite."):
            raise ValueError(
                f"{type(handler).__name__} cannot run in a Heliograph training: it {HANDLERS[kind.__name__]}."
            )
