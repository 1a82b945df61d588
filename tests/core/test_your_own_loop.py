"""A hand-written loop gets every plugin, event and control request."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    Checkpoint,
    EarlyStopping,
    EpochEnd,
    Every,
    ForwardEnd,
    GradientAccumulation,
    GradientsReady,
    LogSchedule,
    Plugin,
    Run,
    SaveSchedule,
    StepEnd,
    Supervised,
    Task,
    Trainer,
    TrainRun,
    ValidationEnd,
    ValidationSchedule,
    on,
)
from heliograph.core.engines.options import PrecisionName, modules_of
from heliograph.tests.kit import Batch, EventRecorder, class_batches, linear_classifier, sgd
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCH = ("batch_start", "forward_end", "backward_end", "gradients_ready", "step_end", "batch_end")


class SkipSecond(Plugin):
    @on(BatchStart)
    def skip(self, run: Run, event: BatchStart) -> None:
        if run.progress.batch == 1:
            run.control.skip_batch("the second")


def plugins(folder: Any) -> list[Plugin]:
    return [
        SkipSecond(),
        GradientAccumulation(2),
        LogSchedule(Every(steps=1)),
        ValidationSchedule(Every(epochs=1), at_start=True),
        EarlyStopping(patience=1, min_delta=10.0),
        SaveSchedule(Every(epochs=1), at_end=True),
        Checkpoint(folder),
    ]


def test_it_emits_what_fit_emits_and_trains_the_same_weights(tmp_path: Any) -> None:
    fitted, mine = linear_classifier(), linear_classifier()
    trainer = Trainer(plugins(tmp_path / "fit"), device="cpu")
    recorder = EventRecorder(trainer.bus)
    result = trainer.fit(
        fitted,
        class_batches(5),
        validation=class_batches(2),
        optimizer=torch.optim.SGD(fitted.model.parameters(), 0.1),
        epochs=3,
    )

    own = Trainer(plugins(tmp_path / "own"), device="cpu")
    own_recorder = EventRecorder(own.bus)
    model, optimizer = mine.model, torch.optim.SGD(mine.model.parameters(), 0.1)
    with own.run(mine, class_batches(5), validation=class_batches(2), optimizer=optimizer, epochs=3) as run:
        for _ in run.epochs():
            for inputs, targets in run.batches():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                run.step(loss)

    assert own_recorder.trace == recorder.trace
    assert all(map(torch.equal, model.parameters(), fitted.model.parameters()))
    assert (run.result.status, run.result.reason) == (result.status, result.reason)
    assert run.result.metrics == result.metrics
    assert result.status == "stopped"


def start(train: list[Batch], *plugins: Plugin, epochs: int = 2) -> tuple[Any, Supervised, EventRecorder]:
    task = linear_classifier()
    trainer = Trainer(plugins, device="cpu")
    recorder = EventRecorder(trainer.bus)
    run = trainer.run(task, train, optimizer=torch.optim.SGD(task.model.parameters(), 0.1), epochs=epochs)
    return run, task, recorder


def loss_of(task: Supervised, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(task.model(batch[0]), batch[1])


def test_break_after_a_step_ends_the_epoch() -> None:
    run, task, recorder = start(class_batches(3))
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(loss_of(task, batch))
                break
    assert [name for name in recorder.trace if name != "should_stop"] == [
        "train_start",
        *["epoch_start", *BATCH, "epoch_end"] * 2,
        "last_boundary",
        "train_end",
        "run_closed",
    ]
    assert (run.result.status, run.result.progress.steps) == ("completed", 2)
    assert "caller: end_epoch -" in str(run.result.history)


def test_break_before_a_step_counts_the_batch_as_skipped() -> None:
    run, _, _ = start(class_batches(3), epochs=1)
    with run:
        for _ in run.epochs():
            for _batch in run.batches():
                break
    progress = run.result.progress
    assert (progress.steps, progress.skipped_batches, progress.epoch) == (0, 1, 1)


def test_leaving_the_epochs_is_a_stop() -> None:
    run, task, recorder = start(class_batches(3), epochs=5)
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(loss_of(task, batch))
            break
    assert recorder.trace[-3:] == ["last_boundary", "train_end", "run_closed"]
    assert (run.result.status, run.result.stopped_by) == ("stopped", "the caller")


def test_a_run_that_never_begins_has_no_end_of_training() -> None:
    run, _, recorder = start(class_batches(3))
    with run:
        pass
    assert recorder.trace == ["run_closed"]
    assert (run.result.status, run.result.progress.batches) == ("stopped", 0)


def test_a_batch_without_a_step_is_an_error() -> None:
    run, _, recorder = start(class_batches(3))
    with pytest.raises(RuntimeError, match=r"run.step\(loss\) was not called"), run:
        for _ in run.epochs():
            for _batch in run.batches():
                pass
    assert recorder.trace[-2:] == ["run_failed", "run_closed"]


def test_an_exception_in_the_body_closes_the_run() -> None:
    run, _, recorder = start(class_batches(3))
    with pytest.raises(ZeroDivisionError), run:
        for _ in run.epochs():
            raise ZeroDivisionError
    assert recorder.trace[-2:] == ["run_failed", "run_closed"]


class TooShort(list[Batch]):
    """Says that it has two batches."""

    def __len__(self) -> int:
        return 2


def test_windows_stay_whole_beyond_the_length_that_a_loader_says() -> None:
    held: list[int] = []
    run, task, _ = start(TooShort(class_batches(5)), GradientAccumulation(3), epochs=2)
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(loss_of(task, batch))
                held.append(run.progress.steps)
    assert held == [0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert "5 batches" in run.result.warnings[0]


def test_break_in_an_open_window_still_steps_it() -> None:
    run, task, _ = start(class_batches(4), GradientAccumulation(3), epochs=1)
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(loss_of(task, batch))
                if run.progress.batch == 1:
                    break
    assert run.result.progress.steps == 1


def test_control_from_the_body_names_the_caller() -> None:
    run, task, _ = start(class_batches(4))
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(loss_of(task, batch))
                run.control.stop("seen enough")
    assert (run.result.stopped_by, run.result.progress.batches) == ("the caller", 1)


def test_two_runs_of_one_trainer_cannot_continue_at_once() -> None:
    class Nested(Plugin):
        def __init__(self) -> None:
            self.trainer: Trainer | None = None

        @on(StepEnd)
        def test(self, run: Run, event: StepEnd) -> None:
            assert self.trainer is not None
            self.trainer.test(linear_classifier(), class_batches(1))

    plugin = Nested()
    plugin.trainer = Trainer([plugin], device="cpu")
    task = linear_classifier()
    with pytest.raises(RuntimeError, match="use another Trainer"):
        plugin.trainer.fit(task, class_batches(1), optimizer=torch.optim.SGD(task.model.parameters(), 0.1), epochs=1)
    assert plugin.trainer.test(task, class_batches(1)).status == "completed"


def test_a_loop_that_would_never_train_is_reported() -> None:
    run, task, _ = start(class_batches(2))
    with pytest.raises(RuntimeError, match=r"over run\.batches\(\) within run\.epochs\(\)"), run:
        for _ in run.epochs():
            pass
    run, task, _ = start(class_batches(2))
    with pytest.raises(RuntimeError, match=r"run\.step\(loss\)"), run:
        for _ in run.epochs():
            for batch in class_batches(2):
                run.step(loss_of(task, batch))
    run, task, _ = start(class_batches(2))
    with pytest.raises(RuntimeError, match="Enter the run first"):
        next(run.epochs())
    run, task, _ = start(class_batches(1), epochs=1)
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(loss_of(task, batch))
    with pytest.raises(RuntimeError, match="can be used once"), run:
        pass


def test_epoch_end_is_received_with_the_epoch_that_ended() -> None:
    received: list[tuple[int, int]] = []

    class Watch(Plugin):
        @on(EpochEnd)
        def look(self, run: Run, event: EpochEnd) -> None:
            received.append((event.epoch, run.progress.epoch))

    run, task, _ = start(class_batches(1), Watch())
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(loss_of(task, batch))
    assert received == [(0, 1), (1, 2)]


def fit(train: list[Batch], *plugins: Plugin, epochs: int = 2) -> Supervised:
    task = linear_classifier()
    optimizer = torch.optim.SGD(task.model.parameters(), 0.1)
    Trainer(plugins, device="cpu").fit(task, train, optimizer=optimizer, epochs=epochs)
    return task


def test_a_loop_may_step_with_gradients_of_its_own() -> None:
    run, task, recorder = start(class_batches(3))
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                torch.autograd.backward(loss_of(task, batch))
                run.step_with_gradients("optimizer")
    assert recorder.trace.count("step_end") == run.result.progress.steps == 6
    assert torch.equal(*(next(each.model.parameters()) for each in (task, fit(class_batches(3)))))


def test_a_batch_may_be_left_without_a_step() -> None:
    run, task, _ = start(class_batches(4))
    with run:
        for _ in run.epochs():
            for index, batch in enumerate(run.batches(must_step=False)):
                torch.autograd.backward(loss_of(task, batch) / 2)
                if index % 2:
                    run.step_with_gradients("optimizer")
    assert (run.result.progress.batches, run.result.progress.steps) == (8, 4)
    accumulated = fit(class_batches(4), GradientAccumulation(2))
    torch.testing.assert_close(*(next(each.model.parameters()) for each in (task, accumulated)))


class Halve(Plugin):
    @on(BatchStart)
    def halve(self, run: Run, event: BatchStart) -> None:
        run.control.scale_loss(0.5, "half")


@pytest.mark.parametrize("plugin", [GradientAccumulation(2), Halve()])
def test_gradients_of_its_own_cannot_be_held_or_scaled(plugin: Plugin) -> None:
    run, task, _ = start(class_batches(4), plugin)
    message = r"holds the step.*run\.step\(loss\)"
    with pytest.raises(RuntimeError, match=message), run:
        for _ in run.epochs():
            for batch in run.batches():
                torch.autograd.backward(loss_of(task, batch))
                run.step_with_gradients("optimizer")


def test_nor_can_those_of_a_precision_that_scales() -> None:
    task = linear_classifier()
    trainer = Trainer(device="cpu", precision="fp16")
    run = trainer.run(task, class_batches(2), optimizer=torch.optim.SGD(task.model.parameters(), 0.1), epochs=1)
    with pytest.raises(RuntimeError, match=r"^precision='fp16' scales the loss,"), run:
        for _ in run.epochs():
            for batch in run.batches():
                torch.autograd.backward(loss_of(task, batch))
                run.step_with_gradients("optimizer")


def test_an_optimizer_that_does_not_exist_is_not_stepped() -> None:
    run, _, _ = start(class_batches(2))
    message = r"optimizer 'optimiser'.*mean 'optimizer'"
    with pytest.raises(ValueError, match=message), run:
        for _ in run.epochs():
            for _ in run.batches():
                run.step_with_gradients("optimiser")


class ExitWithSeven(Plugin):
    @on(EpochEnd)
    def exit(self, run: Run, event: EpochEnd) -> None:
        run.hooks.exit_with(7)


def test_the_result_or_what_a_plugin_left_to_be_raised() -> None:
    run, task, _ = start(class_batches(2), ExitWithSeven())
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(loss_of(task, batch))
    assert run.result_or_raise(exits=False) is run.result
    with pytest.raises(SystemExit) as info:
        run.result_or_raise()
    assert info.value.code == 7


def own_gradients(names: tuple[str, ...], clips: bool) -> list[Tensor]:
    """Train with own backward passes on these ranks, which share each batch; return the weights."""
    task = linear_classifier()
    optimizers = {
        name: torch.optim.SGD([each], 0.5) for name, each in zip(names, task.model.parameters(), strict=False)
    }
    inputs, targets = class_batches(1, size=16)[0]
    trainer = Trainer(use_cpu=True)
    run = trainer.run(
        task,
        TensorDataset(inputs, targets),
        optimizer=optimizers or torch.optim.SGD(task.model.parameters(), 0.5),
        epochs=2,
        loader_params={"global_batch_size": 8},
    )
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                torch.autograd.backward(loss_of(task, batch))
                if clips:
                    run.average_gradients()
                    nn.utils.clip_grad_norm_(task.model.parameters(), 0.1)
                for name in run.optimizers:
                    run.step_with_gradients(name)
    return [each.detach().clone() for each in task.model.parameters()]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("names", [(), ("weight", "bias")])
def test_gradients_of_its_own_are_averaged_over_the_ranks(ranks: Pool, names: tuple[str, ...], clips: bool) -> None:
    expected = own_gradients(names, clips)
    for weights in ranks(2).run(own_gradients, names, clips):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


# Precision.


class Pair(Task):
    """Two models; the second loss is computed with the first one's new weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 2), nn.Linear(2, 2)

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(self.second(self.first(batch[0])), batch[1])

    def training_step(self, run: Run, batch: Batch) -> Any:
        yield "first", self.loss(batch)
        yield "second", self.loss(batch)

    def validation_step(self, run: Run, batch: Batch) -> Tensor:
        return self.loss(batch)


def weights_of(task: Any) -> list[Tensor]:
    return [parameter for module in modules_of(task).values() for parameter in module.parameters()]


def options_of(task: Any) -> dict[str, Any]:
    names = ("first", "second") if isinstance(task, Pair) else ()
    optimizer = {name: sgd() for name in names} or sgd()
    return {"optimizer": optimizer, "validation": class_batches(2), "epochs": 2}


@pytest.mark.parametrize("make", [linear_classifier, Pair], ids=["one", "several"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_computes_in_the_precision_of_fit(precision: PrecisionName, make: Any) -> None:
    def trainer() -> Trainer:
        return Trainer([ValidationSchedule(epochs=1), GradientAccumulation(2)], device="cpu", precision=precision)

    fitted, mine, dtypes, states = make(), make(), set(), set()
    result = trainer().fit(fitted, class_batches(5), **options_of(fitted))
    own = trainer()
    for event in (BatchStart, ForwardEnd, GradientsReady, StepEnd, BatchEnd, ValidationEnd):
        own.bus.on(event, lambda run, event: states.add(torch.is_autocast_enabled("cpu")))
    with own.run(mine, class_batches(5), **options_of(mine)) as run:
        for _ in run.epochs():
            for batch in run.batches():
                if make is Pair:
                    dtypes.add(mine.first(batch[0]).dtype)
                    run.step(mine.loss(batch), "first")
                    run.step(mine.loss(batch), "second")
                else:
                    dtypes.add(mine.model(batch[0]).dtype)
                    run.step(loss_of(mine, batch))
            assert not torch.is_autocast_enabled("cpu")
    assert dtypes == {{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert all(map(torch.equal, weights_of(mine), weights_of(fitted)))
    assert run.result.metrics == result.metrics
    assert states == {False}, "handlers run outside autocast"


class LoopLeftError(Exception):
    pass


def leave_by_break(run: TrainRun, kept: list[Any]) -> None:
    for _ in run.batches():
        break


def leave_with_a_kept_iterator(run: TrainRun, kept: list[Any]) -> None:
    kept.append(run.batches())
    next(kept[0])


def leave_by_return(run: TrainRun, kept: list[Any]) -> None:
    for _ in run.batches():
        return


def leave_by_an_error(run: TrainRun, kept: list[Any]) -> None:
    for _ in run.batches():
        raise LoopLeftError


@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_return, leave_by_an_error, leave_with_a_kept_iterator],
    ids=lambda each: each.__name__,
)
def test_leaving_the_batches_leaves_autocast(leave: Any) -> None:
    kept: list[Any] = []
    with (
        contextlib.suppress(LoopLeftError),
        Trainer(device="cpu", precision="bf16").run(
            linear_classifier(), class_batches(3), optimizer=sgd(), epochs=1
        ) as run,
    ):
        for _ in run.epochs():
            leave(run, kept)
            assert torch.is_autocast_enabled("cpu") is bool(kept)
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_of_the_caller_is_restored() -> None:
    with torch.autocast("cpu", torch.float16):
        with Trainer(device="cpu", precision="bf16").run(
            linear_classifier(), class_batches(2), optimizer=sgd(), epochs=1
        ) as run:
            for _ in run.epochs():
                for batch in run.batches():
                    assert run.task.model(batch[0]).dtype == torch.bfloat16
                    run.step(loss_of(run.task, batch))
        assert run.task.model(batch[0]).dtype == torch.float16


def test_gradients_of_its_own_are_stepped_with_outside_autocast() -> None:
    task, states = linear_classifier(), set()
    trainer = Trainer(device="cpu", precision="bf16")
    trainer.bus.on(StepEnd, lambda run, event: states.add(torch.is_autocast_enabled("cpu")))
    with trainer.run(task, class_batches(2), optimizer=sgd(), epochs=1) as run:
        for _ in run.epochs():
            for batch in run.batches():
                before = task.model(batch[0])
                loss_of(task, batch).backward()  # type: ignore[no-untyped-call]
                run.step_with_gradients("optimizer")
                assert not torch.equal(before, task.model(batch[0])), "computed with new weights"
    assert states == {False}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_nested_run_has_its_own_precision(precision: PrecisionName) -> None:
    alone, nested = linear_classifier(), linear_classifier()

    def train(task: Supervised) -> Any:
        result = Trainer(device="cpu", precision=precision).fit(task, class_batches(4), optimizer=sgd(), epochs=1)
        return Trainer(device="cpu", precision=precision).validate(
            task, class_batches(2)
        ).metrics, result.progress.steps

    expected = train(alone)
    outer = linear_classifier()
    with Trainer(device="cpu", precision="bf16").run(outer, class_batches(1), optimizer=sgd(), epochs=1) as run:
        for _ in run.epochs():
            for batch in run.batches():
                assert train(nested) == expected
                assert outer.model(batch[0]).dtype == torch.bfloat16
                run.step(loss_of(outer, batch))
    assert all(map(torch.equal, weights_of(nested), weights_of(alone)))
