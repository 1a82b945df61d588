"""What a rank runs that is to be lost: by the signal that nobody receives, or in a wait without an end."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path

import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    DDPEngine,
    Event,
    Plugin,
    RankFailed,
    Run,
    RunClosed,
    RunFailed,
    Trainer,
    TrainStart,
    on,
)
from heliograph.core.distributed.group import Board, GlooRounds
from heliograph.tests.ranks_pool import Way, travelling
from torch import Tensor, nn


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_for_ever() -> None:
    threading.Event().wait()


class Lose(Plugin):
    """Loses one rank after the second step.

    Args:
        rank: which.
        how: `die`, `hang` or `stop`.
        where: `batch_end`, or `batch_start`: of the next step, when this rank has posted its summary and read none.
        others: `ask` if the others ask for something then, and so wait for the summaries.
    """

    asks = ("log",)

    def __init__(self, rank: int, how: str, where: str, others: str) -> None:
        self.rank, self.act = rank, {"die": die, "hang": hang_for_ever, "stop": stop}[how]
        self.where, self.others = where, others
        self.ended: list[str] = []

    @on(TrainStart)
    def be_impatient(self, run: Run, event: TrainStart) -> None:
        assert isinstance(run.engine, DDPEngine)
        assert run.engine.watch is not None
        run.engine.watch.limits.report_after = run.engine.watch.limits.grace = 1.0

    @on(BatchStart, BatchEnd)
    def lose(self, run: Run, event: Event) -> None:
        if event.name == self.where and run.progress.steps == 2:
            if run.engine.rank == self.rank:
                self.act()
            elif self.others == "ask":
                run.control.request_log("to wait for the summaries")

    @on(RunFailed, RunClosed)
    def end(self, run: Run, event: RunFailed | RunClosed) -> None:
        self.ended.append(event.name)


def train(
    folder: Path,
    rank: int,
    how: str,
    where: str = "batch_end",
    others: str = "work",
    batches: int = 4,
    way: Way = "board",
) -> None:
    """Train with several ranks and lose one of them; the others write down what they saw of that.

    Args:
        folder: where to write.
        rank: which is lost.
        how: as `Lose`.
        where: as `Lose`.
        others: as `Lose`.
        batches: of all together; after two of each rank they wait for all summaries, as the epoch ends.
        way: how messages travel.
    """
    engine = DDPEngine(timeout=60.0 if how == "die" else 3.0)
    handler = logging.FileHandler(folder / f"{engine.rank}.log")
    logging.getLogger("heliograph").addHandler(handler)
    model, lose = nn.Linear(2, 1), Lose(rank, how, where, others)
    data = [torch.ones(2, 2) for _ in range(batches)]
    with travelling(way):
        run = Trainer([lose], engine=engine).run(
            Task(model), data, optimizer=torch.optim.SGD(model.parameters(), 0.1), epochs=1
        )
    assert engine.group is not None
    assert isinstance(engine.group.rounds, Board if way == "board" else GlooRounds)
    try:
        with run:
            for _ in run.epochs():
                for batch in run.batches():
                    run.step(run.stepping.forward(run, batch))
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
