"""A session without Ray: reports are stored in a folder, as Ray would do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from heliograph.core.host import hosted_by
from heliograph.core.result import RunResult
from heliograph.events import Progress
from heliograph.plugins import Plugins
from heliograph_ray.session import Notice
from heliograph_ray.storage import StoredFolder, list_reports, report_name
from pyarrow.fs import LocalFileSystem  # type: ignore[import-untyped]


class CountingFolder(StoredFolder):
    """Counts how often it is fetched."""

    fetches: list[str]

    def fetch(self, folder: Path) -> None:
        self.fetches.append(self.name)
        super().fetch(folder)


class FakeSession:
    """Keeps what a run reports, in lists.

    Args:
        storage: the folder to which reports are copied.
        call: the id of the launcher's call.
        is_restart: whether it is not the first attempt.
        answers: the values of `report`, in order; then None.
    """

    def __init__(
        self, storage: Path, call: str = "one", *, is_restart: bool = False, answers: tuple[Notice | None, ...] = ()
    ) -> None:
        self.storage, self.call, self.is_restart = storage, call, is_restart
        self.exit_notice: Notice | None = None
        self.warned: Notice | None = None
        self.reports: list[tuple[dict[str, float], list[str] | None]] = []
        self.beginnings: list[tuple[int, Path | None]] = []
        self.pulses: list[int] = []
        self.fetches: list[str] = []
        self.before_report: Callable[[], object] = bool
        self._answers = iter(answers)
        found = list_reports(LocalFileSystem(), str(storage))
        self._first = self._next = max((each.number for each in found), default=0) + 1

    def report(self, metrics: dict[str, float], folder: Path | None) -> Notice | None:
        self.before_report()
        names = None
        if folder is not None:
            names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            shutil.copytree(folder, self.storage / report_name(self._next, self.call))
            self._next += 1
        self.reports.append((dict(metrics), names))
        return next(self._answers, None)

    def stored_reports(self) -> list[StoredFolder]:
        found = []
        for each in list_reports(LocalFileSystem(), str(self.storage)):
            is_own = each.call == self.call and each.number < self._first
            found.append(CountingFolder(each.filesystem, each.path, is_own=is_own))
            found[-1].fetches = self.fetches
        return list(found)

    def notice(self) -> Notice | None:
        return self.warned

    def update_progress(self, run: str, progress: Progress) -> None:
        self.pulses.append(progress.batches)

    def record_start(self, run: str, progress: Progress, path: Path | None) -> None:
        self.beginnings.append((progress.batches, path))


class FakeHost:
    """Has a session, and does nothing."""

    def __init__(self, session: FakeSession) -> None:
        self.session = session

    def prepare(self, plugins: Plugins) -> None:
        pass

    def ended(self, result: RunResult) -> None:
        pass


@contextmanager
def on_ray(session: FakeSession) -> Iterator[FakeSession]:
    """Use a session for every training in the context."""
    with hosted_by(FakeHost(session)):
        yield session
