"""Files that fail."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from heliograph.core.checkpoint.storage import Files

FULL = OSError(errno.ENOSPC, "No space left on device")


class Death(BaseException):
    """The process is gone: nothing that it would still do happens."""


class Faulty(Files):
    """Fails at one operation, or from it on."""

    def __init__(self, first: int | None = None, error: BaseException = FULL, times: float = 1) -> None:
        self.first, self.error, self.times, self.count = first, error, times, 0

    def _step(self) -> None:
        self.count += 1
        if self.first is not None and self.first < self.count <= self.first + self.times:
            raise self.error

    def create(self, path: Path) -> Any:
        self._step()
        return super().create(path)

    def sync(self, file: Any) -> None:
        self._step()

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)

    def remove_folder(self, path: Path) -> None:
        self._step()
        if self.first is not None and self.first + 1 == self.count + 1 and path.exists():
            next(iter(path.iterdir())).unlink(missing_ok=True)  # half of it is gone when the next one fails
        super().remove_folder(path)

    def sync_folder(self, folder: Path) -> None:
        self._step()
