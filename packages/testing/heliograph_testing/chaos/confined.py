"""The plugin in a script that does not know it: reads its plan from a folder, and keeps the training in its copy."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

from heliograph import Lane, Plugin, Resume, Run, on
from heliograph import events as ev

from .plugin import Chaos
from .story import Journal

VARIABLE = "HELIOGRAPH_CHAOS"  # a folder with the plan and the journal
PLAN = "plan.pickle"
JOURNAL = "journal.log"
MOMENTS = (ev.TrainStart, ev.ValidationStart, ev.TestStart, ev.PredictStart, ev.PluginChanged)


class ConfinedChaos(Chaos):
    """Chaos in a copy of a folder; ends the process if a plugin has a path outside the copy."""

    name = "chaos"

    @on(*MOMENTS, lane=Lane.TRANSFORM, before="file_log")
    def stay_inside(self, run: Run, event: ev.Event) -> None:
        for plugin in run.plugins:
            if plugin is self or not isinstance(plugin, Plugin) or not run.plugins.is_enabled(plugin):
                continue
            for path in _paths(plugin):
                if not path.resolve().is_relative_to(self._folder.resolve()):
                    text = (
                        f"The plugin {plugin.name} would write to or resume {path} ({path.resolve()}), outside the "
                        f"copy of the current folder, so its runs would share files. Nothing was written. Use a path "
                        f"relative to the current folder and resume='auto'; exclude a link by --leave-out."
                    )
                    assert self._path is not None
                    Journal(self._path).note("refused", text=text)
                    os._exit(1)  # after an error, plugins would still write outside the copy


def _paths(plugin: Plugin) -> Iterator[Path]:
    for value in vars(plugin).values():
        if isinstance(value, Path):
            yield value
        elif isinstance(value, Resume) and value.path not in (None, "auto"):
            yield Path(value.path)


def make_chaos() -> Chaos:
    """Return the plugin with the plan in the folder that HELIOGRAPH_CHAOS names."""
    if not (notes := os.environ.get(VARIABLE)):
        raise ValueError(f"{VARIABLE} is not set: start the training by `python -m heliograph chaos train.py`.")
    folder = Path(notes)
    plan = pickle.loads((folder / PLAN).read_bytes())  # noqa: S301  # written by the check
    return ConfinedChaos(**plan, journal=folder / JOURNAL)
