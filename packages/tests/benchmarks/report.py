"""What the bench shows: each table as soon as it is measured; then all of them as JSON, as a chart and on a page."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from heliograph.packages.tests.benchmarks import measure
from heliograph.packages.tests.benchmarks.first import FIRST, OURS, TITLE, Setup, missing_peers
from heliograph.packages.tests.benchmarks.measure import Comparison, Conditions, Line, Measured, Spread
from heliograph.packages.tests.benchmarks.rows import PROCESSES, TABLES, Table, Worker

FIRST_NAME = "first"
BUSY = "The machine was busy with other work: small differences say nothing."
NAMES = (FIRST_NAME, *(table.name for table in TABLES))


class Found(NamedTuple):
    """The figures of a run of the bench."""

    conditions: Conditions
    first: list[Comparison]
    tables: list[Measured]


def show(names: Collection[str], *, quick: bool) -> Found:
    """Measure and print these tables."""
    begin = perf_counter()
    tables, setups = [table for table in TABLES if table.name in names], FIRST if FIRST_NAME in names else ()
    found = Found(measure.conditions(1 if quick else PROCESSES, quick=quick), [], [])
    print(heading(found.conditions))
    if found.conditions.is_busy():
        print(BUSY)
    gather = measure.in_one_process(workers_of(setups, tables)) if quick else measure.in_many_processes()
    if setups:
        print(f"\n{FIRST_NAME}: {TITLE}\n  times as long, and us per step beyond it", flush=True)
        for setup in setups:
            found.first.append(measure.comparison(setup, gather))
            print("\n".join(lines_of(found.first[-1])), flush=True)
        for peer in missing_peers():
            print(f"  {peer} is not installed: make .venv/ready installs it")
    for table in tables:
        print(f"\n{table.name}: {table.title}\n  {table.note}", flush=True)
        found.tables.append(measure.table(table, gather))
        print("\n".join(lines_of_table(found.tables[-1])), flush=True)
    print(f"\n{perf_counter() - begin:.0f} s, load {os.getloadavg()[0]:.1f}")
    print("\n".join(["Not held:", *not_held(found)] if not_held(found) else ["Every bar was held."]))
    return found


def workers_of(setups: Iterable[Setup], tables: Iterable[Table]) -> list[Worker]:
    """Return all that measures for these rows, each once, in the order in which they are shown."""
    besides = [each for setup in setups for each in (setup.control, setup.ours, *setup.peers.values())]
    shown = [row for table in tables if not table.absent() for row in table.rows]
    return list(dict.fromkeys([*(each.worker for each in besides), *(row.worker for row in shown)]))


def heading(conditions: Conditions) -> str:
    """Return in one line what the figures depend on."""
    processes = f"medians over {conditions.processes} processes (least .. most)"
    if conditions.quick:
        processes = "quick: fewer rounds, in one process"
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


def lines_of_table(table: Measured) -> list[str]:
    """Return a table, or why there is none."""
    return [f"  not measured: {table.absent}"] if table.absent else [line_of(line) for line in table.lines]


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
