"""What callbacks get as `trainer` and `pl_module`: what they read, what they may set, and what is not there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from heliograph import (
    GradientAccumulation,
    LearningRate,
    LogSchedule,
    RNGCapture,
    Run,
    Supervised,
    Trainer,
    ValidationSchedule,
    tuning,
)
from heliograph.packages.bridges.tests.lightning.conftest import Classifier
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests import kit
from heliograph_bridges.lightning import from_lightning
from heliograph_bridges.lightning.facade import EpochLoop, FitLoop, Strategy, TrainerFacade
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn


def look(act: Callable[..., Any], hook: str = "on_train_batch_end", plugins: Any = (), **options: Any) -> Any:
    """Train with a callback that acts in a hook, and return what it returned, by call, and the result."""
    found: list[Any] = []
    callback = LambdaCallback(**{hook: lambda trainer, module, *rest: found.append(act(trainer, module, *rest))})
    trainer = Trainer([*plugins, from_lightning(callback)], device="cpu")
    result = kit.fit(trainer, **{"train": kit.class_batches(4), **options})
    return found, result


def test_everything_that_it_says_it_has_can_be_read() -> None:
    def read(trainer: Any, *rest: Any) -> list[str]:
        parts = [
            (trainer, TrainerFacade),
            (trainer.strategy, Strategy),
            (trainer.fit_loop, FitLoop),
            (trainer.fit_loop.epoch_loop, EpochLoop),
        ]
        return [name for part, kind in parts for name in kind.readers if getattr(part, name, part) is part]

    found, _ = look(read, validation=kit.class_batches(1), plugins=[ValidationSchedule(epochs=1)])
    assert found == [[]] * 4


def test_where_the_run_is() -> None:
    def read(trainer: Any, module: Any, *rest: Any) -> tuple[Any, ...]:
        lengths = trainer.max_epochs, trainer.max_steps, trainer.num_training_batches, trainer.num_val_batches
        window = trainer.accumulate_grad_batches, trainer.estimated_stepping_batches, trainer.is_last_batch
        return trainer.global_step, trainer.current_epoch, module.global_step, lengths, window

    plugins = [GradientAccumulation({0: 2, 1: 1}), ValidationSchedule(epochs=1)]
    found, _ = look(read, plugins=plugins, validation=kit.class_batches(3), epochs=1.5)
    lengths = (2, -1, 4, [3])
    assert found == [
        (0, 0, 0, lengths, (2, 4, False)),
        (1, 0, 1, lengths, (2, 4, False)),
        (1, 0, 1, lengths, (2, 4, False)),
        (2, 0, 2, lengths, (2, 4, True)),
        (3, 1, 3, lengths, (1, 4, False)),
        (4, 1, 4, lengths, (1, 4, False)),
    ]


def test_the_loaders_the_optimizer_and_its_scheduler() -> None:
    train, validation = kit.class_batches(2), kit.class_batches(1)

    def read(trainer: Any, *rest: Any) -> tuple[Any, ...]:
        (record,) = trainer.lr_scheduler_configs
        same = trainer.train_dataloader is train, trainer.val_dataloaders is validation
        return same, type(trainer.optimizers[0]), type(record.scheduler), record.interval

    found, _ = look(
        read,
        plugins=[LearningRate("step"), ValidationSchedule(epochs=1)],
        train=train,
        validation=validation,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    assert found == [((True, True), torch.optim.SGD, torch.optim.lr_scheduler.StepLR, "step")] * 2


def test_what_is_not_there_is_an_error_that_says_so() -> None:
    with pytest.raises(AttributeError, match=r"trainer\.save_checkpoint in a Heliograph"):
        look(lambda trainer, *rest: trainer.save_checkpoint("here"))
    with pytest.raises(AttributeError, match=r"Did you mean 'global_step'\?"):
        look(lambda trainer, *rest: trainer.globalstep)
    with pytest.raises(AttributeError, match=r"not support trainer\.fit_loop\.epoch_loop\.val_loop"):
        look(lambda trainer, *rest: trainer.fit_loop.epoch_loop.val_loop)


@pytest.mark.parametrize("name", ["accumulate_grad_batches", "current_epoch", "anything"])
def test_what_cannot_be_set_is_an_error(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"trainer\.{name} = 4"):
        look(lambda trainer, *rest: setattr(trainer, name, 4))
    with pytest.raises(AttributeError, match=r"trainer\.fit_loop\.max_epochs = 4"):
        look(lambda trainer, *rest: setattr(trainer.fit_loop, "max_epochs", 4))


def test_a_stop_is_a_request_in_the_name_of_the_callback_and_can_be_taken_back() -> None:
    def stop(trainer: Any, *rest: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 3

    _, result = look(stop)
    assert (result.progress.steps, result.stopped_by) == (3, "lightning_lambda_callback")
    assert_facts(result.reason, "trainer.should_stop")

    def stop_and_go_back(trainer: Any, *rest: Any) -> None:
        trainer.should_stop = True
        trainer.should_stop = False

    _, result = look(stop_and_go_back)
    assert (result.status, result.progress.steps) == ("completed", 4)


def test_metrics_are_tensors_under_both_names() -> None:
    def read(trainer: Any, *rest: Any) -> tuple[Any, ...]:
        metrics = trainer.callback_metrics
        assert torch.equal(metrics["val_loss"], metrics["validation/loss"])
        assert "val_los" not in metrics
        with pytest.raises(KeyError, match=r"Unknown metric .*val_los.* Did"):
            metrics["val_los"]
        return sorted(metrics), sorted(copy.deepcopy(metrics)), trainer.progress_bar_metrics["train/loss"] > 0

    plugins = [LogSchedule(steps=1), ValidationSchedule(epochs=1)]
    found, _ = look(read, "on_validation_end", plugins, validation=kit.class_batches(1))
    names = ["train/loss", "validation/loss"]
    assert found == [(names, names, True)]


def test_a_view_on_the_model_is_a_lightning_module() -> None:
    task = kit.linear_classifier()

    def read(trainer: Any, module: Any, *rest: Any) -> tuple[Any, ...]:
        assert isinstance(module, pl.LightningModule)
        assert next(module.parameters()) is task.model.weight
        assert module.weight is task.model.weight
        assert module.trainer.global_step == trainer.global_step
        twin: Any = copy.deepcopy(module)
        assert twin.model.weight is not task.model.weight
        return module.device.type, [name for name, _ in module.named_parameters()], module.in_features

    found, _ = look(read, task=task)
    assert found == [("cpu", ["model.weight", "model.bias"], 4)] * 4


def test_a_lightning_module_as_the_task_is_refused_with_the_bridge() -> None:
    facts = (
        "Classifier.training_step(batch",
        "called with (run, batch)",
        "HeliographCallback([...])",
        "heliograph_bridges.lightning",
        "training_step(self, run, batch)",
    )
    with pytest.raises(TypeError) as caught:
        kit.fit(task=Classifier(), validation=kit.class_batches(1))
    assert_facts(caught.value, *facts)


class Own(pl.LightningModule):
    """The user's LightningModule, as the model of a task."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs)


def test_the_users_own_module_is_given_and_left_as_it_was() -> None:
    own = Own()
    found, _ = look(lambda trainer, module, *rest: (module is own, own.trainer.global_step), task=task_of(own))
    assert found == [(True, 1), (True, 2), (True, 3), (True, 4)]
    assert "log" not in vars(own)
    with pytest.raises(RuntimeError, match="not attached to a"):
        own.trainer  # noqa: B018


def task_of(own: Own) -> Supervised:
    return Supervised(own, nn.functional.cross_entropy)


def test_several_sets_have_an_index_each_and_one_has_none() -> None:
    sets = {"near": kit.class_batches(2), "far": kit.class_batches(1)}
    schedule = [ValidationSchedule(epochs=1)]
    found, _ = look(lambda *given: given[4:], "on_validation_batch_end", schedule, validation=sets, epochs=2)
    assert found == [(0, 0), (1, 0), (0, 1)] * 2
    found, _ = look(lambda *given: given[3:], "on_validation_batch_start", schedule, validation=kit.class_batches(2))
    assert found == [(0,), (1,)]


@pytest.mark.parametrize("phase", ["validate", "test", "predict"])
def test_a_validation_test_or_prediction_of_its_own(phase: str) -> None:
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda trainer, module, *rest: calls.append(
            f"{name} {trainer.state.fn.value} {trainer.state.stage.value}"
        )

    stage = {"validate": "validation"}.get(phase, phase)
    hooks = ["setup", "teardown", *(f"on_{stage}_{end}" for end in ("start", "epoch_start", "epoch_end", "end"))]
    callback = LambdaCallback(**{hook: note(hook) for hook in hooks})
    trainer = Trainer([from_lightning(callback)], device="cpu")
    getattr(trainer, phase)(kit.linear_classifier(), kit.class_batches(2))
    order = ["setup", f"on_{stage}_start", f"on_{stage}_epoch_start", f"on_{stage}_epoch_end", f"on_{stage}_end"]
    assert calls == [f"{name} {phase} {phase}" for name in [*order, "teardown"]]


class Broken(Supervised):
    """Fails in its third batch."""

    def training_step(self, run: Run, batch: Any) -> Any:
        if run.progress.batch == 2:
            raise OverflowError("too much")
        return super().training_step(run, batch)


def test_after_a_failure_there_is_on_exception_and_no_teardown() -> None:
    calls: list[str] = []
    callback = LambdaCallback(
        on_exception=lambda trainer, module, error: calls.append(f"{type(error).__name__} {trainer.global_step}"),
        on_train_end=lambda *given: calls.append("end"),
        on_fit_end=lambda *given: calls.append("fit end"),
        teardown=lambda *given: calls.append("teardown"),
    )
    task = Broken(nn.Linear(4, 2), nn.functional.cross_entropy)
    with pytest.raises(OverflowError):
        kit.fit(from_lightning(callback), task=task, train=kit.class_batches(4))
    assert calls == ["OverflowError 2"]
    assert not {"log", "log_dict"} & vars(callback).keys()


class Cut(pl.Callback):
    """Cuts a validation short, and notes its hooks."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_validation_epoch_start(self, *given: Any) -> None:
        self.calls.append("epoch_start")

    def on_validation_epoch_end(self, *given: Any) -> None:
        self.calls.append("epoch_end")

    def on_validation_end(self, *given: Any) -> None:
        self.calls.append("end")


def test_a_validation_that_is_cut_short_is_closed_and_not_judged() -> None:
    from heliograph import ValidationBatchEnd

    trainer = Trainer([ValidationSchedule(epochs=1), from_lightning(callback := Cut())], device="cpu")
    trainer.bus.on(ValidationBatchEnd, lambda run, event: run.control.cut_validation("enough"))
    kit.fit(trainer, validation=kit.class_batches(2))
    assert callback.calls == ["epoch_start", "epoch_end"]


def test_what_a_rehearsal_does_is_forgotten() -> None:
    ends: list[int] = []
    callback = LambdaCallback(on_train_end=lambda trainer, module: ends.append(trainer.global_step))
    trainer = Trainer([RNGCapture(), from_lightning(callback)], device="cpu")
    tuning.rehearse(trainer, kit.linear_classifier(), kit.class_batches(4), optimizer=kit.sgd(), epochs=1)
    kit.fit(trainer, train=kit.class_batches(4))
    assert ends[-1:] == [4]
