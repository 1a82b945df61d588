"""What `Remote` costs per step: `python packages/tests/benchmarks/remote.py`.

While nobody asks, beside the same loop without it, in processor time, which other jobs on the machine disturb less. And
in one training, by turns, while its status is asked for without a pause, while it is flooded with malformed messages,
and while it is left in peace.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter, thread_time
from typing import Any
from unittest.mock import patch

import heliograph as h
from heliograph.packages.tests.benchmarks.harness import STEPS as PER_TURN
from heliograph.packages.tests.benchmarks.harness import (
    Seconds,
    Turns,
    batches_of,
    differences,
    per_step,
    race,
    sgd,
    tiny_model,
)
from heliograph.packages.tests.benchmarks.recording import NOBODY, NOBODY_AGAIN, nothing, with_plugins
from heliograph.packages.tests.torture.hostile import attack
from heliograph_recorder import Remote, attach
from torch.nn.functional import mse_loss

EPOCHS = 3
HANDLER, QUIET = "an empty handler of BatchEnd", "Remote"
STEPS, TURNS = 300, 40  # of a phase, and of each kind
PEACE = "left in peace"


class Empty(h.Plugin):
    """Receives the event of every batch."""

    @h.on(h.BatchEnd)
    def receive(self, run: h.Run, event: h.BatchEnd) -> None:
        """Do nothing."""


def race_quiet(seed: int) -> Seconds:
    """Time the loop with and without it, while nobody asks."""
    with TemporaryDirectory() as folder, patch.object(Turns, "clock", staticmethod(thread_time)):
        variants = {
            NOBODY: with_plugins(nothing),
            NOBODY_AGAIN: with_plugins(nothing),
            HANDLER: with_plugins(lambda: [Empty()]),
            QUIET: with_plugins(lambda: [Remote(folder)]),
        }
        return race(variants, EPOCHS, seed)


def ask(path: Path) -> None:
    """Ask for the status."""
    attach(path).status()


def flood(path: Path) -> None:
    """Send malformed messages."""
    attack(str(path), 20, path.name)


DEEDS: dict[str, Callable[[Path], None]] = {"its status is asked for": ask, "flooded": flood}


def disturb(kind: str, path: Path, active: Any) -> None:
    """Do it whenever it is the turn of that; never return."""
    while True:
        active.wait()
        try:
            DEEDS[kind](path)
        except (OSError, LookupError):
            continue  # it has ended, or too many are connected


class InTurns(h.Plugin):
    """Times phases of many steps, in each of which another process does something else."""

    asks = ("stop",)

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.kinds = [PEACE, *DEEDS]
        self.wall: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        self.own: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        self.active: dict[str, Any] = {}
        self.processes: list[Any] = []
        self.began = 0.0, 0.0

    @h.on(h.BatchEnd, when=h.Every(steps=STEPS))
    def turn(self, run: h.Run, event: h.BatchEnd) -> None:
        """End a phase, and begin the next."""
        number = run.progress.steps // STEPS - 1
        now = perf_counter(), thread_time()
        if not number:
            self.start()
        else:
            kind = self.kinds[(number - 1) % len(self.kinds)]
            self.wall[kind].append((now[0] - self.began[0]) / STEPS * 1e6)
            self.own[kind].append((now[1] - self.began[1]) / STEPS * 1e6)
        following = self.kinds[number % len(self.kinds)]
        for kind, active in self.active.items():
            (active.set if kind == following else active.clear)()
        if number == TURNS * len(self.kinds):
            for process in self.processes:
                process.kill()
                process.join()
            run.control.stop("all was timed")
        self.began = perf_counter(), thread_time()

    def start(self) -> None:
        """Start the processes."""
        context = multiprocessing.get_context("spawn")
        for kind in DEEDS:
            self.active[kind] = context.Event()
            args = kind, self.remote.path, self.active[kind]
            self.processes.append(context.Process(target=disturb, args=args, daemon=True))
            self.processes[-1].start()


def time_disturbed() -> InTurns:
    """Train, disturbed by turns."""
    with TemporaryDirectory() as folder:
        remote = Remote(folder)
        timed = InTurns(remote)
        task = h.Supervised(tiny_model(), mse_loss)
        h.Trainer([remote, timed], device="cpu").fit(task, batches_of(1000), optimizer=sgd, steps=10**9)
    return timed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the medians, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    rounds = [race_quiet(seed) for seed in range(options.rounds)]
    seconds = {name: [each for of_round in rounds for each in of_round[name]] for name in rounds[0]}
    fastest = {name: quantiles(each, n=10)[0] / PER_TURN * 1e6 for name, each in seconds.items()}
    print(f"nobody asks: {per_step(seconds[NOBODY]):.2f} us of the processor a step without it, in the median")
    for name in (NOBODY_AGAIN, HANDLER, QUIET):
        beyond, ratio = median(differences(seconds, name, NOBODY)), median(seconds[name]) / median(seconds[NOBODY])
        tenth = fastest[name] - fastest[NOBODY]
        print(f"  {name}: {beyond:+.3f} us (ratio {ratio:.4f}); in the fastest tenth of the turns {tenth:+.3f} us")
    timed = time_disturbed()
    print(f"in turns of {STEPS} steps, {TURNS} of each kind:")
    for kind in timed.kinds:
        wall, own = median(timed.wall[kind]), median(timed.own[kind])
        ratios = wall / median(timed.wall[PEACE]), own / median(timed.own[PEACE])
        print(f"  {kind}: {wall:.1f} us a step (ratio {ratios[0]:.3f}), {own:.1f} of the processor ({ratios[1]:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
