"""The plugin in a script that does not know it: reads its plan from a folder, and keeps the training in its copy."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from copy import copy
from pathlib import Path

from heliograph import Lane, Plugin, Resume, Run, on
from heliograph import events as ev
from heliograph.spi import is_first_party

from .fault import Fault
from .journal import Journal
from .plugin import Chaos

VARIABLE = "HELIOGRAPH_CHAOS"  # a folder with the plan and the journal
PLAN = "plan.pickle"
JOURNAL = "journal.log"
MOMENTS = (ev.TrainStart, ev.ValidationStart, ev.TestStart, ev.PredictStart, ev.PluginChanged)


class ConfinedChaos(Chaos):
    """Chaos in a copy of a folder; ends the process if the training would use files outside the copy."""

    name = "chaos"

    def __init__(self, faults: Iterable[Fault], *, seed: int, journal: Path, disk: Path) -> None:
        super().__init__(faults, seed=seed, journal=journal, disk=disk)
        self._refusals, self._copy = journal, disk.resolve()

    @on(*MOMENTS, lane=Lane.TRANSFORM, before="file_log")
    def stay_inside(self, run: Run, event: ev.Event) -> None:
        for name in run.plugins.names():
            plugin = run.plugins[name]
            paths = _paths(plugin, self._copy) if run.plugins.is_enabled(name) and isinstance(plugin, Plugin) else ()
            for path in paths:
                if not path.resolve().is_relative_to(self._copy):
                    text = (
                        f"The plugin {name} would write to or resume {path} ({path.resolve()}), outside the copy of "
                        f"the current folder, so its runs would share files. Nothing was written. Use a path "
                        f"relative to the current folder and resume='auto'; exclude a link by --leave-out."
                    )
                    Journal(self._refusals).note("refused", text=text)
                    os._exit(1)  # after an error, plugins would still write outside the copy


def _paths(plugin: Plugin, folder: Path) -> Iterator[Path]:
    if type(plugin).rehearse is not Plugin.rehearse and not is_first_party(type(plugin).__module__):
        yield from map(Path, copy(plugin).rehearse(folder))  # sets attributes, opens no file
        return
    for attribute in ("folder", "path", "resume") if is_first_party(type(plugin).__module__) else ():
        value = getattr(plugin, attribute, None)
        value = value.path if isinstance(value, Resume) else value
        if isinstance(value, str | Path) and value != "auto":
            yield Path(value)


def make_chaos() -> Chaos:
    """Return the plugin with the plan in the folder that HELIOGRAPH_CHAOS names."""
    if not (notes := os.environ.get(VARIABLE)):
        raise ValueError(f"{VARIABLE} is not set: start the training by `python -m heliograph chaos train.py`.")
    folder = Path(notes)
    plan = pickle.loads((folder / PLAN).read_bytes())  # noqa: S301  # written by the check
    return ConfinedChaos(**plan, journal=folder / JOURNAL)
