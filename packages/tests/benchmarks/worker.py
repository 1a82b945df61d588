"""What a fresh process of the bench does: it measures one thing, with as many rounds as it should."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from heliograph.packages.tests.benchmarks import harness

MARK = "measured: "  # begins a line of results; libraries print others
WHOLE, QUICK, LEAST = 1.0, 0.1, 0.0  # shares of the rounds
ROUNDS = ("ROUNDS", "ROUNDS_INSIDE", "EPOCHS", "REPEATS", "CALLS", "SAVES", "SMALL_SAVES")  # how the modules name them
LARGE = {
    "STEPS": 100,
    "BATCHES": 20,
    "CHECKPOINTS": 2,
    "FLOATS": 2,
}  # what is large for a reason is small with the least share only


def work(name: str, share: float, seed: int) -> Any:
    """Return what `module:function` measures with a share of its rounds."""
    path, _, function = name.partition(":")
    module = import_module(path)
    resize(module, share)
    return getattr(module, function)(seed)


@cache  # a module may have several workers
def resize(module: ModuleType, share: float) -> None:
    """Let a module do a share of its rounds: its sizes are its constants, which its functions read when called."""
    if share == WHOLE:
        return
    for name in set(ROUNDS) & set(vars(module)):
        size = getattr(module, name)
        setattr(module, name, 2 if share == LEAST else max(min(size, 2), round(size * share)))
    harness.EPOCH = 30 * harness.STEPS  # of which ten warm up, and two end with a save
    if share == LEAST:
        for name in set(LARGE) & set(vars(module)):
            setattr(module, name, LARGE[name])
        harness.EPOCH, harness.WARM_UP = 6 * harness.STEPS, 1  # two of these hold ten turns, from save to save
