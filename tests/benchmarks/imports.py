"""What `import heliograph` costs, in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median

ROUNDS, ROUNDS_INSIDE = 15, 5
TORCH, PACKAGE, TRAINER = "import torch", "import torch, heliograph", "import torch; from heliograph import Trainer"
# Printed from inside: the same cost without the noise of starting an interpreter and importing torch.
INSIDE = "import torch, time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"
STATEMENTS = {PACKAGE: "import heliograph", TRAINER: "from heliograph import Trainer"}


def python(code: str) -> tuple[float, str]:
    """Return the seconds of processor time that an interpreter took for the code, and what it printed.

    Not the time on the clock: that scatters by more than the bar, with whatever else the machine does.
    """
    begin = children_seconds()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return children_seconds() - begin, done.stdout


def children_seconds() -> float:
    """Return the processor time of all finished children."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def time_imports() -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return, in milliseconds: differences to `import torch` round by round, and the medians from the inside."""
    beyond: dict[str, list[float]] = {code: [] for code in STATEMENTS}
    inside: dict[str, list[float]] = {code: [] for code in STATEMENTS}
    python(TRAINER)  # writes the byte code
    for _ in range(ROUNDS):
        base, _ = python(TORCH)
        for code in STATEMENTS:
            seconds, _ = python(code)
            beyond[code].append((seconds - base) * 1e3)
    for _ in range(ROUNDS_INSIDE):
        for code, statement in STATEMENTS.items():
            inside[code].append(float(python(INSIDE.format(statement))[1]) * 1e3)
    return beyond, {code: median(each) for code, each in inside.items()}


def events_bring_torch() -> bool:
    """Return whether importing the events imports torch."""
    return "True" in python("import heliograph.events, sys; print('torch' in sys.modules)")[1]
