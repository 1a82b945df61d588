"""Our plugins in the loop of an engine of Ignite."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    At,
    BatchTransform,
    Checkpoint,
    EarlyStopping,
    EpochEnd,
    Every,
    GradientAccumulation,
    GradientsReady,
    LogSchedule,
    NaNGuard,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    ShouldStop,
    StepEnd,
    TrainStart,
    ValidationCut,
    ValidationEnd,
    ValidationSchedule,
    on,
)
from heliograph.packages.bridges.tests.hosted import loops
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.kit import class_batches
from heliograph_bridges.ignite import attach
from heliograph_recorder import Recorder, replay
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint as IgniteCheckpoint
from ignite.handlers import DiskSaver
from ignite.handlers import EarlyStopping as IgniteEarlyStopping
from ignite.metrics import Loss
from torch import nn


class Training:
    """A supervised training of Ignite, with what is attached to it.

    Args:
        plugins: what is attached.
        batches: in an epoch.
        before: gets the engine and the evaluator before the plugins are attached.
        options: further arguments of `attach`.
    """

    def __init__(
        self,
        *plugins: Any,
        batches: int = 2,
        before: Callable[[Engine, Engine], None] = lambda engine, evaluator: None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loss = nn.CrossEntropyLoss()
        self.batches = class_batches(batches)
        self.engine = create_supervised_trainer(self.model, self.optimizer, self.loss)
        self.evaluator = create_supervised_evaluator(self.model, {"loss": Loss(self.loss)})
        before(self.engine, self.evaluator)
        given: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "loss": self.loss,
            "evaluator": self.evaluator,
            "validation": self.batches,
        }
        self.attached = attach(self.engine, plugins, **{**given, **options})

    def run(self, epochs: int = 1, **options: Any) -> RunResult:
        self.engine.run(self.batches, max_epochs=epochs, **options)
        assert self.attached.result is not None
        return self.attached.result


class Trace(loops.Trace):
    """Keeps the names of our events, and those of Ignite, in their order."""

    quiet = ("validation_batch_start", "validation_batch_end", "should_stop", "forward_end", "backward_end")

    def listen(self, engine: Engine, evaluator: Engine) -> None:
        for event in (
            Events.STARTED,
            Events.EPOCH_STARTED,
            Events.ITERATION_STARTED,
            Events.ITERATION_COMPLETED,
            Events.EPOCH_COMPLETED,
            Events.TERMINATE,
            Events.COMPLETED,
        ):
            engine.add_event_handler(event, lambda _, name=event.name: self.names.append(name.upper()))


def test_the_order_of_events_beside_those_of_ignite() -> None:
    trace = Trace()
    training = Training(trace, LogSchedule(Every(steps=2)), ValidationSchedule(Every(epochs=1)), before=trace.listen)
    result = training.run()

    assert trace.text == (
        "STARTED train_start EPOCH_STARTED epoch_start "
        "ITERATION_STARTED batch_start gradients_ready step_end ITERATION_COMPLETED batch_end "
        "ITERATION_STARTED batch_start gradients_ready step_end ITERATION_COMPLETED batch_end log "
        "EPOCH_COMPLETED epoch_end validation_start validation_end "
        "COMPLETED last_boundary train_end run_closed"
    )
    assert (result.status, result.progress.steps, result.progress.samples) == ("completed", 2, 6)
    assert result.metrics["validation/loss"] == pytest.approx(training.evaluator.state.metrics["loss"])
    assert result.warnings == ()


def accumulating() -> tuple[Engine, dict[str, Any]]:
    """Return an engine of which two iterations make a step, and its parts."""
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iterate(engine: Engine, batch: Any) -> float:
        value = loss(model(batch[0]), batch[1])
        value.backward()
        if engine.state.iteration % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return float(value.item())

    return Engine(iterate), {"model": model, "optimizer": optimizer, "loss": loss}


def test_the_order_with_accumulation_in_the_engine() -> None:
    """Two iterations make a step: boundaries are where the optimizer stepped."""
    trace = Trace()
    engine, parts = accumulating()
    attached = attach(engine, [trace, LogSchedule(Every(steps=1))], **parts)
    engine.run(class_batches(4), max_epochs=1)

    assert trace.text == (
        "train_start epoch_start batch_start batch_end batch_start gradients_ready step_end batch_end log "
        "batch_start batch_end batch_start gradients_ready step_end batch_end log "
        "epoch_end last_boundary train_end run_closed"
    )
    assert attached.result is not None
    assert (attached.result.progress.steps, attached.result.progress.samples) == (2, 12)


def test_what_a_validation_within_a_window_asks_for_waits_for_the_step() -> None:
    windows: list[int] = []
    saves: list[int] = []

    class Save(Plugin):
        asks = ("save",)

        @on(ValidationEnd)
        def ask(self, run: Run, event: ValidationEnd) -> None:
            run.control.request_save("it was measured")

        @on(ShouldStop)
        def look(self, run: Run, event: ShouldStop) -> None:
            windows.append(run.stepping.window)

    engine, parts = accumulating()
    evaluator = create_supervised_evaluator(parts["model"], {"loss": Loss(parts["loss"])})
    attach(engine, [Save()], **parts, evaluator=evaluator, save=lambda engine: saves.append(engine.state.iteration))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda _: evaluator.run(class_batches(2)))
    engine.run(class_batches(4), max_epochs=1)

    assert windows == [0, 0, 0]  # two steps and the end of the epoch
    assert saves == [2]


@pytest.mark.parametrize("shows_optimizer", [True, False])
def test_an_engine_that_continues_without_saved_states_counts_steps_from_there(shows_optimizer: bool) -> None:
    """Six iterations of accumulation are three steps, which nobody knows who did not see them."""
    engine, parts = accumulating()
    engine.load_state_dict({"iteration": 6, "epoch_length": 4, "max_epochs": 3})
    if not shows_optimizer:
        parts["optimizer"] = None
    attached = attach(engine, [Trace()], **parts)
    engine.run(class_batches(4))

    assert attached.result is not None
    progress = attached.result.progress
    assert (progress.epoch, progress.steps) == (3, 3 if shows_optimizer else 12)
    notes = attached.result.notes
    assert any("without states of plugins:" in line for line in notes)
    is_counted = any("steps are counted from" in line for line in notes)
    assert is_counted is shows_optimizer


def test_the_order_where_a_plugin_stops_in_mid_epoch() -> None:
    class Stop(Plugin):
        asks = ("stop",)

        @on(StepEnd)
        def stop(self, run: Run, event: StepEnd) -> None:
            if run.progress.steps == 3:
                run.control.stop("enough")

    trace = Trace()
    training = Training(trace, Stop(), before=trace.listen)
    result = training.run(5)

    assert trace.text.endswith(
        "EPOCH_STARTED epoch_start ITERATION_STARTED batch_start gradients_ready step_end ITERATION_COMPLETED "
        "batch_end TERMINATE COMPLETED last_boundary train_end run_closed"
    )
    assert (result.status, result.stopped_by, result.reason, result.progress.steps) == ("stopped", "stop", "enough", 3)


def test_early_stopping_stops_where_that_of_ignite_does() -> None:
    values = [1.0, 0.5, 0.6, 0.7, 0.8, 0.9]

    def script(engine: Engine, evaluator: Engine) -> None:
        evaluator.add_event_handler(
            Events.COMPLETED, lambda each: each.state.metrics.update(loss=values[engine.state.epoch - 1])
        )

    def theirs(engine: Engine, evaluator: Engine) -> None:
        script(engine, evaluator)
        stop = IgniteEarlyStopping(2, lambda each: -each.state.metrics["loss"], engine)
        evaluator.add_event_handler(Events.COMPLETED, stop)

    ours = Training(EarlyStopping(patience=2), ValidationSchedule(Every(epochs=1)), before=script)
    result = ours.run(6)
    other = Training(ValidationSchedule(Every(epochs=1)), before=theirs)
    other.run(6)

    assert (result.status, result.stopped_by) == ("stopped", "early_stopping")
    assert ours.engine.state.epoch == other.engine.state.epoch == 4


def test_a_validation_that_the_user_runs_is_ours_too_and_decides_at_once() -> None:
    def validate(engine: Engine, evaluator: Engine) -> None:
        engine.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(class_batches(2)))

    class Stop(Plugin):
        asks = ("stop",)

        @on(ValidationEnd)
        def stop(self, run: Run, event: ValidationEnd) -> None:
            run.control.stop(f"loss {event.metrics['validation/loss']:.2f}")

    for order in ("before", "after"):
        training = Training(
            Stop(), before=validate if order == "before" else lambda engine, evaluator: None, validation=None
        )
        if order == "after":
            validate(training.engine, training.evaluator)
        result = training.run(3)
        assert (result.status, result.progress.steps, result.progress.epoch) == ("stopped", 2, 1)


def test_a_step_is_dropped_where_a_plugin_asks_for_it() -> None:
    class Skip(Plugin):
        asks = ("skip_step",)

        @on(GradientsReady)
        def skip(self, run: Run, event: GradientsReady) -> None:
            assert run.task.model.weight.grad is not None
            run.control.skip_step("all of them")

    training = Training(Skip())
    before = training.model.weight.detach().clone()
    result = training.run()

    assert torch.equal(training.model.weight, before)
    assert (result.progress.steps, result.progress.skipped_steps) == (0, 2)


def test_a_loss_that_is_nan_stops_before_the_step() -> None:
    training = Training(NaNGuard("stop"))
    training.batches[1] = (training.batches[1][0] * math.nan, training.batches[1][1])
    result = training.run(2)

    assert (result.status, result.stopped_by, result.progress.steps) == ("stopped", "nan_guard", 1)
    assert bool(torch.isfinite(training.model.weight).all())


@pytest.mark.parametrize(
    ("plugin", "options", "words"),
    [
        (lambda folder: GradientAccumulation(2), {}, "requests hold_step, which Ignite"),
        (
            lambda folder: Checkpoint(folder, every=Every(epochs=1)),
            {"save": print},
            "writes checkpoints, which Ignite",
        ),
        (lambda folder: RNGCapture(), {}, "controls the random generators"),
        (lambda folder: BatchTransform(lambda batch: batch), {}, "replaces run.batch"),
        (
            lambda folder: NaNGuard("skip"),
            {"loss": None},
            "optimizer and the loss",
        ),
        (lambda folder: NaNGuard("raise"), {"loss": None}, "handles GradientsReady, which Ignite"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(
    plugin: Callable[[Path], Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    training = Training(plugin(tmp_path), **options)
    with pytest.raises(ValueError, match=words):
        training.run()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": 3}, TypeError, r"attach\(model=\) .* got int"),
        ({"evaluator": 3}, TypeError, r"attach\(evaluator=\) .* got int"),
        ({"optimizer": "adam"}, TypeError, "torch optimizer, got str"),
        ({"loss": 3}, TypeError, "the output, got int"),
        ({"evaluator": None}, ValueError, r"evaluator, \[\]; got \[''\]"),
        ({"validation": None}, ValueError, "evaluator= and validation="),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Training(ValidationSchedule(Every(epochs=1)), **options)


def test_without_optimizer_and_loss_iterations_are_steps() -> None:
    training = Training(LogSchedule(Every(steps=1)), optimizer=None, loss=None)
    losses: list[float] = []
    training.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    result = training.run()

    assert result.progress.steps == 2
    assert result.metrics["train/loss"] == pytest.approx(losses[-1])


class Plans(Plugin):
    """Keeps the length of a run, as the run and its plan say it."""

    @on(TrainStart)
    def look(self, run: Run, event: TrainStart) -> None:
        self.seen = run.length.planned_steps, run.report.plan().splitlines()[2].strip()


@pytest.mark.parametrize(
    ("shows_optimizer", "length", "seen"),
    [
        (False, {"max_epochs": 2}, (6, ("length: 2 epochs", "6 steps"))),
        (False, {"max_iters": 4}, (4, ("length: 4 steps",))),
        (True, {"max_epochs": 1}, (None, ("length: 1 epoch",))),
        (True, {"max_iters": 4}, (None, ("length: unknown",))),
    ],
)
def test_the_length_is_as_far_known_as_ignite_says_it(
    shows_optimizer: bool, length: dict[str, int], seen: tuple[int | None, tuple[str, ...]]
) -> None:
    plans, options = Plans(), dict[str, Any]() if shows_optimizer else {"optimizer": None}
    training = Training(plans, batches=3, **options)
    training.engine.run(training.batches, **length)
    steps, text = plans.seen
    assert steps == seen[0]
    assert_facts(text, *seen[1])


def test_a_fraction_of_the_run_needs_its_steps() -> None:
    class Steps(Plugin):
        @on(StepEnd, when=At(fraction=0.5))
        def look(self, run: Run, event: StepEnd) -> None:
            self.seen = run.progress.steps

    steps = Steps()
    Training(steps, optimizer=None).run(2)
    assert steps.seen == 2
    with pytest.raises(
        ValueError,
        match=r"steps: omit attach\(optimizer=\), .*steps=100",
    ):
        Training(Steps()).run(2)
    with pytest.raises(ValueError, match=r"engine\.run\(epoch_length=\)"):
        Training(Steps(), optimizer=None).engine.run(iter(class_batches(2)))


def test_an_output_without_a_loss_is_an_error_that_says_what_to_give() -> None:
    engine = Engine(lambda engine, batch: (1, 2))
    attach(engine, [Trace()], model=nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"tuple, .*: pass attach\(loss=\)"):
        engine.run([1], max_epochs=1)


@pytest.mark.parametrize("handled", [False, True])
def test_an_error_closes_the_run_and_is_raised_unless_another_handler_takes_it(handled: bool) -> None:
    trace, taken = Trace(), list[BaseException]()
    training = Training(trace)
    training.batches[1] = (torch.zeros(1, 7), training.batches[1][1])
    if handled:
        training.engine.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: taken.append(error))
        training.run()
        assert len(taken) == 1
    else:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            training.run()
    assert trace.names[-2:] == ["run_failed", "run_closed"]
    assert training.attached.result is not None
    assert training.attached.result.status == "failed"


def test_a_recording_can_be_replayed(tmp_path: Path) -> None:
    training = Training(
        Recorder(tmp_path), EarlyStopping(patience=1), ValidationSchedule(Every(epochs=1)), LogSchedule(Every(steps=1))
    )
    result = training.run(3)
    replayed = replay(tmp_path, [EarlyStopping(patience=1)])

    assert result.recording is not None
    assert (replayed.unheld, replayed.failed) == ({}, {})
    assert "early_stopping" in result.explain()


def resumable(
    folder: Path, *plugins: Any, kill: int | None = None, epochs: int = 5
) -> tuple[Training, RunResult | None]:
    """Train, saving at each epoch, from the newest checkpoint there is."""
    values = [1.0, 0.5, 0.6, 0.7, 0.8, 0.9]

    def script(engine: Engine, evaluator: Engine) -> None:
        evaluator.add_event_handler(
            Events.COMPLETED, lambda each: each.state.metrics.update(loss=values[engine.state.epoch - 1])
        )

    training = Training(*plugins, before=script)
    parts = {
        "engine": training.engine,
        "model": training.model,
        "optimizer": training.optimizer,
        "plugins": training.attached,
    }
    if found := sorted(folder.glob("*.pt"), key=lambda path: path.stat().st_mtime_ns):
        IgniteCheckpoint.load_objects(parts, torch.load(found[-1], weights_only=True))
    saver = DiskSaver(str(folder), create_dir=True, require_empty=False)
    training.engine.add_event_handler(Events.EPOCH_COMPLETED, IgniteCheckpoint(parts, saver, n_saved=None))

    def fail(engine: Engine) -> None:
        if engine.state.epoch == kill:
            raise KeyboardInterrupt

    training.engine.add_event_handler(Events.EPOCH_STARTED, fail)
    try:
        return training, training.run(epochs)
    except KeyboardInterrupt:
        return training, None


def test_the_states_of_plugins_continue_with_the_checkpoints_of_ignite(tmp_path: Path) -> None:
    def plugins() -> list[Any]:
        return [EarlyStopping(patience=2), ValidationSchedule(Every(epochs=1))]

    whole, result = resumable(tmp_path / "whole", *plugins())
    assert resumable(tmp_path / "killed", *plugins(), kill=4)[1] is None
    resumed, again = resumable(tmp_path / "killed", *plugins())

    assert result is not None
    assert again is not None
    assert (again.status, again.stopped_by) == (result.status, result.stopped_by) == ("stopped", "early_stopping")
    assert again.progress.steps == result.progress.steps == 8
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_a_plugin_asks_for_a_save(tmp_path: Path) -> None:
    trace = Trace()
    saver = DiskSaver(str(tmp_path), create_dir=True, require_empty=False)
    objects: dict[str, Any] = {}
    handler = IgniteCheckpoint({"model": nn.Linear(1, 1)}, saver, n_saved=None)
    training = Training(trace, SaveSchedule(At(steps=2)), save=handler, evaluator=None, validation=None)
    handler.to_save = {"model": training.model, "plugins": training.attached, **objects}
    result = training.run(2)

    assert trace.names.count("checkpoint_saved") == 2
    assert result.last_checkpoint == Path(str(handler.last_checkpoint))
    assert result.last_checkpoint.is_file()
    saved = torch.load(result.last_checkpoint, weights_only=True)
    assert saved["plugins"]["progress"]["steps"] == 4
    assert result.warnings == ()


def test_a_run_that_ended_and_gets_longer_continues() -> None:
    training = Training(EarlyStopping(patience=9), ValidationSchedule(Every(epochs=1)))
    first, second = training.run(1), training.run(2)

    assert (first.progress.steps, second.progress.steps, second.progress.epoch) == (2, 4, 2)
    assert training.attached.plugins.names() == ["early_stopping", "validation_schedule"]
    assert_facts(second.notes[0], "Ignite resumed", "epoch 1, batch 0", "step 2", "checkpoint")


@pytest.mark.parametrize("steps", [3, 4])
def test_a_checkpoint_within_an_epoch_or_at_its_last_batch_loses_no_epoch(steps: int, tmp_path: Path) -> None:
    """An epoch has four iterations; the checkpoint of the last is written before the epoch ends."""

    def train(resume: bool) -> tuple[Trace, RunResult]:
        trace = Trace()
        training = Training(trace, batches=4)
        parts = {"engine": training.engine, "plugins": training.attached}
        if resume:
            (path,) = tmp_path.glob("*.pt")
            IgniteCheckpoint.load_objects(parts, torch.load(path, weights_only=True))
        else:
            saver = IgniteCheckpoint(parts, DiskSaver(str(tmp_path)), global_step_transform=lambda *_: steps)
            training.engine.add_event_handler(Events.ITERATION_COMPLETED(once=steps), saver)
        return trace, training.run(3)

    whole, result = train(resume=False)
    trace, resumed = train(resume=True)

    at = [i for i, name in enumerate(whole.names) if name == "batch_end"][steps - 1] + 1
    rest = trace.names[2:]  # train_start, checkpoint_loaded
    assert rest == ["epoch_start", *whole.names[at:]]  # resumed=True
    assert (resumed.progress.epoch, resumed.progress.steps) == (result.progress.epoch, result.progress.steps) == (3, 12)


def test_a_checkpoint_at_the_end_holds_the_states_of_the_end() -> None:
    training = Training(EarlyStopping(patience=9), ValidationSchedule(Every(epochs=1)))
    saved: list[dict[str, Any]] = []
    training.engine.add_event_handler(Events.COMPLETED, lambda _: saved.append(training.attached.state_dict()))
    training.run(2)

    assert saved[0]["progress"]["steps"] == 4
    assert saved[0]["plugins"]["early_stopping"]
    assert saved[0]["in_boundary"] is False


def test_what_a_validation_asks_for_is_served_at_its_boundary(tmp_path: Path) -> None:
    class Save(Plugin):
        asks = ("save",)

        @on(ValidationEnd)
        def ask(self, run: Run, event: ValidationEnd) -> None:
            run.control.request_save("it was measured")

    steps: list[int] = []
    training = Training(
        Save(),
        ValidationSchedule(Every(steps=3), at_end=False),
        batches=4,
        save=lambda engine: steps.append(engine.state.iteration),
    )
    training.run(1)

    assert steps == [3]


def test_a_validation_that_fails_is_left_where_the_error_is_taken() -> None:
    def validate(engine: Engine, evaluator: Engine) -> None:
        def run(_: Engine) -> None:
            with contextlib.suppress(RuntimeError):
                evaluator.run([(torch.zeros(1, 7), torch.zeros(1))])

        engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), run)

    phases: list[tuple[str, str]] = []

    class Look(Plugin):
        @on(StepEnd, EpochEnd, ValidationCut)
        def look(self, run: Run, event: StepEnd | EpochEnd | ValidationCut) -> None:
            phases.append((event.name, run.phase))

    Training(Look(), before=validate, validation=None).run(1)

    assert phases == [
        ("step_end", "train"),
        ("validation_cut", "validation"),
        ("step_end", "train"),
        ("epoch_end", "train"),
    ]


@pytest.mark.parametrize("failing", ["first", "second"])
def test_a_validation_that_is_asked_for_and_fails_is_cut_where_the_error_is_taken(failing: str) -> None:
    seen: list[tuple[str, int]] = []
    bad = [(torch.zeros(1, 7), torch.zeros(1))]

    class Look(Plugin):
        @on(ValidationEnd, ValidationCut)
        def look(self, run: Run, event: ValidationEnd | ValidationCut) -> None:
            seen.append((event.name, run.progress.steps))

    training = Training(evaluator=None, validation=None)
    evaluators = {
        name: create_supervised_evaluator(training.model, {"loss": Loss(training.loss)}) for name in ("first", "second")
    }
    for each in evaluators.values():
        each.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: None)
    sets = {name: bad if name == failing else class_batches(1) for name in evaluators}
    schedule = ValidationSchedule(At(steps=1), at_end=False)
    result = Training(Look(), schedule, evaluator=evaluators, validation=sets).run()

    assert seen == [("validation_cut", 1)]
    assert (result.status, result.progress.validations, result.progress.steps) == ("completed", 0, 2)


def test_a_second_attach_to_an_engine_is_refused() -> None:
    training = Training()
    with pytest.raises(ValueError, match=r"already has attached plugins"):
        attach(training.engine, [Trace()], model=training.model)


def test_a_run_that_another_handler_ends_is_stopped() -> None:
    training = Training(Trace())
    training.engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda engine: engine.terminate())
    result = training.run(9)

    assert (result.status, result.stopped_by, result.reason) == ("stopped", "Ignite", "terminate() was called")
    assert Training(Trace()).run(1).status == "completed"


def test_a_loss_module_that_is_called_twice_is_refused() -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iterate(engine: Engine, batch: Any) -> float:
        value = loss(model(batch[0]), batch[1]) + loss(model(-batch[0]), batch[1])
        return float(value.item())

    engine = Engine(iterate)
    attach(engine, [Trace()], model=model, optimizer=optimizer, loss=loss)
    with pytest.raises(RuntimeError, match="twice in an iteration"):
        engine.run(class_batches(1), max_epochs=1)


def test_a_missing_ignite_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ignite", None)
    with pytest.raises(ImportError, match=r"needs ignite.*pip install 'heliograph\[ignite\]'"):
        attach(object(), [], model=nn.Linear(1, 1))


def test_an_optimizer_that_the_engine_never_steps_is_warned_of() -> None:
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    result = Training(Trace(), optimizer=other).run()

    assert result.progress.steps == 0
    assert any("optimizer= of attach never" in each for each in result.warnings)


def test_a_bridged_callback_is_refused_in_the_loop_of_others() -> None:
    from heliograph_bridges.ignite import from_ignite
    from ignite.handlers import TerminateOnNan

    training = Training(from_ignite(TerminateOnNan(), Events.ITERATION_COMPLETED))
    with pytest.raises(ValueError, match="callback of another framework"):
        training.run()


def test_a_handler_object_without_its_event_is_refused() -> None:
    from heliograph_bridges.ignite import from_ignite
    from ignite.handlers import TerminateOnNan

    with pytest.raises(TypeError, match="from_ignite takes a handler"):
        from_ignite(TerminateOnNan())


def test_a_handler_among_the_plugins_names_the_bridge() -> None:
    from heliograph import Trainer
    from ignite.handlers import TerminateOnNan

    with pytest.raises(TypeError, match="another framework: register from_ignite"):
        Trainer([TerminateOnNan()], device="cpu")


def test_a_save_whose_file_is_unknown_announces_none() -> None:
    trace, saved = Trace(), list[int]()
    schedule = SaveSchedule(At(steps=1), at_end=False)
    result = Training(trace, schedule, save=lambda engine: saved.append(engine.state.iteration)).run()

    assert (saved, result.last_checkpoint) == ([1], None)
    assert "save_point" in trace.names
    assert "checkpoint_saved" not in trace.names
