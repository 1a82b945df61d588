"""A plugin that lets a training meet faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from heliograph import (
    BatchEnd,
    CheckpointLoaded,
    CheckpointSaved,
    EpochStart,
    Lane,
    Log,
    Plugin,
    Run,
    RunClosed,
    RunFailed,
    TrainStart,
    ValidationEnd,
    on,
)
from heliograph.events import Event

from .faults.acts import Act, Since, kill, strike
from .faults.fault import EVENTS, KINDS, Fault

if TYPE_CHECKING:
    from .faults.clock import Clock
    from .faults.disk_faults import DiskFaults
    from .witness import Witness

GRACE = 2  # batches between a notice that was lost and the kill


class Chaos(Plugin):
    """Let faults happen at events of a training, each once, the same ones at the same events for the same seed.

    The emissions of each event are counted, and the counts are in every checkpoint, so a resumed training meets a fault
    where an uninterrupted one would. Add it last. What has acted is in `acts`, with who has noticed it. It is for
    tests: it counts every event, and where there is a journal, it reads every loss.

    Args:
        faults: what is to happen.
        seed: chooses the parameter, the number and the bit of faults in numbers.
        journal: a file that notes what has happened, so that the process after a kill does not repeat it, and every
            loss; must be outside of the run's folder. Needed where a fault ends the process.
        disk: the folder in whose files faults of the disk act; by default the current one. See `Disk` for what is
            covered.

    Raises:
        TypeError: something is not a fault.
        ValueError: a fault ends the process, and there is no journal.
    """

    exclusive = ("chaos",)
    rehearses = False
    affects_training = False  # what has happened is in the journal: a resume need not compare it

    def __init__(
        self,
        faults: Iterable[Fault] = (),
        *,
        seed: int = 0,
        journal: str | Path | None = None,
        disk: str | Path = ".",
    ) -> None:
        self.faults, self.seed = tuple(faults), seed
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise TypeError(f"Chaos(faults) takes a list of Fault(kind, at=..., count=...), got {fault!r}.")
            if journal is None and KINDS[fault.kind].ends:
                raise ValueError(
                    f"{fault} ends the process, and the next one would meet it again: give Chaos a journal=, a file "
                    f"outside of the run's folder."
                )
        self.acts: list[Act] = []
        self._path = None if journal is None else Path(journal).absolute()
        self._folder = Path(disk).absolute()
        self._done: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._witness: Witness | None = None
        self._disk: DiskFaults | None = None
        self._clock: Clock | None = None
        self._unnoticed: tuple[int, Since] | None = None  # the last act in numbers, while nobody has noticed
        self._loses_request: int | None = None
        self._killed_after: int | None = None
        self._run: Run | None = None

    def reset(self) -> None:
        """Forget the former training."""
        self.close()
        self.acts, self._counts, self._done = [], Counter(), set()
        self._unnoticed = self._loses_request = self._killed_after = None

    def describe(self, run: Run) -> str:
        """Say how many faults there will be."""
        return f"lets the training meet {len(self.faults)} faults" if self.faults else ""

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Open the journal."""
        self._run = run
        if self._path is not None:
            from .witness import Witness

            self._witness = Witness(self._path, run)
            self._done = self._witness.met

    @on(CheckpointLoaded, lane=Lane.TRANSFORM, optional=True)
    def note_resume(self, run: Run, event: CheckpointLoaded) -> None:
        """Note that the training was continued; a run that rolls back was not."""
        if self._witness is not None and run.checkpoints.resumed_from == event.path:
            self._witness.note_resume(run)

    @on(CheckpointSaved, lane=Lane.REPORT, optional=True)
    def note_save(self, run: Run, event: CheckpointSaved) -> None:
        """Note that there is a checkpoint from which the training can continue."""
        if self._witness is not None and run.checkpoints.last == event.path:
            self._witness.note_save(event.path)

    @on(Log, ValidationEnd, lane=Lane.REPORT, optional=True)
    def note_metrics(self, run: Run, event: Log | ValidationEnd) -> None:
        """Note what was measured."""
        if self._witness is not None:
            self._witness.tracer.metrics(run, event)

    @on(*EVENTS, lane=Lane.TRANSFORM, optional=True)
    def arrive(self, run: Run, event: Event) -> None:
        """Count an event; let what changes numbers, and what waits for operations on files, act before the others."""
        if isinstance(event, EpochStart) and event.resumed:
            return
        self._counts[event.name] += 1
        for number, fault in self._due(event):
            if fault.is_at_operation:
                self._arm(run, number)
            elif KINDS[fault.kind].changes_numbers and fault.kind != "bit-in-weight":
                self._act(run, number)

    @on(*EVENTS, lane=Lane.REPORT, optional=True)
    def leave(self, run: Run, event: Event) -> None:
        """Let the other faults act, after all handlers."""
        if isinstance(event, BatchEnd):
            self._end_batch(run)
        self._look(run)
        for number, fault in self._due(event):
            if not fault.is_at_operation and not (isinstance(event, EpochStart) and event.resumed):
                self._act(run, number)
        if self._loses_request is not None and run.control.withdraw("save", "a fault: the request is lost", by="chaos"):
            self._note(run, self._loses_request, "the request to save is lost")
            self._loses_request = None

    @on(RunFailed, lane=Lane.REPORT)
    def note_failure(self, run: Run, event: RunFailed) -> None:
        """Note who has failed the run, if that is an answer to a fault in numbers; an error of the disk is not."""
        if not isinstance(event.error, OSError):
            self._notice(event.plugin or "the run", f"{type(event.error).__name__}: {event.error}")

    @on(RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: RunClosed) -> None:
        """Note how the training has ended, and with what."""
        self._look(run)
        if self._witness is not None and run.optimizer is not None:
            self._witness.note_end(run, event, self._counts, self._folder)

    def state_dict(self) -> dict[str, Any]:
        """Return how often each event has come."""
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on."""
        self._counts = Counter(state)

    def close(self) -> None:
        """Put the functions of the system back, and close the journal."""
        if self._disk is not None:
            self._disk.close()
        if self._clock is not None:
            self._clock.close()
        if self._witness is not None:
            self._witness.close()
        self._disk = self._clock = self._witness = self._run = None

    def _due(self, event: Event) -> list[tuple[int, Fault]]:
        """Return the faults of this rank that an emission is the time of, with their numbers."""
        rank = 0 if self._run is None else self._run.engine.rank
        return [
            (number, fault)
            for number, fault in enumerate(self.faults)
            if fault.at == event.name
            and fault.count == self._counts[event.name]
            and fault.rank == rank
            and number not in self._done
        ]

    def _act(self, run: Run, number: int) -> None:
        fault = self.faults[number]
        self._done.add(number)
        if fault.kind == "lost-request":
            self._loses_request = number
        elif fault.kind == "clock-jump":
            from .faults.clock import Clock

            self._clock = self._clock or Clock()
            self._note(run, number, f"the clock is put by {fault.seconds:+g} s")
            self._clock.jump(fault.seconds)
        elif KINDS[fault.kind].changes_numbers:
            from .faults.numbers import change

            since = Since.now(run)
            self._note(run, number, change(fault.kind, run, Random(f"{self.seed} {number}")))
            self._unnoticed = number, since
        else:
            self._note(run, number, KINDS[fault.kind].text)
            if fault.kind == "lost-notice":
                self._killed_after = GRACE
            strike(fault)

    def _end_batch(self, run: Run) -> None:
        if self._witness is not None:
            self._witness.note_batch(run)
        if self._killed_after is not None:
            self._killed_after -= 1
            if self._killed_after <= 0:
                kill()

    def _arm(self, run: Run, number: int) -> None:
        """Let a fault wait for an operation on files."""
        from .faults.disk_faults import DiskFaults

        self._done.add(number)
        if self._disk is None:
            spare = None if self._witness is None else self._witness.path
            self._disk = DiskFaults(self._folder, partial(self._note, run), spare)
        self._disk.add(number, self.faults[number])

    def _note(self, run: Run, number: int, text: str) -> None:
        """Write down that a fault acts now."""
        at, fault = run.progress, self.faults[number]
        where = f"epoch {at.epoch}, batch {at.batch}, step {at.steps}, in {fault.at}"
        self.acts.append(Act(fault, where, text, at.batches))
        if self._witness is not None:
            self._witness.note_act(number, self.acts[-1])

    def _look(self, run: Run) -> None:
        """Look whether some plugin has answered the last fault in numbers."""
        if self._unnoticed is not None and (answer := self._unnoticed[1].answer(run)) is not None:
            self._notice(*answer)

    def _notice(self, by: str, answer: str) -> None:
        if self._unnoticed is None:
            return
        number, self._unnoticed = self._unnoticed[0], None
        self.acts = [
            replace(act, noticed_by=by, answer=answer) if act.fault is self.faults[number] else act for act in self.acts
        ]
        if self._witness is not None:
            self._witness.note_answer(number, by, answer)
