"""Kill trainings with SIGKILL and resume them; print how the repeated steps compare.

Run as a script: `python repeated_kills.py FOLDER`. Each attempt is a forked child: only one process imports torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph.tests.kills import in_a_child
from heliograph.tests.kit import adam, fit, random_batches, saving
from heliograph_recorder import Recorder
from torch import Tensor, nn

SAVES = 5  # steps
END = 25
STORIES: dict[str, tuple[int, ...]] = {  # the batches that the attempts are killed after, 0 for the end of the run
    "plain": (13, 0),
    "chain": (13, 12, 19, 0),
    "at_the_save": (15, 0),
    "counts": (13, 0),
    "leaves_out": (13, 0),
    "two_losses": (13, 0),
    "second_loss_differs": (13, 0),
    "accumulates": (33, 0),
}


class Witness(h.Plugin):
    """Dies where it is to; writes down what is reported of the comparison, and where."""

    affects_training = False

    def __init__(self, folder: Path, kill_at: int) -> None:
        self.folder, self.kill_at = folder, kill_at

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def die(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.batches == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    @h.on(h.ResumeVerified)
    def note(self, run: h.Run, event: h.ResumeVerified) -> None:
        with (self.folder / "reported").open("a") as file:
            file.write(json.dumps([run.progress.batches, event.steps, event.difference]) + "\n")


class LeavesOut(h.Plugin):
    """Leaves out the twelfth batch."""

    asks = ("skip_batch",)

    @h.on(h.BatchStart)
    def skip(self, run: h.Run, event: h.BatchStart) -> None:
        if run.progress.batches == 11:
            run.control.skip_batch("it is the twelfth")


@cache
def calls() -> list[int]:
    """Return what this process counts: in the cache of a function, which nobody looks at."""
    return [0]


class Counting(h.Supervised):
    """Changes the loss of its third batch in this process."""

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        calls()[0] += 1
        return super().training_step(run, batch) * (1.5 if calls()[0] == 3 else 1.0)


class TwoLosses(h.Task):
    """One network in every batch, the other in every second one."""

    def __init__(self, *, counts: bool) -> None:
        self.one, self.other, self.counts = nn.Linear(4, 2), nn.Linear(4, 2), counts

    def training_step(self, run: h.Run, batch: Any) -> Iterator[tuple[str, Tensor]]:
        inputs, targets = batch
        calls()[0] += self.counts
        yield "one", nn.functional.mse_loss(self.one(inputs), targets)
        if run.progress.batches % 2:
            loss = nn.functional.mse_loss(self.other(inputs), targets)
            yield "other", loss * (1.5 if calls()[0] == 2 else 1.0)


def train(name: str, folder: Path, kill_at: int) -> h.RunResult:
    """Train one attempt."""
    torch.manual_seed(0)
    batches = random_batches(10, 3)
    plugins: list[Any] = [
        *saving(folder, h.Every(steps=SAVES), resume="auto"),
        Recorder(folder),
        Witness(folder, kill_at),
    ]
    plugins += [LeavesOut()] if name == "leaves_out" else []
    plugins += [h.GradientAccumulation(2)] if name == "accumulates" else []
    optimizer: Any = adam()
    task: Any = (Counting if name == "counts" else h.Supervised)(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)), nn.functional.mse_loss
    )
    if name in ("two_losses", "second_loss_differs"):
        task = TwoLosses(counts=name == "second_loss_differs")
        optimizer = {each: adam() for each in ("one", "other")}
    return fit(*plugins, task=task, train=batches, optimizer=optimizer, steps=END)


def attempt(name: str, folder: Path, kill_at: int) -> None:
    """In a child: train, and write down how it went."""
    result = train(name, folder, kill_at)
    assert result.resume is not None
    reported = {
        "steps": result.resume.verified_steps,
        "difference": result.resume.divergence,
        "reasons": result.resume.reasons,
        "text": str(result),
        "story": result.explain(),
    }
    (folder / "result").write_text(json.dumps(reported))


def main(folder: Path, names: list[str]) -> None:
    """Fork a child for each attempt of these stories, and wait for its end."""
    torch.set_num_threads(1)
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        for kill_at in STORIES[name]:
            in_a_child(partial(attempt, name, folder / name, kill_at), killed=bool(kill_at), about=name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
