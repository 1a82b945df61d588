"""What a rank writes down of its training while it meets faults: every loss, every checkpoint, the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from heliograph.spi import Tracer, read_manifest

from .checkpoint_facts import quality_of
from .faults.acts import Act
from .journal import Journal, of_rank, pack, read
from .workspace import is_outside

if TYPE_CHECKING:
    from heliograph import Run, RunClosed
    from heliograph.spi import Fact


class Witness:
    """The journal of one training in this process.

    Args:
        path: of the journal of the main rank; another rank has its own beside it.
        run: of the training, which begins.

    Attributes:
        met: the numbers of the faults that had acted before, in other processes.
        path: of the journal of this rank.
        tracer: notes facts.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self.path = of_rank(path, run.engine.rank)
        self.met = {entry["number"] for entry in read(self.path) if entry["what"] == "fault"}
        self.tracer = Tracer(self._note_fact)
        self._journal, self._training = Journal(self.path), next(_trainings(os.getpid()))
        from heliograph import Checkpoint  # the run has loaded it, if it has one

        resumes = any(isinstance(each, Checkpoint) and each.resume.path == "auto" for each in run.plugins)
        self._journal.note("begin", training=self._training, resumes=resumes)

    def note_resume(self, run: Run) -> None:
        """Note where the training was continued."""
        self._journal.note("resumed", training=self._training, batch=run.progress.batches)

    def note_save(self, checkpoint: Path) -> None:
        """Note that a checkpoint was announced, from which the training can continue, and whether it is intact."""
        quality = quality_of(checkpoint)
        at = {} if quality == "without a manifest" else read_manifest(checkpoint).progress
        batch = int(at.get("earlier_batches", 0) + at.get("batch", 0))
        self._journal.note("saved", training=self._training, batch=batch, name=checkpoint.name, quality=quality)

    def note_batch(self, run: Run) -> None:
        """Note the losses of a batch, and whether a step boundary may follow; waits for the device."""
        self.tracer.losses(run)
        self._journal.note(
            "batch", training=self._training, batch=run.progress.batches, ends_step=not run.stepping.window
        )

    def note_act(self, number: int, act: Act) -> None:
        """Note that a fault acts now."""
        facts = {"kind": act.fault.kind, "where": act.where, "text": act.text, "batch": act.batches}
        self._journal.note("fault", number=number, training=self._training, **facts)

    def note_answer(self, number: int, by: str, answer: str) -> None:
        """Note who has noticed a fault in numbers."""
        self._journal.note("noticed", number=number, by=by, answer=answer)

    def note_end(self, run: Run, event: RunClosed, counts: Mapping[str, int], folder: Path) -> None:
        """Note how the training has ended, with what, and what was written outside of its folder."""
        outside = [
            str(each) for each in (run.checkpoints.last, run.report.recording) if each and is_outside(each, folder)
        ]
        self.tracer.record(run, event)
        last = None if run.checkpoints.last is None or outside else str(run.checkpoints.last.absolute())
        recording = None if run.report.recording is None else str(run.report.recording.absolute())
        ended = {"status": event.status, "batch": run.progress.batches, "counts": counts, "outside": outside}
        self._journal.note("end", training=self._training, last=last, recording=recording, **ended)

    def _note_fact(self, fact: Fact) -> None:
        self._journal.note("fact", training=self._training, fact=pack(fact))

    def close(self) -> None:
        """Close the file."""
        self._journal.close()


@cache
def _trainings(process: int) -> count[int]:
    """Return what counts the trainings of a process; a copy of one begins anew."""
    return count()
