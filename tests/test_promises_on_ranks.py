"""The product's promises for several processes, end to end: the same script, shared decisions, shared endings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import sgd
from heliograph.tests.messages import assert_facts, has_facts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class NotTodayError(Exception):
    """An error of the user's own."""


class Watchful(h.Plugin):
    """On one rank: asks for a stop, or fails, at a step."""

    asks = ("stop",)

    def __init__(self, rank: int, step: int, *, fails: bool) -> None:
        self.rank, self.step, self.fails = rank, step, fails

    @h.on(h.StepEnd)
    def act(self, run: h.Run, event: h.StepEnd) -> None:
        if run.engine.rank == self.rank and run.progress.steps == self.step:
            if self.fails:
                raise NotTodayError("the disk burns", run.engine.rank)
            run.control.stop("the sky is falling")


def train(folder: Path, *plugins: h.Plugin, epochs: int = 2) -> tuple[Any, ...]:
    """Train a little; nothing in here knows how many processes do so."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(44, 4, generator=generator), torch.randint(0, 2, (44,), generator=generator))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    saving = [h.SaveSchedule(h.Every(steps=3)), h.Checkpoint(folder, resume="auto")]
    trainer = h.Trainer([h.RNGCapture(), h.ValidationSchedule(h.Every(epochs=1)), *saving, *plugins], use_cpu=True)
    result = trainer.fit(
        h.Supervised(model, nn.functional.cross_entropy, metrics={"accuracy": h.accuracy}),
        data,
        loader_params={"global_batch_size": 8, "shuffle": True},
        validation=DataLoader(data, batch_size=8),
        optimizer=sgd(),
        epochs=epochs,
    )
    weights = [each.tolist() for each in model.parameters()]
    return result.status, result.progress.steps, result.metrics, weights, str(result)


def test_the_same_script_trains_alike_on_one_process_and_on_two(tmp_path: Path) -> None:
    """The order of samples is one; the sums of their gradients round differently."""
    alone = train(tmp_path / "alone")
    first, second = h.launch(train, tmp_path / "together", nprocs=2)
    assert first[:4] == second[:4]
    assert first[:2] == alone[:2] == ("completed", 12)
    for ours, theirs in zip(first[3], alone[3], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))
    assert first[2] == pytest.approx(alone[2], rel=1e-5)


@pytest.mark.whole
def test_what_one_process_asks_all_do_and_the_result_says_which_it_was(tmp_path: Path) -> None:
    first, second = h.launch(train, tmp_path, Watchful(1, 5, fails=False), nprocs=2)
    assert first[:4] == second[:4]
    assert first[:2] == ("stopped", 6)  # it asked after the fifth step, and the other did not
    assert_facts(first[4], "stopped", "watchful on rank 1", "the sky is falling")


@pytest.mark.whole
def test_where_one_process_fails_all_end_and_its_own_error_arrives(tmp_path: Path) -> None:
    with pytest.raises(NotTodayError, match="the disk burns") as caught:
        h.launch(train, tmp_path, Watchful(1, 5, fails=True), nprocs=2)
    assert caught.value.args == ("the disk burns", 1)
    assert vars(caught.value)["heliograph_rank"] == 1
    newest = tmp_path / "run_epoch_0_iter_3.pth"
    facts = (newest, "step 3", "2 steps", "start the program")
    # The main rank states it once, though another rank failed.
    assert sum(has_facts(note, *facts) for note in caught.value.__notes__) == 1

    resumed = h.launch(train, tmp_path, nprocs=2)
    assert resumed[0][:4] == resumed[1][:4]
    assert resumed[0][:2] == ("completed", 12)
