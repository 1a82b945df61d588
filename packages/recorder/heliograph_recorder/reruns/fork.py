"""`fork`: continues a recorded training in another folder, with something changed."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import heliograph as h
from heliograph.builtin_callbacks.checkpoint.resume import UNSAVED_FORK, share_state
from heliograph.spi import Store, Tracker, TrainerFactory, UsageError, check_flag, check_path, describe, on_main

from ..explain.attempt_summary import BETWEEN, CHANGE, PARENT
from ..format.reader import SUFFIX
from ..plugin import Recorder
from .program import (
    Change,
    NotExact,
    Program,
    change_of,
    connect_before_batches,
    function_of,
    make_change,
    name_of,
    naming,
)
from .recorded import Origin, RecordedRun, RerunComparison
from .requests import RepeatedRequests, requests_of_people

logger = logging.getLogger("heliograph")
WRITERS = (Tracker, h.JsonlLog, h.FileLog)  # plugins whose state has the place that they write to


def fork(
    run: str | Path,
    program: Program,
    *,
    into: str | Path,
    at: int | None = None,
    change: Change | str | None = None,
    exact: bool = True,
) -> h.RunResult:
    """Continue a recorded run from one of its steps in another folder, with something changed.

    The new training has the same samples and random draws as its parent. It has its own id, and `resume="auto"` in the
    new folder continues it. Its checkpoints and recording name the parent and the step, and so does
    `run.checkpoints.forked_from`. Without a change, it is bitwise identical to the parent; `diverge` compares the two.
    Requests that people made to the parent with `Remote` are repeated up to that step.

        h.fork("runs/x", "train:make_trainer", at=1200, into="runs/y", change=lower_rate)

    Args:
        run: the folder of the parent, or its recording.
        program: as for `goto`, but it must take the folder to write to. It may have other data or plugins if it can
            resume the checkpoints of the parent; then give `exact=False`.
        into: the folder of the new training, without a training in it.
        at: the last optimizer step of the parent; by default that of the newest checkpoint. Steps after a checkpoint
            are repeated, and compared with the recording of the parent.
        change: a function, or its name as module:function; called with the run right before the first batch after that
            step.
        exact: refuse a rerun that differs or may differ up to that step.

    Returns:
        The result of the training.

    Raises:
        NotExact: a resume of this program may differ, or the rerun differs from the recording.
        ValueError: there is no such step, nothing remains to train after it, or the folder is a file or has a training.
        FileNotFoundError: there is no recording.
        UsageError: the program or the change is not such a function.
        TypeError: the change is not a function.
        BaseException: the training failed.
    """
    check_flag("exact", exact)
    check_path("fork(into)", into, "a folder")
    function, recorded, folder = change_of("fork", change), RecordedRun(run), Path(into)
    check_free(folder)
    wanted = recorded.newest_step if at is None else recorded.check_step(at, least=0)
    factory = _factory_of(program)
    origin = recorded.origin(wanted)
    if exact:
        recorded.check_ranks()
    if (changed := recorded.change_between(origin, wanted)) is not None:
        raise NotExact(
            (
                f"the parent was changed by {recorded.change} after step {changed}: fork it from a later step, after a "
                f"checkpoint that has the change",
            ),
            has_option=False,
        )
    return _train(program, factory, folder, Fork(recorded, origin, wanted, function, exact=exact))


def check_free(folder: Path) -> None:
    """Raise ValueError if a folder has a training other than an unsaved fork."""
    suffixes = (".pth",) if any(folder.rglob(UNSAVED_FORK)) else (".pth", SUFFIX)
    existing = next((path for suffix in suffixes for path in folder.rglob(f"*{suffix}")), None)
    if existing is not None:
        raise ValueError(
            f"{folder} already has a training ({existing.name}): give another into= (--into on the command line)."
        )


def _factory_of(program: Program) -> TrainerFactory:
    function = function_of(program)
    with naming(program):
        factory = TrainerFactory(function)
    if not factory.takes_folder:
        raise UsageError(
            f"{name_of(program)} takes no folder, but a fork needs its own folder: add a parameter, as in "
            f"def make_trainer(folder)."
        )
    return factory


def _train(program: Program, factory: TrainerFactory, folder: Path, plugin: Fork) -> h.RunResult:
    """Train in a folder, and remove it if the fork fails before its change."""
    folder.mkdir(parents=True, exist_ok=True)
    was_empty = not any(folder.iterdir())
    try:
        with naming(program):
            trainer, options = factory(folder)
        return plugin.train(trainer, options, folder)
    except BaseException:  # including Ctrl-C
        if was_empty and not plugin.is_done:
            shutil.rmtree(folder, ignore_errors=True)
        raise


class Fork(h.Plugin):
    """Continues from a checkpoint of the parent, and changes the run after a step."""

    affects_training = False  # a resume of the fork does not have this plugin

    def __init__(self, recorded: RecordedRun, origin: Origin, step: int, change: Change | None, *, exact: bool) -> None:
        self._recorded, self._origin, self._step, self._change, self._exact = recorded, origin, step, change, exact
        self._recorder: Recorder | None = None
        self._savers: list[h.Checkpoint | h.WeightsCheckpoint] = []
        self._marks: list[Path] = []  # so that no training begins or resumes in a fork without a save
        self._place = 0, 0  # epoch and batch of the change
        self._is_due, self.is_done = True, False
        requests = requests_of_people(recorded.recording, origin.begin)
        self._repeated = RepeatedRequests(requests, (), exact=exact)

    def train(self, trainer: h.Trainer, options: dict[str, Any], folder: Path) -> h.RunResult:
        """Train with this plugin and a recorder, without other resumes."""
        plugins = trainer.plugins
        self._savers = [plugin for plugin in plugins if isinstance(plugin, h.Checkpoint | h.WeightsCheckpoint)]
        self._hold_saves(True)
        checkpoints = [saver for saver in self._savers if isinstance(saver, h.Checkpoint)]
        for checkpoint in checkpoints:
            checkpoint.resume = replace(checkpoint.resume, path=None)
        folders = [folder, *(checkpoint.folder for checkpoint in checkpoints)]
        self._marks = [path / UNSAVED_FORK for path in dict.fromkeys(folders)]
        self._recorder = next((plugin for plugin in plugins if isinstance(plugin, Recorder)), None)
        if self._recorder is None:
            self._recorder = Recorder(folder, digests=True)
            plugins.register(self._recorder)
        plugins.register(self)
        connect_before_batches(trainer.bus, self.change_run, self.name)
        self._repeated.subscribe(trainer)
        lineage = {PARENT: f"{self._recorded.recording.path.absolute()}{BETWEEN}{self._step}"}
        if self._change is not None:
            lineage[CHANGE] = describe(self._change)
        options["hyper_parameters"] = {**options.get("hyper_parameters", {}), **lineage}
        return trainer.fit(**options)

    @h.on(h.TrainStart, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        self._check_length(run)
        for mark in self._marks if run.engine.is_main else ():
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(f"a fork of {self._recorded.recording.path} at step {self._step}")
        path = self._origin.path
        parent = {"step": self._step, "recording": str(self._recorded.recording.path.absolute())}
        identity: str = run.engine.broadcast(uuid4().hex)
        run.note(f"a fork of {parent['recording']} at step {self._step}")
        if path is None:
            run.checkpoints.training_id, run.checkpoints.forked_from = identity, {"training": "", **parent}
            return
        state = share_state(run.engine, path, Store(path.parent, path.stem).load(path) if run.engine.is_main else None)
        grandparent = {"forked_from": state["forked_from"]} if "forked_from" in state else {}
        origin = {"training": state["training_id"], **parent, **grandparent}
        writers = [plugin.name for plugin in run.plugins if isinstance(plugin, WRITERS)]
        plugins = {name: plugin_state for name, plugin_state in state["plugins"].items() if name not in writers}
        run.resume({**state, "training_id": identity, "forked_from": origin, "plugins": plugins}, path)

    def change_run(self, run: h.Run, event: h.BatchStart) -> None:
        if not self._is_due or run.progress.steps < self._step:
            return
        if not self.is_done:
            self._check(run)
            silence = self._recorded.silence(self._origin) if self._step > self._origin.step else []
            for note in silence + self._repeated.notes:
                run.warn(note)
            self._repeated.is_over = True
        if self._change is not None:
            make_change(run, self._change)
        self._hold_saves(False)
        self._place = run.progress.epoch, run.progress.batch
        self._is_due, self.is_done = False, True

    @h.on(h.CheckpointLoaded, lane=h.Lane.TRANSFORM)
    def note_roll_back(self, run: h.Run, event: h.CheckpointLoaded) -> None:
        """Repeat the change if the run rolls back to before it."""
        if self.is_done and (run.progress.epoch, run.progress.batch) <= self._place:
            self._is_due = True
            self._hold_saves(True)

    @h.on(h.CheckpointSaved, optional=True)
    def note_save(self, run: h.Run, event: h.CheckpointSaved) -> None:
        checkpoints = [saver.folder for saver in self._savers if isinstance(saver, h.Checkpoint)]
        if run.engine.is_main and event.path.parent in checkpoints:
            self._remove_marks()

    @h.on(h.RunClosed, lane=h.Lane.TRANSFORM)
    def finish(self, run: h.Run, event: h.RunClosed) -> None:
        if self.is_done and event.status == "completed" and run.engine.is_main:
            self._remove_marks()
        if not self.is_done and event.status != "failed":
            text = f"Nothing was changed or saved: the run ended before a batch after step {self._step}. Fork it again."
            run.warn(text)
            logger.warning(text)  # after a signal, the result may not be visible

    def _remove_marks(self) -> None:
        for mark in self._marks:
            mark.unlink(missing_ok=True)

    def _hold_saves(self, holds: bool) -> None:
        for saver in self._savers:
            saver.holds_saves = holds

    def _check_length(self, run: h.Run) -> None:
        """Refuse a fork without remaining steps, before anything is written."""
        origin, epochs, steps = self._origin, run.length.max_epochs, run.length.max_steps
        if (epochs is not None and origin.place[0] >= epochs) or (steps is not None and origin.step >= steps):
            raise ValueError(
                f"No steps remain after step {origin.step} of {self._recorded.recording.path}: give an earlier at= "
                f"(--at on the command line), or a program that trains longer."
            )

    def _check(self, run: h.Run) -> None:
        """Refuse a run that differs from its parent, or warn of it."""
        reasons = run.data.resume_facts().sentences
        if self._exact and reasons and self._origin.path is not None:
            raise NotExact(reasons)
        if self._step == self._origin.step:
            return
        assert self._recorder is not None
        comparison = RerunComparison(self._recorded, self._origin, self._recorder)
        first = on_main(run.engine, lambda: comparison.compare().first)
        if self._exact and first is not None:
            raise NotExact(reasons, first)
        if first is not None:
            run.warn(
                f"The fork differs from its parent before step {self._step}: {first}. Its program starts at the "
                f"checkpoint: for another program, give at={self._origin.step} (--at on the command line)."
            )
