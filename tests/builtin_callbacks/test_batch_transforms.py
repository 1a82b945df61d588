"""BatchTransform, Mixup and CutMix: what a batch becomes, where, and after a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from torch import Tensor, nn


class Seen(h.Task):
    """Keeps the batches that it is given."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.batches: dict[str, list[Any]] = {"train": [], "validation": [], "test": []}

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        self.batches[run.phase].append(batch)
        inputs, targets = batch
        return nn.functional.cross_entropy(self.model(inputs.reshape(len(inputs), -1)[:, :4]), targets)

    def validation_step(self, run: h.Run, batch: Any) -> Tensor:
        return self.training_step(run, batch)


class Images(Seen):
    """Keeps the batches that it is given, of images with a number each."""

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        self.batches["train"].append(batch)
        return self.model.weight.sum()


def halved(batch: Any) -> Any:
    inputs, targets = batch
    return inputs / 2, targets


@pytest.mark.parametrize("phases", [("train",), ("validation", "test"), "test"])
def test_a_function_changes_the_batches_of_its_phases(phases: Any) -> None:
    task, (batch,) = Seen(), class_batches(1)
    trainer = h.Trainer(
        [h.BatchTransform(halved, phases=phases), h.ValidationSchedule(h.Every(epochs=1))], device="cpu"
    )
    trainer.fit(task, [batch], validation=[batch], optimizer=sgd(), epochs=1)
    trainer.test(task, [batch])
    for phase, seen in task.batches.items():
        factor = 0.5 if phase in phases else 1.0
        assert torch.equal(seen[0][0], batch[0] * factor), phase


def test_several_functions_are_used_in_their_order() -> None:
    task, (batch,) = Seen(), class_batches(1)
    more = h.BatchTransform(lambda each: (each[0] + 1, each[1]), name="more")
    h.Trainer([h.BatchTransform(halved), more], device="cpu").fit(task, [batch], optimizer=sgd(), epochs=1)
    assert torch.equal(task.batches["train"][0][0], batch[0] / 2 + 1)


def test_mixup_takes_weighted_means_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Beta, "sample", lambda self: torch.tensor(0.75))
    inputs, targets = torch.arange(12.0).reshape(3, 4), torch.tensor([0, 1, 1])
    task = Seen()
    h.Trainer([h.Mixup(2)], device="cpu").fit(task, [(inputs, targets)], optimizer=sgd(), epochs=1)
    ((mixed, probabilities),) = task.batches["train"]
    assert torch.equal(mixed[0], 0.75 * inputs[0] + 0.25 * inputs[2])
    assert torch.equal(mixed[1], 0.75 * inputs[1] + 0.25 * inputs[0])
    assert torch.equal(probabilities, torch.tensor([[0.75, 0.25], [0.25, 0.75], [0.0, 1.0]]))
    assert torch.equal(inputs, torch.arange(12.0).reshape(3, 4))  # those of the loader are left as they are


def test_cutmix_weights_targets_by_what_is_left_of_the_area() -> None:
    torch.manual_seed(3)
    images = torch.stack([torch.full((1, 8, 6), float(number)) for number in range(4)])
    targets = torch.tensor([0.0, 1.0, 2.0, 3.0])
    task = Images()
    h.Trainer([h.CutMix()], device="cpu").fit(task, [(images, targets)] * 20, optimizer=sgd(), epochs=1)
    shares = set()
    for mixed, weighted in task.batches["train"]:
        for number in range(4):
            own = (mixed[number] == number).float().mean()
            other = (mixed[number] == (number - 1) % 4).float().mean()
            assert own + other == 1
            torch.testing.assert_close(weighted[number], own * number + other * ((number - 1) % 4))
        shares.add(float(own))
    assert len(shares) > 10


def test_targets_that_are_numbers_are_mixed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Beta, "sample", lambda self: torch.tensor(0.5))
    plugin, batch = h.Mixup(), (torch.ones(2, 1), torch.tensor([[0.0], [4.0]]))
    run: Any = SimpleNamespace(report=SimpleNamespace(is_replay=False), batch=batch)
    plugin.apply(run, h.BatchStart())
    assert run.batch[1].tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: h.BatchTransform(3), TypeError, "a batch, got 3"),  # type: ignore[arg-type]
        (lambda: h.BatchTransform(halved, phases=["trian"]), ValueError, "'trian'.*mean 'train'"),
        (lambda: h.Mixup(alpha=0), ValueError, "alpha"),
        (lambda: h.CutMix(1), ValueError, "classes"),
        (lambda: h.Trainer([h.Mixup(3), h.CutMix(3)]), ValueError, "mixing"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


@pytest.mark.parametrize(
    ("plugin", "batch", "error", "sentence"),
    [
        (h.Mixup(), (torch.ones(2, 4), torch.tensor([0, 1])), ValueError, r"Mixup\(classes=10\)"),
        (h.Mixup(2), {"x": torch.ones(2)}, TypeError, ".inputs, targets., got dict"),
        (
            h.Mixup(2),
            (torch.ones(2, 3, dtype=torch.uint8), torch.tensor([0, 1])),
            TypeError,
            "Mixup.*floating-point inputs, got torch.uint8",
        ),
        (h.CutMix(2), (torch.ones(2, 4), torch.tensor([0, 1])), ValueError, r"inputs of \[2, 4\]"),
    ],
)
def test_batches_that_do_not_fit_are_refused(plugin: Any, batch: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        h.Trainer([plugin], device="cpu").fit(Seen(), [batch], optimizer=sgd(), epochs=1)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_resumed_run_mixes_the_same(tmp_path: Path, cut: int) -> None:
    def train(folder: Path, stop: int | None) -> tuple[Any, Any]:
        saving = [h.SaveSchedule(h.Every(steps=1)), h.Checkpoint(folder, resume="auto")]
        noise = h.BatchTransform(lambda batch: (batch[0] + torch.randn(batch[0].shape), batch[1]))
        trainer = h.Trainer([h.RNGCapture(), h.Mixup(2), noise, *saving], device="cpu")
        if stop is not None:
            trainer.bus.on(
                h.BatchEnd, lambda run, event: run.control.stop("enough") if run.progress.steps == stop else None
            )
        task = linear_classifier()
        result = trainer.fit(task, class_batches(3), optimizer=sgd(), epochs=2)
        return task.model.state_dict()["weight"], result

    whole, _ = train(tmp_path / "whole", None)
    train(tmp_path / "cut", cut)
    resumed, result = train(tmp_path / "cut", None)
    assert result.resume.reasons == ()
    assert torch.equal(resumed, whole)
