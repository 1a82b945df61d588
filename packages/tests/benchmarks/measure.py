"""Measuring: workers in fresh processes, and the figures of the tables from what these return."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from heliograph.packages.tests.benchmarks.figures import Figure
from heliograph.packages.tests.benchmarks.first import CONTROL, OURS, Beside, Setup
from heliograph.packages.tests.benchmarks.rows import PROCESSES, Row, Table, Worker
from heliograph.packages.tests.benchmarks.worker import MARK, QUICK, WHOLE

BENCH = Path(__file__).with_name("bench.py")

Gather = Callable[[Worker, int], Sequence[Any]]


class Spread(NamedTuple):
    """A figure: the median over the processes, the least and the greatest."""

    middle: float
    least: float
    most: float


class Line(NamedTuple):
    """A row with its figure."""

    name: str
    figure: Spread
    bar: float | None
    held: bool | None
    digits: int


class Measured(NamedTuple):
    """A table with its figures, or why there are none."""

    name: str
    title: str
    note: str
    lines: list[Line]
    absent: str


class Loop(NamedTuple):
    """A loop beside the hand-written one, whose step is in microseconds."""

    name: str
    hand: float
    ratio: Spread
    beyond: Spread


class Comparison(NamedTuple):
    """A row of the first table with its figures."""

    name: str
    loops: dict[str, Loop]
    bar: str
    held: bool


class Conditions(NamedTuple):
    """What the figures depend on."""

    date: str
    cores: int
    gpu: str
    python: str
    torch: str
    load: float
    processes: int
    quick: bool

    def is_busy(self) -> bool:
        """Return whether so much else ran that small differences say nothing."""
        return self.load > self.cores / 2


def conditions(processes: int, *, quick: bool) -> Conditions:
    """Return those of this machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    versions = platform.python_version(), torch.__version__.partition("+")[0]
    return Conditions(date.today().isoformat(), cores, gpu, *versions, round(load, 1), processes, quick)


def in_many_processes() -> Gather:
    """Return what measures each worker in fresh processes; once, as several tables may show the same race."""
    kept: dict[Worker, list[Any]] = {}

    def gather(worker: Worker, processes: int) -> list[Any]:
        if worker not in kept:
            kept[worker] = [result for seed in range(processes) for result in in_process([worker], WHOLE, seed)]
        return kept[worker]

    return gather


def in_one_process(workers: Sequence[Worker]) -> Gather:
    """Return what measures these workers, in the order in which their figures are needed, in a single process."""
    kept: dict[Worker, Any] = {}
    results = zip(workers, in_process(workers, QUICK), strict=True)

    def gather(worker: Worker, processes: int) -> list[Any]:
        while worker not in kept:
            measured, result = next(results)
            kept[measured] = result
        return [kept[worker]]

    return gather


def in_process(workers: Iterable[Worker], share: float, seed: int = 0) -> Iterator[Any]:
    """Yield what workers measure one after another in one fresh process, each as soon as it is there."""
    options = ["--share", str(share), "--seed", str(seed), "--worker", *map(name_of, workers)]
    with subprocess.Popen([sys.executable, str(BENCH), *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)


def name_of(worker: Worker) -> str:
    """Return by what name a process finds a worker."""
    return f"{worker.__module__}:{worker.__name__}"


def table(declared: Table, gather: Gather) -> Measured:
    """Measure the rows of a table."""
    absent = declared.absent()
    lines = [] if absent else [line(row, gather(row.worker, declared.processes)) for row in declared.rows]
    return Measured(declared.name, declared.title, declared.note, lines, absent)


def line(row: Row, results: Sequence[Any]) -> Line:
    """Return a row with its figure."""
    figure = spread(row.figure, results)
    held = None if row.bar is None else figure.middle <= row.bar
    return Line(row.name, figure, row.bar, held, row.digits)


def spread(figure: Figure, results: Sequence[Any]) -> Spread:
    """Return the median, the least and the greatest over the processes."""
    values: list[float] = []
    for each in results:
        found = figure(each)
        values += [found] if isinstance(found, int | float) else found
    return Spread(median(values), min(values), max(values))


def comparison(setup: Setup, gather: Gather) -> Comparison:
    """Measure a row of the first table."""
    besides = {CONTROL: setup.control, OURS: setup.ours, **setup.peers}
    loops = {name: loop(name, each, gather) for name, each in besides.items()}
    ours = loops[OURS]
    held = (ours.ratio if setup.bar is None else ours.beyond).middle <= setup.limit
    return Comparison(setup.name, loops, setup.bar_in_words(), held)


def loop(name: str, beside: Beside, gather: Gather) -> Loop:
    """Measure one loop of such a row."""
    results = gather(beside.worker, PROCESSES)
    hand, ratio, beyond = (spread(figure, results) for figure in (beside.hand, beside.ratio, beside.beyond))
    return Loop(name, hand.middle, ratio, beyond)
