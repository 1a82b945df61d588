"""Validation between and within passes, by the task or by a function, weighted by samples."""

from __future__ import annotations

from typing import Any

import heliograph as h
import pytest
from heliograph.packages.ray.tests.creators import creators
from heliograph.packages.ray.tests.creators.creators import HELD_OUT, make

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
    with pytest.raises(TypeError, match="validation_function returns a dict of numbers"):
        make(validation_function=lambda *args: None).validate()
