"""Handlers of Ignite can read where the trainer is, whatever else has a handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import heliograph as h
import pytest
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph_bridges.ignite import from_ignite
from ignite.engine import Engine, Events
from ignite.handlers import global_step_from_engine


def places_of(role: str, name: str) -> list[tuple[int, int]]:
    """Return where the trainer is at an event, in two epochs of three batches, where nothing else has a handler."""
    seen: list[tuple[int, int]] = []

    def script(trainer: Engine, evaluator: Engine) -> None:
        engine = trainer if role == "trainer" else evaluator
        engine.add_event_handler(Events[name], lambda: seen.append((trainer.state.epoch, trainer.state.iteration)))

    plugins = [h.ValidationSchedule(steps=2, at_end=False), from_ignite(script)]
    h.Trainer(plugins, device="cpu").fit(
        linear_classifier(), class_batches(3), validation=class_batches(1), optimizer=sgd(), epochs=2
    )
    return seen


@pytest.mark.parametrize(
    ("role", "name", "expected"),
    [
        ("trainer", "EPOCH_STARTED", [(1, 0), (2, 3)]),
        ("trainer", "ITERATION_STARTED", [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]),
        ("trainer", "EPOCH_COMPLETED", [(1, 3), (2, 6)]),
        ("trainer", "COMPLETED", [(2, 6)]),
        ("evaluator", "STARTED", [(1, 2), (2, 4), (2, 6)]),
        ("evaluator", "ITERATION_COMPLETED", [(1, 2), (2, 4), (2, 6)]),
        ("evaluator", "COMPLETED", [(1, 2), (2, 4), (2, 6)]),
    ],
)
def test_a_handler_alone_knows_where_the_trainer_is(role: str, name: str, expected: list[tuple[int, int]]) -> None:
    assert places_of(role, name) == expected


def test_the_step_that_a_validation_is_logged_at() -> None:
    seen: list[int] = []

    def script(trainer: Engine, evaluator: Engine) -> None:
        step = global_step_from_engine(trainer, Events.ITERATION_COMPLETED)
        evaluator.add_event_handler(Events.COMPLETED, lambda: seen.append(step(evaluator, Events.COMPLETED)))

    plugins = [h.ValidationSchedule(epochs=1), from_ignite(script)]
    h.Trainer(plugins, device="cpu").fit(
        linear_classifier(), class_batches(3), validation=class_batches(1), optimizer=sgd(), epochs=2
    )
    assert seen == [3, 6]


def test_where_a_training_has_failed_or_was_stopped() -> None:
    seen: list[tuple[str, int, int]] = []

    def script(trainer: Engine) -> None:
        for name in ("TERMINATE", "EXCEPTION_RAISED"):

            def note(engine: Engine, *_: Any, name: str = name) -> None:
                seen.append((name, engine.state.epoch, engine.state.iteration))

            trainer.add_event_handler(Events[name], note)

    def train(act: Callable[[h.Run], None]) -> None:
        trainer = h.Trainer([from_ignite(script)], device="cpu")
        trainer.bus.on(h.BatchEnd, lambda run, event: act(run) if run.progress.batches == 4 else None)
        trainer.fit(linear_classifier(), class_batches(3), optimizer=sgd(), epochs=2)

    def fail(run: h.Run) -> None:
        raise RuntimeError("the disk is full")

    train(lambda run: run.control.stop("enough"))
    with pytest.raises(RuntimeError, match="the disk is full"):
        train(fail)
    assert seen == [("TERMINATE", 2, 4), ("EXCEPTION_RAISED", 2, 4)]
