"""Run an example as a user does: in a process of its own, in an empty folder, with one thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


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


KILLED = """
import os, runpy, signal, sys
import heliograph as h

path, at = sys.argv[1], int(sys.argv[2])
sys.argv = [path]
made = h.Trainer.__init__


class Kill(h.Plugin):
    asks = ("save",)

    @h.on(h.BatchEnd)
    def act(self, run, event):
        if run.progress.steps == at:
            run.control.request_save("the kill is near")
        if run.progress.steps == at + 2:
            os.kill(os.getpid(), signal.SIGKILL)


def make(self, plugins=(), **options):
    made(self, [*plugins, Kill()], **options)


h.Trainer.__init__ = make
runpy.run_path(path, run_name="__main__")
"""


def kill_example(name: str, folder: Path, at: int) -> None:
    """Run an example, save after so many steps, and kill it two steps later.

    Args:
        name: of the file in `docs/examples`.
        folder: that it runs in.
        at: optimizer steps.
    """
    command = [sys.executable, "-c", KILLED, str(EXAMPLES / name), str(at)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr + done.stdout


def final_weights(folder: Path) -> Any:
    """Return the modules of the newest checkpoint below a folder."""
    newest = max(folder.rglob("*.pth"), key=lambda path: path.stat().st_mtime_ns)
    return torch.load(newest, weights_only=True)["modules"]
