"""What the bench shows: each table as soon as it is measured; then all of them as JSON, as a chart and on a page."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from heliograph.tests.benchmarks import measure
from heliograph.tests.benchmarks.first import FIRST, OURS, TITLE, missing_peers
from heliograph.tests.benchmarks.measure import Comparison, Conditions, Line, Measured, Spread
from heliograph.tests.benchmarks.rows import PROCESSES, TABLES
from heliograph.tests.benchmarks.worker import WHOLE

FIRST_NAME = "first"
NAMES = (FIRST_NAME, *(table.name for table in TABLES))


class Found(NamedTuple):
    """The figures of a run of the bench."""

    conditions: Conditions
    first: list[Comparison]
    tables: list[Measured]


def show(names: Collection[str], share: float) -> Found:
    """Measure and print these tables."""
    quick, begin = share < WHOLE, perf_counter()
    processes = 1 if quick else PROCESSES
    found = Found(measure.conditions(processes, quick=quick), [], [])
    print(heading(found.conditions))
    gather = measure.in_processes(share, processes)
    if FIRST_NAME in names:
        print(f"\n{FIRST_NAME}: {TITLE}\n  times as long, and us per step beyond it", flush=True)
        for setup in FIRST:
            found.first.append(measure.comparison(setup, gather))
            print("\n".join(lines_of(found.first[-1])), flush=True)
        for peer in missing_peers():
            print(f"  {peer} is not installed: make .venv/ready installs it")
    for table in TABLES:
        if table.name in names:
            print(f"\n{table.name}: {table.title}\n  {table.note}", flush=True)
            found.tables.append(measure.table(table, gather))
            print("\n".join(line_of(line) for line in found.tables[-1].lines), flush=True)
            if found.tables[-1].absent:
                print(f"  not measured: {found.tables[-1].absent}")
    print(f"\n{perf_counter() - begin:.0f} s, load {os.getloadavg()[0]:.1f}")
    print("\n".join(["Not held:", *not_held(found)] if not_held(found) else ["Every bar was held."]))
    return found


def heading(conditions: Conditions) -> str:
    """Return in one line what the figures depend on."""
    processes = f"medians over {conditions.processes} processes (least .. most)"
    if conditions.quick:
        processes = "quick: one process for each figure, a fifth of the rounds"
    return (
        f"Python {conditions.python}, torch {conditions.torch}, {conditions.cores} cores, {conditions.gpu}, 1 thread; "
        f"load {conditions.load}; {processes}"
    )


def lines_of(row: Comparison) -> list[str]:
    """Return a row of the first table, a line for each loop."""
    lines = [f"  {row.name}: by hand {row.loops[OURS].hand:.1f} us a step"]
    for name, loop in row.loops.items():
        verdict = f"  bar {row.bar}: {'held' if row.held else 'NOT HELD'}" if name == OURS else ""
        lines.append(f"    {name:<26}{loop.ratio.middle:>8.2f}{in_words(loop.beyond, 1)}{verdict}")
    return lines


def line_of(line: Line) -> str:
    """Return a row of another table."""
    verdict = "" if line.held is None else f"  bar {line.bar:g}: {'held' if line.held else 'NOT HELD'}"
    return f"  {line.name:<58}{in_words(line.figure, line.digits)}{verdict}"


def in_words(figure: Spread, digits: int) -> str:
    """Return a figure and its spread."""
    spread = "" if figure.least == figure.most else f"   ({figure.least:+.{digits}f} .. {figure.most:+.{digits}f})"
    return f"{figure.middle:>+10.{digits}f}{spread}"


def not_held(found: Found) -> list[str]:
    """Return what is above its bar."""
    first = [f"  {FIRST_NAME}: {row.name}" for row in found.first if not row.held]
    return first + [
        f"  {table.name}: {line.name}" for table in found.tables for line in table.lines if line.held is False
    ]


def write_json(found: Found, path: Path) -> None:
    """Write all figures."""
    path.write_text(json.dumps(plain(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """Return named tuples as dictionaries, all the way down."""
    if hasattr(value, "_asdict"):
        return {name: plain(each) for name, each in value._asdict().items()}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value
