"""The bench works, with sizes that say nothing of speed; and its page has its rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import heliograph.packages.bridges.tests.ignite.quietly  # noqa: F401  # the benchmarks import it, and torch warns
import pytest
from heliograph.packages.tests.benchmarks import bench, harness, hosted, imports, measure, page, report, rows, worker
from heliograph.packages.tests.benchmarks.agreement import time_ranks
from heliograph.packages.tests.benchmarks.chart import draw
from heliograph.packages.tests.benchmarks.first import CONTROL, FIRST, OURS
from heliograph.packages.tests.benchmarks.measure import Comparison, Line, Loop, Measured, Spread
from heliograph.packages.tests.benchmarks.rows import Worker
from heliograph.packages.tests.benchmarks.trackers import per_log
from heliograph.packages.tests.benchmarks.worker import LEAST
from heliograph.packages.tests.facts import assert_facts

HOSTED: list[Worker] = [hosted.in_huggingface, hosted.in_lightning, hosted.in_ignite]  # a dozen trainings of each
SLOW = [
    imports.starts,
    imports.starts_and_ends,
    time_ranks,
    per_log,
    *HOSTED,
]  # and interpreters, ranks, services of trackers

PARTS = 3  # of which `make test` measures one


def workers() -> list[Worker]:
    """Return everything that the bench measures with on this machine."""
    return report.workers_of(FIRST, rows.TABLES)


def check(chosen: list[Worker]) -> None:
    """Measure with some workers, each with its least size, and compute every figure of what they return."""
    results = dict(zip(chosen, measure.in_process(chosen, LEAST), strict=True))

    def gather(worker: Worker, processes: int) -> list[Any]:
        return [results[worker]]

    lines = [
        measure.line(row, gather(row.worker, 1)) for table in rows.TABLES for row in table.rows if row.worker in results
    ]
    figures = {line.name: line.figure for line in lines}
    for setup in FIRST:
        for name, beside in {CONTROL: setup.control, OURS: setup.ours, **setup.peers}.items():
            if beside.worker in results:
                loop = measure.loop(name, beside, gather)
                assert loop.hand > 0
                assert loop.ratio.middle > 0
                figures[f"{setup.name}, {name}"] = loop.beyond
    assert {name for name, figure in figures.items() if not all(map(math.isfinite, figure))} == set()
    assert figures


@pytest.mark.whole
@pytest.mark.parametrize("part", range(PARTS))
def test_everything_is_measured(part: int) -> None:
    check([each for each in workers() if each not in SLOW][part::PARTS])


@pytest.mark.whole
def test_what_takes_long_is_measured() -> None:
    check(SLOW)


def found() -> report.Found:
    """Return figures that nobody has measured, for every row."""
    figure = Spread(1.5, 1.0, 2.0)
    first = [
        Comparison(
            setup.name,
            {name: Loop(name, 60.0, Spread(1.05, 1.0, 1.1), figure) for name in (CONTROL, OURS, *setup.peers)},
            setup.bar_in_words(),
            held=index > 0,
        )
        for index, setup in enumerate(FIRST)
    ]
    tables = [
        Measured(
            table.name,
            table.title,
            table.note,
            [Line(row.name, figure, row.bar, held(row), 1) for row in table.rows],
            "",
        )
        for table in rows.TABLES
    ]
    return report.Found(measure.conditions(5, quick=False), first, tables)


def held(row: rows.Row) -> bool | None:
    return None if row.bar is None else row.bar >= 1.5


def rows_after(text: str, title: str) -> list[tuple[str, str]]:
    """Return the name and the bar of each row in the first block after a title."""
    head, *lines = text[text.index(title) :].split("```")[1].split("\n\n")[1].rstrip().split("\n")
    cells = [[line[: head.index("bar")].split("  ")[0], line[head.index("bar") :]] for line in lines]
    return [(name, bar.removesuffix(" missed")) for name, bar in cells]


def rows_of(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the names and bars of all tables of the page, by title."""
    titles = [table.title for table in rows.TABLES if not table.absent()]
    return {"first": rows_after(text, page.BEGIN)} | {title: rows_after(text, f"### {title}\n") for title in titles}


def test_the_page_has_the_rows_of_the_bench() -> None:
    """Write it with `python packages/tests/benchmarks/bench.py --page`."""
    text = page.PAGE.read_text(encoding="utf-8")
    declared = {"first": [(setup.name, setup.bar_in_words()) for setup in FIRST]}
    for table in rows.TABLES:
        if not table.absent():
            declared[table.title] = [(row.name, "" if row.bar is None else f"{row.bar:g}") for row in table.rows]
    assert rows_of(text) == declared


def test_the_page_is_written_between_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{page.BEGIN}what was there\n{page.END}after\n", encoding="utf-8")
    page.write_page(found(), path, tmp_path / "picture.svg", tmp_path / "overhead.svg")
    assert "beyond the hand-written loop" in (tmp_path / "overhead.svg").read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{page.BEGIN}")
    assert text.endswith(f"{page.END}after\n")
    assert "what was there" not in text
    assert "+1.5  +1.5 (1.05)" in text
    assert max(len(line) for line in text.splitlines() if line[:1] not in {"#", "M"}) <= page.WIDTH
    path.write_text("without marks", encoding="utf-8")
    with pytest.raises(ValueError, match="between which the figures"):
        page.write_page(found(), path, tmp_path / "picture.svg", tmp_path / "overhead.svg")


def test_the_picture_has_a_bar_for_every_loop_and_no_background(tmp_path: Path) -> None:
    draw(found().first, tmp_path / "one.svg")
    draw(found().first, tmp_path / "two.svg")
    one = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert one == (tmp_path / "two.svg").read_text(encoding="utf-8")
    loops = sum(len(row.loops) - 1 for row in found().first)
    filled = [each.get("style", "") for each in ElementTree.fromstring(one).iter() if "path" in each.tag]
    assert sum("fill: #d97a1f" in style or "fill: #8f9bb0" in style for style in filled) == loops


def test_json_has_every_figure_and_what_is_not_held(tmp_path: Path) -> None:
    report.write_json(found(), tmp_path / "figures.json")
    written = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in written["first"]] == [setup.name for setup in FIRST]
    assert written["first"][0]["loops"][OURS]["beyond"] == {"middle": 1.5, "least": 1.0, "most": 2.0}
    assert [table["name"] for table in written["tables"]] == list(report.NAMES[1:])
    assert f"  first: {FIRST[0].name}" in report.not_held(found())
    assert_facts(report.lines_of(found().first[0])[2], "bar +2 µs", "NOT HELD")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "leen"], "no table leen;"),
        (["--only", "ranks", "--page"], "--page needs the figures"),
        (["--only", "ranks", "--chart", "x.svg"], "add --only first"),
    ],
)
def test_options_that_contradict_are_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.py", *options])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert message in capsys.readouterr().err


def test_a_share_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((imports, "ROUNDS"), (imports, "ROUNDS_INSIDE"), (harness, "EPOCH")):
        monkeypatch.setattr(module, name, getattr(module, name))
    worker.resize(imports, worker.WHOLE)
    assert (imports.ROUNDS, imports.ROUNDS_INSIDE) == (5, 3)
    worker.resize(imports, worker.QUICK)
    assert (imports.ROUNDS, imports.ROUNDS_INSIDE) == (2, 2)
