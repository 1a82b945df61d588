"""What a rank runs that is to be lost: by the signal that nobody receives, or in a wait without an end."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path

import torch
from heliograph import BatchEnd, DDPEngine, Plugin, RankFailed, Run, RunClosed, RunFailed, Trainer, TrainStart, on
from torch import Tensor, nn


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_for_ever() -> None:
    threading.Event().wait()


class Lose(Plugin):
    """Loses one rank after the second step."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.act = rank, {"die": die, "hang": hang_for_ever, "stop": stop}[how]
        self.ended: list[str] = []

    @on(TrainStart)
    def be_impatient(self, run: Run, event: TrainStart) -> None:
        assert isinstance(run.engine, DDPEngine)
        assert run.engine.watch is not None
        run.engine.watch.limits.report_after = run.engine.watch.limits.grace = 1.0

    @on(BatchEnd)
    def lose(self, run: Run, event: BatchEnd) -> None:
        if run.engine.rank == self.rank and run.progress.steps == 2:
            self.act()

    @on(RunFailed, RunClosed)
    def end(self, run: Run, event: RunFailed | RunClosed) -> None:
        self.ended.append(event.name)


def train(folder: Path, rank: int, how: str) -> None:
    """Train with two ranks and lose one of them; the other writes down what it saw of that.

    Args:
        folder: where to write.
        rank: which is lost.
        how: `die`, `hang` or `stop`.
    """
    engine = DDPEngine(timeout=60.0 if how == "die" else 3.0)
    handler = logging.FileHandler(folder / f"{engine.rank}.log")
    logging.getLogger("heliograph").addHandler(handler)
    model, lose = nn.Linear(2, 1), Lose(rank, how)
    data = [torch.ones(2, 2) for _ in range(4)]
    run = Trainer([lose], engine=engine).run(
        Task(model), data, optimizer=torch.optim.SGD(model.parameters(), 0.1), epochs=1
    )
    try:
        with run:
            for _ in run.epochs():
                for batch in run.batches():
                    run.step(run.forward(run, batch))
    except RankFailed as error:
        seen = {"rank": error.rank, "kind": error.kind, "text": error.text, "notes": error.__notes__}
        seen |= {"cause": type(error.__cause__).__name__, "status": run.result.status, "ended": lose.ended}
        (folder / f"{engine.rank}.json").write_text(json.dumps(seen))
        raise


class Task:
    """A task of one layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def training_step(self, run: Run, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch).sum()
        return loss
