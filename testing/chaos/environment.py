"""The plugin as the environment of a process says it: for a script that knows nothing of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from heliograph.testing.chaos.faults.fault import Fault
from heliograph.testing.chaos.plugin import Chaos

VARIABLE = "HELIOGRAPH_CHAOS"
JOURNAL = "journal.jsonl"


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
    return Chaos(faults, seed=plan["seed"], journal=folder / JOURNAL, disk=plan["disk"])
