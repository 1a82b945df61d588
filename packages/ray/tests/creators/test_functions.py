"""Training with a train_function, of one model or of several."""

from __future__ import annotations

from functools import partial
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.ray.tests.creators import creators
from heliograph.packages.ray.tests.creators.creators import HELD_OUT, SAMPLES, make, weights
from heliograph.tests.kit import EventRecorder
from heliograph_ray.creators.user_functions import SteppedOptimizer
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

BOTH = pytest.mark.parametrize("function", [creators.train_as_usual, creators.train_through_the_loop])
PAIR = {
    "model_creator": creators.pair,
    "optimizer_creator": creators.pair_of_optimizers,
    "train_function": creators.train_pair,
    "validation_function": creators.validate_pair,
}


@BOTH
def test_it_equals_the_default_training(function: Any) -> None:
    options = {"scheduler_creator": creators.scheduler, "scheduler_step_freq": "epoch", "config": {"dropout": 0.2}}
    usual, own = make(**options, metrics={"accuracy": h.accuracy}), make(**options, train_function=function)
    expected, returned = usual.train(passes=3), own.train(passes=3)
    assert torch.equal(weights(own), weights(usual))
    assert own.result is not None
    assert (own.result.progress.steps, own.result.progress.samples) == (12, 3 * SAMPLES)
    assert returned["train/optimizer_learning_rate"] == 0.05
    if function is creators.train_as_usual:
        assert returned["train/own_loss"] == pytest.approx(expected["train/loss"])
        assert returned["train/accuracy"] == pytest.approx(expected["train/accuracy"])
    else:
        assert returned["train/optimizer_loss"] == expected["train/loss"]


@BOTH
def test_its_events_are_those_of_a_fit(function: Any) -> None:
    traces: list[list[str]] = []

    class Listen(h.Plugin):
        @h.on(h.TrainStart)
        def begin(self, run: h.Run, event: h.TrainStart) -> None:
            traces.append(EventRecorder(run.bus).trace)

    for options in ({}, {"train_function": function}):
        make(**options, plugin_creator=lambda config: [Listen()]).train(passes=2)
    assert "step_end" in traces[0]
    own = {"forward_end", "backward_end"} if function is creators.train_as_usual else set()  # it goes backward itself
    assert [name for name in traces[0] if name not in own] == traces[1]


@pytest.mark.parametrize("function", [None, creators.train_as_usual])
def test_a_part_that_its_creator_has_put_into_eval_mode_stays_so(function: Any) -> None:
    """`validate` in between switches all modules, and back."""
    modes: list[list[bool]] = []

    class Look(h.Plugin):
        @h.on(h.EpochStart)
        def look(self, run: h.Run, event: h.EpochStart) -> None:
            modes.append([part.training for module in run.modules.values() for part in module.children()])

    def model(config: Any) -> nn.Module:
        made = creators.model(config)
        made.get_submodule("1").eval()
        return made

    trainer = make(model_creator=model, train_function=function, plugin_creator=lambda config: [Look()])
    trainer.train()
    trainer.validate()
    trainer.train()
    assert modes == [[True, False, True]] * 2


@BOTH
def test_handlers_change_its_gradients(function: Any) -> None:
    options = {"plugin_creator": lambda config: [h.GradientClipping(norm=0.01)]}
    usual, own = make(**options), make(**options, train_function=function)
    usual.train()
    own.train()
    assert torch.equal(weights(own), weights(usual))


def test_it_may_step_its_scheduler_itself() -> None:
    options: dict[str, Any] = {"scheduler_creator": creators.scheduler}
    usual = make(**options, scheduler_step_freq="epoch")
    own = make(**options, scheduler_step_freq=None, train_function=creators.train_and_step_the_scheduler)
    for _ in range(3):  # the scheduler's state is returned, too
        usual.train()
        own.train()
    assert torch.equal(weights(own), weights(usual))


def test_it_may_accumulate_by_hand() -> None:
    trainer = make(train_function=creators.train_every_second)
    assert trainer.train()["train/batches"] == 4
    assert trainer.result is not None
    assert (trainer.result.progress.steps, trainer.result.progress.samples) == (2, SAMPLES)


def test_it_may_leave_a_pass_early() -> None:
    trainer = make(train_function=creators.train_the_first)
    assert trainer.train(passes=2)["train/samples"] == 8
    assert trainer.result is not None
    progress = trainer.result.progress
    assert (progress.epoch, progress.steps, progress.samples) == (2, 2, 16)


def test_a_step_that_needs_the_loss_needs_the_loop() -> None:
    def accumulate(config: Any) -> list[h.Plugin]:
        return [h.GradientAccumulation(2)]

    options: list[dict[str, Any]] = [
        {"plugin_creator": accumulate},
        {"precision": "fp16"},
        {"engine": partial(h.DeviceEngine, "cpu", precision="fp16")},
        {"plugin_creator": lambda config: [h.NaNGuard()]},
    ]
    for each in options:
        with pytest.raises(RuntimeError, match=r"call iterator\.step\(loss\)"):
            make(**each, train_function=creators.train_as_usual).train()
        own = make(**each, train_function=creators.train_through_the_loop)
        own.train()
        if "plugin_creator" in each:
            usual = make(**each)
            usual.train()
            assert torch.equal(weights(own), weights(usual))


def test_its_optimizer_differs_only_in_the_step() -> None:
    seen: list[Any] = []

    def function(config: Any, model: Any, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any) -> Any:
        assert isinstance(optimizer, SteppedOptimizer)
        seen.extend([optimizer.param_groups[0]["lr"], optimizer.defaults["momentum"]])
        optimizer.param_groups[0]["lr"] = 0.0
        return creators.train_as_usual(config, model, iterator, criterion, optimizer, scheduler)

    trainer = make(train_function=function)
    before = weights(trainer)
    trainer.train()
    assert seen == [0.1, 0.9]
    assert torch.equal(weights(trainer), before)


def test_its_iterator_is_for_one_pass_and_a_step_takes_no_closure() -> None:
    def twice(*args: Any) -> Any:
        creators.train_as_usual(*args)
        return creators.train_as_usual(*args)

    def by_closure(config: Any, model: Any, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any) -> Any:
        for _ in iterator:
            optimizer.step(lambda: 0.0)

    with pytest.raises(RuntimeError, match=r"only once.*, call train\(passes=2\)"):
        make(train_function=twice).train()
    with pytest.raises(TypeError, match="takes no closure"):
        make(train_function=by_closure).train()


@pytest.mark.parametrize("make_scheduler", [StepLR, ReduceLROnPlateau])
def test_a_scheduler_is_not_made_in_it(make_scheduler: Any) -> None:
    def function(config: Any, model: Any, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any) -> Any:
        make_scheduler(optimizer, **({"step_size": 1} if make_scheduler is StepLR else {}))

    with pytest.raises(TypeError, match=r"scheduler_creator\(optimizer, config\)"):
        make(train_function=function).train()


def test_another_error_of_types_is_raised_as_it_is() -> None:
    def function(*args: Any) -> Any:
        raise TypeError("not an int")

    with pytest.raises(TypeError, match=r"^not an int\b"):
        make(train_function=function).train()


def test_training_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="never stepped an optimizer"):
        make(train_function=creators.train_nothing).train()


@pytest.mark.parametrize("returned", [None, {"mood": "good"}])
def test_it_returns_numbers(returned: Any) -> None:
    def function(*args: Any) -> Any:
        creators.train_as_usual(*args)
        return returned

    with pytest.raises(TypeError, match="train_function returns a dict"):
        make(train_function=function).train()


def test_an_unknown_optimizer_is_refused() -> None:
    def function(config: Any, model: Any, iterator: Any, criterion: Any, optimizer: Any, scheduler: Any) -> Any:
        for inputs, targets in iterator:
            iterator.step(criterion(model(inputs), targets), 1)

    with pytest.raises(ValueError, match="optimizers; got 1"):
        make(train_function=function).train()


def test_a_stream_has_no_length() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(4), torch.tensor(1))])

    with pytest.raises(TypeError, match="iterable dataset is unknown"):
        make(data_creator=lambda config: Stream(), train_function=creators.train_every_second).train()


@pytest.mark.parametrize("function", [creators.train_pair, creators.train_pair_through_the_loop])
def test_several_models_with_an_optimizer_and_a_scheduler_each(function: Any) -> None:
    config = {"lr": 0.1}
    train, _ = creators.data(config)
    options = {**PAIR, "train_function": function, "data_creator": lambda config: train}
    options |= {"scheduler_creator": creators.pair_of_schedulers, "scheduler_step_freq": "epoch"}
    trainer = make(**options, dataloader_config={"shuffle": False})
    models = trainer.get_model()
    for _ in range(3):
        trainer.train()

    optimizers = creators.pair_of_optimizers(models, config)
    schedulers = creators.pair_of_schedulers(optimizers, config)
    for _ in range(3):
        for start in range(0, SAMPLES, 8):
            inputs, targets = train[start : start + 8]
            for optimizer in optimizers:
                optimizer.zero_grad()
                loss: Any = torch.nn.functional.cross_entropy(models[1](models[0](inputs)), targets)
                loss.backward()
                optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    expected = torch.cat([each.detach().flatten() for model in models for each in model.parameters()])
    assert torch.equal(weights(trainer), expected)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == pytest.approx([0.01, 0.00125])
    assert trainer.result is not None
    assert trainer.result.progress.steps == 12


def test_several_models_need_a_function() -> None:
    with pytest.raises(ValueError, match="for several, pass train_function="):
        make(**{**PAIR, "train_function": None}).train()
    with pytest.raises(ValueError, match="for several, pass validation_function="):
        make(**{**PAIR, "validation_function": None}).validate()
    assert make(**PAIR).validate()["validation/loss"] > 0


def test_each_optimizer_has_at_most_one_scheduler() -> None:
    def twice(optimizers: Any, config: Any) -> Any:
        return [creators.scheduler(optimizers[0], config)] * 2

    def strangers(optimizers: Any, config: Any) -> Any:
        return creators.scheduler(creators.optimizer(creators.model(config), config), config)

    options = {**PAIR, "scheduler_step_freq": "epoch"}
    with pytest.raises(ValueError, match="optimizer that already"):
        make(**options, scheduler_creator=twice).train()
    with pytest.raises(ValueError, match="for another optimizer"):
        make(**options, scheduler_creator=strangers).train()


USUAL = {"metrics": {"accuracy": h.accuracy}}
OWN = {"validation_function": creators.validate_as_usual}


def test_a_function_measures_what_the_default_does() -> None:
    usual, own = make(**USUAL), make(**OWN)
    for trainer in (usual, own):
        trainer.train(passes=2)
    expected, returned = usual.validate(), own.validate()
    assert returned["validation/loss"] == pytest.approx(expected["validation/loss"])
    assert returned["validation/accuracy"] == pytest.approx(expected["validation/accuracy"])
    assert own.result is not None
    assert own.result.progress.samples == HELD_OUT


def test_weights_that_were_never_trained_are_validated_as_they_begin() -> None:
    trainer = make(**USUAL)
    before = trainer.validate()
    assert trainer.validate() == before
    trainer.train(passes=3)
    assert trainer.validate()["validation/loss"] < before["validation/loss"]


def test_a_function_is_called_within_a_pass_too() -> None:
    def watch(config: Any) -> list[h.Plugin]:
        return [h.ValidationSchedule(h.Every(epochs=1)), h.EarlyStopping(patience=1, min_delta=10.0)]

    for options in ({}, {"train_function": creators.train_as_usual}):
        trainer = make(**OWN, **options, plugin_creator=watch)
        metrics = trainer.train(passes=4)
        assert trainer.result is not None
        assert trainer.result.stopped_by == "early_stopping"
        assert trainer.result.progress.samples == 2 * creators.SAMPLES
        assert metrics["validation/loss"] == trainer.validate()["validation/loss"]


def test_without_a_validation_set_there_is_nothing_to_validate() -> None:
    trainer = make(data_creator=creators.only_training_data)
    trainer.train()
    with pytest.raises(ValueError, match="no validation set"):
        trainer.validate()


def test_a_function_gets_the_scheduler_and_must_not_step_it() -> None:
    seen: list[float] = []

    def look(config: Any, model: Any, iterator: Any, criterion: Any, scheduler: Any) -> dict[str, Any]:
        seen.append(scheduler.get_last_lr()[0])
        return creators.validate_as_usual(config, model, iterator, criterion, scheduler)

    options: dict[str, Any] = {"scheduler_creator": creators.scheduler, "scheduler_step_freq": "epoch"}
    trainer = make(**options, validation_function=look)
    trainer.train(passes=2)
    trainer.validate()
    assert seen == [0.05]

    options = {"scheduler_creator": creators.plateau, "scheduler_step_freq": "manual"}
    trainer = make(**options, validation_function=creators.validate_and_step)
    with pytest.raises(RuntimeError, match=r"call trainer\.update_scheduler\(metric\) after validate\(\)"):
        trainer.validate()


def test_a_function_reads_its_data_and_returns_numbers() -> None:
    with pytest.raises(TypeError, match="validation_function returns a dict"):
        make(validation_function=lambda *args: None).validate()
