"""The session of a worker of the launcher: it reports to `ray.train`, and to the caller through the mailbox."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph import Progress
from heliograph.spi import require

from ..session import Notice
from ..storage.checkpoints import ReportFolder, StoredFolder, list_reports, report_name
from .mailbox import ProgressUpdate, Reported, Resumed

if TYPE_CHECKING:
    from .worker_channel import WorkerChannel

PURPOSE = "RayLauncher"


class TrainSession:
    """Connects a run with Ray Train and with the process that called the launcher.

    Args:
        call: the id of the launcher's call, which is in the names of its reports; the same in all its attempts.
        channel: sends messages to the caller.
        is_restart: whether an earlier attempt of this call failed, or had another number of workers.
        has_own_storage: whether what other calls have stored there is not to be resumed.

    Attributes:
        exit_notice: the notice on which a run of this process ended.
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
        """Report to Ray, which waits for all ranks and copies the folder to the storage before it returns.

        Raises:
            RuntimeError: Ray did not store the folder.
            OSError: the storage failed; a note names it.
        """
        checkpoint, name = None, None
        if folder is not None:
            checkpoint = self._train.Checkpoint.from_directory(folder.absolute())
            name = report_name(self._next_number(), self._call)
        try:
            self._train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=name)
        except OSError as error:
            error.add_note(f"heliograph: while {name or 'a report'} was stored in {self._storage()[1]}")
            raise
        if not self._is_main:
            return None
        path = None if name is None else self._check_stored(name)
        if path is not None:
            self._remove_orphans()
        self._channel.send(Reported(metrics, path))
        return self._channel.commands.stop

    def stored_reports(self) -> list[StoredFolder]:
        """Return the reports in the storage, also those that Ray does not know because their worker died too soon."""
        self._list_once()
        found = list_reports(*self._storage())
        return [
            StoredFolder(each.filesystem, each.path, is_own=each.call == self._call and each.number < self._first)
            for each in found
            if each.call == self._call or not self._has_own_storage
        ]

    def notice(self) -> Notice | None:
        """Return a notice if a machine of this run is to be taken away, or the caller asks the workers to exit."""
        info = self._preemption.preemption_info
        if info is None:
            return self._channel.commands.exit
        ranks = ", ".join(map(str, info.preempted_ranks))
        deadline = None if info.deadline_ms is None else info.deadline_ms / 1000
        return Notice("ray", f"the machine of rank {ranks} is to be taken away", deadline)

    def record_exit(self, notice: Notice) -> None:
        """Record that a run ended on a notice."""
        self.exit_notice = notice

    def update_progress(self, run: str, progress: Progress) -> None:
        """Send the progress with the channel's next exchange; the main rank's counts for all, which are in step."""
        if self._is_main:
            self._channel.progress = ProgressUpdate(run, progress.batches, progress.steps, progress.samples)

    def record_start(self, run: str, progress: Progress, path: Path | None) -> None:
        """Send where a run starts."""
        self._channel.send(Resumed(run, progress.batches, progress.steps, path))

    def _storage(self) -> tuple[Any, str]:
        storage = self._context.get_storage()
        return storage.storage_filesystem, storage.experiment_fs_path

    def _list_once(self) -> None:
        """Find the first free number, and the folders that Ray does not know and so would never remove."""
        if self._number is None:
            found = list_reports(*self._storage())
            self._number = self._first = 1 + max((each.number for each in found), default=0)
            own = [each for each in found if each.call == self._call]
            reported = self._train.get_all_reported_checkpoints() if own else []
            known = {Path(each.checkpoint.path).name for each in reported}
            self._orphans = [each for each in own if Path(each.path).name not in known]

    def _next_number(self) -> int:
        self._list_once()
        assert self._number is not None
        self._number += 1
        return self._number - 1

    def _remove_orphans(self) -> None:
        """Remove folders that dead processes stored in part, or did not report: there is a newer one now."""
        while self._orphans:
            orphan = self._orphans.pop()
            orphan.filesystem.delete_dir(orphan.path)

    def _check_stored(self, name: str) -> str:
        """Return the path in the storage of what was just reported."""
        newest = self._train.get_checkpoint()
        path = "" if newest is None else str(newest.path)
        if Path(path).name != name:
            raise RuntimeError(
                f"Ray did not store the checkpoint that was reported as {name!r}; the newest that it has is "
                f"{path or 'none'}. Its log says why: search for 'report'."
            )
        return path


def _preemption_context() -> Any:
    """Return the object in which Ray announces a preemption to a worker; its public API waits for all workers."""
    context = require("ray.train.v2._internal.execution.context", PURPOSE, extra="ray").get_train_context()
    found = getattr(context, "preemption_context", None)
    if not hasattr(found, "preemption_info"):
        version = require("ray", PURPOSE, extra="ray").__version__
        raise ImportError(
            f"RayLauncher cannot read from Ray {version} whether a worker's machine is to be taken away, as it can "
            f"from 2.60: pip install 'ray[train]>=2.60,<2.61'"
        )
    return found
