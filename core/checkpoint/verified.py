"""Lines beside the checkpoints: when a comparison of two runs showed that a program resumes exactly."""

from __future__ import annotations

import json
import logging
from datetime import date
from pathlib import Path
from typing import Final

logger = logging.getLogger("heliograph")
FILE: Final = ".verified.jsonl"


def record_verified(folder: Path, run_name: str, steps: int, by: str) -> None:
    """Append a line to the file of a folder of checkpoints.

    Args:
        folder: the folder; created if it is missing.
        run_name: the name of the run whose program was verified.
        steps: the number of optimizer steps that were bitwise identical.
        by: the comparison, for example `rehearse`.
    """
    line = {"date": date.today().isoformat(), "run": run_name, "steps": steps, "result": "identical", "by": by}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / FILE).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
    except OSError as error:  # the comparison is done; only a later report lacks the line
        logger.warning("%s got no line about the comparison: %s", folder / FILE, error)


def verified_before(folder: Path, run_name: str) -> str | None:
    """Return date and steps of the newest line of a run, such as `2026-11-30, 37 steps`."""
    try:
        lines = [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]
        newest = [line for line in lines if line["run"] == run_name][-1]
        return f"{newest['date']}, {newest['steps']:,} step{'s' * (newest['steps'] != 1)}"
    except (OSError, ValueError, LookupError, TypeError):  # no line, or a damaged file
        return None
