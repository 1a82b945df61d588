"""What makes a short run do everything that a long one would, and looks on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ...events import (
    CATALOGUE,
    BatchEnd,
    BatchStart,
    Bus,
    CheckpointLoaded,
    EpochEnd,
    EpochStart,
    Event,
    Lane,
    LastBoundary,
    SavePoint,
    ShouldStop,
    TrainStart,
    ValidationEnd,
    ValidationStart,
)
from ..checkpoint.state.leaves import Leaf, leaves
from ..objects.values import encode

BY = "the rehearsal"
STEPS = 2  # of each epoch, and batches of each validation set
OWN = "state.pth"
KEPT = ("modules", "optimizers", "schedulers", "engine", "task", "progress", "data", "metrics", "means", "plugins")
AT_THE_END = ("modules", "optimizers", "schedulers", "engine", "task", "progress", "plugins")
CLOCKS = ("seconds", "facts")  # of the progress and of the data


@dataclass(slots=True)
class Script:
    """What a rehearsal does, and where.

    Attributes:
        folder: where the plugins write.
        copied: where what they have written by the first save is copied to, for the run that resumes from there.
        plugins: those whose states are compared.
        logs: whether a log is planned.
        saves: whether a save is.
        keeps_own: whether the state is saved apart from the plugins, since none of them resumes.
    """

    folder: Path
    copied: Path
    plugins: Collection[str]
    logs: bool = False
    saves: bool = False
    keeps_own: bool = False


@dataclass(slots=True)
class Seen:
    """What happened in a run of a rehearsal.

    Attributes:
        events: the names of the events.
        facts: what was read, and each loss, of the batches after the first save.
        saved: the state at the first save.
        loaded: the state when one was loaded.
        ended: the state at the end.
        steps: seconds of each step.
        validations: seconds of each validation, and its batches.
        saves: seconds of each save.
        bytes: of the first checkpoint.
    """

    events: list[str] = field(default_factory=list)
    facts: list[tuple[str, Any]] = field(default_factory=list)
    saved: dict[str, Leaf] | None = None
    loaded: dict[str, Leaf] | None = None
    ended: dict[str, Leaf] | None = None
    steps: list[float] = field(default_factory=list)
    validations: list[tuple[float, int]] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    bytes: int | None = None


class Director:
    """Requests a log, a validation and a save after the first step, and ends each epoch after the second.

    Args:
        script: what to do.
        resumes: whether the run is to begin at the first save.
    """

    def __init__(self, script: Script, *, resumes: bool = False) -> None:
        self.script, self.resumes, self.seen = script, resumes, Seen()
        self._is_staged = self._is_copied = resumes
        self._windows = int(resumes)
        self._clock = self._save_began = self._validation_began = 0.0
        self._aside = 0.0  # seconds of work of this class

    @contextmanager
    def subscribed(self, bus: Bus) -> Iterator[None]:
        """Handle the events of a bus within this context; nothing at a save is handled as by one that writes then."""
        handlers: list[tuple[type[Event], Callable[[Any, Any], None], Lane]] = [
            (TrainStart, self.begin, Lane.REPORT),
            (CheckpointLoaded, self.compare, Lane.REPORT),
            (EpochStart, self.begin_epoch, Lane.REPORT),
            (BatchStart, self.read, Lane.REPORT),
            (BatchEnd, self.direct, Lane.REPORT),
            (ValidationStart, self.begin_validation, Lane.TRANSFORM),
            (ValidationEnd, self.end_validation, Lane.REPORT),
            (SavePoint, self.save, Lane.MEASURE),
            (ShouldStop, self.end_boundary, Lane.TRANSFORM),
            (EpochEnd, self.end_epoch, Lane.REPORT),
            (LastBoundary, self.end, Lane.TRANSFORM),
        ]
        known = dict.fromkeys([*CATALOGUE, *(signal.event for signal in bus.signals())])
        handles = [
            bus.on(event, self.note, lane=Lane.MEASURE if event is SavePoint else Lane.REPORT) for event in known
        ]
        handles += [bus.on(event, handler, lane=lane) for event, handler, lane in handlers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note(self, run: Any, event: Event) -> None:
        """Note the event."""
        self.seen.events.append(event.name)

    def begin(self, run: Any, event: TrainStart) -> None:
        """Resume, where no plugin does."""
        path = self.script.folder / OWN
        if self.resumes and self.script.keeps_own and not run.checkpoints.is_resuming:
            content = run.engine.broadcast(path.read_bytes() if run.engine.is_main else b"")
            run.resume(torch.load(BytesIO(content), weights_only=True), path)

    def compare(self, run: Any, event: CheckpointLoaded) -> None:
        """Look at what was loaded."""
        if self.resumes and self.seen.loaded is None:
            self.seen.loaded = comparable(run.state_dict(), self.script.plugins)

    def begin_epoch(self, run: Any, event: EpochStart) -> None:
        """Begin to count."""
        if not event.resumed:
            self._windows = 0
        self._clock = _now(run)

    def read(self, run: Any, event: BatchStart) -> None:
        """Look at a batch."""
        if self._is_copied:
            self.seen.facts.append(("batch", encode(run.batch)["digest"]))

    def direct(self, run: Any, event: BatchEnd) -> None:
        """Request what is planned after the first step, and end the epoch after the second."""
        if self._is_copied and run.loss is not None:
            self.seen.facts.append(("loss", leaves(run.loss.detach())))
        if run.stepping.window:
            return
        self._windows += 1
        self.seen.steps.append(_now(run) - self._clock)
        if not self._is_staged:
            self._is_staged = True
            if self.script.logs:
                run.control.request_log("a log is planned", by=BY)
            if run.data.validation_sets:
                run.control.request_validation("a validation is planned", by=BY)
            if self.script.saves:
                run.control.request_save("a save is planned", by=BY)
        if self._windows >= STEPS:
            run.control.end_epoch(f"{STEPS} steps of each epoch are rehearsed", by=BY)
        self._clock = _now(run)

    def begin_validation(self, run: Any, event: ValidationStart) -> None:
        """Start the clock of a validation."""
        self._validation_began = _now(run)

    def end_validation(self, run: Any, event: ValidationEnd) -> None:
        """Stop it."""
        self.seen.validations.append((_now(run) - self._validation_began, run.progress.evaluated))

    def save(self, run: Any, event: SavePoint) -> None:
        """Look at the state of the first save."""
        self._save_began = _now(run)
        if self._is_staged and self.seen.saved is None and not self.resumes:
            state = run.state_dict()
            self.seen.saved = comparable(state, self.script.plugins)
            if self.script.keeps_own and run.engine.is_main:
                self.script.folder.mkdir(parents=True, exist_ok=True)
                torch.save(state, self.script.folder / OWN)
            self._aside = _now(run) - self._save_began

    def end_boundary(self, run: Any, event: ShouldStop) -> None:
        """Copy what the plugins have written by the first save, as a kill would leave it."""
        if self._save_began:
            self.seen.saves.append(_now(run) - self._save_began - self._aside)
            self._save_began = self._aside = 0.0
        if self.seen.saved is not None and not self._is_copied:
            self._is_copied = True
            run.hooks.settle()
            run.engine.barrier()
            if run.engine.is_main:
                self.seen.bytes = _size(run.checkpoints.last)
                shutil.copytree(self.script.folder, self.script.copied, copy_function=_link_or_copy)
        self._clock = _now(run)

    def end_epoch(self, run: Any, event: EpochEnd) -> None:
        """Continue with the next phase of the data."""
        if not run.data.is_last_phase:
            run.control.next_phase("each phase is rehearsed", by=BY)

    def end(self, run: Any, event: LastBoundary) -> None:
        """Look at the state at the end."""
        self.seen.ended = comparable(run.state_dict(), self.script.plugins, at_end=True)


def compare_runs(whole: Seen, resumed: Seen) -> str | None:
    """Return where a resumed run differs first from the one that was not interrupted; None where it does not."""
    assert whole.saved is not None
    if resumed.loaded is None:
        return "no plugin resumed from the save"
    if name := first_difference(whole.saved, resumed.loaded):
        return f"{name} was not loaded as it was saved"
    for (kind, one), (_, other) in zip(whole.facts, resumed.facts, strict=False):
        if one != other:
            return f"the first {kind} after the resume that differs is not the one that the run itself had"
    if len(whole.facts) != len(resumed.facts):
        return "another number of batches followed"
    assert whole.ended is not None
    name = first_difference(whole.ended, resumed.ended or {})
    return None if name is None else f"{name} is another one at the end"


def _now(run: Any) -> float:
    """Return the time, when the device has done what it was given."""
    if run.engine.device.type == "cuda":
        torch.cuda.synchronize(run.engine.device)
    return perf_counter()


def _size(path: Path | None) -> int | None:
    """Return the bytes of a checkpoint, with what lies beside it under its name."""
    if path is None:
        return None
    beside = [each for each in path.parent.iterdir() if each.name.startswith(path.stem)]
    found = [part for each in beside for part in (each.rglob("*") if each.is_dir() else [each])]
    return sum(each.stat().st_size for each in found if each.is_file())


def _link_or_copy(source: str, target: str) -> str:
    """Link what is never written to again, and copy the rest."""
    path = Path(source)
    if path.suffix == ".pth" or ".shards" in path.parent.name:
        with suppress(OSError):  # not every disk has links
            Path(target).hardlink_to(path)
            return target
    return shutil.copy2(source, target)


def comparable(state: Mapping[str, Any], plugins: Collection[str], *, at_end: bool = False) -> dict[str, Leaf]:
    """Return every value of a snapshot that does not depend on the clock.

    Args:
        state: the snapshot.
        plugins: the names of those whose states count.
        at_end: whether metrics do not: some are measured with the clock.
    """
    parts: dict[str, Any] = {name: state[name] for name in (AT_THE_END if at_end else KEPT)}
    for name in {"progress", "data"} & parts.keys():
        parts[name] = {key: value for key, value in parts[name].items() if not any(each in key for each in CLOCKS)}
    parts["plugins"] = {name: value for name, value in state["plugins"].items() if name in plugins}
    return leaves(parts)


def first_difference(expected: Mapping[str, Leaf], found: Mapping[str, Leaf]) -> str | None:
    """Return the name of the first value that differs; None where none does."""
    return next((name for name in {**expected, **found} if expected.get(name) != found.get(name)), None)
