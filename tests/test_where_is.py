"""The page "Where is what you know": every row of the five systems is there, and what it names exists."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import heliograph
import pytest
from heliograph.tests import where_is

ROOT = Path(__file__).parents[1]
# How many rows each group has, as counted in the systems themselves.
GROUPS = {
    "helios": {
        "H-ARG": 14, "H-ST": 8, "H-EV": 9, "H-M": 9, "H-STOP": 6, "H-GA": 3, "H-CK": 6, "H-RES": 6, "H-MIG": 2,
        "H-RNG": 4, "H-DL": 5, "H-PL": 9, "H-EXC": 4, "H-Q": 1, "H-DI": 2, "H-LOG": 5, "H-BAR": 1, "H-REG": 2,
        "H-UT": 6,
    },
    "hf": {
        "HF-CT": 5, "HF-EVT": 16, "HF-EV": 4, "HF-DF": 6, "HF-LG": 8, "HF-ES": 7, "HF-CB": 4, "HF-CK": 9,
        "HF-RES": 7, "HF-LP": 10,
    },
    "fms": {"F-CFG": 8, "F-LC": 8, "F-ME": 6, "F-OP": 5, "F-RU": 7, "F-TE": 23},
    "catalyst": {"C-EI": 19, "C-EN": 13, "C-RU": 11, "C-OR": 9, "C-CB": 17},
    "raysgd": {"R-CR": 13, "R-RN": 7, "R-MO": 8},
    "union": {
        "U-EV": 20, "U-CT": 12, "U-SP": 8, "U-OP": 13, "U-CK": 18, "U-DA": 9, "U-DE": 13, "U-ER": 3, "U-OB": 9,
        "U-CF": 5,
    },
}  # fmt: skip
ALL = {group: count for groups in GROUPS.values() for group, count in groups.items()}
NUMBERS: dict[str, Iterable[int | str]] = {"HF-CB": range(5, 9), "HF-RES": [1, 2, 3, 4, 5, "5b", 6]}
UNNUMBERED = {"H-ST", "HF-CT", "HF-EVT", "F-ME", "F-TE", "C-EI", "C-OR", "C-CB", "R-MO"}
KEYS = {
    "works": {"there", "here", "status", "tests", "page"},
    "replaced": {"there", "here", "status", "tests", "page"},
    "none": {"there", "reason", "status"},
}


@cache
def names_of_tests(file: str) -> set[str]:
    """Return the names of the tests of a file, parametrized or not, without importing it; `Class::test` of a class."""
    found, tree = set[str](), ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for node in tree.body:
        within = [(f"{node.name}::", each) for each in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        found |= {prefix + each.name for prefix, each in within if isinstance(each, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def test_every_row_is_there_once() -> None:
    """A key that is there twice is an error of the TOML."""
    found = where_is.content()
    assert list(found) == ["groups", *where_is.SYSTEMS]
    assert {system: Counter(map(where_is.group_of, found[system])) for system in where_is.SYSTEMS} == GROUPS
    keys = [f"{group}-{number}" for group, count in ALL.items() for number in NUMBERS.get(group, range(1, count + 1))]
    assert sorted(where_is.rows()) == sorted(keys)
    assert list(found["groups"]) == list(ALL)


def test_the_numbers_of_rows() -> None:
    union, unnumbered = sum(GROUPS["union"].values()), sum(ALL[group] for group in UNNUMBERED)
    assert (sum(ALL.values()) - union - unnumbered, unnumbered, union) == (221, 111, 110)


@pytest.mark.parametrize("system", where_is.SYSTEMS)
def test_every_row_says_what_its_status_needs(system: str) -> None:
    for key, row in where_is.content()[system].items():
        status = row["status"]
        assert set(row) <= KEYS[status], key
        assert KEYS[status] - set(row) <= {"works": {"page"}, "replaced": {"tests"}}.get(status, set()), key
        assert all(row[name].strip() for name in ("there", "here", "reason") if name in row), key
        assert len(row.get("reason", "a reason is a sentence")) > 20, key
        assert row.get("tests", ["one"]), key
        assert len(set(row.get("tests", ()))) == len(row.get("tests", ())) <= 3, key


@pytest.mark.parametrize("system", where_is.SYSTEMS)
def test_every_named_test_exists(system: str) -> None:
    for key, row in where_is.content()[system].items():
        for test in row.get("tests", ()):
            file, _, name = test.partition("::")
            assert name in names_of_tests(file), f"{key} names {test}"


@pytest.mark.parametrize("system", where_is.SYSTEMS)
def test_every_named_page_and_heading_exists(system: str) -> None:
    for key, row in where_is.content()[system].items():
        page, _, anchor = row.get("page", "index.md#heliograph").partition("#")
        assert anchor in where_is.headings(page), f"{key} names {page}#{anchor}"


def test_what_replaces_a_row_is_shown_by_code_that_runs() -> None:
    """`test_docs.py` executes the pages."""
    for key, row in where_is.rows().items():
        if row["status"] == "replaced":
            text = (ROOT / "docs" / row["page"].partition("#")[0]).read_text(encoding="utf-8")
            assert re.search(r"^```python$", text, re.MULTILINE), key


def called(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (class, keywords) of every call of a class in the code of a cell, as in `Checkpoint(folder, monitor=)`."""
    for code in re.findall(r"`([^`]+)`", text):
        try:
            tree = ast.parse(re.sub(r"=(?=[,)])", "=...", code.lstrip("@")), mode="eval")
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[0].isupper():
                yield node.func.id, [each.arg for each in node.keywords if each.arg is not None]


def test_what_cells_call_is_public_and_takes_these_arguments() -> None:
    count = 0
    for key, row in where_is.rows().items():
        for name, keywords in called(row.get("here", "")):
            taken = inspect.signature(getattr(heliograph, name)).parameters
            if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
                assert set(keywords) <= set(taken), f"{key}: {name}"
            count += 1
    assert count > 100


def test_the_page_is_up_to_date() -> None:
    """Write it with `python tests/where_is.py`."""
    assert where_is.PAGE.read_text(encoding="utf-8") == where_is.page()
