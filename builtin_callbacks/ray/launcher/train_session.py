"""The session of a worker of the launcher: reports by `ray.train`, news by way of the mailbox."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.system.extras import require
from ....events import Progress
from ..session import Notice
from ..storage.checkpoints import Listed, StoredFolder, listed, name_of
from .mailbox import Pulse, Reported, Resumed

if TYPE_CHECKING:
    from .worker_channel import Post

PURPOSE = "RayLauncher"


class TrainSession:
    """The line from a run to Ray Train, and to the process that called the launcher.

    Args:
        call: what tells the call of the launcher apart from others with the same storage; the same in all its attempts.
        post: takes messages to the caller.
        is_restart: whether an earlier attempt of this call failed, or had another number of workers.

    Attributes:
        left: the notice upon which a run here ended.
    """

    def __init__(self, call: str, post: Post, *, is_restart: bool) -> None:
        self._train = require("ray.train", PURPOSE, extra="ray")
        self._context = self._train.get_context()
        self._preemption = _preemption_context()
        self._call, self._post, self.is_restart = call, post, is_restart
        self.left: Notice | None = None
        self._is_main = self._context.get_world_rank() == 0
        self._number: int | None = None  # of the next report with a folder, on the main rank
        self._first = 0  # of such reports of this process
        self._orphans: list[Listed] = []

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        """Report to Ray, which waits for all ranks, and copies the folder into the storage before it returns.

        Raises:
            RuntimeError: Ray did not take the folder.
            OSError: the storage did not; it is named in a note.
        """
        checkpoint, name = None, None
        if folder is not None:
            checkpoint = self._train.Checkpoint.from_directory(folder.absolute())
            name = name_of(self._take_number(), self._call)
        try:
            self._train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=name)
        except OSError as error:
            error.add_note(f"heliograph: while {name or 'a report'} was stored in {self._place()[1]}")
            raise
        if not self._is_main:
            return None
        path = None if name is None else self._check_taken(name)
        if path is not None:
            self._clean_up()
        self._post.send(Reported(metrics, path))
        return self._post.orders.stop

    def stored(self) -> list[StoredFolder]:
        """Return what is in the storage, those folders too that Ray has not heard of: their reporter died first."""
        self._look()
        found = listed(*self._place())
        return [
            StoredFolder(each.filesystem, each.path, is_own=each.call == self._call and each.number < self._first)
            for each in found
        ]

    def notice(self) -> Notice | None:
        """Return whether a machine of this run is to be taken away, or its caller is to end."""
        info = self._preemption.preemption_info
        if info is None:
            return self._post.orders.leave
        ranks = ", ".join(map(str, info.preempted_ranks))
        deadline = None if info.deadline_ms is None else info.deadline_ms / 1000
        return Notice("ray", f"the machine of rank {ranks} is to be taken away", deadline)

    def leave(self, notice: Notice) -> None:
        """Remember that a run ended upon a notice."""
        self.left = notice

    def pulse(self, run: str, progress: Progress) -> None:
        """Tell where the run is, with the next beat of the post; the ranks are in step, so the main one does."""
        if self._is_main:
            self._post.pulse = Pulse(run, progress.batches, progress.steps, progress.samples)

    def resumed(self, run: str, progress: Progress, path: Path | None) -> None:
        """Tell where a run begins."""
        self._post.send(Resumed(run, progress.batches, progress.steps, path))

    def _place(self) -> tuple[Any, str]:
        storage = self._context.get_storage()
        return storage.storage_filesystem, storage.experiment_fs_path

    def _look(self) -> None:
        """Find out, once, which numbers are free, and what Ray does not know of, and so would never remove."""
        if self._number is None:
            found = listed(*self._place())
            self._number = self._first = 1 + max((each.number for each in found), default=0)
            own = [each for each in found if each.call == self._call]
            reported = self._train.get_all_reported_checkpoints() if own else []
            known = {Path(each.checkpoint.path).name for each in reported}
            self._orphans = [each for each in own if Path(each.path).name not in known]

    def _take_number(self) -> int:
        self._look()
        assert self._number is not None
        self._number += 1
        return self._number - 1

    def _clean_up(self) -> None:
        """Remove what processes that died have left half stored, or had not told Ray of: there is a newer one now."""
        while self._orphans:
            orphan = self._orphans.pop()
            orphan.filesystem.delete_dir(orphan.path)

    def _check_taken(self, name: str) -> str:
        """Return where the storage has what was reported."""
        taken = self._train.get_checkpoint()
        path = "" if taken is None else str(taken.path)
        if Path(path).name != name:
            raise RuntimeError(
                f"Ray did not take the checkpoint that was reported as {name!r}; the newest that it knows of is "
                f"{path or 'none'}. Its log says why: search for 'report'."
            )
        return path


def _preemption_context() -> Any:
    """Return what Ray tells a worker of its machine in; what is public about it waits for all other workers."""
    context = require("ray.train.v2._internal.execution.context", PURPOSE, extra="ray").get_train_context()
    found = getattr(context, "preemption_context", None)
    if not hasattr(found, "preemption_info"):
        version = require("ray", PURPOSE, extra="ray").__version__
        raise ImportError(
            f"RayLauncher reads where Ray tells a worker that its machine is to be taken away, and Ray {version} does "
            f"not have it where 2.60 has: pip install 'ray[train]>=2.60,<2.61'"
        )
    return found
