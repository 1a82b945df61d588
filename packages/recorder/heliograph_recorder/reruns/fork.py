"""`fork`: a training that continues another one, with one thing changed."""

from __future__ import annotations

import logging
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from heliograph import (
    BatchStart,
    Checkpoint,
    CheckpointLoaded,
    CheckpointSaved,
    FileLog,
    JsonlLog,
    Lane,
    Plugin,
    Run,
    RunClosed,
    RunResult,
    Trainer,
    TrainStart,
    WeightsCheckpoint,
    on,
)
from heliograph.builtin_callbacks.checkpoint.resume import share_state
from heliograph.spi import Store, Tracker, TrainerFactory, UsageError, check_flag, check_path, describe, on_main

from ..divergence.report import Difference
from ..explain.lineage import BETWEEN, CHANGE, PARENT
from ..plugin import Recorder
from ..remote.outcomes import KEEPS
from .change import Change, RepeatedChange, change_of, connect_before_batches, make_change
from .comparison import Comparison
from .errors import NotExact
from .fork_folder import UnsavedMarks, check_free
from .program import Program, function_of, name_of, naming
from .recorded import Origin, RecordedRun
from .requests import RepeatedRequests, repeatable

FEW = 3  # requests that are named
LATER = "fork it from a later step, whose checkpoint holds the change"
logger = logging.getLogger("heliograph")
PAGES = (Tracker, JsonlLog, FileLog)  # plugins whose state says where they write


def fork(
    run: str | Path,
    program: Program,
    *,
    into: str | Path,
    at: int | None = None,
    change: Change | str | None = None,
    exact: bool = True,
) -> RunResult:
    """Train on from a step of a recorded run, in a folder of its own and with something changed.

    The new training has the same samples and the same random draws as its parent. It is one of its own: `resume="auto"`
    in the new folder continues it. Its checkpoints, their manifests and its recording name the parent and the step, as
    does `run.checkpoints.forked_from`. With nothing changed it equals the parent, bit for bit; `diverge` compares the
    two. What people asked of the parent up to that step, with `Remote`, is requested again; later requests are not.

        h.fork("runs/x", "train:make_trainer", at=1200, into="runs/y", change=lower_rate)

    Args:
        run: the parent's folder, or its recording.
        program: as for `goto`, but it must take the folder that it writes to. It may be another program, with other
            data or plugins, as far as it can resume the parent's checkpoints; give `exact=False` then.
        into: the folder of the new training, in which there is none yet.
        at: after which optimizer step it parts from the parent; by default that of the newest checkpoint. Steps between
            a checkpoint and this one are done again, and compared with the parent's recording.
        change: a function, or its name, `module:function`; called with the run, right before the first batch after
            that step.
        exact: refuse a rerun that may differ, or does differ, up to that step.

    Returns:
        How it ended.

    Raises:
        NotExact: a resume of this program may differ, or the rerun differs from the recording.
        ValueError: there is no such step, nothing is left to train after it, or the folder is a file, or holds a
            training.
        FileNotFoundError: there is no recording.
        UsageError: the program is not such a function, or there is no function of the name of the change.
        TypeError: the change is not a function.
        BaseException: the training failed.
    """
    check_flag("exact", exact)
    check_path("fork(into)", into, "a folder")
    function, recorded, folder = change_of("fork", change), RecordedRun(run), Path(into)
    check_free(folder)
    wanted = recorded.newest_step if at is None else recorded.check_step(at, least=0)
    factory = _factory_of(program)
    parting = Fork(recorded, recorded.origin(wanted), wanted, function, exact=exact)
    with recorded.naming_ranks() if exact else nullcontext():
        return _train(program, factory, folder, parting)


def _factory_of(program: Program) -> TrainerFactory:
    """Return what makes trainers; raise UsageError where they would not write to a folder that is given."""
    function = function_of(program)
    with naming(program):
        factory = TrainerFactory(function)
    if not factory.takes_folder:
        raise UsageError(
            f"{name_of(program)} takes no folder, and a fork writes to one of its own: let it take one, as in "
            f"def make_trainer(folder)."
        )
    return factory


def _train(program: Program, factory: TrainerFactory, folder: Path, parting: Fork) -> RunResult:
    """Train in a folder, which is removed again where nothing of use is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    was_empty = not any(folder.iterdir())
    try:
        with naming(program):
            trainer, options = factory(folder)
        return parting.train(trainer, options, folder)
    except BaseException:  # whatever ended it, Ctrl-C included, it leaves no folder without a training
        if was_empty and not parting.is_done:
            shutil.rmtree(folder, ignore_errors=True)
        raise


class Fork(Plugin):
    """Continues from the parent's checkpoint, and changes the run at a step.

    Args:
        recorded: the parent.
        origin: its checkpoint.
        step: where to change the run.
        change: what to do there.
        exact: whether to compare what is done again until then.
    """

    affects_training = False  # it is not there when the fork is resumed

    def __init__(self, recorded: RecordedRun, origin: Origin, step: int, change: Change | None, *, exact: bool) -> None:
        self._recorded, self._origin, self._step, self._change, self._exact = recorded, origin, step, change, exact
        self._recorder: Recorder | None = None
        self._savers: list[Checkpoint | WeightsCheckpoint] = []
        self._marks: UnsavedMarks | None = None
        self._place = 0, 0  # epoch and batch before which the run was changed
        self._is_due, self.is_done = True, False
        self._refusal: Exception | None = None
        requests = list(repeatable(recorded.requests_after(origin), ends=False))
        self._requests = RepeatedRequests(requests, (), resumes=origin.path is not None, exact=exact)
        self._repeated: list[RepeatedRequests | RepeatedChange] = [self._requests]
        if (changed := recorded.repeated_change(origin, None, exact=exact, mend=LATER)) is not None:
            self._repeated.append(changed)

    def train(self, trainer: Trainer, options: dict[str, Any], folder: Path) -> RunResult:
        """Train; whatever a plugin makes of a refusal, it is raised itself."""
        self._prepare(trainer, folder)
        lineage = {PARENT: f"{self._recorded.recording.path.absolute()}{BETWEEN}{self._step}"}
        if self._change is not None:
            lineage[CHANGE] = describe(self._change)
        options["hyper_parameters"] = {**options.get("hyper_parameters", {}), **lineage}
        try:
            return trainer.fit(**options)
        except Exception:  # a plugin may have made another error of it
            for refusal in [self._refusal, *(each.refusal for each in self._repeated)]:
                if refusal is not None:
                    raise refusal from None
            raise

    def _prepare(self, trainer: Trainer, folder: Path) -> None:
        """Add this to the plugins of a trainer, and a recorder if there is none; let nothing else resume."""
        plugins = trainer.plugins
        self._savers = [each for each in plugins if isinstance(each, Checkpoint | WeightsCheckpoint)]
        self._hold_saves(True)
        checkpoints = [each for each in self._savers if isinstance(each, Checkpoint)]
        for checkpoint in checkpoints:
            checkpoint.resume = replace(checkpoint.resume, path=None)
        folders = [each.folder for each in checkpoints]
        self._marks = UnsavedMarks(folder, folders, f"a fork of {self._recorded.recording.path} at step {self._step}")
        self._recorder = next((each for each in plugins if isinstance(each, Recorder)), None)
        if self._recorder is None:
            self._recorder = Recorder(folder, digests=True)
            plugins.register(self._recorder)
        plugins.register(self)
        connect_before_batches(trainer.bus, self.part, self.name)
        for each in self._repeated:
            each.subscribe(trainer)

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Continue from the checkpoint, as another training."""
        self._check_length(run)
        if run.engine.is_main and self._marks is not None:
            self._marks.write()
        path = self._origin.path
        parent = {"step": self._step, "recording": str(self._recorded.recording.path.absolute())}
        identity: str = run.engine.broadcast(uuid4().hex)
        run.note(f"a fork of {parent['recording']} at step {self._step}")
        if path is None:
            run.checkpoints.training_id, run.checkpoints.forked_from = identity, {"training": "", **parent}
            return
        state = share_state(run.engine, path, Store(path.parent, path.stem).load(path) if run.engine.is_main else None)
        former = {"forked_from": state["forked_from"]} if "forked_from" in state else {}
        origin = {"training": state["training_id"], **parent, **former}
        pages = [each.name for each in run.plugins if isinstance(each, PAGES)]  # they are its parent's
        plugins = {name: own for name, own in state["plugins"].items() if name not in pages}
        run.resume({**state, "training_id": identity, "forked_from": origin, "plugins": plugins}, path)

    def part(self, run: Run, event: BatchStart) -> None:
        """Change the run, if the step is reached; before any other handler of the batch."""
        if not self._is_due or run.progress.steps < self._step:
            return
        if not self.is_done:
            self._check(run)
            self._note_what_is_not_repeated(run)
        if self._change is not None:
            make_change(run, self._change)
        self._hold_saves(False)
        self._place = run.progress.epoch, run.progress.batch
        self._is_due, self.is_done = False, True

    @on(CheckpointLoaded, lane=Lane.TRANSFORM)
    def part_again(self, run: Run, event: CheckpointLoaded) -> None:
        """Change the run once more where it goes back to before the change, as with `RollBack`."""
        if self.is_done and (run.progress.epoch, run.progress.batch) <= self._place:
            self._is_due = True
            self._hold_saves(True)

    @on(CheckpointSaved, optional=True)
    def note_save(self, run: Run, event: CheckpointSaved) -> None:
        """Let the folder be that of a training."""
        if run.engine.is_main and self._marks is not None:
            self._marks.note_save(event.path)

    @on(RunClosed, lane=Lane.TRANSFORM)
    def finish(self, run: Run, event: RunClosed) -> None:
        """Say that there was no change, if the run ended before."""
        if self.is_done and event.status == "completed" and run.engine.is_main and self._marks is not None:
            self._marks.remove()
        if not self.is_done and event.status != "failed":
            text = f"Nothing was changed or saved: the run ended before a batch after step {self._step}. Fork it again."
            run.warn(text)
            logger.warning(text)  # where a signal ends the process, nobody sees the result

    def _hold_saves(self, holds: bool) -> None:
        for each in self._savers:
            each.holds_saves = holds

    def _check_length(self, run: Run) -> None:
        """Refuse to continue where nothing is left to train; nothing is written by then."""
        origin, epochs, steps = self._origin, run.length.max_epochs, run.length.max_steps
        if (epochs is not None and origin.place[0] >= epochs) or (steps is not None and origin.step >= steps):
            self._refusal = ValueError(
                f"Nothing is left to train after step {origin.step} of {self._recorded.recording.path}: give at= (--at "
                f"on the command line) an earlier step, or a program that trains longer."
            )
            raise self._refusal

    def _note_what_is_not_repeated(self, run: Run) -> None:
        """Say what could not be done again until now, and that what people asked of the parent later is not."""
        if self._step > self._origin.step:
            for each in self._recorded.silence(self._origin):
                run.warn(each)
        for note in [note for each in self._repeated for note in each.notes]:
            run.warn(note)
        for repeated in self._repeated:
            repeated.stop()
        later = [each for each in self._requests.waiting if not each.reason.startswith(KEEPS)]
        if later:
            run.note(
                f"requested of the parent after step {self._step}, and not of the fork: "
                + "; ".join(f"{each.what} by {each.by}" for each in later[:FEW])
                + f"; and {len(later) - FEW} more" * (len(later) > FEW)
            )

    def _check(self, run: Run) -> None:
        """Refuse a run that is not as its parent was until now, or warn of it."""
        reasons = run.data.resume_facts().sentences
        if self._exact and reasons and self._origin.path is not None:
            self._refusal = NotExact(reasons)
            raise self._refusal
        if self._step == self._origin.step:
            return  # nothing was done again
        first, problem = on_main(run.engine, self._compare)
        if self._exact and (problem or first):
            self._refusal = NotExact((problem,)) if problem else NotExact(reasons, first)
            raise self._refusal
        if problem:
            run.warn(f"{problem[0].upper()}{problem[1:]}.")
        if first is not None:
            run.warn(
                f"The fork differs from its parent before step {self._step}: {first}. Its program acts from step "
                f"{self._origin.step} on: for another one, give at={self._origin.step} (--at on the command line)."
            )

    def _compare(self) -> tuple[Difference | None, str]:
        """Return where what was done again differs from what was recorded, or why that is not known."""
        recorder = self._recorder
        assert recorder is not None  # it was prepared
        if recorder.path is None or not recorder.path.exists():
            return None, "the recorder of the fork does not write, so what is done again cannot be compared"
        return Comparison(self._recorded, self._origin, recorder).compare().first, ""
