"""Where the plugins of a rehearsal write, and whether anything else was written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...plugins.filters import Filter
from ...plugins.first_party import is_first_party
from ...plugins.plugin import Plugin
from ..engines.contract import LoopEngine
from .objects import KeptObjects

MOST_FILES = 10_000  # of a folder that is watched
Listing = dict[Path, tuple[int, int]]


@contextmanager
def temporary_folder(engine: LoopEngine, parent: str | Path | None) -> Iterator[Path]:
    """Return a folder of all ranks, made by the main one and removed afterwards; the process is in its group."""
    if not engine.is_main:
        yield Path(engine.broadcast(None))
        return
    with TemporaryDirectory(prefix="heliograph-rehearsal-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(engine.broadcast(folder))


def left_out(plugins: Iterable[Any]) -> list[Any]:
    """Return the plugins that take no part in a rehearsal."""
    return [each for each in plugins if not getattr(each, "rehearses", True)]


def redirect(plugins: Any, folder: Path) -> dict[str, list[Path]]:
    """Let every plugin write to a folder of its own in `folder`; return by name where each would have written."""
    found = {}
    for name in plugins.names():
        plugin = plugins[name]
        if plugins.is_enabled(name) and isinstance(plugin, Plugin):
            found[name] = [Path(each) for each in plugin.rehearse(folder / name)]
    return {name: paths for name, paths in found.items() if paths}


def shorten(objects: KeptObjects) -> None:
    """Let every filter be due at the first occasion."""
    for each in list(objects.found(Filter)):
        each.shorten()


def keeps_states_itself(plugins: Any) -> bool:
    """Return whether a plugin that writes at a save can be redirected, and so resume."""
    return any(keeps_states(each) for each in plugins)


def keeps_states(plugin: Any) -> bool:
    """Return whether a plugin that can be redirected writes what a run resumes from, and not only weights."""
    can_be_redirected = isinstance(plugin, Plugin) and type(plugin).rehearse is not Plugin.rehearse
    is_whole = not getattr(plugin, "weights_only", False)
    return can_be_redirected and is_whole and "save" in {*plugin.needs, *plugin.asks}


class Watch:
    """The files that plugins with a path, and no `rehearse` of their own, may write; and those of the current folder.

    Args:
        plugins: of the trainer.

    Attributes:
        unredirected: the names of such plugins.
    """

    def __init__(self, plugins: Any) -> None:
        self._places = {
            name: [value for value in vars(plugins[name]).values() if isinstance(value, Path)]
            for name in plugins.names()
            if cannot_be_redirected(plugins[name])
        }
        self.unredirected = tuple(name for name, paths in self._places.items() if paths)
        self._before, self._here = self._listings(), set(Path().iterdir())

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each plugin that wrote something that is still there."""
        now = self._listings()
        for name, before in self._before.items():
            new = [path for path, facts in now[name].items() if before.get(path) != facts]
            if new:
                yield (
                    f"plugin {name!r} wrote {new[0]}{f' and {len(new) - 1} more' * (len(new) > 1)}, which is still "
                    f"there: give it a method rehearse(folder), or rehearses = False."
                )

    def notes(self) -> Iterator[str]:
        """Yield a line where the current folder has more in it than before."""
        if new := sorted(set(Path().iterdir()) - self._here):
            yield f"new in the current folder since the rehearsal began: {', '.join(map(str, new[:5]))}"

    def _listings(self) -> dict[str, Listing]:
        return {name: {k: v for path in paths for k, v in _files(path)} for name, paths in self._places.items()}


def cannot_be_redirected(plugin: Any) -> bool:
    """Return whether a plugin of somebody else's writes where it always does, if it writes at all."""
    has_way = isinstance(plugin, Plugin) and type(plugin).rehearse is not Plugin.rehearse
    is_ours = is_first_party(type(plugin).__module__)
    return not (has_way or is_ours) and getattr(plugin, "rehearses", True) and hasattr(plugin, "__dict__")


def _files(path: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    found = islice(path.rglob("*"), MOST_FILES) if path.is_dir() else [path]
    for each in found:
        if each.is_file():
            status = each.stat()
            yield each, (status.st_size, status.st_mtime_ns)


def room(path: Path) -> tuple[int, str]:
    """Return the free bytes where a path is or will be, and why nothing can be written there, if that is so."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return 0, f"{place} is a file" if place != path.absolute() else ""
    reason = "" if os.access(place, os.W_OK | os.X_OK) else f"this process may not write to {place}"
    return shutil.disk_usage(place).free, reason
