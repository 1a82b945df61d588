"""The journal of a rank: faults, losses and ends of trainings; it outlives its processes."""

from __future__ import annotations

import json
import os
import pickle
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.spi import Store, Tracer, read_manifest

from .faults.acts import FaultAct
from .workspace import is_outside

if TYPE_CHECKING:
    from heliograph import Run, RunClosed
    from heliograph.spi import Fact

Entry = dict[str, Any]


class Journal:
    """A file with a line of JSON per entry, written at once because a kill may follow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._write = os.write  # a fault of the disk may replace it later
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, what: str, **facts: Any) -> None:
        self._write(self._file, json.dumps({"what": what, **facts}).encode() + b"\n")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}") if rank else path


def read(path: Path) -> Iterator[Entry]:
    # A kill may have truncated the last line.
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def refusal_in(paths: Iterable[Path]) -> str:
    return next((entry["text"] for path in paths for entry in read(path) if entry["what"] == "refused"), "")


def pack(fact: Fact) -> str:
    # Digests are enough for arrays.
    values = fact.leaves.items()
    small = {path: replace(leaf, sample=None) if hasattr(leaf.sample, "shape") else leaf for path, leaf in values}
    return b64encode(pickle.dumps(replace(fact, leaves=small))).decode()


def unpack(text: str) -> Fact:
    fact: Fact = pickle.loads(b64decode(text))  # noqa: S301
    return fact


class Witness:
    """Writes the journal of one training in this process.

    Attributes:
        faults: the numbers of the faults that acted in earlier processes.
        path: the journal of this rank.
        tracer: records facts.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self.path = of_rank(path, run.engine.rank)
        self.faults = {entry["number"] for entry in read(self.path) if entry["what"] == "fault"}
        self.tracer = Tracer(self._note_fact)
        self._journal, self._training = Journal(self.path), next(_trainings(os.getpid()))
        from heliograph import Checkpoint  # loaded already if the run uses it

        resumes = any(isinstance(plugin, Checkpoint) and plugin.resume.path == "auto" for plugin in run.plugins)
        self._journal.note("begin", training=self._training, resumes=resumes)

    def note_resume(self, run: Run) -> None:
        self._journal.note("resumed", training=self._training, batch=run.progress.batches)

    def note_save(self, checkpoint: Path) -> None:
        quality = quality_of(checkpoint)
        at = {} if quality == "without a manifest" else read_manifest(checkpoint).progress
        batch = int(at.get("earlier_batches", 0) + at.get("batch", 0))
        self._journal.note("saved", training=self._training, batch=batch, name=checkpoint.name, quality=quality)

    def note_batch(self, run: Run) -> None:
        # Waits for the device.
        self.tracer.losses(run)
        self._journal.note(
            "batch", training=self._training, batch=run.progress.batches, ends_step=not run.stepping.window
        )

    def note_act(self, number: int, act: FaultAct) -> None:
        facts = {"kind": act.fault.kind, "where": act.where, "text": act.text, "batch": act.batches}
        self._journal.note("fault", number=number, training=self._training, **facts)

    def note_answer(self, number: int, by: str, answer: str) -> None:
        self._journal.note("noticed", number=number, by=by, answer=answer)

    def note_end(self, run: Run, event: RunClosed, counts: Mapping[str, int], folder: Path) -> None:
        outside = [
            str(path) for path in (run.checkpoints.last, run.report.recording) if path and is_outside(path, folder)
        ]
        self.tracer.record(run, event)
        last = None if run.checkpoints.last is None or outside else str(run.checkpoints.last.absolute())
        recording = None if run.report.recording is None else str(run.report.recording.absolute())
        ended = {"status": event.status, "batch": run.progress.batches, "counts": counts, "outside": outside}
        self._journal.note("end", training=self._training, last=last, recording=recording, **ended)

    def _note_fact(self, fact: Fact) -> None:
        self._journal.note("fact", training=self._training, fact=pack(fact))

    def close(self) -> None:
        self._journal.close()


@cache
def _trainings(process: int) -> count[int]:
    # A fork has another process number and counts from 0.
    return count()


def quality_of(path: Path) -> str:
    try:
        read_manifest(path)
    except (OSError, ValueError):
        return "without a manifest"
    try:
        Store(path.parent, path.stem).verify(path)
    except (OSError, ValueError):
        return "damaged"
    return "intact"
