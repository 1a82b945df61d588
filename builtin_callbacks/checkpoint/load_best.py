"""`LoadBest`: load the best checkpoint at the end of a training."""

from __future__ import annotations

from functools import partial
from math import isnan
from typing import Literal

from ...core.checkpoint.compatibility import load_scheduler, with_frozen
from ...core.checkpoint.schema import State
from ...core.checkpoint.storage import Entry
from ...core.checkpoint.storage.reader import load
from ...core.distributed.outcomes import on_main
from ...core.engines.weights import LEFT_WEIGHTS, load_average, measured_average
from ...core.host import ended_for_good
from ...core.metrics.monitor import Monitor
from ...core.resumption import load_parts
from ...core.system.errors import NotRecorded
from ...events import Lane, Run, RunClosed, TrainEnd, TrainStart
from ...plugins import Plugin, on
from .plugin import WeightsCheckpoint
from .resume import share_state
from .saver import Saver

Extent = Literal["weights", "everything"]


class LoadBest(Plugin):
    """Load the best checkpoint back into the task, at the end of a run that completed or was stopped.

    It is loaded at `TrainEnd`, before the handlers outside the lane `TRANSFORM`, so that they can for example export
    it. The file is verified first. If a plugin such as `EMA` validates with averaged weights, the average is loaded,
    because the metric ranks it. Checkpoints that are requested later are not written, because the weights are no longer
    from the last step. The result warns if nothing was loaded.

    Args:
        extent: `weights` only, or `everything`: also the state of the optimizers and the schedulers.

    Raises:
        ValueError: `extent` is neither; at the run's start, no plugin ranks checkpoints by a metric, or several do, or
            there is no validation data to measure it; at the end, the best checkpoint is damaged.
        FileNotFoundError: at the end, the best checkpoint is missing.
    """

    affects_training = False
    exclusive = (LEFT_WEIGHTS,)

    def __init__(self, extent: Extent = "weights") -> None:
        if extent not in ("weights", "everything"):
            raise ValueError(f"LoadBest loads 'weights' or 'everything', got {extent!r}.")
        self.extent = extent
        self._saver: Saver | None = None
        self._paused: list[Saver] = []  # plugins that must not write any more
        self._is_loaded = False

    def describe(self, run: Run) -> str:
        """Describe the plugin for the plan of a run."""
        return f"loads the best {self.extent} back at the end"

    @on(TrainStart)
    def find(self, run: Run, event: TrainStart) -> None:
        """Find the plugin that ranks checkpoints."""
        if run.report.is_replay:
            raise NotRecorded("the state of the run, such as its weights")
        self._release()
        ranking = [saver for saver in _savers(run) if saver.monitor is not None]
        if self.extent == "everything":
            ranking = [saver for saver in ranking if not isinstance(saver, WeightsCheckpoint)]
        if len(ranking) != 1:
            raise ValueError(
                f"LoadBest({self.extent!r}) loads the best checkpoint of one plugin, but {len(ranking)} plugins rank "
                f"checkpoints: register one Checkpoint(folder, keep_best=1, monitor='validation/loss')."
            )
        monitor = ranking[0].monitor
        if monitor is not None and not monitor.can_come(run):
            raise ValueError(
                f"LoadBest needs {monitor.name!r}, but there is no validation data: pass validation= to fit."
            )
        self._saver = ranking[0]

    @on(TrainEnd, lane=Lane.TRANSFORM)
    def load(self, run: Run, event: TrainEnd) -> None:
        """Load the best checkpoint before other handlers use the weights. A collective."""
        if self._saver is None or self._saver.monitor is None:
            return
        self._saver.drain()
        if note := load_best(run, self._saver.best, self._saver.monitor, self.extent):
            run.note(note)
            self._is_loaded = True
            self._paused = [saver for saver in _savers(run) if not saver.holds_saves]
            for saver in self._paused:
                saver.holds_saves = True

    @on(RunClosed, lane=Lane.TRANSFORM)
    def end(self, run: Run, event: RunClosed) -> None:
        """Allow checkpoints again; warn if nothing was loaded."""
        is_missed = run.phase == "train" and not self._is_loaded and run.progress.batches > 0
        if is_missed and ended_for_good(run, event.status):
            late = "it was registered or enabled after the training began" if self._saver is None else ""
            run.warn(f"LoadBest loaded nothing: {late or 'no checkpoint is the best'}.")
        self._release()

    def _release(self) -> None:
        for saver in self._paused:
            saver.holds_saves = False
        self._paused, self._saver, self._is_loaded = [], None, False


def _savers(run: Run) -> list[Saver]:
    return [plugin for plugin in run.plugins if isinstance(plugin, Saver) and run.plugins.is_enabled(plugin)]


def load_best(run: Run, best: Entry | None, monitor: Monitor, extent: Extent) -> str:
    """Load the best checkpoint into a run; return a note, or an empty text. A collective.

    If a plugin such as `EMA` validates with averaged weights, the average is loaded.

    Args:
        run: the run, at the end of its training.
        best: on the main rank, the best checkpoint when it was ranked; nothing is loaded for None or a metric of NaN.
        monitor: the metric that ranked it.
        extent: only the weights, or also the optimizers and the schedulers.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is damaged.
    """
    states: list[State] = []
    best = on_main(run.engine, partial(_read_best, best, states))
    if best is None or best.judged_by is None:
        return ""
    saved = with_frozen(share_state(run.engine, best.path, next(iter(states), None)), run.modules)
    optimizers = run.optimizers if extent == "everything" else {}
    load_parts(run, saved, optimizers, best.path)
    for name, scheduler in run.schedulers.items() if extent == "everything" else ():
        load_scheduler(name, scheduler, saved)
    average = None if monitor.split == "train" else measured_average(saved)
    if average is not None:
        load_average(run.modules, saved, average)
    content = extent if average is None else f"{extent} averaged by {average!r}"
    return (
        f"loaded back at the end: {content} of the best checkpoint {best.path}, {monitor.name} {best.judged_by[2]:.6g}"
    )


def _read_best(best: Entry | None, states: list[State]) -> Entry | None:
    value = None if best is None or best.judged_by is None else best.judged_by[2]
    if best is None or value is None or isnan(value):
        return None
    states.append(load(best.path))
    return best
