"""What `import heliograph` and the start of a minimal fit cost, in fresh interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from tempfile import TemporaryDirectory

ROUNDS, ROUNDS_INSIDE = 5, 3
TORCH, PACKAGE, TRAINER = "import torch", "import torch, heliograph", "import torch; from heliograph import Trainer"
HAND_STEP, FIT_STEP = "import and first step by hand, by the clock", "import and first step of a minimal fit"
MORE = "the minimal fit, beyond by hand"
# Printed from inside: the same cost without the noise of starting an interpreter and importing torch.
INSIDE = "import torch, time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"
STATEMENTS = {PACKAGE: "import heliograph", TRAINER: "from heliograph import Trainer"}
# From after `import torch` to the end of the first step. By hand, most of it is what torch imports at the first step.
MODEL = "model = torch.nn.Linear(4, 2); batch = (torch.randn(8, 4), torch.randint(2, (8,)))"
BY_HAND = f"""
import torch, time
begin = time.perf_counter()
{MODEL}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
optimizer.step()
optimizer.zero_grad()
print(time.perf_counter() - begin)
"""
MINIMAL_FIT = f"""
import torch, time
begin = time.perf_counter()
from heliograph import Supervised, Trainer
{MODEL}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = torch.nn.functional.cross_entropy
Trainer(device="cpu").fit(Supervised(model, loss), [batch], optimizer=optimizer, epochs=1)
print(time.perf_counter() - begin)
"""

# From after the first step by hand: what comes beyond it to the end of the first step of a fit, and after its last one.
WITH_PLUGINS = f"""
import json, os, sys, time, torch
folder, epochs = sys.argv[1], int(sys.argv[2])
{MODEL}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = torch.nn.functional.cross_entropy
loss(model(batch[0]), batch[1]).backward()
optimizer.step()
optimizer.zero_grad()
clocks = time.process_time, time.perf_counter
times = [[clock() for clock in clocks]]
import heliograph as h
trainer = h.Trainer({{plugins}}, device="cpu")
trainer.bus.on(h.BatchEnd, lambda run, event: times.append([clock() for clock in clocks]))
task = h.Supervised(model, loss)
trainer.fit(task, [batch] * 2, validation={{validation}}, optimizer=optimizer, epochs=epochs)
times.append([clock() for clock in clocks])
print(json.dumps([times[0], times[1], times[-2], times[-1]]))
"""
USUAL_PLUGINS = """[
    h.ProgressBar(plain=False, file=open(os.devnull, "w")),
    h.LogSchedule(h.Every(steps=50)),
    h.TensorBoard(folder),
    h.EarlyStopping(patience=1_000),
    h.ValidationSchedule(h.Every(steps=1_000)),
    h.SaveSchedule(h.Every(steps=1_000)),
    h.Checkpoint(folder, keep_last=1{resume}),
    {exact}
]"""
MINIMAL, USUAL, EXACT, RESUMED = "a minimal fit", "the usual set", "the exact set", "the exact set, resumed"
START, END = "to the end of the first step", "from the last step to the return"
TIME, CLOCK = "processor time", "by the clock"
SETS = {
    MINIMAL: WITH_PLUGINS.format(plugins="[]", validation="None"),
    USUAL: WITH_PLUGINS.format(plugins=USUAL_PLUGINS.format(resume="", exact=""), validation="[batch]"),
    EXACT: WITH_PLUGINS.format(
        plugins=USUAL_PLUGINS.format(resume=', resume="auto"', exact="h.RNGCapture(0),"), validation="[batch]"
    ),
}


ALL_SETS = (*SETS, RESUMED)
STARTS, ENDS = ([f"{name}: {part}, {TIME}" for name in ALL_SETS] for part in (START, END))


def python(code: str, *arguments: str) -> tuple[float, str]:
    """Return the seconds of processor time that an interpreter took for the code, and what it printed.

    Not the time on the clock: that scatters by more than the bar, with whatever else the machine does.
    """
    begin = children_seconds()
    # Users have byte code; an environment that never writes it would compile every file in every round.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True, env=environment
    )
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


def time_first_steps() -> tuple[list[float], list[float]]:
    """Return the milliseconds to the end of the first step, by hand and by a minimal fit, round by round in turns."""
    pairs = [(float(python(BY_HAND)[1]) * 1e3, float(python(MINIMAL_FIT)[1]) * 1e3) for _ in range(ROUNDS + 1)]
    by_hand, minimal_fit = zip(*pairs[1:], strict=True)  # the first round writes the byte code
    return list(by_hand), list(minimal_fit)


def starts_and_ends(seed: int) -> dict[str, list[float]]:
    """Return the milliseconds of processor time and by the clock of the start and the end of fits, each of many."""
    spent: dict[str, list[float]] = {}
    for measured in range(-1, ROUNDS_INSIDE):  # the first round writes the byte code
        with TemporaryDirectory() as folder:
            runs = [(name, code, "1") for name, code in SETS.items()] + [(RESUMED, SETS[EXACT], "2")]
            for name, code, epochs in runs:
                own = folder if name in (EXACT, RESUMED) else f"{folder}/{name}"
                times = json.loads(python(code, own, epochs)[1])
                for place, part in enumerate((START, END)):
                    for clock, how in enumerate((TIME, CLOCK)):
                        before, after = times[2 * place][clock], times[2 * place + 1][clock]
                        if measured >= 0:
                            spent.setdefault(f"{name}: {part}, {how}", []).append((after - before) * 1e3)
    return spent


def starts(seed: int) -> dict[str, list[float]]:
    """Return the milliseconds of all imports and first steps, each of many interpreters."""
    beyond, inside = time_imports()
    by_hand, minimal_fit = time_first_steps()
    more = [fit - hand for fit, hand in zip(minimal_fit, by_hand, strict=True)]
    clocked = {f"{code}, by the clock inside": [value] for code, value in inside.items()}
    return {**beyond, **clocked, HAND_STEP: by_hand, FIT_STEP: minimal_fit, MORE: more}
