"""Copies of the folder of a script, and the check that a training stays in its copy."""

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

MOST = 500 * 2**20  # bytes per copy
NEVER = frozenset({"__pycache__", "node_modules"})
WRITTEN = ("folder", "path")  # attributes of plugins with the paths that they write


def copy_folder(source: Path, to: Path, leave_out: Collection[str]) -> None:
    for name in leave_out:
        if not (source / name).exists():
            raise UsageError(f"--leave-out {name}: {source} has no such entry.")
    excluded = {(source / name).resolve() for name in leave_out}

    def ignored(folder: str, names: list[str]) -> set[str]:
        here = Path(folder)
        return {
            name
            for name in names
            if name.startswith(".")
            or name in NEVER
            or (here / name).resolve() in excluded
            or (here / name / "pyvenv.cfg").exists()
        }

    size = 0
    for folder, folders, files in os.walk(source):
        skipped = ignored(folder, [*folders, *files])
        folders[:] = [name for name in folders if name not in skipped]
        size += sum((Path(folder) / name).lstat().st_size for name in files if name not in skipped)
        if size > MOST:
            raise UsageError(
                f"{source} has more than {MOST // 2**20} MB and is copied three times: exclude what the script does "
                f"not read, for example --leave-out data, or run this in a smaller folder."
            )
    shutil.copytree(source, to, symlinks=True, ignore=ignored)


def reason_to_refuse(run: Run, folder: Path) -> str:
    # Empty if the training stays in the folder.
    return next(_reasons(run, folder.resolve()), "")


def is_outside(path: Path, folder: Path) -> bool:
    return not path.resolve().is_relative_to(folder.resolve())


def _reasons(run: Run, folder: Path) -> Iterator[str]:
    unredirected = run.plugins.unredirected()
    for name in run.plugins.names():
        plugin = run.plugins[name]
        if not run.plugins.is_enabled(name) or not isinstance(plugin, Plugin) or name in unredirected:
            continue
        for path in _written(plugin, folder):
            if is_outside(path, folder):
                yield _describe_escape(name, path)
        for path in _paths(plugin, ("resume",)):
            if is_outside(path, folder):
                yield (
                    f"The training would resume {path}, which is outside the copy of the current folder. Resume from "
                    f"the training's own checkpoints: {name} with resume='auto'."
                )


def _written(plugin: Plugin, folder: Path) -> Iterator[Path]:
    # Foreign plugins declare their paths in rehearse().
    if type(plugin).rehearse is Plugin.rehearse or is_first_party(type(plugin).__module__):
        yield from _paths(plugin, WRITTEN)
    else:
        yield from map(Path, copy(plugin).rehearse(folder))  # sets attributes, opens no file


def _paths(plugin: Any, attributes: tuple[str, ...]) -> Iterator[Path]:
    for value in (getattr(plugin, attribute, None) for attribute in attributes):
        value = value.path if isinstance(value, Resume) else value
        if isinstance(value, str | Path) and value != "auto":
            yield Path(value)


def _describe_escape(name: str, path: Path) -> str:
    if path.is_absolute():
        fix = f"Use a path for {name} that is relative to the current folder, for example {Path('runs', path.name)}."
    else:
        fix = (
            f"The path contains a link or '..': exclude the link, for example --leave-out {path.parts[0]}, or use a "
            f"path for {name} in the current folder."
        )
    where = path if path.is_absolute() else f"{path}, which is {path.resolve()}"
    return (
        f"The training would write to {where}, outside the copy of the current folder, so its runs would share files. "
        f"Nothing was written. {fix}"
    )
