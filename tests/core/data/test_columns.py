"""Supervised tasks with batches that are dicts: their columns are named, or the model computes its own loss."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    DDPEngine,
    Every,
    LogSchedule,
    RNGCapture,
    SaveSchedule,
    Supervised,
    Trainer,
    ValidationSchedule,
    accuracy,
)
from heliograph.tests import kit
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn

PAIRS = kit.class_batches(4)


class Output(dict[str, Any]):
    """What models of transformers return: a dict, whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class OwnLoss(nn.Module):
    """A model of the surface of those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout = nn.Linear(4, 2), nn.Dropout(0.25)

    def forward(self, values: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.layer(self.dropout(values))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return Output(**loss, logits=logits)


def dicts(*names: str, kind: Any = dict) -> list[Any]:
    """Return the batches as dicts with the columns of these names, and one that is nobody's."""
    return [kind({**dict(zip(names, batch, strict=True)), "number": torch.arange(len(batch[0]))}) for batch in PAIRS]


def losses(task: Supervised, batches: list[Any]) -> tuple[list[float], dict[str, float]]:
    """Return the losses of a training, and its metrics."""
    seen = kit.Losses()
    plugins = [seen, LogSchedule(Every(epochs=1)), ValidationSchedule(Every(epochs=1))]
    result = kit.fit(*plugins, task=task, train=batches, validation=batches)
    return seen.values, {name: value for name, value in result.metrics.items() if not name.endswith("seconds")}


Expected = tuple[list[float], dict[str, float]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    """What the same training gives with pairs."""
    return losses(kit.linear_classifier(metrics={"accuracy": accuracy}), PAIRS)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_named_columns_train_as_pairs_do(kind: Any, expected: Expected) -> None:
    columns: dict[str, Any] = {"inputs": "image", "targets": "label"}
    task = kit.linear_classifier(metrics={"accuracy": accuracy}, **columns)
    assert losses(task, dicts("image", "label", kind=kind)) == expected


def test_several_columns_are_given_by_name(expected: Expected) -> None:
    class Summed(nn.Linear):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(left + right)

    torch.manual_seed(0)
    task = Supervised(
        Summed(4, 2),
        nn.functional.cross_entropy,
        inputs=("left", "right"),
        targets="label",
        metrics={"accuracy": accuracy},
    )
    batches = [{"label": y, "right": x - 1, "left": torch.ones_like(x)} for x, y in PAIRS]
    assert losses(task, batches)[0] == pytest.approx(expected[0], rel=1e-5)


def test_a_model_computes_its_own_loss_and_metrics_get_its_logits(expected: Expected) -> None:
    class Plain(OwnLoss):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.0)

    batches = [{"values": x, "labels": y} for x, y in PAIRS]
    task = Supervised(Plain(), metrics={"accuracy": accuracy})
    assert losses(task, batches) == expected
    chosen = Supervised(Plain(), inputs=("values", "labels"), metrics={"accuracy": accuracy})
    assert losses(chosen, dicts("values", "labels")) == expected


def test_handlers_see_the_whole_outputs_and_predictions_are_the_logits() -> None:
    task, seen = Supervised(OwnLoss()), list[Any]()
    trainer = Trainer(device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: seen.append(sorted(run.outputs)))
    batches = [{"values": x, "labels": y} for x, y in PAIRS]
    trainer.fit(task, batches, optimizer=kit.sgd(), epochs=1)
    assert seen == [["logits", "loss"]] * 4
    unlabelled = [{"values": x} for x, _ in PAIRS]
    for given in (batches, unlabelled):
        assert trainer.predict(task, given).predictions.shape == (12, 2)
    named = kit.linear_classifier(inputs="image", targets="label")
    assert trainer.predict(named, [{"image": x} for x, _ in PAIRS]).predictions.shape == (12, 2)


def test_a_resume_is_bitwise_equal(tmp_path: Path) -> None:
    batches = [{"values": x, "labels": y} for x, y in PAIRS]

    def fit(folder: Path, **options: Any) -> tuple[Supervised, Any]:
        task = Supervised(OwnLoss())
        plugins = kit.saving(folder, Every(steps=1), keep_last=None, **options)
        return task, kit.fit(*plugins, task=task, train=batches, steps=4)

    whole, _ = fit(tmp_path)
    again, result = fit(tmp_path / "again", resume=tmp_path / "run_epoch_0_iter_2.pth")
    assert result.resume.reasons == ()
    assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))


def trained_together() -> list[list[float]]:
    """Train on the batches on all ranks; return the weights."""
    model = OwnLoss()
    model.dropout.p = 0.0
    trainer = Trainer([RNGCapture(), SaveSchedule(Every(steps=1))], engine=DDPEngine(device="cpu"))
    batches = [{"values": x, "labels": y} for x, y in PAIRS]
    size = trainer.engine.world_size
    merged = [
        {name: torch.cat([each[name] for each in batches[at : at + 2]]) for name in ("values", "labels")}
        for at in (0, 2)
    ]
    trainer.fit(Supervised(model), batches if size == 2 else merged, optimizer=kit.sgd(), epochs=1)
    found: list[list[float]] = model.layer.weight.tolist()
    return found


@pytest.mark.whole
def test_ranks_train_as_one_process_does(ranks: Pool) -> None:
    (whole,) = ranks(1).run(trained_together)
    for weights in ranks(2).run(trained_together):
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(whole))


@pytest.mark.parametrize(
    ("options", "batch", "error"),
    [
        (
            {},
            (torch.ones(2, 4), torch.ones(2)),
            r"without a loss.*got tuple",
        ),
        ({}, {"values": torch.ones(2, 4)}, r"without a loss.*'labels'"),
        ({"inputs": ("values", "mask")}, {"values": torch.ones(2, 4)}, r"'mask'.*has 'values'"),
        ({"targets": "label"}, {"values": torch.ones(2, 4)}, r"'label'.*has 'values'"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(options: Any, batch: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Trainer(device="cpu").validate(Supervised(OwnLoss(), **options), [batch])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"inputs": "image"}, r"inputs='image', targets='label'.*targets= is missing"),
        ({"targets": "label"}, r"inputs= is missing"),
        (
            {"inputs": 3, "targets": "label"},
            r"inputs=.*tuple of names.*got 3",
        ),
        (
            {"inputs": "image", "targets": ("a", "b")},
            r"targets= one name.*'a', 'b'",
        ),
    ],
)
def test_columns_that_are_none_are_refused(options: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        kit.linear_classifier(**options)


def test_outputs_without_logits_have_no_metrics() -> None:
    class Headless(OwnLoss):
        def forward(self, values: Tensor, labels: Tensor | None = None) -> Any:
            return {"loss": super().forward(values, labels).loss}

    with pytest.raises(TypeError, match="returned a dict without"):
        losses(Supervised(Headless(), metrics={"accuracy": accuracy}), [{"values": x, "labels": y} for x, y in PAIRS])
    assert losses(Supervised(Headless()), [{"values": x, "labels": y} for x, y in PAIRS])[0]
