"""Write the page "Where is what you know" from docs/where_is.toml: `python tests/where_is.py`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
SOURCE, PAGE = DOCS / "where_is.toml", DOCS / "where_is.md"
SYSTEMS = {
    "helios": "Helios",
    "hf": "The Trainer of Hugging Face",
    "fms": "The trainer controller of fms-hf-tuning",
    "catalyst": "Catalyst",
    "raysgd": "RaySGD",
    "union": "All five together",
}
HEAD = """\
# Where is what you know

What five other systems have, row by row, and where it is here. The last column names the tests that prove a row, with
their file in `tests/`; or `replaced`, with the page that shows what does it instead; or `none`, with the reason in the
column before.

[Migrating](migrating.md) has the same by event and by argument, with examples.
"""
FENCE = re.compile(r"^(`{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,3} (.+)$", re.MULTILINE)

Row = dict[str, Any]


@cache
def content() -> dict[str, dict[str, Any]]:
    """Return the titles of `groups`, and the rows of each system by their keys, such as `H-ARG-1` of group `H-ARG`."""
    return tomllib.loads(SOURCE.read_text(encoding="utf-8"))


def rows() -> dict[str, Row]:
    """Return all rows by their keys."""
    return {key: row for system in SYSTEMS for key, row in content()[system].items()}


def group_of(key: str) -> str:
    """Return the group of a row: its key without the number."""
    return key.rpartition("-")[0]


@cache
def headings(page: str) -> dict[str, str]:
    """Return the headings of a page of the documentation, by their anchors as GitHub and the site make them."""
    text = FENCE.sub("", (DOCS / page).read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-"): each for each in HEADING.findall(text)}


def link(target: str) -> str:
    """Return a link to a heading, `page.md#anchor`, named after it."""
    page, _, anchor = target.partition("#")
    return f"[{headings(page)[anchor]}]({target})"


def proof(row: Row) -> str:
    """Return the last cell of a row: the tests, or the page, or that there is none."""
    shown = [f"replaced: {link(row['page'])}"] if row["status"] == "replaced" else []
    for file, tests in groupby(row.get("tests", ()), lambda test: test.partition("::")[0]):
        names = ", ".join(f"`{test.partition('::')[2]}`" for test in tests)
        shown.append(f"{names} in `{file.removeprefix('tests/')}`")
    return "; ".join(shown) or row["status"]


def cells(row: Row) -> list[str]:
    """Return the cells of a row in Markdown."""
    here = row["reason"] if row["status"] == "none" else row["here"]
    if row["status"] == "works" and "page" in row:
        here = f"{here} ({link(row['page'])})"
    return [each.replace("|", "\\|") for each in (row["there"], here, proof(row))]


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    for system, title in SYSTEMS.items():
        yield f"## {title}\n"
        for group, keys in groupby(content()[system], group_of):
            yield f"### {content()['groups'][group]}\n"
            yield "| there | here | shown by |"
            yield "| --- | --- | --- |"
            yield from (f"| {' | '.join(cells(content()[system][key]))} |" for key in keys)
            yield ""


def page() -> str:
    """Return the text of the page."""
    return "\n".join(lines()).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
