"""Metrics of torchmetrics in a supervised task: whole sets, collections, ranks, resume, validations that are cut."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    Checkpoint,
    DDPEngine,
    EarlyStopping,
    Every,
    LogSchedule,
    SavePoint,
    SaveSchedule,
    Supervised,
    Trainer,
    TrainStart,
    ValidationBatchEnd,
    ValidationCut,
    ValidationEnd,
    ValidationSchedule,
)
from heliograph.tests import kit
from heliograph.tests.ranks_pool import Pool
from torchmetrics import AUROC, ConfusionMatrix, F1Score, MetricCollection, Precision, Recall

BATCHES = kit.class_batches(5, 6)
OPTIONS: dict[str, Any] = {"task": "multiclass", "num_classes": 2}
MACRO: dict[str, Any] = {**OPTIONS, "average": "macro"}


def several(**options: Any) -> MetricCollection:
    """Return a collection of which two metrics add up the same, and one keeps every score."""
    return MetricCollection(
        {"precision": Precision(**MACRO), "recall": Recall(**MACRO), "auroc": AUROC(**OPTIONS)}, **options
    )


def measured_at_once(task: Supervised, metric: Any, batches: list[kit.Batch]) -> Any:
    """Return the value of a metric over all batches in one update."""
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    with torch.no_grad():
        metric.update(task.model(inputs), targets)
    return metric.compute()


def test_a_validation_measures_the_whole_set_by_its_own_names() -> None:
    task = kit.linear_classifier(metrics={"f1": F1Score(**MACRO), "all": several(prefix="own_")})
    metrics = Trainer(device="cpu").validate(task, BATCHES).metrics
    expected = {
        f"validation/all/{key}": each for key, each in measured_at_once(task, several(prefix="own_"), BATCHES).items()
    }
    expected["validation/f1"] = measured_at_once(task, F1Score(**MACRO), BATCHES)
    assert set(expected) == metrics.keys() - {"validation/loss"}
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: float(each) for name, each in expected.items()}
    )


def test_plugins_monitor_what_a_collection_measures(tmp_path: Path) -> None:
    result = kit.fit(
        ValidationSchedule(Every(steps=1)),
        Checkpoint(tmp_path, every=Every(steps=1), keep_best=1, monitor="validation/own_recall", mode="max"),
        EarlyStopping("validation/own_recall", mode="max", patience=1),
        task=kit.linear_classifier(metrics=several(prefix="own_")),
        train=BATCHES,
        validation=BATCHES[:2],
        optimizer=kit.sgd(0.0),
        epochs=3,
    )
    assert (result.status, result.progress.steps) == ("stopped", 2)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.name.startswith("run_epoch_0_iter_1")


def test_a_name_that_a_collection_does_not_measure_is_an_error_at_the_first_validation() -> None:
    with pytest.raises(ValueError, match=r"metric 'validation/recal'\. .*'validation/recall'"):
        kit.fit(
            ValidationSchedule(Every(steps=1)),
            EarlyStopping("validation/recal", mode="max", patience=1),
            task=kit.linear_classifier(metrics=several()),
            validation=BATCHES,
        )


def test_after_a_validation_that_was_cut_the_next_begins_again() -> None:
    task = kit.linear_classifier(metrics=several())
    trainer = Trainer([ValidationSchedule(Every(steps=1))], device="cpu")
    cuts, found = list[Any](), list[Any]()

    def cut_the_first(run: Any, event: ValidationBatchEnd) -> None:
        if run.progress.steps == 1:
            run.control.cut_validation("enough was seen")

    trainer.bus.on(ValidationBatchEnd, cut_the_first)
    trainer.bus.on(ValidationCut, lambda run, event: cuts.append(run.progress.steps))
    trainer.bus.on(ValidationEnd, lambda run, event: found.append(dict(event.metrics)))
    kit.fit(trainer, task=task, train=BATCHES[:2], validation=BATCHES[2:], optimizer=kit.sgd(0.0))

    whole = measured_at_once(task, several(), BATCHES[2:])
    assert cuts == [1]
    (metrics,) = found
    assert {name: metrics[f"validation/{name}"] for name in whole} == pytest.approx(
        {key: float(each) for key, each in whole.items()}
    )


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_resume_between_two_logs_measures_what_was_before(after: int) -> None:
    """Metrics of a collection that add up the same keep one state for all of them."""
    states: list[Any] = []

    def fit(*plugins: Any) -> dict[str, float]:
        trainer = Trainer([LogSchedule(Every(steps=4)), *plugins], device="cpu")
        if states:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(states[0]))
        else:
            trainer.bus.on(SavePoint, lambda run, event: states.append(deepcopy(run.state_dict())))
        result = kit.fit(trainer, task=kit.linear_classifier(metrics=several()), train=BATCHES, steps=4)
        return {name: value for name, value in result.metrics.items() if name != "train/loss"}

    whole = fit(SaveSchedule(Every(steps=after)))
    assert whole.keys() == {"train/precision", "train/recall", "train/auroc"}
    assert fit() == whole


# On ranks.


def validated(count: int) -> tuple[dict[str, float], dict[str, Any], list[str]]:
    """Return what is measured of so many batches, what is collected, and the notes."""
    metrics = {"all": several(), "matrix": ConfusionMatrix(**OPTIONS)}
    trainer, collected = Trainer(engine=DDPEngine(device="cpu")), dict[str, Any]()
    trainer.bus.on(ValidationEnd, lambda run, event: collected.update(run.collected))
    result = trainer.validate(kit.linear_classifier(metrics=metrics), {"": BATCHES[:count], "first": BATCHES[:2]})
    return dict(result.metrics), collected, list(result.notes)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.whole)])
def test_ranks_measure_what_one_process_measures(ranks: Pool, size: int, count: int) -> None:
    """The batches are dealt out unevenly, so that a rank may have none."""
    ((whole, matrices, _),) = ranks(1).run(validated, count)
    assert matrices["matrix"].sum() == count * 6
    for metrics, collected, notes in ranks(size).run(validated, count):
        assert metrics == pytest.approx(whole, rel=1e-6)
        assert {name: each.tolist() for name, each in collected.items()} == {
            name: each.tolist() for name, each in matrices.items()
        }
        assert len([note for note in notes if "'matrix'" in note]) == 1
