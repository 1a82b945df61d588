"""Runs that are not one process's `fit`: the user's own loop, background saves, several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.events import Request
from heliograph.packages.recorder.tests.recordings import fit
from heliograph.packages.recorder.tests.replay_scenarios import facts
from heliograph.tests.kit import sgd
from heliograph.tests.ranks_pool import Pool
from heliograph_recorder import Recorder
from heliograph_recorder.replays.replay import replay
from torch import Tensor, nn

DATA = [torch.full((2, 1), float(number)) for number in range(6)]


def plugins() -> list[Any]:
    return [
        h.LogSchedule(h.Every(batches=2), at_end=True),
        h.GradientAccumulation(2),
        h.EarlyStopping("train/loss", patience=3, mode="max"),
    ]


def assert_alike(recording: Path, requests: list[Request]) -> None:
    """Assert that each replayed plugin makes the requests that it made."""
    for each in plugins():
        replayed = replay(recording, [each])
        assert facts(replayed.requests(each.name), each.name) == facts(requests, each.name)
        assert not replayed.unheld
        assert not replayed.failed


@pytest.mark.parametrize("leave_at", [None, 4, 9])
def test_the_users_own_loop(tmp_path: Path, leave_at: int | None) -> None:
    task = h.Supervised(nn.Linear(1, 1), lambda outputs, targets: outputs.sum())
    run = h.Trainer([*plugins(), Recorder(tmp_path)], device="cpu").run(task, DATA, optimizer=sgd(1e-3), epochs=3)
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                if run.progress.batches == leave_at:
                    run.control.request_log("by hand")
                    break
                run.step(task.model(batch).sum())
    assert_alike(tmp_path, list(run.result.history))


def test_saves_in_the_background(tmp_path: Path) -> None:
    def all_plugins() -> list[Any]:
        saving = [h.SaveSchedule(h.Every(steps=2)), h.Checkpoint(tmp_path, background=True, resume="auto")]
        return [*plugins(), *saving, Recorder(tmp_path)]

    first, _ = fit(all_plugins(), validation=None, epochs=1)
    second, _ = fit(all_plugins(), validation=None, epochs=2)
    for each in plugins():
        replayed = replay(tmp_path, [each])
        for number, result in enumerate((first, second), 1):
            own = [made.request for made in replayed.asked if made.attempt == number]
            assert facts(own, each.name) == facts(list(result.history), each.name)
    assert not replayed.notes


class Sums(h.Task):
    """Its loss is the sum of the outputs."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)

    def training_step(self, run: h.Run, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch).sum()
        return loss


def train_together(folder: str) -> list[Any]:
    """Train on this rank; return its requests."""
    recorder = Recorder(folder)
    trainer = h.Trainer([*plugins(), recorder], device="cpu")
    result = trainer.fit(Sums(), DATA, optimizer=sgd(1e-3), epochs=2)
    return [list(map(str, facts(list(result.history), each.name))) for each in plugins()]


def test_a_run_of_two_ranks(tmp_path: Path, ranks: Pool) -> None:
    main, _ = ranks(2).run(train_together, str(tmp_path))
    for each, live in zip(plugins(), main, strict=True):
        replayed = replay(tmp_path, [each])
        assert list(map(str, facts(replayed.requests(each.name), each.name))) == live
        assert not replayed.unheld


class Gathers(h.Plugin):
    @h.on(h.Log)
    def gather(self, run: h.Run, event: h.Log) -> None:
        run.control.stop(f"{run.engine.gather_objects(run.progress.steps)}")


def test_values_of_other_ranks_are_not_recorded(tmp_path: Path, ranks: Pool) -> None:
    ranks(2).run(train_together, str(tmp_path))
    replayed = replay(tmp_path, [Gathers()])
    assert "gather_objects" in replayed.unheld["gathers"][0]
