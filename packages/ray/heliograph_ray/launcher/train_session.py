"""The session of a launcher's worker, which reports to `ray.train` and to the caller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph import Progress
from heliograph.spi import require

from ..session import Notice
from ..storage import ReportFolder, StoredFolder, list_reports, report_name
from .mailbox import ProgressUpdate, Reported, Resumed

if TYPE_CHECKING:
    from .mailbox import WorkerChannel

PURPOSE = "RayLauncher"


class TrainSession:
    """Connects a run with Ray Train and with the caller of the launcher.

    Args:
        call: the id of the launcher's call, which is part of the names of its reports; the same in all its attempts.
        channel: sends messages to the caller.
        is_restart: whether an earlier attempt of this call failed, or had another number of workers.
        has_own_storage: whether to ignore the stored reports of other calls.

    Attributes:
        exit_notice: the notice that ended a run of this process.
    """

    def __init__(self, call: str, channel: WorkerChannel, *, is_restart: bool, has_own_storage: bool = False) -> None:
        self._train = require("ray.train", PURPOSE, extra="ray")
        self._context = self._train.get_context()
        self._preemption = _preemption_context()
        self._call, self._channel, self.is_restart = call, channel, is_restart
        self._has_own_storage = has_own_storage
        self.exit_notice: Notice | None = None
        self._is_main = self._context.get_world_rank() == 0
        self._number: int | None = None  # of the next report with a folder, on the main rank
        self._first = 0  # the number of this process's first report with a folder
        self._orphans: list[ReportFolder] = []

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        checkpoint, name = None, None
        if folder is not None:
            checkpoint = self._train.Checkpoint.from_directory(folder.absolute())
            name = report_name(self._next_number(), self._call)
        try:
            self._train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=name)
        except OSError as error:
            error.add_note(f"heliograph: raised while storing {name or 'a report'} in {self._storage()[1]}")
            raise
        if not self._is_main:
            return None
        path = None if name is None else self._check_stored(name)
        if path is not None:
            self._remove_orphans()
        self._channel.send(Reported(metrics, path))
        return self._channel.commands.stop

    def stored_reports(self) -> list[StoredFolder]:
        self._list_once()
        reports = list_reports(*self._storage())
        return [
            StoredFolder(
                report.filesystem, report.path, is_own=report.call == self._call and report.number < self._first
            )
            for report in reports
            if report.call == self._call or not self._has_own_storage
        ]

    def notice(self) -> Notice | None:
        info = self._preemption.preemption_info
        if info is None:
            return self._channel.commands.exit
        ranks = ", ".join(map(str, info.preempted_ranks))
        deadline = None if info.deadline_ms is None else info.deadline_ms / 1000
        return Notice("ray", f"the machine of rank {ranks} will be taken away", deadline)

    def record_exit(self, notice: Notice) -> None:
        self.exit_notice = notice

    def update_progress(self, run: str, progress: Progress) -> None:
        if self._is_main:
            self._channel.progress = ProgressUpdate(run, progress.batches, progress.steps, progress.samples)

    def record_start(self, run: str, progress: Progress, path: Path | None) -> None:
        self._channel.send(Resumed(run, progress.batches, progress.steps, path))

    def _storage(self) -> tuple[Any, str]:
        storage = self._context.get_storage()
        return storage.storage_filesystem, storage.experiment_fs_path

    def _list_once(self) -> None:
        if self._number is None:
            reports = list_reports(*self._storage())
            self._number = self._first = 1 + max((report.number for report in reports), default=0)
            ours = [report for report in reports if report.call == self._call]
            reported = self._train.get_all_reported_checkpoints() if ours else []
            registered = {Path(stored.checkpoint.path).name for stored in reported}
            self._orphans = [report for report in ours if Path(report.path).name not in registered]

    def _next_number(self) -> int:
        self._list_once()
        assert self._number is not None
        self._number += 1
        return self._number - 1

    def _remove_orphans(self) -> None:
        while self._orphans:
            orphan = self._orphans.pop()
            orphan.filesystem.delete_dir(orphan.path)

    def _check_stored(self, name: str) -> str:
        newest = self._train.get_checkpoint()
        path = "" if newest is None else str(newest.path)
        if Path(path).name != name:
            raise RuntimeError(
                f"Ray did not store the reported checkpoint {name!r}; its newest is {path or 'none'}. Search Ray's "
                f"log for 'report' to find the reason."
            )
        return path


def _preemption_context() -> Any:
    context = require("ray.train.v2._internal.execution.context", PURPOSE, extra="ray").get_train_context()
    preemption = getattr(context, "preemption_context", None)
    if not hasattr(preemption, "preemption_info"):
        version = require("ray", PURPOSE, extra="ray").__version__
        raise ImportError(
            f"RayLauncher cannot read preemption notices from Ray {version}: pip install 'ray[train]>=2.60,<2.61'"
        )
    return preemption
