"""Copies of the folder that a script runs in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from heliograph.testing.resume.errors import UsageError

MOST = 500 * 2**20  # bytes of a copy
NEVER = frozenset({"__pycache__", "node_modules"})


def copy_folder(source: Path, to: Path, leave_out: Collection[str]) -> None:
    """Copy a folder without hidden names, virtual environments, and some other names; links stay links.

    Raises:
        UsageError: there is much to copy, or a name to leave out is not there.
    """
    for name in leave_out:
        if not (source / name).exists():
            raise UsageError(f"There is no {name} in {source} to leave out.")
    left = {(source / name).resolve() for name in leave_out}

    def ignored(folder: str, names: list[str]) -> set[str]:
        here = Path(folder)
        return {
            name
            for name in names
            if name.startswith(".")
            or name in NEVER
            or (here / name).resolve() in left
            or (here / name / "pyvenv.cfg").exists()
        }

    size = 0
    for folder, folders, files in os.walk(source):
        skipped = ignored(folder, [*folders, *files])
        folders[:] = [name for name in folders if name not in skipped]
        size += sum((Path(folder) / name).lstat().st_size for name in files if name not in skipped)
        if size > MOST:
            raise UsageError(
                f"{source} holds more than {MOST // 2**20} MB, and is copied three times: leave out what the script "
                f"does not read, as in --leave-out data, or run this in a smaller folder."
            )
    shutil.copytree(source, to, symlinks=True, ignore=ignored)
