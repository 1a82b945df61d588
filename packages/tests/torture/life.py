"""One attempt of a random program, in a process of its own: it writes down what it does, and kills itself on order."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple, cast
from unittest.mock import patch

import heliograph as h
from heliograph.core.checkpoint import storage
from heliograph.core.objects.equality import Leaf, leaves
from heliograph.core.run import TrainRun
from heliograph.packages.tests.torture.assembly import parts_of, train
from heliograph.packages.tests.torture.files import WatchedFiles, kind_of
from heliograph.packages.tests.torture.program import LATER, Kill, Program

LINE = struct.Struct("<iid")
COMPARED = ("progress", "modules", "optimizers", "schedulers", "task", "metrics", "plugins", "control")
OF_THE_PROCESS = ("checkpoint", "recorder")  # plugins whose states name files and dates
KILLED = 9  # the exit status of an attempt that ends itself without a signal


class Step(NamedTuple):
    """A batch that is done: in which attempt, how many there were with it, and its loss."""

    attempt: int
    batch: int
    loss: float


@dataclass(frozen=True, slots=True)
class End:
    """What an attempt that came to its end leaves: what its report lists, and all that is compared."""

    reasons: tuple[str, ...]
    resumed: bool
    facts: Mapping[str, Leaf] = field(repr=False)


class Killer:
    """Ends this process where it is asked to.

    Args:
        kill: the place of the kill; None without one.
        journal: a file descriptor to which every batch is written.
        attempt: the number of this attempt.
        edited: a file that lists the state that the program sets differently at a resume.
    """

    __module__ = h.Plugin.__module__  # its state is of the attempt, not of the program: it is not restored

    def __init__(self, kill: Kill | None, journal: int, attempt: int, edited: Path) -> None:
        self._kill, self._journal, self._attempt, self._edited = kill, journal, attempt, edited
        self._batches = self._saved = -1

    def watch(self, trainer: h.Trainer) -> None:
        """Receive what counts, and what kills."""
        receive = trainer.bus.on
        receive(h.BatchEnd, self._note, lane=h.Lane.REPORT)
        receive(h.SavePoint, self._note_save, lane=h.Lane.REPORT)
        receive(h.EpochStart, self._begin, lane=h.Lane.TRANSFORM)
        if self._kill is None or " " in self._kill.at:
            return
        first = h.Lane.TRANSFORM if self._kill.before else h.Lane.REPORT
        receive(getattr(h, self._kill.at), self._at_event, lane=first)

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Kill before or after an operation on files."""
        is_it = self._kill is not None and self._kill.at == name and self._is_due(0)
        if is_it and self._kill is not None and self._kill.before:
            self._strike()
        yield
        if is_it:
            self._strike()

    def _begin(self, run: h.Run, event: h.EpochStart) -> None:
        if self._batches < 0:
            self._batches = self._saved = run.progress.batches
            with self._edited.open("a") as file:
                edited = cast(TrainRun, run).checkpoints.edited
                file.writelines(f"{path}\n" for path in edited if not path.startswith("module __main__"))

    def _note(self, run: h.Run, event: h.BatchEnd) -> None:
        self._batches = run.progress.batches
        loss = 0.0 if run.loss is None or run.control.skips_batch else float(run.loss.detach())
        os.write(self._journal, LINE.pack(self._attempt, self._batches, loss))
        if self._is_due(LATER):
            self._strike()

    def _note_save(self, run: h.Run, event: h.SavePoint) -> None:
        self._saved = run.progress.batches

    def _at_event(self, run: h.Run, event: h.Event) -> None:
        if self._is_due(0):
            self._strike()

    def _is_due(self, later: int) -> bool:
        kill = self._kill
        if kill is None:
            return False
        return self._batches >= kill.batch + later and self._batches - self._saved >= kill.repeats

    def _strike(self) -> None:
        assert self._kill is not None
        if self._kill.way == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(KILLED)


class QuickFiles(WatchedFiles):
    """Waits for no disk: what a killed process has written stays written."""

    def sync(self, file: FileIO) -> None:
        """Show that it would be synced."""
        with self.operation(f"sync {kind_of(Path(str(file.name)))}"):
            pass

    def sync_folder(self, folder: Path) -> None:
        """Show that it would be synced."""
        with self.operation("sync folder"):
            pass


def live(program: Program, folder: Path, attempt: int, kill: Kill | None) -> None:
    """Train from the newest checkpoint on, to the end or until killed; leave a journal, and what the end was."""
    warnings.simplefilter("ignore")
    logging.getLogger("heliograph").setLevel(logging.ERROR)
    journal = os.open(folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    edited = folder / "edited"
    killer, facts = Killer(kill, journal, attempt, edited), dict[str, Leaf]()

    def watched(trainer: h.Trainer) -> None:
        killer.watch(trainer)
        trainer.bus.on(h.RunClosed, lambda run, event: facts.update(facts_of(run)), lane=h.Lane.REPORT)

    files = QuickFiles(killer.operation)
    with patch.object(storage, "Store", partial(storage.Store, files=files)):
        result = train(parts_of(program, folder, attempt), watched)
    said = result.resume
    assert said is not None
    changed = (f"changed by the program: {path}" for path in edited.read_text().splitlines())
    reasons = (*said.reasons, *changed, *filter(None, [said.divergence]))
    end = End(reasons, said.path is not None, facts)
    (folder / "end").write_bytes(pickle.dumps(end))


def facts_of(run: h.Run) -> dict[str, Leaf]:
    """Return all that must be equal in the end, by its path."""
    state = {name: value for name, value in run.state_dict().items() if name in COMPARED}
    state["progress"] = {name: value for name, value in state["progress"].items() if name != "earlier_seconds"}
    state["plugins"] = {name: value for name, value in state["plugins"].items() if name not in OF_THE_PROCESS}
    state["buffers"] = {name: dict(module.named_buffers()) for name, module in run.modules.items()}
    return leaves(state)


def end_of(folder: Path) -> End | None:
    """Return what the attempt left that came to its end, None where none did."""
    path = folder / "end"
    return pickle.loads(path.read_bytes()) if path.exists() else None


def steps_of(folder: Path) -> list[Step]:
    """Return every batch that was done, in the order in which it was, also the ones that a kill undid."""
    path = folder / "journal"
    return [Step(*line) for line in LINE.iter_unpack(path.read_bytes())] if path.exists() else []
