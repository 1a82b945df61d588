"""Rehearsals, searches and overfitting on two ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph import tuning
from heliograph.core.data import rng
from heliograph.core.objects.equality import leaves
from heliograph.tests.core.rehearsal.pair import FACTS, Facts, Pair
from heliograph.tests.kit import adam, class_batches, random_batches, sgd
from heliograph.tests.messages import assert_facts
from heliograph.tests.ranks_pool import Pool
from torch import nn
from torch.utils.data import TensorDataset

NOTES: list[str] = []  # a global one is not put back
BEFORE = (None, "rehearse", "overfit", "find_learning_rate", "find_batch_size")


def net() -> h.Supervised:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 2))
    return h.Supervised(model, nn.functional.mse_loss)


def options_of(kind: str) -> dict[str, Any]:
    data = TensorDataset(*(torch.cat(each) for each in zip(*random_batches(12), strict=True)))
    options: dict[str, Any] = {
        "task": net(),
        "train": data,
        "loader_params": {"batch_size": 4, "shuffle": True, "num_workers": int(kind == "workers")},
        "validation": random_batches(5, seed=7),
        "optimizer": adam(),
        "epochs": 2,
    }
    if kind == "several optimizers":
        options |= {"task": Pair(), "optimizer": {"one": adam(), "two": sgd()}}
    if kind == "an object":
        options["optimizer"] = torch.optim.Adam(options["task"].model.parameters(), lr=0.01)
    return options


def trainer(folder: Path, **options: Any) -> h.Trainer:
    often = h.Every(steps=4)
    plugins = [h.RNGCapture(3), h.LogSchedule(often), h.ValidationSchedule(often), h.SaveSchedule(often), Facts()]
    return h.Trainer([*plugins, h.GradientAccumulation(2), h.Checkpoint(folder / "runs", resume="auto")], **options)


def train_after(folder: str, kind: str, what: str | None) -> tuple[Any, ...]:
    """Do something, then train; return what was trained, the draws, and what was found."""
    FACTS.clear()
    options, own, found = options_of(kind), trainer(Path(folder) / str(what)), ""
    short = {name: each for name, each in options.items() if name not in ("epochs", "validation")}
    if what == "rehearse":
        report = tuning.rehearse(own, **options)
        assert report.problems == ()
        assert not [*(Path(folder) / what).rglob("*.pth")]
        assert report.prediction.steps == 6
        found = report.resume
    elif what == "overfit":
        found = str(tuning.overfit(own, **short, steps=3).losses)
    elif what == "find_learning_rate" and kind != "several optimizers":
        found = str(tuning.find_learning_rate(own, **short, steps=4, lowest=0.01, highest=0.1))
    elif what == "find_batch_size":
        found = str(tuning.find_batch_size(own, **options, largest=8))
    FACTS.clear()
    own.fit(**options)
    modules = {name: each for name, each in vars(options["task"]).items() if isinstance(each, nn.Module)}
    states = [leaves(dict(each.state_dict())) for each in modules.values()]
    return found, list(FACTS), states, leaves(rng.capture()), torch.distributed.is_initialized()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["dropout", "workers", "several optimizers", "an object"])
def test_the_fit_that_follows_equals_one_without(kind: str, ranks: Pool, tmp_path: Path) -> None:
    expected: list[Any] = []
    for what in BEFORE[:2] if kind == "workers" else BEFORE:  # starting these takes long
        results = ranks(2).run(train_after, str(tmp_path), kind, what)
        assert results[0][0] == results[1][0]  # both ranks have found the same
        expected = expected or [result[1:] for result in results]
        assert [result[1:] for result in results] == expected
    assert len(expected[0][0]) >= 10


def rehearse_sharded(folder: str) -> tuple[Any, ...]:
    options = options_of("dropout")
    task = h.Supervised(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), nn.functional.mse_loss)
    options["task"] = task
    before = {name: each.clone() for name, each in task.model.state_dict().items()}
    kinds = [type(each) for each in task.model.modules()]
    own = trainer(Path(folder), engine=h.FSDPEngine(state="sharded"))
    report = tuning.rehearse(own, **options)
    assert all(torch.equal(before[name], each) for name, each in task.model.state_dict().items())
    assert [type(each) for each in task.model.modules()] == kinds
    return report.problems, report.resume, [*Path(folder).rglob("*.pth")]


def test_sharded_weights(ranks: Pool, tmp_path: Path) -> None:
    for problems, resume, left in ranks(2).run(rehearse_sharded, str(tmp_path)):
        assert problems == ()
        assert resume.startswith("resumed at step 1;")
        assert left == []


class FailsOnOne(h.Plugin):
    """Raises on rank 1."""

    @h.on(h.ValidationEnd)
    def fail(self, run: h.Run, event: h.ValidationEnd) -> None:
        if run.engine.rank == 1:
            raise LookupError("only here")


def rehearse_and_fail(folder: str) -> tuple[Any, ...]:
    options, own = options_of("dropout"), trainer(Path(folder))
    own.plugins.register(FailsOnOne())
    before = leaves(dict(options["task"].model.state_dict()))
    kinds = LookupError if int(os.environ["RANK"]) else h.RankFailed
    with pytest.raises(kinds) as raised:
        tuning.rehearse(own, **options)
    assert leaves(dict(options["task"].model.state_dict())) == before
    return raised.value.__notes__[-1], list(Path(folder).iterdir())


def test_an_error_on_one_rank(ranks: Pool, tmp_path: Path) -> None:
    for note, left in ranks(2).run(rehearse_and_fail, str(tmp_path)):
        assert_facts(note, "rehearsal", "restored")
        assert left == []


class Differs(h.Plugin):
    """Keeps a state that no checkpoint holds, on rank 1."""

    def __init__(self) -> None:
        self.factor = 1.0

    @h.on(h.StepEnd)
    def scale(self, run: h.Run, event: h.StepEnd) -> None:
        if run.engine.rank == 1:
            self.factor *= 1.5
            run.task.model[0].weight.data.mul_(self.factor)


def rehearse_unequal(folder: str) -> tuple[str, ...]:
    own = trainer(Path(folder))
    own.plugins.register(Differs())
    return tuning.rehearse(own, **options_of("dropout")).problems


def test_a_problem_of_one_rank_is_reported_on_all(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2).run(rehearse_unequal, str(tmp_path))
    assert any("does not equal" in text for text in second)
    assert any("does not equal" in text for text in first)


def test_the_batches_are_a_classifiers(ranks: Pool) -> None:
    first, second = ranks(2).run(overfit_lists)
    assert first == second
    assert first[0] > first[-1]


def overfit_lists() -> tuple[float, ...]:
    torch.manual_seed(0)
    task = h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)
    return tuning.overfit(h.Trainer(), task, class_batches(6), optimizer=sgd(0.5), steps=5).losses["loss"]


def overfit_noting() -> tuple[list[str], float]:
    NOTES.clear()
    trainer = h.Trainer()
    trainer.bus.on(h.RunClosed, lambda run, event: NOTES.extend(run.report.notes))
    data = TensorDataset(*(torch.cat(each) for each in zip(*random_batches(4), strict=True)))
    found = tuning.overfit(trainer, net(), data, loader_params={"batch_size": 4}, optimizer=sgd(0.1), steps=2)
    return NOTES, found.metrics["validation/loss"]


def test_nothing_is_to_be_shared_out_of_the_first_batches(ranks: Pool) -> None:
    first, second = ranks(2).run(overfit_noting)
    assert first == second
    assert first[0] == []
    assert first[1] > 0
