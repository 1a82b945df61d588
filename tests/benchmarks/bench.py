"""Measure heliograph beside a hand-written loop, and print every figure beside its bar.

Run as a script: `python tests/benchmarks/bench.py`, about seven minutes. A bar that is not held is printed, not raised:
on a shared machine a figure is not a test. Each figure is the median over five fresh processes of the median in each;
for agreement, over three, or over three pairs of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch
from heliograph.tests.benchmarks import (
    agreement,
    comparison,
    dispatch,
    gpu,
    imports,
    lean,
    recording,
    resume,
    saves,
    trackers,
    usual,
)
from heliograph.tests.benchmarks.harness import STEPS, Seconds, differences, per_step

PROCESSES = 5
FEWER = 3  # where there is much to start
ROUNDS_PER_SAVE = 10
WORKERS = {
    "loops": lean.race_loops,
    "handlers": lean.race_handlers,
    "usual": usual.race_usual,
    "dispatch": dispatch.time_dispatch,
    "resumable": resume.per_step,
    "loading": resume.per_batch,
    "far": resume.far_resume,
    "rows": comparison.per_batch,
    "attributes": comparison.at_save,
    "probe": comparison.starts,
    "folders": comparison.folders,
    "saves": saves.stalls,
    "ranks": agreement.time_ranks,
    "gpu": gpu.race_gpu,
    "recording": recording.race_recorder,
    "recorded": recording.race_usual_recorder,
    "trackers": trackers.per_log,
}


def gather(worker: str, processes: int = PROCESSES) -> list[Any]:
    """Return what each of some fresh processes measured."""
    results = []
    for seed in range(processes):
        command = [sys.executable, __file__, "--worker", worker, "--seed", str(seed)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def row(name: str, values: Iterable[float], bar: float | None = None, digits: int = 2) -> None:
    """Print a figure, its spread over the processes, its bar and whether it held."""
    values = sorted(values)
    spread = f"{values[0]:+.{digits}f} .. {values[-1]:+.{digits}f}"
    verdict = "" if bar is None else f"  bar {bar:g}: {'held' if median(values) <= bar else 'NOT HELD'}"
    print(f"  {name:<44}{median(values):>+9.{digits}f}   ({spread}){verdict}", flush=True)


def title(text: str, note: str) -> None:
    """Print the head of a table."""
    print(f"\n{text}\n  {note}", flush=True)


def show_lean() -> None:
    """Print the loop without plugins."""
    title("1. Lean: MLP 16-16-1, batch 8, SGD, no plugins", "us per step beyond the hand-written loop")
    show_race("loops", {lean.CONTROL: None, lean.SUPERVISED: 3.0, lean.OWN_TASK: 3.0, lean.IGNITE: None})


def show_race(worker: str, bars: Mapping[str, float | None]) -> None:
    """Print the hand-written loop, and what the others take beyond it."""
    results = gather(worker)
    print(f"  {lean.HAND + ', a step':<44}{median(per_step(each[lean.HAND]) for each in results):>9.2f}")
    for name, bar in bars.items():
        row(name, (median(beyond_hand(each, name)) for each in results), bar)


def beyond_hand(seconds: Seconds, name: str) -> list[float]:
    """Return the differences to the hand-written loop: to both copies, or from the one to the other."""
    return differences(seconds, name, *([lean.HAND] if name == lean.CONTROL else [lean.HAND, lean.CONTROL]))


def show_usual() -> None:
    """Print the usual set, also apart: the steps between the saves, and what a save adds."""
    title(
        "2. Usual: bar, log every 50 steps, TensorBoard, early stopping, validation and save every 1,000",
        "us per step beyond the hand-written loop with the same features; all sync file and folder at a save",
    )
    gathered = gather("usual")
    results, left = [seconds for seconds, _ in gathered], gathered[0][1]
    whole = median(per_step(sums(each[lean.HAND])) for each in results) / ROUNDS_PER_SAVE
    print(f"  {lean.HAND + ', a step':<44}{whole:>9.2f}")
    for name, bar in {lean.CONTROL: None, usual.OURS: 10.0, usual.IGNITE: None}.items():
        row(name, (whole_difference(each, name) for each in results), bar)
        row("    steps between the saves", (between_saves(each, name) for each in results))
        row("    validation and save, ms each", (at_save(each, name) for each in results), digits=3)
    sizes = ", ".join(f"{name} {left[name]}" for name in (lean.HAND, usual.OURS, usual.IGNITE))
    print(f"  left on the disk, bytes: {sizes}")
    print("  hand-written: model, optimizer, step; heliograph: these, progress, metrics, state of every plugin;")
    print("  ignite: model, optimizer, engine; its loss is a running average, it writes 2 scalars of 3 per log,")
    print("  and its bar moves every 50 steps: by default it redraws at every step")


def sums(values: list[float]) -> list[float]:
    """Return the sums over the rounds from save to save."""
    return [sum(values[begin : begin + ROUNDS_PER_SAVE]) for begin in range(0, len(values), ROUNDS_PER_SAVE)]


def whole_difference(seconds: Seconds, name: str) -> float:
    """Return the median over thousands of steps, saves included."""
    return median(sums(beyond_hand(seconds, name))) / ROUNDS_PER_SAVE


def between_saves(seconds: Seconds, name: str) -> float:
    """Return the median over the rounds without a save."""
    values = beyond_hand(seconds, name)
    return median(value for index, value in enumerate(values) if (index + 1) % ROUNDS_PER_SAVE)


def at_save(seconds: Seconds, name: str) -> float:
    """Return what a round with a save takes longer than the others, beyond the hand-written loop's, in milliseconds."""
    values = beyond_hand(seconds, name)[ROUNDS_PER_SAVE - 1 :: ROUNDS_PER_SAVE]
    return (median(values) - between_saves(seconds, name)) * STEPS / 1e3


def show_dispatch() -> None:
    """Print one emission, and handlers in the loop."""
    title("3. Dispatch: handlers that do nothing", "ns per emission, the loop around it subtracted")
    results = gather("dispatch")
    print(f"  {'handlers':<32}" + "".join(f"{number:>10}" for number in dispatch.NUMBERS))
    for name in (dispatch.GUARD, dispatch.EMIT, dispatch.SEND, dispatch.PLAIN):
        figures = [median(each[f"{name} {number}"] for each in results) for number in dispatch.NUMBERS]
        print(f"  {name:<32}" + "".join(f"{figure:>10.0f}" for figure in figures))
    row("an event that nobody receives", (each[f"{dispatch.GUARD} 0"] for each in results), 50, 0)
    one, many = f"{dispatch.EMIT} 1", f"{dispatch.EMIT} 20"
    row("a further handler", ((each[many] - each[one]) / 19 for each in results), 100, 0)
    title("   The same in the training loop", "us per step beyond the loop in which nobody listens")
    results = gather("handlers")
    for name in (lean.NOBODY_AGAIN, lean.ONE, lean.MANY):
        row(name, (median(differences(each, name, lean.NOBODY)) for each in results))
    row("a further handler", (median(differences(each, lean.MANY, lean.ONE)) / 20 for each in results), 0.1, 3)


def show_resume() -> None:
    """Print what exact resume costs."""
    title(
        "4. Resuming: RNGCapture, Checkpoint, SaveSchedule; a list of batches",
        "us per step beyond 1 handler of BatchEnd",
    )
    results = gather("resumable")
    for name, bar in {resume.AGAIN: None, resume.KEPT: 1.0, resume.RESUMABLE: 1.0}.items():
        row(name, (beyond(each, name, resume.LISTENED) for each in results), bar)
    row(resume.COMPARABLE, (beyond(each, resume.RESUMABLE, resume.UNCOMPARED) for each in results), 0.2)
    title("   Keyed loading: batches of 8 tensors", "us per batch beyond torch's DataLoader(shuffle=True)")
    results = gather("loading")
    for workers in (0, 2):
        plain, keyed = (f"{name}, {workers} workers" for name in (resume.PLAIN, resume.KEYED))
        print(f"  {plain:<44}{median(median(each[plain]) for each in results):>9.2f}")
        row(keyed, (beyond(each, keyed, plain) for each in results), 25.0)
    title("   An epoch of 1,000,000,000 samples", "ms from fit to the end of the first batch")
    results = gather("far")
    print(f"  {resume.FRESH:<44}{median(median(each[resume.FRESH]) for each in results):>9.2f}")
    row(resume.DURING + ", beyond it", (beyond(each, resume.DURING, resume.FRESH) for each in results), 50.0)


def show_comparison() -> None:
    """Print what it costs to compare."""
    title("   Comparing: repeated steps", "us a batch")
    results = gather("rows", FEWER)
    row(comparison.ROW_OF_BATCH, (median(each[comparison.ROW_OF_BATCH]) for each in results), 0.2)
    row(comparison.READING, (median(each[comparison.READING]) for each in results))
    title("   Comparing: what no state_dict holds, and what lies in the folder", "ms")
    results = gather("attributes", FEWER)
    row(comparison.ATTRIBUTES, (median(each[comparison.ATTRIBUTES]) for each in results), 5.0)
    results = gather("probe", FEWER)
    for name in (comparison.BATCH, comparison.UNPROBED):
        row(name, (median(each[name]) for each in results))
    probes = [beyond(each, comparison.PROBED, comparison.UNPROBED) - median(each[comparison.BATCH]) for each in results]
    row("the probe, beyond one batch", probes, 50.0)
    results = gather("folders", FEWER)
    row(comparison.EMPTY, (median(each[comparison.EMPTY]) for each in results))
    for name in (comparison.FULL, comparison.AUTO):
        row(f"{name}, beyond it", (beyond(each, name, comparison.EMPTY) for each in results), 500.0)


def show_saves() -> None:
    """Print how long the loop waits for a background save."""
    title(
        "5. A background save of 400 MB",
        "ms that the loop waits; then as a multiple of the copy in the same run",
    )
    results = gather("saves")
    for name in (saves.COPY, saves.SAVE, saves.FIRST, saves.LATER):
        row(name, (median(each[name]) for each in results), digits=1)
    for name in (saves.FIRST, saves.LATER):
        row(f"{name}, of the copy", (median(each[name]) / median(each[saves.COPY]) for each in results), 1.3)


def beyond(spent: Seconds, name: str, base: str) -> float:
    """Return the median of the differences, round by round."""
    return median(mine - other for mine, other in zip(spent[name], spent[base], strict=True))


def show_imports() -> None:
    """Print what the import and the start of a minimal fit cost."""
    title(
        "6. Import and start",
        f"ms of processor time beyond `import torch`; medians and quartiles of {imports.ROUNDS} interpreters",
    )
    beyond, inside = imports.time_imports()
    for code, values in beyond.items():
        quarter = len(values) // 4
        middle = sorted(values)[quarter : len(values) - quarter]
        row(code, middle, 50, 1)
        print(f"      by the clock inside of the interpreter: {inside[code]:.1f}")
    print(f"  `import heliograph.events` leaves torch out: {'NO' if imports.events_bring_torch() else 'yes'}")
    by_hand, minimal_fit = imports.time_first_steps()
    row("import and first step by hand, by the clock", by_hand, digits=1)
    row("import and first step of a minimal fit", minimal_fit, digits=1)
    row("the minimal fit, beyond by hand", map(float.__sub__, minimal_fit, by_hand), digits=1)


def show_ranks() -> None:
    """Print what agreement costs two ranks."""
    title(
        "7. Agreement of two gloo ranks: the tiny model, batch 8 on each, in turns",
        "us per step; the means, and what is beyond DDP by hand, are medians over every ten steps",
    )
    results = gather("ranks", FEWER)
    print(f"  {'':<44}{'median':>8}{'p99':>8}{'mean':>8}{'beyond hand':>14}{'median, p99 / hand':>20}")
    hands = [agreement.figures(each, agreement.HAND, agreement.CONTROL) for each in results]
    for name in agreement.VARIANTS:
        figures = [agreement.figures(each, name) for each in results]
        middle, worst = (median(each[place] for each in figures) for place in (0, 1))
        means = [median(agreement.in_tens(each, name)) for each in results]
        more = median(rounds_beyond(each, name, agreement.HAND) for each in results)
        ratios = [
            median(mine[place] / hand[place] for mine, hand in zip(figures, hands, strict=True)) for place in (0, 1)
        ]
        bar = agreement.BARS.get(name)
        verdict = "" if bar is None else f"  bar {bar:g}: {'held' if max(ratios) <= bar else 'NOT HELD'}"
        cells = f"{middle:>8.0f}{worst:>8.0f}{median(means):>8.0f}{more:>+14.0f}{ratios[0]:>12.2f}{ratios[1]:>8.2f}"
        print(f"  {name:<44}{cells}{verdict}", flush=True)


def rounds_beyond(spent: agreement.Spent, name: str, base: str) -> float:
    """Return the median of the differences between ten steps of each, round by round."""
    pairs = zip(agreement.in_tens(spent, name), agreement.in_tens(spent, base), strict=True)
    return median(mine - other for mine, other in pairs)


def show_recording() -> None:
    """Print what a recorder and a rule cost."""
    title("9. Recorder and rules", "us per step beyond the same loop without them")
    results = gather("recording", FEWER)
    bars = {recording.NOBODY_AGAIN: None, recording.RECORDER: 2.0, recording.LOSSES: None, recording.STEP_RULE: None}
    for name, bar in bars.items():
        row(name, (median(differences(each, name, recording.NOBODY)) for each in results), bar)
    row(recording.LOG_RULE, (median(differences(each, recording.LOG_RULE, recording.LOGGED)) for each in results))
    results = gather("recorded", FEWER)
    for name, bar in {recording.PLAIN_AGAIN: None, recording.RECORDED: 2.0}.items():
        row(name, (median(differences(each, name, recording.PLAIN)) for each in results), bar)


def show_trackers() -> None:
    """Print what a log costs the loop with each tracker."""
    title(
        "10. Trackers: a log of three metrics every 50 steps",
        "us of processor time per log, beyond the same loop without a tracker",
    )
    results = gather("trackers")
    parts = {trackers.HANDLERS: ("its handlers", 100.0), trackers.OTHERS: ("other threads", None)}
    for kind, (about, bar) in parts.items():
        for name in trackers.MAKERS:
            if name != trackers.NONE:
                row(f"{name}: {about}", (beyond_none(each[kind], name) for each in results), bar, 0)


def beyond_none(spent: Seconds, name: str) -> float:
    """Return the difference of the medians with a tracker and without."""
    return median(spent[name]) - median(spent[trackers.NONE])


def show_gpu() -> None:
    """Print the loop without plugins on a GPU."""
    title("8. A GPU: the loop of 1., batches in pinned memory", "us per step beyond the hand-written loop")
    if torch.cuda.is_available():
        print(f"  {torch.cuda.get_device_name()}")
        show_race("gpu", {lean.CONTROL: None, lean.SUPERVISED: None})
    else:
        print("  skipped: torch sees no CUDA device")


def main() -> None:
    """Print all tables, or work for the process that does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", choices=WORKERS, help="measure one thing and print JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the turns")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        print(json.dumps(WORKERS[arguments.worker](arguments.seed)))
        return
    begin = perf_counter()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, 1 thread; ", end="")
    print(f"load {os.getloadavg()[0]:.1f}; medians over {PROCESSES} processes, (least .. most)")
    for show in SHOWS:
        show()
    print(f"\n{perf_counter() - begin:.0f} s, load {os.getloadavg()[0]:.1f}")


SHOWS = (
    show_lean,
    show_usual,
    show_dispatch,
    show_resume,
    show_comparison,
    show_saves,
    show_imports,
    show_ranks,
    show_gpu,
    show_recording,
    show_trackers,
)

if __name__ == "__main__":
    main()
