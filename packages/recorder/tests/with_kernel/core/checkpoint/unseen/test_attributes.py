"""State that no `state_dict` holds: restored if it is plain data of a module or the task, else reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph_recorder import Recorder
from torch import Tensor, nn

SAVED, STEPS = 6, 12


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((3, 4), number / 10), torch.tensor([0, 1, 0])) for number in range(5)]


class Net(nn.Module):
    """A layer, and whatever a test puts beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 2), nn.Dropout(0.0)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.drop(self.layer(inputs)) * self.factor()  # type: ignore[no-any-return]  # a module returns Any

    def factor(self) -> float:
        return 1.0


def supervised(net: type[Net] = Net) -> h.Supervised:
    torch.manual_seed(0)
    return h.Supervised(net(), nn.functional.cross_entropy)


class Job:
    """One program: created for each attempt."""

    def __init__(
        self,
        task: Callable[[], Any] = supervised,
        plugins: Callable[[], Iterable[Any]] = tuple,
        *,
        data: Callable[[], Any] = batches,
        optimizer: Callable[[Any], Any] = lambda each: torch.optim.SGD(each, 0.1),
        scheduler: Callable[[Any], Any] | None = None,
        **engine: Any,
    ) -> None:
        self.task, self.plugins, self.data, self.optimizer, self.engine = task, plugins, data, optimizer, engine
        self.scheduler = scheduler

    def fit(self, folder: Path, steps: int, **checkpoint: Any) -> tuple[h.RunResult, Any]:
        task, scheduling = self.task(), [h.LearningRate("step")] if self.scheduler else []
        saving = [h.SaveSchedule(h.At(steps=SAVED)), h.Checkpoint(folder, **checkpoint)]
        trainer = h.Trainer([h.RNGCapture(), *scheduling, *self.plugins(), *saving], device="cpu", **self.engine)
        result = trainer.fit(
            task, self.data(), optimizer=self.optimizer, scheduler=self.scheduler, steps=steps, name="unseen"
        )
        return result, task

    def attempts(self, folder: Path, later: Job | None = None, **options: Any) -> tuple[h.RunResult, bool]:
        """Train in one go, and in two attempts; return the second one's result and whether it ended equal."""
        _, whole = self.fit(folder / "whole", STEPS)
        first, _ = self.fit(folder / "first", SAVED)
        result, resumed = (later or self).fit(folder / "second", STEPS, resume=first.last_checkpoint, **options)
        mine, theirs = (task.model.state_dict() for task in (resumed, whole))
        return result, all(torch.equal(mine[name], theirs[name]) for name in theirs)


def reasons(result: h.RunResult) -> str:
    assert result.resume is not None
    return "; ".join(result.resume.reasons)


def test_all_built_in_plugins_are_exact_when_nothing_changes(tmp_path: Path) -> None:
    def plugins() -> list[Any]:
        schedules = [h.ValidationSchedule(h.Every(steps=2)), h.LogSchedule(h.Every(steps=2))]
        deciding = [h.EarlyStopping("train/loss", patience=50), h.NaNGuard(), h.GradientNorm()]
        reports = [
            h.JsonlLog(tmp_path / "log.jsonl"),
            h.ProgressBar(plain=True),
            h.HandlerTimes(),
            Recorder(tmp_path),
        ]
        return [h.GradientAccumulation(2), h.EMA(), *schedules[1:], *deciding, *reports]

    result, is_equal = Job(plugins=plugins).attempts(tmp_path)
    assert (result.resume is not None and result.resume.guarantee, is_equal) == ("exact", True), reasons(result)
