"""Passes of the default training in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.ray.tests.creators import creators
from heliograph.packages.ray.tests.creators.creators import make, weights
from heliograph_ray.creators.recipe import create_seeded
from heliograph_ray.creators.train_job import average_metrics
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

STEPPED = {"scheduler_creator": creators.scheduler, "config": {"dropout": 0.2}}


def fitted(*, epochs: int, frequency: Any) -> tuple[Tensor, h.RunResult]:
    """Train without a `CreatorTrainer`."""
    seed, config = 6691, {"lr": 0.1, "dropout": 0.2}
    train, _ = create_seeded(seed, creators.data, config)
    model = create_seeded(seed, creators.model, config)
    optimizer = creators.optimizer(model, config)
    plugins = [h.RNGCapture(seed), h.LearningRate(frequency), h.LogSchedule(h.Every(epochs=1))]
    result = h.Trainer(plugins, use_cpu=True).fit(
        h.Supervised(model, nn.CrossEntropyLoss(), metrics={"accuracy": h.accuracy}),
        train,
        loader_params={"batch_size": 8, "shuffle": True},
        optimizer=optimizer,
        scheduler=creators.scheduler(optimizer, config),
        epochs=epochs,
    )
    return torch.cat([each.detach().flatten() for each in model.parameters()]), result


@pytest.mark.parametrize(("creators_word", "word"), [("batch", "step"), ("epoch", "epoch")])
def test_three_calls_equal_one_of_three_passes_and_an_uninterrupted_fit(creators_word: Any, word: str) -> None:
    options = {**STEPPED, "scheduler_step_freq": creators_word, "metrics": {"accuracy": h.accuracy}}
    one_by_one = make(**options)
    returned = [one_by_one.train() for _ in range(3)]
    at_once = make(**options)
    assert at_once.train(passes=3) == returned[2]
    assert torch.equal(weights(one_by_one), weights(at_once))

    expected, result = fitted(epochs=3, frequency=word)
    assert torch.equal(weights(at_once), expected)
    assert returned[2] == result.metrics
    assert at_once.result is not None
    assert (at_once.result.progress.steps, at_once.result.progress.samples) == (12, 84)


def test_creators_do_not_change_the_callers_random_state() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    make().get_model()
    assert torch.equal(torch.get_rng_state(), before)


def test_an_interrupted_pass_is_finished_by_the_next_call() -> None:
    class Impatient(h.Plugin):
        asks = ("stop",)

        @h.on(h.StepEnd)
        def stop(self, run: h.Run, event: h.StepEnd) -> None:
            if run.progress.steps == 6:
                run.control.stop("enough for now")

    whole, halved = make(**STEPPED), make(**STEPPED, plugin_creator=lambda config: [Impatient()])
    whole.train(passes=2)
    halved.train(passes=2)
    assert halved.result is not None
    assert (halved.result.status, halved.result.stopped_by) == ("stopped", "impatient")
    assert halved.result.progress.steps == 6
    halved.train()
    assert torch.equal(weights(halved), weights(whole))


def test_an_error_keeps_the_state_of_the_passes_before() -> None:
    class Fails(h.Plugin):
        @h.on(h.EpochStart)
        def fail(self, run: h.Run, event: h.EpochStart) -> None:
            if event.epoch == 2 and not self.healed:
                raise creators.OwnError("disk full")

        healed = False

    plugin = Fails()
    whole, failing = make(), make(plugin_creator=lambda config: [plugin])
    whole.train(passes=3)
    with pytest.raises(creators.OwnError):
        failing.train(passes=3)
    plugin.healed = True
    failing.train()
    assert torch.equal(weights(failing), weights(whole))


@pytest.mark.parametrize("options", [{}, {"train_function": creators.train_as_usual}])
def test_an_exit_that_a_plugin_requests_is_raised(options: dict[str, Any]) -> None:
    class Leaves(h.Plugin):
        def __init__(self, status: int | None) -> None:
            self.status = status

        @h.on(h.TrainEnd)
        def leave(self, run: h.Run, event: h.TrainEnd) -> None:
            if self.status is None:
                run.hooks.raise_when_closed(creators.OwnError("not today"))
            else:
                run.hooks.exit_with(self.status)

    whole = make(**options)
    whole.train()
    for status, error in ((7, SystemExit), (None, creators.OwnError)):
        trainer = make(**options, plugin_creator=lambda config, status=status: [Leaves(status)])
        with pytest.raises(error, match=r"7|not today"):
            trainer.train()
        assert torch.equal(weights(trainer), weights(whole))


def test_metrics_are_means_over_the_whole_pass_with_any_log_interval() -> None:
    def logs(config: Any) -> list[h.Plugin]:
        return [h.LogSchedule(h.Every(steps=3))]

    often, once = make(plugin_creator=logs), make()
    assert often.train()["train/loss"] == pytest.approx(once.train()["train/loss"])
    assert average_metrics([(3, {"a": 1.0}), (1, {"a": 5.0, "b": 2.0}), (0, {"a": 9.0})]) == {"a": 2.0, "b": 2.0}
    assert average_metrics([(0, {"a": 9.0})]) == {"a": 9.0}


def test_plugins_validate_within_a_pass() -> None:
    def watch(config: Any) -> list[h.Plugin]:
        return [h.ValidationSchedule(h.Every(epochs=1)), h.EarlyStopping(patience=1, min_delta=10.0)]

    trainer = make(plugin_creator=watch)
    metrics = trainer.train(passes=5)
    assert trainer.result is not None
    assert (trainer.result.stopped_by, trainer.result.progress.epoch) == ("early_stopping", 2)
    assert metrics["validation/loss"] == trainer.validate()["validation/loss"]


def test_the_hook_is_called_first_with_the_config(tmp_path: Path) -> None:
    calls: list[str] = []

    def hook(config: Any) -> None:
        calls.append(f"hook {config['lr']}")

    def data(config: Any) -> Any:
        calls.append("data")
        return creators.data(config)

    trainer = make(initialization_hook=hook, data_creator=data)
    trainer.train()
    trainer.validate()
    assert calls == ["hook 0.1", "data"] * 2


def test_a_loss_is_made_from_a_class_or_by_a_function_of_the_config() -> None:
    plain = make(loss_creator=nn.CrossEntropyLoss).train()
    smooth = make(loss_creator=creators.loss, config={"smoothing": 0.5}).train()
    assert make(loss_creator=creators.loss, config={"smoothing": 0.0}).train() == plain
    assert smooth["train/loss"] > plain["train/loss"]


def test_loggers_read_the_config() -> None:
    seen: list[Any] = []

    class Look(h.Plugin):
        @h.on(h.TrainStart)
        def look(self, run: h.Run, event: h.TrainStart) -> None:
            seen.append((run.name, run.hyper_parameters["lr"], run.engine.device.type))

    make(name="mine", plugin_creator=lambda config: [Look()]).train()
    assert seen == [("mine", 0.1, "cpu")]


class Counted(Dataset[Any]):
    """Notes in which order it is read."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return torch.full((4,), float(index)), torch.tensor(index % 2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Counted()[index] for index in range(12))


def test_the_training_set_is_shuffled_unless_the_dataloader_config_says_otherwise() -> None:
    in_order, shuffled = Counted(), Counted()
    make(data_creator=lambda config: in_order, dataloader_config={"shuffle": False}).train()
    make(data_creator=lambda config: shuffled).train()
    first, other = (list(dict.fromkeys(each.seen)) for each in (in_order, shuffled))  # the first batch is loaded twice
    assert first == list(range(12))
    assert other != first
    assert sorted(other) == first


def test_a_stream_has_an_order_of_its_own() -> None:
    trainer = make(data_creator=lambda config: Stream())
    trainer.train()
    assert trainer.result is not None
    assert trainer.result.progress.samples == 12


def test_an_engine_is_made_where_it_is_used() -> None:
    made: list[h.DeviceEngine] = []

    def engine() -> h.DeviceEngine:
        made.append(h.DeviceEngine("cpu", precision="bf16"))
        return made[-1]

    trainer = make(engine=engine)
    returned = trainer.train()
    trainer.train()
    assert len(made) == 2
    assert returned == make(engine="device", precision="bf16").train() == make(precision="bf16").train()
