"""Handlers of Ignite are called here as an Ignite script calls them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph_bridges.ignite import from_ignite
from ignite.engine import Engine, Events

Line = tuple[str, str, int, int]
NAMES = (
    "STARTED",
    "EPOCH_STARTED",
    "GET_BATCH_COMPLETED",
    "ITERATION_STARTED",
    "ITERATION_COMPLETED",
    "TERMINATE_SINGLE_EPOCH",
    "EPOCH_COMPLETED",
    "TERMINATE",
    "COMPLETED",
)
TWO_EPOCHS = """
trainer STARTED 0 0
trainer EPOCH_STARTED 1 0
trainer GET_BATCH_COMPLETED 1 0
trainer ITERATION_STARTED 1 1
trainer ITERATION_COMPLETED 1 1
trainer GET_BATCH_COMPLETED 1 1
trainer ITERATION_STARTED 1 2
trainer ITERATION_COMPLETED 1 2
trainer EPOCH_COMPLETED 1 2
evaluator STARTED 0 0
evaluator EPOCH_STARTED 1 0
evaluator GET_BATCH_COMPLETED 1 0
evaluator ITERATION_STARTED 1 1
evaluator ITERATION_COMPLETED 1 1
evaluator EPOCH_COMPLETED 1 1
evaluator COMPLETED 1 1
trainer EPOCH_STARTED 2 2
trainer GET_BATCH_COMPLETED 2 2
trainer ITERATION_STARTED 2 3
trainer ITERATION_COMPLETED 2 3
trainer GET_BATCH_COMPLETED 2 3
trainer ITERATION_STARTED 2 4
trainer ITERATION_COMPLETED 2 4
trainer EPOCH_COMPLETED 2 4
evaluator STARTED 0 0
evaluator EPOCH_STARTED 1 0
evaluator GET_BATCH_COMPLETED 1 0
evaluator ITERATION_STARTED 1 1
evaluator ITERATION_COMPLETED 1 1
evaluator EPOCH_COMPLETED 1 1
evaluator COMPLETED 1 1
trainer COMPLETED 2 4
"""


def note_all(lines: list[str], trainer: Engine, evaluator: Engine) -> None:
    """Let both engines note each of their events, with the epoch and the iteration."""
    for role, engine in (("trainer", trainer), ("evaluator", evaluator)):
        for name in NAMES:

            def note(engine: Engine, *_: Any, role: str = role, name: str = name, **__: Any) -> None:
                lines.append(f"{role} {name} {engine.state.epoch} {engine.state.iteration}")

            engine.add_event_handler(Events[name], note)


def run_there(lines: list[str], stop: str = "") -> None:
    """Train two epochs of two batches in Ignite, with a validation after each."""
    trainer, evaluator = Engine(lambda engine, batch: 0.0), Engine(lambda engine, batch: 0.0)
    note_all(lines, trainer, evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    if stop:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: getattr(trainer, stop)())
    trainer.run([0, 0], max_epochs=2)


def run_here(lines: list[str], stop: str = "") -> h.RunResult:
    """Train the same here."""

    def script(trainer: Engine, evaluator: Engine) -> None:
        note_all(lines, trainer, evaluator)
        if stop:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: getattr(trainer, stop)())

    plugins = [h.ValidationSchedule(epochs=1, at_end=False), from_ignite(script)]
    return h.Trainer(plugins, device="cpu").fit(
        linear_classifier(), class_batches(2), validation=class_batches(1), optimizer=sgd(), epochs=2
    )


def alike(lines: Iterable[str]) -> list[str]:
    """Return the lines but for the epoch of the evaluator's STARTED, which Ignite leaves as the last run left it."""
    return [
        line.replace("STARTED 1 1", "STARTED 0 0") if line.startswith("evaluator STARTED") else line for line in lines
    ]


def test_an_epoch_with_its_validation() -> None:
    theirs: list[str] = []
    ours: list[str] = []
    run_there(theirs)
    run_here(ours)
    assert alike(theirs) == TWO_EPOCHS.strip().splitlines()
    assert alike(ours) == TWO_EPOCHS.strip().splitlines()


@pytest.mark.parametrize(("stop", "steps"), [("terminate", 1), ("terminate_epoch", 3)])
def test_what_is_asked_for_ends_the_same_way(stop: str, steps: int) -> None:
    theirs: list[str] = []
    ours: list[str] = []
    run_there(theirs, stop)
    result = run_here(ours, stop)
    assert alike(ours) == alike(theirs)
    assert result.progress.steps == steps


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Events.ITERATION_COMPLETED(every=3), [3, 6, 9]),
        (Events.ITERATION_STARTED(once=[2, 5]), [2, 5]),
        (Events.ITERATION_COMPLETED(before=3), [1, 2]),
        (Events.EPOCH_COMPLETED(every=2), [10]),
        (Events.EPOCH_STARTED | Events.ITERATION_COMPLETED(once=7), [0, 5, 7]),
        (Events.ITERATION_COMPLETED(lambda engine, event: event in (4, 8)), [4, 8]),
    ],
)
def test_filters(event: Any, expected: list[int]) -> None:
    seen: list[int] = []
    plugin = from_ignite(lambda engine: seen.append(engine.state.iteration), event)
    h.Trainer([plugin], device="cpu").fit(linear_classifier(), class_batches(5), optimizer=sgd(), epochs=2)
    assert seen == expected


def test_the_state_of_an_engine() -> None:
    seen: dict[str, Any] = {}

    def look(engine: Engine) -> None:
        state = engine.state
        seen.update(vars(state), output=state.output, batch=state.batch)

    batches = class_batches(3)
    schedule = h.LogSchedule(steps=2)
    h.Trainer([schedule, from_ignite(look, Events.ITERATION_COMPLETED)], device="cpu").fit(
        linear_classifier(), batches, optimizer=sgd(), epochs=2
    )
    assert (seen["epoch"], seen["iteration"], seen["epoch_length"], seen["max_epochs"]) == (2, 6, 3, 2)
    assert seen["dataloader"] is batches
    assert torch.equal(seen["batch"][0], batches[2][0])
    assert seen["output"].shape == ()
    assert not seen["output"].requires_grad
    assert set(seen["metrics"]) == {"loss"}


def test_a_handler_may_replace_the_batch() -> None:
    outputs: list[float] = []

    def halve(engine: Engine) -> None:
        inputs, targets = engine.state.batch  # type: ignore[misc]
        vars(engine.state)["batch"] = (0 * inputs, targets)

    def script(trainer: Engine) -> None:
        trainer.add_event_handler(Events.ITERATION_STARTED, halve)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(float(trainer.state.output)))  # type: ignore[arg-type]

    task = linear_classifier()
    task.model.register_parameter("bias", torch.nn.Parameter(torch.zeros(2)))
    h.Trainer([from_ignite(script)], device="cpu").fit(task, class_batches(1), optimizer=sgd(), epochs=1)
    assert outputs == [pytest.approx(0.6931472)]


def test_an_exception_is_shown_to_handlers_and_fails_the_run() -> None:
    seen: list[BaseException] = []

    def fail(engine: Engine) -> None:
        raise RuntimeError("the disk is full")

    def script(trainer: Engine) -> None:
        def show(engine: Engine, error: BaseException) -> None:
            seen.append(error)
            raise error  # as many scripts of Ignite do

        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), fail)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, show)

    with pytest.raises(RuntimeError, match="the disk is full") as caught:
        h.Trainer([from_ignite(script)], device="cpu").fit(
            linear_classifier(), class_batches(3), optimizer=sgd(), epochs=1
        )
    assert seen == [caught.value]
