"""Direct a short run so that it does everything that a long one would, and record it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ...events import (
    CATALOGUE,
    BatchEnd,
    Bus,
    CheckpointLoaded,
    EpochEnd,
    EpochStart,
    Event,
    Lane,
    SavePoint,
    ShouldStop,
    TrainStart,
    ValidationEnd,
    ValidationStart,
)
from .trace import RECORDED, Difference, Fact, Tracer

BY = "the rehearsal"
STEPS = 2  # of each epoch, and batches of each validation set
STATE_FILE = "state.pth"
AT_SAVE = "when it was saved"
# Depends on the clock, has no effect, or does not exist after a mere load.
IGNORED = frozenset((part, "") for part in ("metrics", "means", "draws", "at_save_point"))


@dataclass(slots=True)
class Seen:
    """The record of one run of a rehearsal.

    Attributes:
        events: the names of the events.
        facts: the facts to compare: the state at the first save, and everything after it.
        steps: seconds of each step.
        validations: seconds of each validation, and its batches.
        saves: seconds of each save.
        bytes: the size of the first checkpoint.
    """

    events: list[str] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    validations: list[tuple[float, int]] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    bytes: int | None = None


class Director:
    """Request a log, a validation and a save after the first step, and end each epoch after the second.

    Args:
        folder: where the plugins write.
        copied: where their files are copied after the first save, for the run that resumes from there.
        logs: whether a log is planned.
        saves: whether a save is planned.
        keeps_own: whether the state is saved without the plugins, because none of them resumes.
        resumes: whether the run starts at the first save.
    """

    def __init__(self, folder: Path, copied: Path, *, logs: bool, saves: bool, keeps_own: bool, resumes: bool) -> None:
        self._folder, self._copied, self._logs, self._saves = folder, copied, logs, saves
        self._keeps_own, self.resumes, self.seen = keeps_own, resumes, Seen()
        self._tracer = Tracer(self.seen.facts.append)
        self._is_staged = self._is_copied = resumes
        self._windows = int(resumes)
        self._clock = self._save_began = self._validation_began = 0.0
        self._overhead = 0.0  # seconds of this class's work during a save

    @contextmanager
    def subscribed(self, bus: Bus) -> Iterator[None]:
        events = dict.fromkeys([*CATALOGUE, *(signal.event for signal in bus.signals())])
        handlers: list[tuple[type[Event], Callable[[Any, Any], None], Lane]] = [
            *((event, self.note, Lane.MEASURE if event is SavePoint else Lane.REPORT) for event in events),
            (TrainStart, self.begin, Lane.REPORT),
            (CheckpointLoaded, self.compare, Lane.REPORT),
            (EpochStart, self.begin_epoch, Lane.REPORT),
            (BatchEnd, self.direct, Lane.REPORT),
            (ValidationStart, self.begin_validation, Lane.TRANSFORM),
            (ValidationEnd, self.end_validation, Lane.REPORT),
            (SavePoint, self.save, Lane.MEASURE),
            (ShouldStop, self.end_boundary, Lane.TRANSFORM),
            (EpochEnd, self.end_epoch, Lane.REPORT),
        ]
        with ExitStack() as stack:
            for event, handler, lane in handlers:
                stack.callback(bus.on(event, handler, lane=lane).remove)
            yield

    def note(self, run: Any, event: Event) -> None:
        # the time to record facts is excluded from the run's
        self.seen.events.append(event.name)
        if self.seen.facts and isinstance(event, RECORDED):
            began = _now(run)
            self._tracer.record(run, event)
            self._clock += _now(run) - began

    def begin(self, run: Any, event: TrainStart) -> None:
        path = self._folder / STATE_FILE
        if self.resumes and self._keeps_own and not run.checkpoints.is_resuming:
            content = run.engine.broadcast(path.read_bytes() if run.engine.is_main else b"")
            run.resume(torch.load(BytesIO(content), weights_only=True), path)

    def compare(self, run: Any, event: CheckpointLoaded) -> None:
        if self.resumes and not self.seen.facts:
            self._tracer.state(run, AT_SAVE)

    def begin_epoch(self, run: Any, event: EpochStart) -> None:
        if not event.resumed:
            self._windows = 0
        self._clock = _now(run)

    def direct(self, run: Any, event: BatchEnd) -> None:
        if run.stepping.window:
            return
        self._windows += 1
        self.seen.steps.append(_now(run) - self._clock)
        if not self._is_staged:
            self._is_staged = True
            if self._logs:
                run.control.request_log("a log is planned", by=BY)
            if run.data.validation_sets:
                run.control.request_validation("a validation is planned", by=BY)
            if self._saves:
                run.control.request_save("a save is planned", by=BY)
        if self._windows >= STEPS:
            run.control.end_epoch(f"{STEPS} steps of each epoch are rehearsed", by=BY)
        self._clock = _now(run)

    def begin_validation(self, run: Any, event: ValidationStart) -> None:
        self._validation_began = _now(run)

    def end_validation(self, run: Any, event: ValidationEnd) -> None:
        self.seen.validations.append((_now(run) - self._validation_began, run.progress.evaluated))

    def save(self, run: Any, event: SavePoint) -> None:
        self._save_began = _now(run)
        if self._is_staged and not self.seen.facts and not self.resumes:
            self._tracer.state(run, AT_SAVE)
            if self._keeps_own:
                state = run.state_dict()
                if run.engine.is_main:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    torch.save(state, self._folder / STATE_FILE)
            self._overhead = _now(run) - self._save_began

    def end_boundary(self, run: Any, event: ShouldStop) -> None:
        if self._save_began:
            self.seen.saves.append(_now(run) - self._save_began - self._overhead)
            self._save_began = self._overhead = 0.0
        if self.seen.facts and not self._is_copied:
            self._is_copied = True
            run.hooks.settle()
            run.engine.barrier()
            if run.engine.is_main:
                self.seen.bytes = _size(run.checkpoints.last)
                shutil.copytree(self._folder, self._copied, copy_function=_link_or_copy)
        self._clock = _now(run)

    def end_epoch(self, run: Any, event: EpochEnd) -> None:
        if not run.data.is_last_phase:
            run.control.next_phase("each phase is rehearsed", by=BY)


def compare_runs(uninterrupted: Seen, resumed: Seen) -> str | None:
    if not resumed.facts:
        return "no plugin resumed from the save"
    difference = next(Difference.between(uninterrupted.facts, resumed.facts, aside=IGNORED), None)
    return None if difference is None else str(difference)


def _now(run: Any) -> float:
    # after the device has finished its work
    if run.engine.device.type == "cuda":
        torch.cuda.synchronize(run.engine.device)
    return perf_counter()


def _size(path: Path | None) -> int | None:
    # of a checkpoint with its other files
    if path is None:
        return None
    items = [item for item in path.parent.iterdir() if item.name.startswith(path.stem)]
    files = [file for item in items for file in (item.rglob("*") if item.is_dir() else [item])]
    return sum(file.stat().st_size for file in files if file.is_file())


def _link_or_copy(source: str, target: str) -> str:
    # only files that are never written again are linked
    path = Path(source)
    if path.suffix == ".pth" or ".shards" in path.parent.name:
        with suppress(OSError):  # not every disk has links
            Path(target).hardlink_to(path)
            return target
    return shutil.copy2(source, target)
