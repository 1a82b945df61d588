"""The plugin that injects faults into a training."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from random import Random
from typing import Any

import torch
from heliograph import Lane, Plugin, Run, on
from heliograph import events as ev
from heliograph.spi import Fact, Store, Tracer, leaves
from torch import Tensor

from .disk import DiskFaults, JumpingClock, WatchedDisk, replaced
from .fault import EVENTS, KINDS, Fault, FaultOutcome
from .story import AT_THE_END, Journal, of_rank, read

SOON = 2  # batches after a fault in which a request counts as an answer
OF_A_PROCESS = (".lock", ".holder", ".steps", ".verified.jsonl")  # files that stay after a kill
ANSWERS = frozenset({"stop", "skip_step", "skip_batch", "roll_back"})  # requests that answer bad numbers
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


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
        self, faults: Iterable[Fault] = (), *, seed: int = 0, journal: str | Path | None = None, disk: str | Path = "."
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
        self._path = None if journal is None else Path(journal).absolute()
        self._folder = Path(disk).absolute()
        self._acts: dict[int, FaultOutcome] = {}
        self._done: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._rank = 0
        self._tracer = Tracer(self._note_fact)
        self._journal: Journal | None = None
        self._disk: DiskFaults | None = None
        self._clock: JumpingClock | None = None
        self._opened = ExitStack()
        self._unnoticed: tuple[int, Baseline] | None = None  # the last fault in numbers, until it is noticed

    @property
    def acts(self) -> list[FaultOutcome]:
        """The faults that have acted in this process, in order."""
        return [*self._acts.values()]

    def reset(self) -> None:
        """Forget the previous training."""
        self.close()
        self._acts, self._counts, self._done, self._unnoticed = {}, Counter(), set(), None

    def describe(self, run: Run) -> str:
        """Return the number of faults."""
        return f"injects {len(self.faults)} faults" if self.faults else ""

    @on(ev.TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Open the journal."""
        self._rank = run.engine.rank
        if self._path is not None:
            path = of_rank(self._path, self._rank)
            self._done = {entry["number"] for entry in read(path) if entry["what"] == "fault"}
            self._journal = Journal(path)
            self._opened.callback(self._journal.close)
            self._journal.note("begin")

    @on(ev.CheckpointLoaded, lane=Lane.TRANSFORM, optional=True)
    def note_resume(self, run: Run, event: ev.CheckpointLoaded) -> None:
        # A rollback is not a resume.
        if self._journal is not None and run.checkpoints.resumed_from == event.path:
            self._journal.note("resumed", batch=run.progress.batches)

    @on(ev.CheckpointSaved, lane=Lane.REPORT, optional=True)
    def note_save(self, run: Run, event: ev.CheckpointSaved) -> None:
        if self._journal is None or run.checkpoints.last != event.path:
            return
        if (saved := _verify(event.path)) is None:
            self._journal.note("damaged", name=event.path.name)
        else:
            self._journal.note("saved", batch=int(saved.get("earlier_batches", 0) + saved.get("batch", 0)))

    @on(ev.BatchEnd, ev.Log, ev.ValidationEnd, lane=Lane.REPORT, optional=True)
    def note_numbers(self, run: Run, event: ev.BatchEnd | ev.Log | ev.ValidationEnd) -> None:
        if self._journal is None:
            return
        if isinstance(event, ev.BatchEnd):
            self._tracer.losses(run)  # waits for the device
            self._journal.note("batch", batch=run.progress.batches, ends_step=not run.stepping.window)
        else:
            self._tracer.metrics(run, event)

    @on(*EVENTS, lane=Lane.TRANSFORM, optional=True)
    def arrive(self, run: Run, event: ev.Event) -> None:
        """Count an event, and apply faults that must act before other handlers."""
        if isinstance(event, ev.EpochStart) and event.resumed:
            return
        self._counts[event.name] += 1
        for number, fault in self._due(event):
            if fault.is_at_operation:
                self._done.add(number)
                if self._disk is None:
                    self._disk = DiskFaults(partial(self._note_act, run))
                    self._opened.enter_context(replaced(WatchedDisk(self._folder, self._disk.operate).doubles))
                self._disk.add(number, fault)
            elif fault.changes_numbers:
                baseline = Baseline(run)
                self._note_act(run, number, change(fault.kind, run, Random(f"{self.seed} {number}")))
                self._unnoticed = number, baseline

    @on(*EVENTS, lane=Lane.REPORT, optional=True)
    def leave(self, run: Run, event: ev.Event) -> None:
        """Apply the other faults, after all handlers."""
        self._check_answer(run)
        for number, fault in () if isinstance(event, ev.EpochStart) and event.resumed else self._due(event):
            if fault.kind == "clock-jump":
                if self._clock is None:
                    self._clock = JumpingClock()
                    self._opened.enter_context(replaced(self._clock.doubles))
                self._clock.offset += fault.seconds
                self._note_act(run, number, f"the clock jumps by {fault.seconds:+g} s")
                continue
            self._note_act(run, number, KINDS[fault.kind].text)
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "preempt":
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep({"slow": fault.seconds, "hang": 1e6}.get(fault.kind, 0.0))

    @on(ev.RunFailed, lane=Lane.REPORT)
    def note_failure(self, run: Run, event: ev.RunFailed) -> None:
        # An error of the disk does not answer a fault in numbers.
        if not isinstance(event.error, OSError):
            self._note_answer(event.plugin or "the run", f"{type(event.error).__name__}: {event.error}")

    @on(ev.RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: ev.RunClosed) -> None:
        """Record the end of the training."""
        self._check_answer(run)
        if self._journal is not None and run.optimizer is not None:
            self._tracer.record(run, event)
            if run.engine.is_main and event.status != "failed" and run.checkpoints.last is not None:
                for what, value in _files_of(run.checkpoints.last).items():
                    self._note_fact(Fact(what, AT_THE_END, (0, 0, 0), leaves(value)))
            self._journal.note("end", status=event.status, counts=self._counts, batch=run.progress.batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of emissions of each event."""
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers of emissions."""
        self._counts = Counter(state)

    def close(self) -> None:
        """Restore the replaced functions, and close the journal."""
        self._opened.close()
        self._disk = self._clock = self._journal = None

    def _due(self, event: ev.Event) -> list[tuple[int, Fault]]:
        place = (event.name, self._counts[event.name], self._rank)
        return [
            (number, fault)
            for number, fault in enumerate(self.faults)
            if (fault.at, fault.count, fault.rank) == place and number not in self._done
        ]

    def _note_fact(self, fact: Fact) -> None:
        # Digests are enough for arrays.
        small = {
            path: replace(leaf, sample=None) if hasattr(leaf.sample, "shape") else leaf
            for path, leaf in fact.leaves.items()
        }
        if self._journal is not None:
            self._journal.note("fact", fact=replace(fact, leaves=small))

    def _note_act(self, run: Run, number: int, text: str) -> None:
        self._done.add(number)
        at, fault = run.progress, self.faults[number]
        where = f"epoch {at.epoch}, batch {at.batch}, step {at.steps}, in {fault.at}"
        self._set_outcome(number, FaultOutcome(fault, where, text, at.batches))

    def _check_answer(self, run: Run) -> None:
        if self._unnoticed is not None and (answer := self._unnoticed[1].answer(run)) is not None:
            self._note_answer(*answer)

    def _note_answer(self, by: str, answer: str) -> None:
        if self._unnoticed is not None:
            number, self._unnoticed = self._unnoticed[0], None
            self._set_outcome(number, replace(self._acts[number], noticed_by=by, answer=answer))

    def _set_outcome(self, number: int, outcome: FaultOutcome) -> None:
        self._acts[number] = outcome
        if self._journal is not None:
            self._journal.note("fault", number=number, outcome=outcome)


class Baseline:
    """The numbers of requests, warnings and batches of a run when a number was changed."""

    def __init__(self, run: Run) -> None:
        self._requests = run.control.history.total
        self._warnings = len(run.report.warnings)
        self._batches = run.progress.batches

    def answer(self, run: Run) -> tuple[str, str] | None:
        # A request soon after the fault, or a warning.
        history, warnings = run.control.history, run.report.warnings
        new = list(history)[len(history) - (history.total - self._requests) :]
        for request in new if run.progress.batches - self._batches <= SOON else ():
            if request.verb in ANSWERS:
                return request.by, f"{request.verb}: {request.reason}"
        return ("a warning", warnings[self._warnings]) if len(warnings) > self._warnings else None


def _files_of(last: Path) -> dict[str, Any]:
    # of the folder of the last checkpoint: what a training without faults leaves there, too
    names = sorted(path.name for path in last.parent.iterdir())
    hidden = [name for name in names if name.startswith(".") and not any(part in name for part in OF_A_PROCESS)]
    checkpoints = [name for name in names if name.endswith(".pth") and not name.startswith(".")]
    qualities = {name: "damaged" if _verify(last.with_name(name)) is None else "intact" for name in checkpoints}
    return {"leftovers": hidden or "none", "checkpoints": {"last": last.name, **qualities}}


def _verify(path: Path) -> Mapping[str, Any] | None:
    # the progress in a checkpoint; None if it is damaged
    try:
        return Store(path.parent, path.stem).verify(path).progress
    except (OSError, ValueError):
        return None


def change(kind: str, run: Run, random: Random) -> str:
    """Change a number of a run, chosen by `random`, and return a description of the change."""
    if kind == "nan-loss":
        before = run.loss.detach().item()
        run.loss.detach().fill_(nan)
        run.loss.register_hook(lambda gradient: gradient * nan)
        return f"the loss is nan instead of {before:.6g}"
    tensors: dict[str, Any] = {
        f"{module}.{name}": parameter
        for module, owner in run.modules.items()
        for name, parameter in owner.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }
    if kind == "bit-in-weight":
        return _flip("weight", tensors, random)
    gradients = {name: weight.grad for name, weight in tensors.items() if weight.grad is not None}
    if kind == "bit-in-gradient":
        return _flip("gradient", gradients, random)
    name, numbers, place = _choose(gradients, random)
    before = numbers[place].item()
    numbers[place] = nan
    return f"number {place} of the gradient of {name} is nan instead of {before:.6g}"


def _flip(title: str, tensors: Mapping[str, Tensor], random: Random) -> str:
    name, numbers, place = _choose(tensors, random)
    size = numbers.element_size()
    bit = random.randrange(8 * size)
    before = numbers[place].item()
    word = numbers[place].view(WORDS[size])
    word ^= -(1 << bit) if bit == 8 * size - 1 else 1 << bit  # the highest bit is the sign of a word
    after = numbers[place].item()
    return f"bit {bit} of number {place} of the {title} of {name} is flipped: {after!r} instead of {before!r}"


def _choose(tensors: Mapping[str, Any], random: Random) -> tuple[str, Tensor, int]:
    if not tensors:
        raise ValueError("No parameter has a gradient at this event.")
    name = random.choice(sorted(tensors))
    tensor = tensors[name].detach()
    numbers = getattr(tensor, "to_local", lambda: tensor)().view(-1)
    return name, numbers, random.randrange(numbers.numel())
