"""`LateResults`: a training reads what another process measured on its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from operator import attrgetter
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import heliograph as h
from heliograph.events import Alarm
from heliograph.spi import Entry, check_number, check_path, count, ended_for_good, on_main, read_manifest

from .files import RESULT, Evaluation, Journal, Position, Reading, is_current, local, read_evaluation

BATCHES = attrgetter("batches")
START: Position = (0, -1, False)
POLL = 0.2  # seconds between two looks while the end of a training waits


class LateResults(h.Plugin):
    """Read the results of `python -m heliograph evaluate` while the training continues.

    The command evaluates each checkpoint in another process, and writes the result beside it. This plugin looks for new
    results before each save and at the end. It emits a `LateResult` for each, in the order of their steps, with metrics
    such as `late/accuracy`. They rank the checkpoints of `Checkpoint(keep_best=1, monitor="late/accuracy")`, stop the
    run by `EarlyStopping("late/accuracy")`, and are in the next log, with `late/steps`, and in `result.metrics`.

    All ranks read the same results at the same step. A journal in the folder records the step before a result takes
    effect, so a resumed run repeats the decision, also if it continues from an older checkpoint. After a roll-back,
    results are read anew.

    Args:
        folder: the folder of the checkpoints on this machine.
        wait: at the end of the training, wait up to this many seconds for the results of the remaining checkpoints.

    Raises:
        ValueError: `folder` is a URL; `wait` is negative; at the start of a run, the journal is damaged.
        OSError: the journal cannot be written.
    """

    affects_training = False
    needs = ("save",)

    def __init__(self, folder: str | Path, *, wait: float = 0.0) -> None:
        check_path("LateResults(folder)", folder, "a folder")
        self.folder = local("LateResults(folder)", folder)
        self.wait = check_number("LateResults(wait)", wait, of="seconds", at_least=0)
        self._journal: Journal | None = None  # on the main rank
        self._is_rehearsal = False  # in other folders, where no command evaluates
        self.reset()

    def reset(self) -> None:
        self._position: Position = START  # of the last look
        self._steps: list[int] = []  # of the checkpoints whose results were read
        self._unlogged: dict[str, float] = {}
        self._recorded: list[Reading] = []  # of an earlier attempt, still to repeat
        self._until: Position = START  # where the earlier attempt looked last
        self._has_begun = False
        self._done: list[Reading] = []  # on the main rank, for the journal
        self._discarded: set[str] = set()  # digests of checkpoints after the loaded one, whose steps are repeated
        self._warned: set[Path] = set()

    def describe(self, run: h.Run) -> str:
        return f"reads evaluations of the checkpoints in {self.folder} before each save"

    def rehearse(self, folder: Path) -> list[Path]:
        before, self.folder, self._is_rehearsal = self.folder, folder, True
        return [before]

    @h.on(h.TrainStart, lane=h.Lane.REPORT)  # when the training and its folder are known
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        if run.report.is_replay:
            raise h.NotRecorded("the files of an evaluation")
        self._recorded, until = on_main(run.engine, partial(self._open, run))
        self._until = until or START

    @h.on(h.CheckpointLoaded)
    def find_position(self, run: h.Run, event: h.CheckpointLoaded) -> None:
        if self._has_begun:  # a roll-back
            self._recorded, self._until = [], self._position
        on_main(run.engine, partial(self._discard, run))
        self._recorded = [reading for reading in self._recorded if reading.position > self._position]
        self._until = max(self._until, self._position)

    @h.on(h.EpochStart)
    def note_beginning(self, run: h.Run, event: h.EpochStart) -> None:
        self._has_begun = True

    @h.on(h.BatchEnd, h.EpochEnd, idle_until="next_recorded")
    def repeat(self, run: h.Run, event: h.BatchEnd | h.EpochEnd) -> None:
        """Read the results that an earlier attempt read here."""
        self._repeat(run, self._position_of(run))

    def next_recorded(self, run: h.Run) -> Alarm:
        return BATCHES, self._recorded[0].position[1] if self._recorded else inf

    @h.on(h.SavePoint, lane=h.Lane.MEASURE, optional=True)
    def read_before_save(self, run: h.Run, event: h.SavePoint) -> None:
        self._read(run)

    @h.on(h.TrainEnd, lane=h.Lane.TRANSFORM, before="load_best")
    def read_at_end(self, run: h.Run, event: h.TrainEnd) -> None:
        if self.wait:
            run.hooks.settle()  # the last checkpoint is on disk
            limit = monotonic() + self.wait
            while not on_main(run.engine, partial(self._has_waited, run, limit)):
                pass  # each round is short, so that no rank seems to hang
        self._read(run, is_end=True)

    @h.on(h.Log, lane=h.Lane.MEASURE, optional=True)
    def add_to_log(self, run: h.Run, event: h.Log) -> None:
        event.metrics.update(self._unlogged)
        self._unlogged = {}

    @h.on(h.CheckpointPruned, optional=True)
    def remove_result(self, run: h.Run, event: h.CheckpointPruned) -> None:
        if run.engine.is_main:
            self._remove_read(event.path)

    @h.on(h.RunClosed)
    def end(self, run: h.Run, event: h.RunClosed) -> None:
        if self._journal is None or not ended_for_good(run, event.status):
            return
        self._journal.mark(is_over=True)
        failed = {evaluation.checkpoint: evaluation for evaluation in self._results(run) if evaluation.error}
        if names := [entry.path.name for entry in self._unread(run) if entry.path.name not in failed]:
            of = f"{count(len(names), 'checkpoint', 'checkpoints')}: {', '.join(names)}"
            run.note(f"late results: {len(self._steps)} read, none yet for {of}")
        if failed:
            last = max(failed.values(), key=attrgetter("steps"))
            of = count(len(failed), "evaluation", "evaluations")
            run.warn(f"late results: {len(self._steps)} read, {of} failed, the last: {last.checkpoint}: {last.error}")
        elif not self._steps and not self._is_rehearsal:
            run.warn(
                f"LateResults read no result in {self.folder}: run `python -m heliograph evaluate --follow "
                f"{self.folder} module:function` beside the training, and set wait= if it needs longer."
            )

    def close(self) -> None:
        self._journal = None

    def state_dict(self) -> dict[str, Any]:
        return {"position": list(self._position), "steps": list(self._steps), "unlogged": dict(self._unlogged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        epoch, batches, is_end = state.get("position", START)
        self._position = epoch, batches, is_end
        self._steps, self._unlogged = list(state.get("steps", ())), dict(state.get("unlogged", {}))

    def _position_of(self, run: h.Run, *, is_end: bool = False) -> Position:
        return run.progress.epoch, run.progress.batches, is_end

    def _read(self, run: h.Run, *, is_end: bool = False) -> None:
        position = self._position_of(run, is_end=is_end)
        self._repeat(run, position)
        if is_end or position > self._until:  # nothing is decided after the end; else no earlier attempt looked here
            self._until = position
            self._publish(run, on_main(run.engine, partial(self._look, run, position)))
        self._position = position

    def _repeat(self, run: h.Run, position: Position) -> None:
        while self._recorded and self._recorded[0].position <= position:
            self._position = self._recorded[0].position
            self._publish(run, self._recorded.pop(0))

    def _publish(self, run: h.Run, reading: Reading) -> None:
        for evaluation in reading.evaluations:
            self._steps.append(evaluation.steps)
            metrics = {f"late/{name}": value for name, value in evaluation.metrics.items()}
            self._unlogged |= {**metrics, "late/steps": float(evaluation.steps)}
            run.metrics.update(self._unlogged)
            run.emit(h.LateResult(self.folder / evaluation.checkpoint, evaluation.steps, metrics))
            if run.engine.is_main and not (self.folder / evaluation.checkpoint).exists():
                self._remove_read(self.folder / evaluation.checkpoint)

    # On the main rank.

    def _open(self, run: h.Run) -> tuple[list[Reading], Position | None]:
        savers = [plugin for plugin in run.plugins if isinstance(plugin, h.Checkpoint | h.WeightsCheckpoint)]
        folders = sorted({str(saver.folder) for saver in savers})
        is_elsewhere = self.folder.resolve() not in map(Path.resolve, map(Path, folders))
        if folders and is_elsewhere and not self._is_rehearsal:
            run.warn(
                f"LateResults({str(self.folder)!r}) reads another folder than the checkpoints are in: pass "
                f"{' or '.join(map(repr, folders))}."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(self.folder, run.name)
        self._journal.mark(is_over=False)
        self._done, until = self._journal.of(run.checkpoints.training_id)
        return list(self._done), until

    def _discard(self, run: h.Run) -> None:
        steps = run.progress.steps
        self._discarded |= {entry.sha256 for entry in self._entries(run) if entry.progress["steps"] > steps}
        self._discarded |= {evaluation.sha256 for evaluation in self._results(run) if evaluation.steps > steps}
        if self._has_begun and self._journal is not None:
            self._done = [reading for reading in self._done if reading.position <= self._position]
            self._journal.write(run.checkpoints.training_id, self._done, self._position)

    def _look(self, run: h.Run, position: Position) -> Reading:
        found: dict[int, Evaluation] = {}
        for evaluation in self._results(run):
            is_new = evaluation.steps <= run.progress.steps and evaluation.steps not in self._steps
            if is_new and not evaluation.error and evaluation.sha256 not in self._discarded:
                found[evaluation.steps] = evaluation
        reading = Reading(position, [found[steps] for steps in sorted(found)])
        self._done += [reading] * bool(found)
        assert self._journal is not None
        self._journal.write(run.checkpoints.training_id, self._done, position)
        return reading

    def _results(self, run: h.Run) -> Iterator[Evaluation]:
        """Yield the results for the files of this training; a damaged one is reported."""
        for path in sorted(self.folder.glob(f"*{RESULT}")):
            try:
                evaluation = read_evaluation(path)
                if evaluation is None or evaluation.training != run.checkpoints.training_id:
                    continue
                if is_current(evaluation, self.folder / evaluation.checkpoint):
                    yield evaluation
            except (OSError, ValueError) as error:
                if path not in self._warned:
                    self._warned.add(path)
                    run.warn(f"A late result was not read: {error}")

    def _entries(self, run: h.Run) -> Iterator[Entry]:
        """Yield the checkpoints of this training."""
        for path in sorted(self.folder.glob("*.pth")):
            with suppress(OSError, ValueError):  # not a checkpoint
                if (entry := read_manifest(path)).training == run.checkpoints.training_id:
                    yield entry

    def _unread(self, run: h.Run) -> list[Entry]:
        return [entry for entry in self._entries(run) if entry.progress["steps"] not in self._steps]

    def _has_waited(self, run: h.Run, limit: float) -> bool:
        if monotonic() >= limit or {entry.sha256 for entry in self._unread(run)} <= {
            evaluation.sha256 for evaluation in self._results(run)
        }:
            return True
        sleep(POLL)
        return False

    def _remove_read(self, checkpoint: Path) -> None:
        path = checkpoint.with_suffix(RESULT)
        try:
            evaluation = read_evaluation(path)
        except ValueError:
            return  # reported when it was read
        if evaluation is not None and evaluation.steps in self._steps:
            path.unlink(missing_ok=True)
