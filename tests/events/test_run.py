"""What handlers are given: few members, in parts, all of them on one page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from heliograph.events.run import Run, RunCheckpoints, RunData, RunHooks, RunLength, RunReport, RunStepping

PAGE = (Path(__file__).parents[2] / "docs/reference/run.md").read_text(encoding="utf-8")
PARTS = {
    "length": RunLength, "data": RunData, "stepping": RunStepping, "checkpoints": RunCheckpoints, "hooks": RunHooks,
    "report": RunReport,
}  # fmt: skip


def members(protocol: type) -> set[str]:
    names = {*getattr(protocol, "__annotations__", ()), *vars(protocol)}
    return {name for name in names if not name.startswith("_")}


def documented(heading: str) -> set[str]:
    section = PAGE.split(f"\n## {heading}")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def test_a_run_has_at_most_40_members() -> None:
    assert len(members(Run)) <= 40
    assert members(Run) >= PARTS.keys()


def test_the_page_lists_the_members_of_a_run() -> None:
    assert documented("On `run` itself") == members(Run) - PARTS.keys()


@pytest.mark.parametrize("part", PARTS)
def test_the_page_lists_the_members_of_each_part(part: str) -> None:
    assert documented(f"`run.{part}`") == members(PARTS[part])
