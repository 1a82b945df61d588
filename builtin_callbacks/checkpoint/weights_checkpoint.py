"""`WeightsCheckpoint`: checkpoints of weights for use, which no run can resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar

from ...core.checkpoint.storage import Entry
from ...core.distributed.failure import on_main
from ...events import Run
from .plugin import Checkpoint
from .saver import Saver


class WeightsCheckpoint(Saver):
    """Save only the weights, for use; a run cannot resume them.

    The files are small: the weights with an average of them, the counters and the metrics. `load_weights`,
    `trainer.test(weights=...)` and the command `checkpoint export` of heliograph-cli read them. Names and retention are
    as for `Checkpoint`. To resume the training, also register a `Checkpoint` in another folder.

    Args:
        folder: as for `Checkpoint`.
        every: as for `Checkpoint`.
        keep_last: as for `Checkpoint`.
        keep_best: as for `Checkpoint`.
        monitor: as for `Checkpoint`.
        mode: as for `Checkpoint`.
        background: as for `Checkpoint`.

    Raises:
        ValueError: as for `Checkpoint`.
        OSError: a save failed.
    """

    weights_only: ClassVar[bool] = True

    def _start(self, run: Run) -> None:
        if not any(isinstance(plugin, Checkpoint) and run.plugins.is_enabled(plugin) for plugin in run.plugins):
            run.data.report_untracked("everything but weights", "WeightsCheckpoint saves no state to resume")
        on_main(run.engine, partial(self._open, run))

    def _open(self, run: Run) -> None:
        self._files.open(run, self.folder)

    def _continue(self, run: Run, path: Path | None, newest: Entry | None, *, is_newest: bool) -> None:
        if newest is not None:
            self._saved.path, self._saved.steps = newest.path, int(newest.progress["steps"])

    def _lost(self, run: Run) -> str | None:
        if self._saved.path is None:
            return "no weights were saved, and no checkpoint that can be resumed"
        return (
            f"the newest weights are {self._saved.path}, of step {self._saved.steps}; only weights are saved, so the "
            f"run cannot be resumed"
        )
