"""`PredictionWriter`: outputs on disk, of a prediction that is complete or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    Plugin,
    PredictBatchEnd,
    PredictionWriter,
    Run,
    Trainer,
    on,
    read_prediction_batches,
    read_predictions,
)
from heliograph.tests import kit
from heliograph.tests.kit import linear_classifier, random_batches
from heliograph.tests.messages import assert_each
from torch import Tensor


def inputs(batches: int = 5) -> list[Tensor]:
    return [batch[0] for batch in random_batches(batches)]


def test_it_reads_as_the_result_would_be(tmp_path: Path) -> None:
    task = linear_classifier()
    result = Trainer([PredictionWriter(tmp_path / "out", batches=2)], device="cpu").predict(task, inputs())
    assert torch.equal(read_predictions(tmp_path / "out"), result.predictions)
    assert [len(each) for each in read_prediction_batches(tmp_path / "out")] == [4] * 5
    assert len(list((tmp_path / "out").glob("*.pt"))) == 3
    assert_each(result.notes, ("predictions", tmp_path / "out"))


def test_several_sets_and_batches_without_gathering(tmp_path: Path) -> None:
    task, trainer = linear_classifier(), Trainer([PredictionWriter(str(tmp_path))], device="cpu")
    sets = {"b": inputs(3), "a": inputs(1)}
    assert trainer.predict(task, sets, gather=False).predictions is None
    found = read_predictions(tmp_path)
    assert {name: len(each) for name, each in found.items()} == {"b": 12, "a": 4}
    assert [name for name, _ in read_prediction_batches(tmp_path)] == ["b", "b", "b", "a"]
    assert list(found) == ["b", "a"]


def test_predict_batches_writes_too(tmp_path: Path) -> None:
    trainer, task = Trainer([PredictionWriter(tmp_path)], device="cpu"), linear_classifier()
    yielded = list(trainer.predict_batches(task, inputs()))
    assert torch.equal(read_predictions(tmp_path), torch.cat(yielded))


def test_complete_predictions_are_not_overwritten_unasked(tmp_path: Path) -> None:
    task = linear_classifier()
    Trainer([PredictionWriter(tmp_path, batches=1)], device="cpu").predict(task, inputs(3))
    with pytest.raises(ValueError, match="overwrite=True"):
        Trainer([PredictionWriter(tmp_path)], device="cpu").predict(task, inputs(2))
    assert len(read_predictions(tmp_path)) == 12
    Trainer([PredictionWriter(tmp_path, overwrite=True)], device="cpu").predict(task, inputs(2))
    assert len(read_predictions(tmp_path)) == 8
    assert len(list(tmp_path.glob("*.pt"))) == 1


class Breaking(Plugin):
    """Ends the prediction at its third batch."""

    def __init__(self, how: str) -> None:
        self.how = how

    @on(PredictBatchEnd)
    def end(self, run: Run, event: PredictBatchEnd) -> None:
        if run.progress.evaluated < 3:
            return
        if self.how == "fails":
            raise ArithmeticError
        run.control.cut_validation("no time")


@pytest.mark.parametrize("how", ["fails", "is cut"])
def test_what_is_not_complete_is_not_read_and_a_new_prediction_removes_it(tmp_path: Path, how: str) -> None:
    task, trainer = linear_classifier(), Trainer([Breaking(how), PredictionWriter(tmp_path, batches=1)], device="cpu")
    result = None
    try:
        result = trainer.predict(task, inputs())
    except ArithmeticError:
        assert how == "fails"
    if result is not None:
        assert_each(result.warnings, ("predictions", tmp_path, "not complete"))
    with pytest.raises(ValueError, match=r"not complete: index\.json"):
        read_predictions(tmp_path)
    trainer.plugins.disable("breaking")
    assert torch.equal(trainer.predict(task, inputs(1)).predictions, read_predictions(tmp_path))


def test_it_does_nothing_in_a_training_or_a_test(tmp_path: Path) -> None:
    trainer = Trainer([PredictionWriter(tmp_path / "out")], device="cpu")
    assert kit.fit(trainer).warnings == ()
    trainer.test(linear_classifier(), kit.class_batches(1))
    assert not (tmp_path / "out").exists()


def test_one_that_is_switched_on_in_the_middle_writes_nothing(tmp_path: Path) -> None:
    trainer = Trainer([PredictionWriter(tmp_path)], device="cpu")
    trainer.plugins.disable("prediction_writer")
    batches = trainer.predict_batches(linear_classifier(), inputs())
    next(batches)
    trainer.plugins.enable("prediction_writer")
    assert len(list(batches)) == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((3,), TypeError, "path.*folder, got 3"),
        (("x", 0), ValueError, "batches"),
        (("x", 1, 2), TypeError, "overwrite"),
    ],
)
def test_arguments_are_checked(arguments: Any, kind: type[Exception], said: str) -> None:
    names = dict(zip(("folder", "batches", "overwrite"), arguments, strict=False))
    with pytest.raises(kind, match=said):
        PredictionWriter(**names)
