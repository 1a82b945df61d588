"""Lightning's EarlyStopping here: it stops at the same epoch as in Lightning's Trainer on the same numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from heliograph import LogSchedule, Plugin, Run, ShouldStop, Supervised, Trainer, ValidationSchedule, on
from heliograph.packages.bridges.tests.lightning.conftest import Classifier
from heliograph.tests import kit
from heliograph_bridges.lightning import from_lightning
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

VALUES = [1.0, 0.9, 0.95, 0.85, 0.86, 0.9, 0.84, 0.9, 0.9, 0.9]


class Scripted(Supervised):
    """Measures one value after the other in its validations."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__(kit.linear_classifier().model, torch.nn.functional.cross_entropy)
        self.values: Iterator[float] = iter(values)

    def validation_step(self, run: Run, batch: Any) -> Any:
        return {"loss": torch.tensor(next(self.values)), "accuracy": 0.5}


class ScriptedThere(Classifier):
    """The same, for Lightning's Trainer."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        self.values = iter(values)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", Tensor([next(self.values)])[0])


def fit(stopper: EarlyStopping, values: Sequence[float], *plugins: Any, every: Any = None, **options: Any) -> Any:
    schedule = ValidationSchedule(epochs=1) if every is None else every
    trainer = Trainer([schedule, *plugins, from_lightning(stopper)], device="cpu")
    options.setdefault("epochs", len(values))
    return kit.fit(trainer, task=Scripted(values), validation=kit.class_batches(1), **options)


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "patience": ({"patience": 2}, 6),
    "one": ({"patience": 1}, 3),
    "delta": ({"patience": 3, "min_delta": 0.2}, 4),
    "threshold": ({"stopping_threshold": 0.86}, 4),
    "divergence": ({"divergence_threshold": 0.94}, 1),
    "epoch end": ({"patience": 2, "check_on_train_epoch_end": True}, 6),
    "validation end": ({"patience": 2, "check_on_train_epoch_end": False}, 6),
    "never": ({"patience": 9}, 10),
}


def rounded(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without the last digits: Lightning adds in float32, and this loop in float64."""
    message = re.sub(r"\d+\.\d{6,}", lambda number: f"{float(number[0]):.5f}", state["stopping_reason_message"] or "")
    return {**state, "best_score": round(state["best_score"].item(), 5), "stopping_reason_message": message}


@pytest.mark.parametrize("case", CASES)
def test_it_stops_at_the_epoch_where_it_stops_there(case: str, lightning_fit: Callable[..., Any]) -> None:
    options, epochs = CASES[case]
    here, there = EarlyStopping("val_loss", **options), EarlyStopping("val_loss", **options)
    result = fit(here, VALUES)
    with_sanity_check = {"num_sanity_val_steps": 0, "max_epochs": len(VALUES)}
    trainer = lightning_fit([there], ScriptedThere(VALUES), train=2, **with_sanity_check)
    assert (result.progress.epoch, trainer.current_epoch) == (epochs, epochs)
    assert rounded(here.state_dict()) == rounded(there.state_dict())
    assert here.stopped_epoch == there.stopped_epoch
    assert result.stopped_by == (None if case == "never" else "lightning_early_stopping")
    assert case == "never" or (here.stopping_reason_message or "").startswith(result.reason)


def test_both_spellings_of_a_metric_are_found() -> None:
    for name in ("val_loss", "validation/loss", "val/loss", "validation_loss"):
        assert fit(EarlyStopping(name, patience=1), VALUES).progress.epoch == 3, name


def test_a_metric_that_there_is_not_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(RuntimeError, match=r"available.*`validation/loss`, `validation/accuracy`"):
        fit(EarlyStopping("val_los"), VALUES)


def test_a_training_loss_is_judged_where_it_is_logged() -> None:
    stopper = EarlyStopping("train_loss", patience=1, mode="max", check_on_train_epoch_end=True)
    result = fit(stopper, VALUES, LogSchedule(epochs=1))
    assert (result.progress.epoch, result.stopped_by) == (2, "lightning_early_stopping")


def test_validations_within_epochs_are_judged_each() -> None:
    result = fit(
        EarlyStopping("val_loss", patience=2), VALUES, every=ValidationSchedule(steps=1), train=kit.class_batches(4)
    )
    assert (result.progress.epoch, result.progress.steps) == (1, 6)


class AtLeast(Plugin):
    """Postpones stops until an epoch."""

    @on(ShouldStop, before="lightning_early_stopping")
    def look(self, run: Run, event: ShouldStop) -> None:
        if run.progress.epoch < 5:
            run.control.veto_stop("five epochs at least")


def test_another_plugin_may_postpone_the_stop() -> None:
    result = fit(EarlyStopping("val_loss", patience=1), VALUES, AtLeast())
    assert (result.progress.epoch, result.stopped_by) == (5, "lightning_early_stopping")
