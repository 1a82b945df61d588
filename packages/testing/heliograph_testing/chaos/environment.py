"""Adds the plugin to a script that does not know it, by environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from heliograph import Lane, PluginChanged, PredictStart, Run, TestStart, TrainStart, ValidationStart, on
from heliograph.events import Event

from .faults.fault import Fault
from .journal import Journal
from .plugin import Chaos
from .workspace import reason_to_refuse

VARIABLE = "HELIOGRAPH_CHAOS"
JOURNAL = "journal.jsonl"


class ConfinedChaos(Chaos):
    """Chaos in a copy of a folder; ends the process if the training would write outside the copy."""

    name = "chaos"

    def __init__(self, faults: Iterable[Fault], *, seed: int, journal: Path, disk: Path) -> None:
        super().__init__(faults, seed=seed, journal=journal, disk=disk)
        self._refusals, self._copy = journal, disk

    @on(TrainStart, ValidationStart, TestStart, PredictStart, lane=Lane.TRANSFORM, before="file_log")
    def stay_inside(self, run: Run, event: Event) -> None:
        self._check_paths(run)

    @on(PluginChanged, lane=Lane.TRANSFORM, before="file_log")
    def check_enabled_plugin(self, run: Run, event: PluginChanged) -> None:
        self._check_paths(run)

    def _check_paths(self, run: Run) -> None:
        if reason := reason_to_refuse(run, self._copy):
            Journal(self._refusals).note("refused", text=reason)
            os._exit(1)  # after an error, plugins would still write outside the copy


def make_chaos() -> Chaos:
    """Return the plugin with the plan in the folder that HELIOGRAPH_CHAOS names."""
    if not (notes := os.environ.get(VARIABLE)):
        raise ValueError(f"{VARIABLE} is not set: start the training by `python -m heliograph chaos train.py`.")
    folder = Path(notes)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    faults = [Fault(**fault) for fault in plan["faults"]]
    return ConfinedChaos(faults, seed=plan["seed"], journal=folder / JOURNAL, disk=Path(plan["disk"]))
