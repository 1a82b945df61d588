"""Literal traces of what the loop emits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MemberDescriptorType
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    Checkpoint,
    EpochEnd,
    EpochStart,
    Event,
    GradientAccumulation,
    GradientsReady,
    Lane,
    Log,
    Plugin,
    Run,
    RunResult,
    SavePoint,
    ShouldStop,
    StepEnd,
    Supervised,
    TrainEnd,
    Trainer,
    TrainStart,
    ValidationEnd,
    on,
)
from heliograph.core.context import RunContext
from heliograph.tests.kit import Batch, EventRecorder, class_batches, fit, linear_classifier
from heliograph.tests.messages import assert_each
from torch import Tensor, nn

EVENTS: list[Any] = [TrainStart, EpochStart, BatchStart, GradientsReady, StepEnd, BatchEnd, Log, ValidationEnd]
EVENTS += [SavePoint, ShouldStop, EpochEnd, TrainEnd]
# ShouldStop is emitted at every boundary and would drown the rest.
QUIET = {"should_stop"}


class Ask(Plugin):
    """Calls a function once, at the n-th emission of an event."""

    asks = ("validation", "save", "log", "stop")

    def __init__(self, event: type[Event], action: Callable[[Run], None], *, at: int = 1) -> None:
        self._event, self._action, self._at, self._received = event, action, at, 0

    @on(*EVENTS)
    def count(self, run: Run, event: Event) -> None:
        if isinstance(event, self._event):
            self._received += 1
            if self._received == self._at:
                self._action(run)


def trace(*plugins: Any, quiet: set[str] = QUIET, **options: Any) -> tuple[list[str], RunResult]:
    trainer = Trainer(plugins, device="cpu")
    recorder = EventRecorder(trainer.bus)
    result = fit(trainer, **options)
    return [name for name in recorder.trace if name not in quiet], result


END = ["last_boundary", "train_end", "run_closed"]
PASSES = ["forward_end", "backward_end"]
BATCH = ["batch_start", *PASSES, "gradients_ready", "step_end", "batch_end"]
HELD = ["batch_start", *PASSES, "batch_end"]
SKIPPED = ["batch_start", "batch_end"]
VALIDATION = ["validation_start", "validation_batch_start", "validation_batch_end", "validation_end"]


def test_two_epochs() -> None:
    names, result = trace(epochs=2, quiet=set())
    assert names == [
        "train_start",
        "epoch_start",
        "batch_start",
        "forward_end",
        "backward_end",
        "gradients_ready",
        "step_end",
        "batch_end",
        "should_stop",
        "batch_start",
        "forward_end",
        "backward_end",
        "gradients_ready",
        "step_end",
        "batch_end",
        "should_stop",
        "epoch_end",
        "should_stop",
        "epoch_start",
        "batch_start",
        "forward_end",
        "backward_end",
        "gradients_ready",
        "step_end",
        "batch_end",
        "should_stop",
        "batch_start",
        "forward_end",
        "backward_end",
        "gradients_ready",
        "step_end",
        "batch_end",
        "should_stop",
        "epoch_end",
        "should_stop",
        *END,
    ]
    assert (result.status, result.reason, result.stopped_by) == ("completed", "2 epochs done", None)
    assert (result.progress.epoch, result.progress.steps, result.progress.batches) == (2, 4, 4)
    assert result.progress.samples == 12


def test_log_validation_save_and_stop_at_one_boundary_come_in_this_order() -> None:
    def everything(run: Run) -> None:
        run.control.stop("enough")
        run.control.request_save("now")
        run.control.request_validation("now")
        run.control.request_log("now")

    names, result = trace(Ask(StepEnd, everything), validation=class_batches(1), quiet=set())
    assert names == [
        "train_start",
        "epoch_start",
        *BATCH,
        "log",
        *VALIDATION,
        "save_point",
        "should_stop",
        *END,
    ]
    assert (result.status, result.reason, result.stopped_by) == ("stopped", "enough", "ask")


@pytest.mark.parametrize("event", [TrainStart, EpochStart, BatchStart, GradientsReady, StepEnd, BatchEnd])
def test_a_request_from_any_event_is_served_once_at_the_next_boundary(event: type[Event]) -> None:
    names, _ = trace(Ask(event, lambda run: run.control.request_log("asked")))
    assert names.count("log") == 1
    expected = {TrainStart: "train_start", EpochStart: "epoch_start"}.get(event, "batch_end")
    assert names[names.index("log") - 1] == expected


def test_a_request_from_validation_end_is_served_at_the_same_boundary_where_it_is_later_in_the_order() -> None:
    def save(run: Run) -> None:
        run.control.request_save("a new best")

    plugins = [Ask(StepEnd, lambda run: run.control.request_validation("due")), Ask(ValidationEnd, save).named("saver")]
    names, _ = trace(*plugins, validation=class_batches(1))
    assert names[names.index("validation_end") + 1] == "save_point"


def test_a_request_that_comes_too_late_for_its_boundary_is_served_at_the_next() -> None:
    def log(run: Run) -> None:
        run.control.request_log("after the fact")

    plugins = [Ask(StepEnd, lambda run: run.control.request_save("due")), Ask(SavePoint, log).named("late")]
    names, _ = trace(*plugins)
    assert names == [
        "train_start",
        "epoch_start",
        *BATCH,
        "save_point",
        *BATCH,
        "log",
        "epoch_end",
        *END,
    ]


def test_what_train_end_asks_for_is_served_before_the_run_closes() -> None:
    names, _ = trace(Ask(TrainEnd, lambda run: run.control.request_save("at the end")))
    assert names[-3:] == ["train_end", "save_point", "run_closed"]


def test_what_epoch_end_asks_for_is_served_after_it() -> None:
    names, _ = trace(Ask(EpochEnd, lambda run: run.control.request_validation("epoch")), validation=class_batches(1))
    assert names == ["train_start", "epoch_start", *BATCH, *BATCH, "epoch_end", *VALIDATION, *END]


def test_stop_at_train_start_trains_nothing() -> None:
    names, result = trace(Ask(TrainStart, lambda run: run.control.stop("never mind")))
    assert names == ["train_start", *END]
    assert (result.status, result.progress.batches) == ("stopped", 0)


def test_stop_at_epoch_start_trains_nothing_more_and_ends_no_epoch() -> None:
    names, result = trace(Ask(EpochStart, lambda run: run.control.stop("no more"), at=2), epochs=3)
    assert names == [
        "train_start",
        "epoch_start",
        *BATCH,
        *BATCH,
        "epoch_end",
        "epoch_start",
        *END,
    ]
    assert (result.progress.epoch, result.progress.batch) == (1, 0)


def test_stop_in_mid_epoch_leaves_the_epoch_open() -> None:
    names, result = trace(Ask(BatchEnd, lambda run: run.control.stop("enough")), epochs=3)
    assert names == ["train_start", "epoch_start", *BATCH, *END]
    assert (result.progress.epoch, result.progress.batch) == (0, 1)


def test_stop_on_the_last_batch_ends_the_epoch_too() -> None:
    names, result = trace(Ask(BatchEnd, lambda run: run.control.stop("enough"), at=2), epochs=3)
    assert names == ["train_start", "epoch_start", *BATCH, *BATCH, "epoch_end", *END]
    assert (result.progress.epoch, result.progress.batch, result.status) == (1, 0, "stopped")


def test_stop_at_epoch_end() -> None:
    names, result = trace(Ask(EpochEnd, lambda run: run.control.stop("enough")), epochs=3)
    assert names == ["train_start", "epoch_start", *BATCH, *BATCH, "epoch_end", *END]
    assert result.status == "stopped"


def test_end_epoch_continues_with_the_next() -> None:
    names, result = trace(Ask(BatchEnd, lambda run: run.control.end_epoch("boring")), epochs=2)
    assert names == [
        "train_start",
        "epoch_start",
        *BATCH,
        "epoch_end",
        "epoch_start",
        *BATCH,
        *BATCH,
        "epoch_end",
        *END,
    ]
    assert (result.status, result.progress.epoch, result.progress.batches) == ("completed", 2, 3)


def test_end_epoch_at_epoch_start_is_an_empty_epoch() -> None:
    names, result = trace(Ask(EpochStart, lambda run: run.control.end_epoch("skip it")), epochs=2)
    assert names == [
        "train_start",
        "epoch_start",
        "epoch_end",
        "epoch_start",
        *BATCH,
        *BATCH,
        "epoch_end",
        *END,
    ]
    assert result.progress.epoch == 2


class AlwaysEnd(Plugin):
    """Asks for the end of the epoch at every emission of an event."""

    asks = ("validation",)

    def __init__(self, event: type[Event]) -> None:
        self._event = event

    @on(*EVENTS)
    def ask(self, run: Run, event: Event) -> None:
        if isinstance(event, EpochEnd):
            run.control.request_validation("at the end of every epoch")
        if isinstance(event, self._event) and not run.progress.batch:
            run.control.end_epoch("this one")


@pytest.mark.parametrize("event", [TrainStart, EpochEnd, ValidationEnd, ShouldStop, TrainEnd])
@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_an_end_of_the_epoch_that_is_asked_for_between_two_epochs_ends_none(event: type[Event], unit: str) -> None:
    length: dict[str, Any] = {unit: {"epochs": 3, "steps": 6}[unit]}
    names, result = trace(AlwaysEnd(event), validation=class_batches(1), **length)
    assert names.count("epoch_start") == names.count("epoch_end") == 3
    assert (result.status, result.progress.epoch, result.progress.steps) == ("completed", 3, 6)


@pytest.mark.parametrize("save_at", ["in the handler", "at the boundary"])
def test_a_run_resumed_between_two_epochs_does_not_end_the_next_one(save_at: str) -> None:
    states: list[dict[str, Any]] = []

    def save(run: Run, event: EpochEnd | SavePoint) -> None:
        states.append(run.state_dict())

    first = Trainer([AlwaysEnd(EpochEnd)], device="cpu")
    first.bus.on(EpochEnd if save_at == "in the handler" else SavePoint, save, lane=Lane.PERSIST)
    first.bus.on(EpochEnd, lambda run, event: run.control.request_save("the state"))
    task = linear_classifier()
    fit(first, task=task, epochs=2, validation=class_batches(1))

    second = Trainer([AlwaysEnd(EpochEnd)], device="cpu")
    second.bus.on(TrainStart, lambda run, event: run.resume(states[0]))
    names = EventRecorder(second.bus).trace
    result = fit(second, epochs=2, validation=class_batches(1))
    assert (result.progress.epoch, result.progress.steps) == (2, 4)
    assert names.count("batch_start") == 2


def test_skip_batch() -> None:
    names, result = trace(Ask(BatchStart, lambda run: run.control.skip_batch("bad data")))
    assert names == ["train_start", "epoch_start", *SKIPPED, *BATCH, "epoch_end", *END]
    progress = result.progress
    assert (progress.skipped_batches, progress.steps, progress.batches, progress.samples) == (1, 1, 2, 3)


def test_skip_step_drops_the_gradients() -> None:
    task = linear_classifier()
    before = task.model.state_dict()["weight"].clone()
    trainer = Trainer([Ask(GradientsReady, lambda run: run.control.skip_step("too large"))], device="cpu")
    recorder = EventRecorder(trainer.bus)
    result = fit(trainer, task=task, train=class_batches(1))
    names = [name for name in recorder.trace if name not in QUIET]
    assert names[2:7] == ["batch_start", *PASSES, "gradients_ready", "batch_end"]
    assert (result.progress.steps, result.progress.skipped_steps) == (0, 1)
    assert torch.equal(task.model.state_dict()["weight"], before)


def test_hold_step_accumulates_but_never_across_the_epoch() -> None:
    class HoldAlways(Plugin):
        @on(BatchStart)
        def hold(self, run: Run, event: BatchStart) -> None:
            run.control.hold_step("always")

    names, result = trace(HoldAlways(), train=class_batches(3))
    assert names == ["train_start", "epoch_start", *HELD, *HELD, *BATCH, "epoch_end", *END]
    assert result.progress.steps == 1


def test_accumulation_with_a_tail() -> None:
    names, result = trace(GradientAccumulation(2), train=class_batches(5), quiet=set())
    assert names == [
        "train_start",
        "epoch_start",
        *HELD,
        *BATCH,
        "should_stop",
        *HELD,
        *BATCH,
        "should_stop",
        *BATCH,
        "should_stop",
        "epoch_end",
        "should_stop",
        *END,
    ]
    assert (result.progress.steps, result.progress.batches) == (3, 5)


@pytest.mark.parametrize("sized", [True, False])
def test_a_skipped_last_batch_still_steps_the_window(sized: bool) -> None:
    class SkipLast(Plugin):
        @on(BatchStart, lane=Lane.TRANSFORM)
        def skip(self, run: Run, event: BatchStart) -> None:
            if run.data.is_last_batch:
                run.control.skip_batch("the last")

    train: Any = class_batches(5) if sized else Unsized(class_batches(5))
    names, result = trace(SkipLast(), GradientAccumulation(4), train=train)
    assert names == [
        "train_start",
        "epoch_start",
        *HELD,
        *HELD,
        *HELD,
        *BATCH,
        *SKIPPED,
        "epoch_end",
        *END,
    ]
    names, result = trace(SkipLast(), GradientAccumulation(3), train=train)
    stepped_when_skipped = ["batch_start", "gradients_ready", "step_end", "batch_end"]
    assert names == [
        "train_start",
        "epoch_start",
        *HELD,
        *HELD,
        *BATCH,
        *HELD,
        *stepped_when_skipped,
        "epoch_end",
        *END,
    ]
    assert (result.progress.steps, result.progress.skipped_batches) == (2, 1)


def test_a_window_that_everybody_has_left_is_still_closed() -> None:
    trainer = Trainer([GradientAccumulation(3)], device="cpu")

    class Leave(Plugin):
        @on(BatchEnd)
        def leave(self, run: Run, event: BatchEnd) -> None:
            trainer.plugins.unregister("gradient_accumulation")
            trainer.plugins.unregister(self)

    trainer.plugins.register(Leave())
    result = fit(trainer, train=class_batches(5))
    assert (result.progress.steps, result.progress.batches, trainer.bus.receiver_count) == (4, 5, 0)


def test_a_request_inside_a_window_waits_for_its_end() -> None:
    names, _ = trace(
        GradientAccumulation(3), Ask(BatchEnd, lambda run: run.control.request_save("now")), train=class_batches(3)
    )
    assert names == [
        "train_start",
        "epoch_start",
        *HELD,
        *HELD,
        *BATCH,
        "save_point",
        "epoch_end",
        *END,
    ]


def test_scale_loss_scales_the_gradient_and_not_the_reported_loss() -> None:
    seen: list[tuple[float, Tensor]] = []

    class Look(Plugin):
        @on(BatchStart)
        def scale(self, run: Run, event: BatchStart) -> None:
            run.control.scale_loss(0.5, "half")
            run.control.scale_loss(0.5, "of half")

        @on(GradientsReady)
        def look(self, run: Run, event: GradientsReady) -> None:
            seen.append((run.loss.item(), run.task.model.weight.grad.clone()))

    trace(Look(), train=class_batches(1))
    task = linear_classifier()
    inputs, targets = class_batches(1)[0]
    loss = nn.functional.cross_entropy(task.model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert seen[0][0] == loss.item()
    weight = task.model.weight
    assert isinstance(weight, Tensor)
    assert weight.grad is not None
    assert torch.equal(seen[0][1], weight.grad * 0.25)


def test_veto_puts_a_stop_off_and_does_not_forget_it() -> None:
    class AtLeast(Plugin):
        @on(ShouldStop)
        def insist(self, run: Run, event: ShouldStop) -> None:
            if run.control.should_stop and run.progress.steps < 3:
                run.control.veto_stop("at least 3 steps")

    names, result = trace(AtLeast(), Ask(StepEnd, lambda run: run.control.stop("tired")), train=class_batches(5))
    assert names == ["train_start", "epoch_start", *BATCH, *BATCH, *BATCH, *END]
    assert (result.status, result.reason, result.progress.steps) == ("stopped", "tired", 3)
    assert [(each.verb, each.by, each.times) for each in result.history] == [
        ("stop", "ask", 1),
        ("veto_stop", "at_least", 2),
    ]


def test_a_steps_limit_ends_the_run_during_an_epoch() -> None:
    names, result = trace(train=class_batches(2), epochs=None, steps=3)
    assert names == [
        "train_start",
        "epoch_start",
        *BATCH,
        *BATCH,
        "epoch_end",
        "epoch_start",
        *BATCH,
        *END,
    ]
    assert (result.status, result.reason) == ("completed", "3 steps done")


def test_a_steps_limit_at_the_end_of_an_epoch_ends_the_epoch() -> None:
    names, result = trace(train=class_batches(2), epochs=None, steps=2)
    assert names == ["train_start", "epoch_start", *BATCH, *BATCH, "epoch_end", *END]
    assert (result.progress.epoch, result.progress.batch) == (1, 0)


class Unsized:
    """An iterable without a length."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches
        self.read = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self.read += 1
            yield batch


class Sized(Unsized):
    """An iterable that says its length, rightly or not."""

    def __init__(self, batches: list[Batch], length: int) -> None:
        super().__init__(batches)
        self._length = length

    def __len__(self) -> int:
        return self._length


def test_an_unsized_loader_runs_like_a_sized_one() -> None:
    assert trace(train=Unsized(class_batches(3)), epochs=2)[0] == trace(train=class_batches(3), epochs=2)[0]


@pytest.mark.parametrize(("sized", "ahead"), [(True, 0), (False, 1)])
def test_looks_one_item_ahead_only_where_the_size_is_unknown(sized: bool, ahead: int) -> None:
    loader = Sized(class_batches(3), 3) if sized else Unsized(class_batches(3))
    read: list[int] = []

    class Watch(Plugin):
        @on(BatchStart)
        def watch(self, run: Run, event: BatchStart) -> None:
            read.append(loader.read)

    trace(Watch(), train=loader)
    assert read == [min(1 + ahead, 3), min(2 + ahead, 3), 3]


@pytest.mark.parametrize("loader", [class_batches(3), Unsized(class_batches(3))])
def test_everybody_can_ask_whether_this_is_the_last_batch(loader: Any) -> None:
    seen: list[bool] = []

    class Watch(Plugin):
        @on(BatchStart, StepEnd, BatchEnd)
        def watch(self, run: Run, event: BatchStart | StepEnd | BatchEnd) -> None:
            seen.append(run.data.is_last_batch)

    trace(Watch(), train=loader)
    assert seen == [False] * 6 + [True] * 3


def test_a_loader_that_ends_before_its_length_steps_the_open_window_and_warns() -> None:
    names, result = trace(GradientAccumulation(2), train=Sized(class_batches(3), 5))
    assert_each(result.warnings, ("train loader", "3 batches", "length says 5"))
    assert names[-7:] == ["batch_end", "gradients_ready", "step_end", "epoch_end", *END]
    assert result.progress.steps == 2


@pytest.mark.parametrize(("says", "steps"), [(1, [2, 2, 1]), (2, [2, 2, 1]), (4, [2, 2, 1])])
def test_windows_stay_whole_beyond_the_length_of_a_loader(says: int, steps: list[int]) -> None:
    names, result = trace(GradientAccumulation(2), train=Sized(class_batches(5), says))
    assert_each(result.warnings, ("train loader", "5 batches", f"length says {says}"))
    assert [part.count("batch_start") for part in " ".join(names).split(" step_end")[:-1]] == steps
    assert result.progress.epoch == 1


def test_a_transform_replaces_the_batch_for_everybody() -> None:
    seen: list[int] = []

    class Halve(Plugin):
        @on(BatchStart, lane=Lane.TRANSFORM)
        def halve(self, run: Run, event: BatchStart) -> None:
            inputs, targets = run.batch
            run.batch = inputs[:1], targets[:1]

        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None:
            seen.append(len(run.batch[0]))

    _, result = trace(Halve())
    assert seen == [1, 1]
    assert result.progress.samples == 2


def test_several_validation_sets_are_one_validation() -> None:
    sets = {"clean": class_batches(2), "noisy": class_batches(1)}
    trainer = Trainer([Ask(EpochEnd, lambda run: run.control.request_validation("due"))], device="cpu")
    recorder = EventRecorder(trainer.bus)
    result = fit(trainer, train=class_batches(1), validation=sets)
    pair = ["validation_batch_start", "validation_batch_end"]
    received = [name for name in recorder.trace if name.startswith("validation")]
    assert received == ["validation_start", *pair, *pair, *pair, "validation_end"]
    datasets = [getattr(event, "dataset", None) for event in recorder.events if event.name == "validation_batch_end"]
    assert datasets == ["clean", "clean", "noisy"]
    assert {name for name in result.metrics if name.startswith("validation")} == {
        "validation/clean/loss",
        "validation/noisy/loss",
    }


def test_validation_runs_in_eval_mode_without_gradients_until_its_end_and_gives_every_module_its_mode_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    seen: list[tuple[str, bool, bool, str]] = []

    class Watch(Plugin):
        asks = ("validation",)

        @on(TrainStart)
        def freeze(self, run: Run, event: TrainStart) -> None:
            model[2].eval()

        @on(EpochEnd)
        def ask(self, run: Run, event: EpochEnd) -> None:
            run.control.request_validation("due")

        @on(ValidationEnd, TrainEnd)
        def look(self, run: Run, event: ValidationEnd | TrainEnd) -> None:
            seen.append((event.name, model.training, torch.is_grad_enabled(), run.phase))

    task = Supervised(model, nn.functional.cross_entropy)
    fit(Watch(), task=task, validation=class_batches(1))
    assert seen == [("validation_end", False, False, "validation"), ("train_end", True, True, "train")]
    assert [module.training for module in model] == [True, True, False, True]


def test_fit_enables_gradients_by_itself() -> None:
    task = linear_classifier()
    before = task.model.state_dict()["weight"].clone()
    with torch.no_grad():
        fit(task=task, train=class_batches(1))
        assert not torch.is_grad_enabled()
    assert not torch.equal(task.model.state_dict()["weight"], before)


def test_nothing_keeps_a_batch_or_its_outputs_past_the_epoch() -> None:
    kept: list[tuple[Any, Any, Any]] = []

    class Watch(Plugin):
        @on(EpochEnd)
        def look(self, run: Run, event: EpochEnd) -> None:
            kept.append((run.batch, run.loss, run.outputs))

    trace(Watch())
    assert kept == [(None, None, None)]


def test_stop_iteration_of_user_code_is_an_error_and_no_end(tmp_path: Any) -> None:
    class Leak(Supervised):
        def training_step(self, run: Run, batch: Any) -> Tensor:
            raise StopIteration("mine")

    class LeakInHandler(Plugin):
        @on(BatchEnd)
        def leak(self, run: Run, event: BatchEnd) -> None:
            raise StopIteration("a handler's")

    with pytest.raises(StopIteration, match="mine"):
        fit(task=Leak(nn.Linear(4, 2), nn.functional.cross_entropy))
    with pytest.raises(StopIteration, match="a handler's"):
        trace(LeakInHandler())


def test_a_checkpoint_at_a_boundary_holds_what_the_validation_did_to_every_plugin(tmp_path: Any) -> None:
    class Count(Plugin):
        def __init__(self) -> None:
            self.seen = 0

        @on(ValidationEnd, lane=Lane.REPORT)
        def count(self, run: Run, event: ValidationEnd) -> None:
            self.seen += 1

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: Any) -> None:
            self.seen = state["seen"]

    def both(run: Run) -> None:
        run.control.request_save("now")
        run.control.request_validation("now")

    _, result = trace(Ask(StepEnd, both), Checkpoint(tmp_path), Count(), validation=class_batches(1))
    assert result.last_checkpoint is not None
    state = torch.load(result.last_checkpoint, weights_only=True)
    assert state["plugins"]["count"] == {"seen": 1}
    assert "validation/loss" in state["metrics"]


def test_what_every_step_reads_of_a_run_has_a_slot() -> None:
    """In its `__dict__` each would take three times as long, as soon as a cached property has made that."""
    slots = {name for name, each in vars(RunContext).items() if isinstance(each, MemberDescriptorType)}
    assert slots == {"bus", "control", "hot", "loss", "origin", "outputs", "progress", "size_of", "stepping", "work"}
