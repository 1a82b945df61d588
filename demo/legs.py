"""The demo's processes beside its own: one that is killed half way, and one that is left alone."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import heliograph as h

from .training import EVERY, deciding, reporting, task, train

LATEST_KILL = 16  # an epoch; early stopping leaves about twice as many


class KillHalfWay(h.Plugin):
    """A plugin of the demo's own: kills its process amid an epoch, half way between two saves.

    Args:
        epoch: the first one in which it does so.
    """

    affects_training = False

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def kill(self, run: h.Run, event: h.BatchEnd) -> None:
        """Kill, if it is time to."""
        epoch, step = run.progress.epoch, run.progress.steps
        is_half_way = step > EVERY and step % EVERY == EVERY // 2 and not run.window
        if epoch >= self.epoch and is_half_way and not run.is_last_batch:
            print(f"\n\nKilled by SIGKILL in epoch {epoch}, after step {step}.", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder: Path, epochs: int) -> None:
    """Train in a process of its own, in full view, until it is killed half way.

    Raises:
        ValueError: it ended in another way.
    """
    with _process("killed", folder, epochs) as process:
        pass
    if process.returncode != -signal.SIGKILL:
        raise ValueError(f"The process that was to be killed ended by itself, with exit status {process.returncode}.")


@contextmanager
def left_alone(folder: Path, epochs: int) -> Iterator[None]:
    """Train from start to end in a process beside this one, without a word; leaving waits for it.

    Raises:
        ValueError: it failed.
    """
    with _process("alone", folder, epochs) as process:
        try:
            yield
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ValueError(f"The process that was left alone failed, with exit status {process.returncode}.")


def _process(what: str, folder: Path, epochs: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", __name__, what, str(folder), str(epochs)])  # noqa: S603  # our own


def _main(what: str, folder: Path, epochs: int) -> None:
    plugins = deciding(folder)
    if what == "killed":
        plugins += [*reporting(folder), KillHalfWay(min(epochs // 2, LATEST_KILL))]
    else:
        logging.getLogger("heliograph").addHandler(logging.NullHandler())  # without a word
    train(h.Trainer(plugins, device="cpu"), task(), epochs)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
