"""The plugin that injects faults into a training."""

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

from .faults.acts import Baseline, FaultAct, kill, strike
from .faults.fault import EVENTS, KINDS, Fault

if TYPE_CHECKING:
    from .faults.disk import DiskFaults
    from .faults.replacements import JumpingClock
    from .journal import Witness

GRACE = 2  # batches between a lost notice and the kill


class Chaos(Plugin):
    """Inject faults at events of a training, each once, and equal ones for equal seeds.

    Emissions of each event are counted, and checkpoints contain the counts, so a resumed training meets a fault at the
    same place as an uninterrupted one. Register it last. `acts` lists the faults that have acted and the plugins that
    noticed them. It is for tests: it counts every event and, with a journal, reads every loss.

    Args:
        faults: the faults.
        seed: selects the parameter, the number and the bit of faults in numbers.
        journal: a file for faults and losses, so that the process after a kill does not repeat a fault. It must be
            outside the folder of the run, and is required if a fault ends the process.
        disk: the folder for faults of the disk; by default the current one. See `WatchedDisk` for what is covered.

    Raises:
        TypeError: an item is not a fault.
        ValueError: a fault ends the process, but there is no journal.
    """

    exclusive = ("chaos",)
    rehearses = False
    affects_training = False  # its effects are in the journal, not in its state

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
                raise TypeError(f"faults must be a list of Fault(kind, at=..., count=...), got {fault!r}.")
            if journal is None and KINDS[fault.kind].ends:
                raise ValueError(
                    f"{fault} ends the process, and the next process would repeat it: pass journal=, a file outside "
                    f"the folder of the run."
                )
        self.acts: list[FaultAct] = []
        self._path = None if journal is None else Path(journal).absolute()
        self._folder = Path(disk).absolute()
        self._done: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._witness: Witness | None = None
        self._disk: DiskFaults | None = None
        self._clock: JumpingClock | None = None
        self._unnoticed: tuple[int, Baseline] | None = None  # the last fault in numbers, until it is noticed
        self._loses_request: int | None = None
        self._batches_to_kill: int | None = None
        self._run: Run | None = None

    def reset(self) -> None:
        """Forget the previous training."""
        self.close()
        self.acts, self._counts, self._done = [], Counter(), set()
        self._unnoticed = self._loses_request = self._batches_to_kill = None

    def describe(self, run: Run) -> str:
        """Return the number of faults."""
        return f"injects {len(self.faults)} faults" if self.faults else ""

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Open the journal."""
        self._run = run
        if self._path is not None:
            from .journal import Witness

            self._witness = Witness(self._path, run)
            self._done = self._witness.faults

    @on(CheckpointLoaded, lane=Lane.TRANSFORM, optional=True)
    def note_resume(self, run: Run, event: CheckpointLoaded) -> None:
        # A rollback is not a resume.
        if self._witness is not None and run.checkpoints.resumed_from == event.path:
            self._witness.note_resume(run)

    @on(CheckpointSaved, lane=Lane.REPORT, optional=True)
    def note_save(self, run: Run, event: CheckpointSaved) -> None:
        if self._witness is not None and run.checkpoints.last == event.path:
            self._witness.note_save(event.path)

    @on(Log, ValidationEnd, lane=Lane.REPORT, optional=True)
    def note_metrics(self, run: Run, event: Log | ValidationEnd) -> None:
        if self._witness is not None:
            self._witness.tracer.metrics(run, event)

    @on(*EVENTS, lane=Lane.TRANSFORM, optional=True)
    def arrive(self, run: Run, event: Event) -> None:
        """Count an event, and apply faults that must act before other handlers."""
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
        """Apply the other faults, after all handlers."""
        if isinstance(event, BatchEnd):
            self._end_batch(run)
        self._check_answer(run)
        for number, fault in self._due(event):
            if not fault.is_at_operation and not (isinstance(event, EpochStart) and event.resumed):
                self._act(run, number)
        if self._loses_request is not None and run.control.withdraw("save", "a fault: the request is lost", by="chaos"):
            self._note(run, self._loses_request, "the request for a save is lost")
            self._loses_request = None

    @on(RunFailed, lane=Lane.REPORT)
    def note_failure(self, run: Run, event: RunFailed) -> None:
        # An error of the disk does not answer a fault in numbers.
        if not isinstance(event.error, OSError):
            self._record_answer(event.plugin or "the run", f"{type(event.error).__name__}: {event.error}")

    @on(RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: RunClosed) -> None:
        """Record the end of the training."""
        self._check_answer(run)
        if self._witness is not None and run.optimizer is not None:
            self._witness.note_end(run, event, self._counts, self._folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of emissions of each event."""
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers of emissions."""
        self._counts = Counter(state)

    def close(self) -> None:
        """Restore the replaced functions, and close the journal."""
        if self._disk is not None:
            self._disk.close()
        if self._clock is not None:
            self._clock.close()
        if self._witness is not None:
            self._witness.close()
        self._disk = self._clock = self._witness = self._run = None

    def _due(self, event: Event) -> list[tuple[int, Fault]]:
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
            from .faults.replacements import JumpingClock

            self._clock = self._clock or JumpingClock()
            self._note(run, number, f"the clock jumps by {fault.seconds:+g} s")
            self._clock.jump(fault.seconds)
        elif KINDS[fault.kind].changes_numbers:
            from .faults.acts import change

            baseline = Baseline.now(run)
            self._note(run, number, change(fault.kind, run, Random(f"{self.seed} {number}")))
            self._unnoticed = number, baseline
        else:
            self._note(run, number, KINDS[fault.kind].text)
            if fault.kind == "lost-notice":
                self._batches_to_kill = GRACE
            strike(fault)

    def _end_batch(self, run: Run) -> None:
        if self._witness is not None:
            self._witness.note_batch(run)
        if self._batches_to_kill is not None:
            self._batches_to_kill -= 1
            if self._batches_to_kill <= 0:
                kill()

    def _arm(self, run: Run, number: int) -> None:
        from .faults.disk import DiskFaults

        self._done.add(number)
        if self._disk is None:
            journal = None if self._witness is None else self._witness.path
            self._disk = DiskFaults(self._folder, partial(self._note, run), journal)
        self._disk.add(number, self.faults[number])

    def _note(self, run: Run, number: int, text: str) -> None:
        at, fault = run.progress, self.faults[number]
        where = f"epoch {at.epoch}, batch {at.batch}, step {at.steps}, in {fault.at}"
        self.acts.append(FaultAct(fault, where, text, at.batches))
        if self._witness is not None:
            self._witness.note_act(number, self.acts[-1])

    def _check_answer(self, run: Run) -> None:
        if self._unnoticed is not None and (answer := self._unnoticed[1].answer(run)) is not None:
            self._record_answer(*answer)

    def _record_answer(self, by: str, answer: str) -> None:
        if self._unnoticed is None:
            return
        number, self._unnoticed = self._unnoticed[0], None
        self.acts = [
            replace(act, noticed_by=by, answer=answer) if act.fault is self.faults[number] else act for act in self.acts
        ]
        if self._witness is not None:
            self._witness.note_answer(number, by, answer)
