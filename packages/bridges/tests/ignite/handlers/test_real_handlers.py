"""Handlers and metrics of Ignite, as they are."""

from __future__ import annotations

import io
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.kit import class_batches, fit, linear_classifier, random_batches
from heliograph_bridges.ignite import from_ignite
from ignite.engine import Engine, Events
from ignite.handlers import (
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    EMAHandler,
    FastaiLRFinder,
    LinearCyclicalScheduler,
    ModelCheckpoint,
    ProgressBar,
    TerminateOnNan,
    TimeLimit,
    Timer,
)
from ignite.metrics import Accuracy, RunningAverage
from torch import nn


def stop_early(trainer: Engine, evaluator: Engine) -> None:
    """Add what scripts of Ignite add."""
    handler = EarlyStopping(2, lambda engine: -engine.state.metrics["loss"], trainer)
    evaluator.add_event_handler(Events.COMPLETED, handler)


def overfit(*plugins: Any, epochs: int = 20, **options: Any) -> h.RunResult:
    """Train on noise, with another noise for the validation of every epoch."""
    torch.manual_seed(0)
    task = h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
    return fit(
        h.Trainer([h.ValidationSchedule(epochs=1, at_end=False), *plugins], device="cpu"),
        task=task,
        train=random_batches(4),
        validation=random_batches(4, seed=1),
        epochs=epochs,
        **options,
    )


def test_early_stopping_stops_where_ours_does() -> None:
    ours = overfit(h.EarlyStopping(patience=2))
    theirs = overfit(from_ignite(stop_early))
    assert theirs.progress.steps == ours.progress.steps < 80
    assert theirs.stopped_by == "stop_early"
    assert_facts(theirs.reason, "trainer.terminate()", "Events.COMPLETED", "evaluator")


def test_early_stopping_attached_by_itself_stops_the_engine_that_it_was_given() -> None:
    def script(trainer: Engine, evaluator: Engine) -> None:
        EarlyStopping(2, lambda engine: -engine.state.metrics["loss"], trainer).attach(evaluator, reset_engine=trainer)

    assert overfit(from_ignite(script)).progress.steps == overfit(from_ignite(stop_early)).progress.steps


def test_terminate_on_nan() -> None:
    batches = class_batches(4)
    batches[2] = (batches[2][0] * float("nan"), batches[2][1])
    result = fit(from_ignite(TerminateOnNan(), Events.ITERATION_COMPLETED), train=batches, epochs=3)
    assert (result.stopped_by, result.progress.batches) == ("terminate_on_nan", 3)


def test_the_progress_bar_draws() -> None:
    written = io.StringIO()

    def script(trainer: Engine) -> None:
        RunningAverage(output_transform=float).attach(trainer, "loss")
        ProgressBar(file=written, ascii=True, mininterval=0).attach(trainer, ["loss"])

    plugin = from_ignite(script)
    fit(plugin, train=class_batches(3), epochs=2)
    text = written.getvalue()
    assert "Epoch [2/2]: [3/3]" in text
    assert "loss=" in text
    assert from_ignite(ProgressBar()).affects_training is False
    assert plugin.affects_training is True  # a running mean may decide


def test_a_timer() -> None:
    timer = Timer(average=True)

    def script(trainer: Engine) -> None:
        events = {"resume": Events.ITERATION_STARTED, "pause": Events.ITERATION_COMPLETED}
        timer.attach(trainer, start=Events.STARTED, step=Events.ITERATION_COMPLETED, **events)

    plugin = from_ignite(script)
    fit(plugin, train=class_batches(3), epochs=2)
    assert timer.step_count == 6
    assert timer.value() > 0
    assert not plugin.affects_training


def test_a_time_limit() -> None:
    limit = TimeLimit(1)
    limit.start_time -= 10
    result = fit(from_ignite(limit, Events.ITERATION_COMPLETED), epochs=3)
    assert (result.stopped_by, result.progress.steps) == ("time_limit", 1)


def test_an_average_of_weights() -> None:
    task = linear_classifier()
    handler = EMAHandler(task.model, momentum=0.25)
    trained: Any = task.model
    model: Any = handler.ema_model
    averaged = model.weight.clone()
    weights: list[torch.Tensor] = []

    class Keeps(h.Plugin):
        @h.on(h.StepEnd)
        def keep(self, run: h.Run, event: h.StepEnd) -> None:
            weights.append(trained.weight.detach().clone())

    fit(from_ignite(handler), Keeps(), task=task, train=class_batches(4))
    for each in weights:
        averaged = 0.75 * averaged + 0.25 * each
    torch.testing.assert_close(model.weight, averaged)


def test_a_scheduler_of_a_parameter() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = LinearCyclicalScheduler(optimizer, "lr", start_value=1.0, end_value=0.0, cycle_size=4)
    rates: list[float] = []

    class Keeps(h.Plugin):
        @h.on(h.GradientsReady)
        def keep(self, run: h.Run, event: h.GradientsReady) -> None:
            rates.append(run.optimizer.param_groups[0]["lr"])

    task = h.Supervised(model, nn.functional.mse_loss)
    fit(from_ignite(scheduler), Keeps(), task=task, train=random_batches(4), optimizer=optimizer)
    assert rates == [1.0, 0.5, 0.0, 0.5]


def test_metrics_of_ignite_are_metrics_of_the_validation() -> None:
    def script(trainer: Engine, evaluator: Engine) -> None:
        Accuracy().attach(evaluator, "accuracy")

    def output(run: h.Run) -> Any:
        return run.outputs, run.batch[1]

    ours = h.Trainer([h.ValidationSchedule(epochs=1)], device="cpu")
    theirs = h.Trainer(
        [h.ValidationSchedule(epochs=1), from_ignite(script, phase="validation", output=output)], device="cpu"
    )
    results = [
        fit(each, task=linear_classifier(metrics=metrics), validation=class_batches(3), epochs=2)
        for each, metrics in ((ours, {"accuracy": h.accuracy}), (theirs, {}))
    ]
    assert results[0].metrics["validation/accuracy"] == pytest.approx(results[1].metrics["validation/accuracy"])
    assert 0 < results[0].metrics["validation/accuracy"] < 1


def test_the_evaluator_cuts_a_validation_short() -> None:
    def script(trainer: Engine, evaluator: Engine) -> None:
        evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=2), evaluator.terminate)
        evaluator.add_event_handler(Events.TERMINATE, lambda: seen.append(evaluator.state.iteration))

    seen: list[int] = []
    plugins = [h.ValidationSchedule(epochs=1, at_end=False), from_ignite(script)]
    result = fit(h.Trainer(plugins, device="cpu"), validation=class_batches(4), epochs=2)
    assert seen == [2, 2]
    assert "validation/loss" not in result.metrics


@pytest.mark.parametrize(
    ("handler", "event", "sentence"),
    [
        (
            ModelCheckpoint(".", create_dir=False, require_empty=False),
            Events.EPOCH_COMPLETED,
            r"add Checkpoint\('runs/x'",
        ),
        (
            Checkpoint({"x": nn.Linear(1, 1)}, DiskSaver(".", create_dir=False, require_empty=False)),
            Events.COMPLETED,
            r"Checkpoint cannot run in",
        ),
        (FastaiLRFinder(), None, "tuning.find_learning_rate"),
        (print, Events.GET_BATCH_STARTED, "use GET_BATCH_COMPLETED or ITERATION_STARTED"),
        (print, Events.DATALOADER_STOP_ITERATION, "ends with its loader"),
        (print, Events.EPOCH_STARTED | Events.INTERRUPT, "training cannot be interrupted"),
        (lambda engine: None, None, "added no handler"),
    ],
    ids=["ModelCheckpoint", "Checkpoint", "FastaiLRFinder", "loading", "loader", "interrupt", "nothing"],
)
def test_what_is_refused(handler: Any, event: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_ignite(handler, event)


@pytest.mark.parametrize("wrong", [7, lambda: None, lambda a, b, c: None])
def test_what_is_no_handler(wrong: Any) -> None:
    with pytest.raises(TypeError, match="from_ignite takes a handler"):
        from_ignite(wrong)


def test_a_phase_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="'train' or 'validation',"):
        from_ignite(print, Events.COMPLETED, phase="test")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda engine: engine.run([0]), "cannot run alone"),
        (lambda engine: engine.interrupt(), "cannot be interrupted"),
        (lambda engine: engine.set_data([0]), "the data to fit"),
        (lambda engine: engine.load_state_dict({}), "resume the training"),
        (lambda engine: engine.add_event_handler(Events.EPOCH_COMPLETED, print), "not listen to this"),
    ],
)
def test_what_an_engine_here_does_not_do(call: Any, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        fit(from_ignite(call, Events.ITERATION_COMPLETED))


def test_an_engine_outside_of_a_training() -> None:
    kept: list[Engine] = []

    def script(trainer: Engine, evaluator: Engine) -> None:
        kept.extend([trainer, evaluator])
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: None)

    fit(from_ignite(script))
    for engine in kept:
        with pytest.raises(RuntimeError, match="none is running"):
            engine.terminate()
    assert kept[0].state.dataloader is None
