"""Trainings with WandB and Trackio, and what these hold of them.

Run as a script, `python tracker_runs.py FOLDER`, it makes trainings that are killed by SIGKILL and resumed, in forked
children: only one process imports torch. Each has a folder and a project of Trackio with its name:

- `lost`: W&B has put nothing on the disk when the run is killed.
- `seen`: what was logged beyond the checkpoint is on the disk.
- `back`: the run is killed after it went back to its checkpoint, which was taken before.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import heliograph as h
from heliograph.tests.kills import in_a_child
from heliograph.tests.kit import class_batches, fit, linear_classifier, saving
from heliograph_trackers import Trackio, WandB
from heliograph_trackers import wandb as wandb_module
from heliograph_trackers.wandb import records, rows

SAVED_AT, KILLED_AT, STEPS = 10, 13, 20
Loss = tuple[int, int, float]  # the step, the number of rollbacks, the loss


class Killer(h.Plugin):
    """Kills the process at a step, when both trackers have written all that was logged."""

    policy = "observer"

    def __init__(self, scenario: str, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.left = 2 if scenario == "back" else 1

    @h.on(h.StepEnd)
    def kill(self, run: h.Run, event: h.StepEnd) -> None:
        """Die at a step of which nothing was logged yet."""
        self.left -= run.progress.steps == KILLED_AT
        if not self.left:
            while run.plugins["wandb"]._outbox._queue or run.plugins["trackio"]._outbox._queue:
                Event().wait(0.02)
            expected = (KILLED_AT - 1, int(self.scenario == "back"))
            while self.scenario != "lost" and expected not in places(wandb_losses(self.folder)):
                Event().wait(0.02)
            os.kill(os.getpid(), signal.SIGKILL)


class Speaker(h.Plugin):
    """Prints where the run is, once the page is open."""

    policy = "observer"

    @h.on(h.StepEnd)
    def speak(self, run: h.Run, event: h.StepEnd) -> None:
        """Print a line in each attempt."""
        if run.progress.steps in (1, SAVED_AT + 1) and run.plugins["wandb"]._page is None:
            while run.plugins["wandb"]._page is None:
                Event().wait(0.02)
            print(f"step {run.progress.steps}", flush=True)


def wandb_files(folder: Path) -> list[Path]:
    """Return W&B's files, the oldest first."""
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.stat().st_ctime_ns)


def wandb_records(path: Path) -> list[Any]:
    """Return what is in one of W&B's files."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # its classes are made when it is imported
    return [messages.Record.FromString(content) for content in records(path.read_bytes())]


def wandb_losses(folder: Path) -> list[Loss]:
    """Return the losses in W&B's files."""
    return _losses(row for path in wandb_files(folder) for row in rows(path))


def trackio_rows(project: str) -> list[dict[str, Any]]:
    """Return the rows of the only run of a project."""
    from trackio.sqlite_storage import SQLiteStorage

    (known,) = SQLiteStorage.get_run_records(project)
    return SQLiteStorage.get_logs(project, run_id=known["id"])


def trackio_losses(project: str) -> list[Loss]:
    """Return the losses in Trackio's database."""
    return _losses(trackio_rows(project))


def _losses(found: Any) -> list[Loss]:
    return [(row["step"], row["rollbacks"], row["train/loss"]) for row in found if "train/loss" in row]


def places(losses: list[Loss]) -> list[tuple[int, int]]:
    """Return the steps and the numbers of rollbacks of losses."""
    return [(step, rollbacks) for step, rollbacks, _ in losses]


def train(scenario: str, folder: Path, *plugins: Any) -> h.RunResult:
    """Train for 20 steps that are all logged, with a checkpoint at the tenth; `back` cannot use the fifteenth batch."""
    batches = class_batches(STEPS + (scenario == "back"))
    exact = saving(folder / "saved", h.Every(steps=SAVED_AT), resume="auto")
    if scenario == "back":
        batches[14][0].fill_(float("nan"))
        exact.append(h.RollBack())
    trainer = h.Trainer([h.LogSchedule(h.Every(steps=1)), *exact, *plugins], device="cpu")
    return fit(trainer, task=linear_classifier(), train=batches)


def attempt(scenario: str, folder: Path, *plugins: Any) -> None:
    """Train in this process, with trackers that fail the run where anything is wrong."""
    if scenario == "lost" and plugins:
        wandb_module.FLUSH = 0.0  # type: ignore[misc]  # W&B writes its file at the end, or where a block is full
    trackers = [WandB(mode="offline", folder=folder), Trackio(scenario), Speaker()]
    result = train(scenario, folder, *trackers, *plugins)
    assert (result.status, result.warnings, result.plugin_errors) == ("completed", (), {}), result


def on_two_ranks(folder: Path) -> tuple[tuple[str, ...], list[str | None]]:
    """Train as one of two ranks; return the warnings of the result, and the pages that the states name."""
    os.environ["TRACKIO_DIR"] = str(folder)  # before it is imported
    trackers = [WandB(mode="offline", folder=folder), Trackio("ranks")]
    plugins = [h.RNGCapture(), h.LogSchedule(h.Every(steps=1)), *trackers]
    result = fit(h.Trainer(plugins, engine=h.DDPEngine(timeout=60.0)), train=class_batches(4, 2))
    return result.warnings, [each.state_dict()["page"] for each in trackers]


def in_the_middle(act: Callable[[h.Run], None]) -> h.Plugin:
    """Return a plugin that acts once, when the first step has ended."""

    class Acts(h.Plugin):
        @h.on(h.StepEnd, when=h.Once())
        def act(self, run: h.Run, event: h.StepEnd) -> None:
            act(run)

    return Acts()


def end_as(status: str) -> h.Plugin:
    """Return a plugin that ends a run, after its first step, in a way."""

    def end(run: h.Run) -> None:
        if status == "failed":
            raise RuntimeError("a fault")
        if status == "interrupted":
            raise KeyboardInterrupt
        if status != "completed":
            run.control.stop("enough", required=status == "preempted")

    return in_the_middle(end)


if __name__ == "__main__":
    os.environ["TRACKIO_DIR"] = sys.argv[1]
    import trackio  # noqa: F401
    import wandb  # noqa: F401

    for each in ("lost", "seen", "back"):
        place = Path(sys.argv[1]) / each
        in_a_child(lambda: attempt(each, place, Killer(each, place)), killed=True, about=f"{each}, killed")  # noqa: B023
        in_a_child(lambda: attempt(each, place), killed=False, about=f"{each}, resumed")  # noqa: B023
