"""`fork`: a training that continues another one, with one thing changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from heliograph.builtin_callbacks.checkpoint.plugin import Checkpoint
from heliograph.builtin_callbacks.checkpoint.resume import share_state
from heliograph.builtin_callbacks.file_log import FileLog
from heliograph.builtin_callbacks.jsonl_log import JsonlLog
from heliograph.builtin_callbacks.recorder.format.reader import SUFFIX
from heliograph.builtin_callbacks.recorder.plugin import Recorder
from heliograph.builtin_callbacks.trackers.tracker import Tracker
from heliograph.core.checkpoint import conversion
from heliograph.core.checkpoint.state.schema import training_of
from heliograph.core.checkpoint.storage.manifest import SUFFIX as CHECKPOINT
from heliograph.core.distributed.ranks.failure import on_main
from heliograph.core.result import RunResult
from heliograph.core.trainer import Trainer
from heliograph.events import BatchStart, Lane, Run, RunClosed, TrainStart
from heliograph.events.bus import PluginName, Subscription
from heliograph.events.checks import check_flag
from heliograph.events.paths import check_path
from heliograph.plugins import Plugin, on
from heliograph.reruns.errors import NotExact
from heliograph.reruns.program import Program, function_of
from heliograph.reruns.recorded import Origin, RecordedRun
from heliograph.testing.resume import UsageError
from heliograph.testing.resume.factory import TrainerFactory

Change = Callable[[Run], object]
PAGES = (Tracker, JsonlLog, FileLog)  # plugins whose state says where they write


def fork(
    run: str | Path,
    program: Program,
    *,
    into: str | Path,
    at: int | None = None,
    change: Change | None = None,
    exact: bool = True,
) -> RunResult:
    """Train on from a step of a recorded run, in a folder of its own and with something changed.

    The new training has the same samples and the same random draws as its parent. It is one of its own: `resume="auto"`
    in the new folder continues it. Its checkpoints, their manifests and its recording name the parent and the step, as
    does `run.forked_from`. With nothing changed it equals the parent, bit for bit; `diverge` compares the two.

        h.fork("runs/x", "train:make_trainer", at=1200, into="runs/y", change=lower_rate)

    Args:
        run: the parent's folder, or its recording.
        program: as for `goto`, but it must take the folder that it writes to. It may be another program, with other
            data or plugins, as far as it can resume the parent's checkpoints; give `exact=False` then.
        into: the folder of the new training, in which there is none yet.
        at: after which optimizer step it parts from the parent; by default that of the newest checkpoint. Steps between
            a checkpoint and this one are done again, and compared with the parent's recording.
        change: called with the run, right before the first batch after that step.
        exact: whether to refuse what is not exact up to that step.

    Returns:
        How it ended.

    Raises:
        NotExact: a resume of this program is not exact, or what is done again differs from what was recorded.
        ValueError: there is no such step, or the folder holds a training.
        FileNotFoundError: there is no recording.
        UsageError: the program is not such a function.
        TypeError: the change is not a function.
        BaseException: the training failed.
    """
    check_flag("exact", exact)
    check_path("fork(into)", into, "a folder")
    if change is not None and not callable(change):
        raise TypeError(f"fork(change=) takes a function of the run, got {change!r}.")
    recorded, folder = RecordedRun(run), Path(into)
    found = next((each for end in (CHECKPOINT, SUFFIX) for each in folder.rglob(f"*{end}")), None)
    if found is not None:
        raise ValueError(f"{folder} holds a training already ({found.name}): give into= another folder.")
    wanted = recorded.newest_step if at is None else recorded.check_step(at, least=0)
    factory = TrainerFactory(function_of(program))
    if not factory.takes_folder:
        raise UsageError("A fork writes to a folder of its own: let make_trainer take it, def make_trainer(folder).")
    folder.mkdir(parents=True, exist_ok=True)
    parting = Fork(recorded, recorded.origin(wanted), wanted, change, exact=exact)
    was_empty = not any(folder.iterdir())
    try:
        trainer, options = factory(folder)
        return parting.train(trainer, options, folder)
    except BaseException:
        if was_empty and not parting.is_done:  # nothing of use is in it
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
        self.is_done = False
        self._refusal: NotExact | None = None

    def train(self, trainer: Trainer, options: dict[str, Any], folder: Path) -> RunResult:
        """Train; whatever a plugin makes of a refusal, it is raised itself."""
        self._prepare(trainer, folder)
        parent = f"{self._recorded.recording.path.absolute()} at step {self._step}"
        options["hyper_parameters"] = {**options.get("hyper_parameters", {}), "forked_from": parent}
        try:
            return trainer.fit(**options)
        except Exception:
            if self._refusal is not None:
                raise self._refusal from None
            raise

    def _prepare(self, trainer: Trainer, folder: Path) -> None:
        """Add this to the plugins of a trainer, and a recorder if there is none; let nothing else resume."""
        plugins = trainer.plugins
        for each in plugins:
            if isinstance(each, Checkpoint):
                each.resume = None
        self._recorder = next((each for each in plugins if isinstance(each, Recorder)), None)
        if self._recorder is None:
            self._recorder = Recorder(folder, digests=True)
            plugins.register(self._recorder)
        plugins.register(self)
        before_all = Subscription((Lane.TRANSFORM, -2), PluginName(self.name))
        trainer.bus.signal(BatchStart).connect(self.part, weak=False, subscription=before_all)

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Continue from the checkpoint, as another training."""
        path = self._origin.path
        parent = {"step": self._step, "recording": str(self._recorded.recording.path.absolute())}
        identity: str = run.engine.broadcast(uuid4().hex)
        run.note(f"a fork of {parent['recording']} at step {self._step}")
        if path is None:
            run.training_id, run.forked_from = identity, {"training": "", **parent}
            return
        state = share_state(run.engine, path, conversion.load_any(path) if run.engine.is_main else None)
        former = {"forked_from": state["forked_from"]} if "forked_from" in state else {}
        origin = {"training": training_of(state), **parent, **former}
        pages = [each.name for each in run.plugins if isinstance(each, PAGES)]  # they are its parent's
        plugins = {name: own for name, own in state["plugins"].items() if name not in pages}
        run.resume({**state, "training_id": identity, "forked_from": origin, "plugins": plugins}, path)

    def part(self, run: Run, event: BatchStart) -> None:
        """Change the run, if the step is reached; before any other handler of the batch."""
        if self.is_done or run.progress.steps < self._step:
            return
        if self._exact:
            self._check(run)
        if self._change is not None:
            self._change(run)
            if "save" in run.plugins.declared("asks"):  # else a kill before the first save would lose the change
                run.control.request_save("the fork has been changed", by=self.name)
        self.is_done = True

    @on(RunClosed, lane=Lane.TRANSFORM)
    def finish(self, run: Run, event: RunClosed) -> None:
        """Say that there was no change, if the run ended before."""
        if not self.is_done and event.status != "failed":
            run.warn(f"Nothing was changed: the run ended before a batch after step {self._step}.")

    def _check(self, run: Run) -> None:
        level, reasons = run.data.guarantee()
        if level != "exact" and self._origin.path is not None:
            self._refusal = NotExact(reasons)
            raise self._refusal
        recorder = self._recorder
        assert recorder is not None  # it was prepared
        found = on_main(run.engine, lambda: self._recorded.compare(self._origin, recorder))
        if found.first is not None:
            self._refusal = NotExact(reasons, found.first)
            raise self._refusal
