"""The plugin as the environment of a process says it: for a script that knows nothing of it."""

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
    """Chaos in a copy of a folder, outside of which nothing may be written.

    Args:
        faults: see `Chaos`.
        seed: see there.
        journal: see there.
        disk: the copy.
    """

    name = "chaos"

    def __init__(self, faults: Iterable[Fault], *, seed: int, journal: Path, disk: Path) -> None:
        super().__init__(faults, seed=seed, journal=journal, disk=disk)
        self._refusals, self._copy = journal, disk

    @on(TrainStart, ValidationStart, TestStart, PredictStart, lane=Lane.TRANSFORM, before="file_log")
    def stay_inside(self, run: Run, event: Event) -> None:
        """End the process of what would leave the copy: after an error, logs there would still note it."""
        self._check_paths(run)

    @on(PluginChanged, lane=Lane.TRANSFORM, before="file_log")
    def look_again(self, run: Run, event: PluginChanged) -> None:
        """Look at a plugin that was enabled."""
        self._check_paths(run)

    def _check_paths(self, run: Run) -> None:
        if reason := reason_to_refuse(run, self._copy):
            Journal(self._refusals).note("refused", text=reason)
            os._exit(1)


def make_chaos() -> Chaos:
    """Return the plugin with the plan and the journal that the variable HELIOGRAPH_CHAOS names the folder of.

    Raises:
        ValueError: the variable is not set.
    """
    if not (named := os.environ.get(VARIABLE)):
        raise ValueError(f"{VARIABLE} is not set: `python -m heliograph chaos train.py` sets it for what it starts.")
    folder = Path(named)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    faults = [Fault(**each) for each in plan["faults"]]
    return ConfinedChaos(faults, seed=plan["seed"], journal=folder / JOURNAL, disk=Path(plan["disk"]))
