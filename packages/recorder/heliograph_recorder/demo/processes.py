"""The child processes of the demo: one is killed halfway, the other is not interrupted."""

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

from .training import EVERY, reporting_plugins, task, train, training_plugins

LATEST_KILL = 16  # epoch; early stopping ends the training after about twice as many


class KillHalfWay(h.Plugin):
    """Kills its process halfway between two saves, in the given epoch or later."""

    affects_training = False

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def kill(self, run: h.Run, event: h.BatchEnd) -> None:
        epoch, step = run.progress.epoch, run.progress.steps
        is_half_way = step > EVERY and step % EVERY == EVERY // 2 and not run.stepping.window
        if epoch >= self.epoch and is_half_way and not run.data.is_last_batch:
            print(f"\n\nKilled by SIGKILL in epoch {epoch}, after step {step}.", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder: Path, epochs: int) -> None:
    with _process("killed", folder, epochs) as process:
        pass
    if process.returncode != -signal.SIGKILL:
        raise ValueError(f"The process that should have been killed ended with exit status {process.returncode}.")


@contextmanager
def uninterrupted_training(folder: Path, epochs: int) -> Iterator[None]:
    """Train in a child process without output; the context waits for it at the end."""
    with _process("uninterrupted", folder, epochs) as process:
        try:
            yield
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ValueError(f"The uninterrupted process failed with exit status {process.returncode}.")


def _process(kind: str, folder: Path, epochs: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", __name__, kind, str(folder), str(epochs)])  # noqa: S603  # this module


def _main(kind: str, folder: Path, epochs: int) -> None:
    plugins = training_plugins(folder)
    if kind == "killed":
        plugins += [*reporting_plugins(folder), KillHalfWay(min(epochs // 2, LATEST_KILL))]
    else:
        logging.getLogger("heliograph").addHandler(logging.NullHandler())
    train(h.Trainer(plugins, device="cpu"), task(), epochs)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
