"""Run an example as a user does: in a process of its own, in an empty folder, with one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def environment() -> dict[str, str]:
    """Return the environment that an example runs in: no plugin of the user is loaded, no hub is asked."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("COV", "HELIOGRAPH_"))}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "error"}


def run_example(name: str, folder: Path, *arguments: str) -> str:
    """Return what an example prints; an error shows its traceback.

    Args:
        name: of the file in `docs/examples`.
        folder: that it runs in.
        arguments: of its command line.
    """
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
