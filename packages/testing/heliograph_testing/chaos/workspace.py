"""Copies of the folder that a script runs in, and what would leave one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph import Plugin, Resume
from heliograph.spi import UsageError, is_first_party

if TYPE_CHECKING:
    from heliograph import Run

MOST = 500 * 2**20  # bytes of a copy
NEVER = frozenset({"__pycache__", "node_modules"})
WRITTEN = ("folder", "path")  # attributes of plugins that say where they write


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


def reason_to_refuse(run: Run, folder: Path) -> str:
    """Return why a training must not begin, as it would leave a folder; empty where it would not.

    Args:
        run: which begins.
        folder: all that it may write to and resume from.
    """
    return next(_reasons(run, folder.resolve()), "")


def is_outside(path: Path, folder: Path) -> bool:
    """Return whether a path is not in a folder, once links are followed."""
    return not path.resolve().is_relative_to(folder.resolve())


def _reasons(run: Run, folder: Path) -> Iterator[str]:
    unredirected = run.plugins.unredirected()
    for name in run.plugins.names():
        plugin = run.plugins[name]
        if not run.plugins.is_enabled(name) or not isinstance(plugin, Plugin) or name in unredirected:
            continue
        for path in _written(plugin, folder):
            if is_outside(path, folder):
                yield _of_written(name, path)
        for path in _paths(plugin, ("resume",)):
            if is_outside(path, folder):
                yield (
                    f"The training would resume {path}, which is outside of the copy of the current folder. Nothing "
                    f"was read. Let {name} continue what the training itself has saved: resume='auto'."
                )


def _written(plugin: Plugin, folder: Path) -> Iterator[Path]:
    """Yield where a plugin writes: by its attributes, or by what one of somebody else's says in a rehearsal."""
    if type(plugin).rehearse is Plugin.rehearse or is_first_party(type(plugin).__module__):
        yield from _paths(plugin, WRITTEN)
    else:
        yield from map(Path, copy(plugin).rehearse(folder))  # which sets attributes, and opens nothing


def _paths(plugin: Any, attributes: tuple[str, ...]) -> Iterator[Path]:
    for value in (getattr(plugin, attribute, None) for attribute in attributes):
        value = value.path if isinstance(value, Resume) else value
        if isinstance(value, str | Path) and value != "auto":
            yield Path(value)


def _of_written(name: str, path: Path) -> str:
    if path.is_absolute():
        mend = f"Give {name} a path that is relative to the current folder, such as {Path('runs', path.name)}."
    else:
        mend = (
            f"A link or '..' leads there: leave the link out of the copy, as in --leave-out {path.parts[0]}, or give "
            f"{name} a path within the current folder."
        )
    where = path if path.is_absolute() else f"{path}, which is {path.resolve()}"
    return (
        f"The training would write to {where}, outside of the copy of the current folder, where the runs would meet. "
        f"Nothing was written there. {mend}"
    )
