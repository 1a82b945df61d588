"""Files of runs that are given one path."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.core.system.numbered_files import find_numbered, make_numbered


@pytest.mark.parametrize(
    ("name", "end", "names"),
    [
        ("log.csv", "", ["log.csv", "log-2.csv", "log-3.csv"]),
        ("log", "", ["log", "log-2", "log-3"]),
        ("a.b.config.yaml", ".config.yaml", ["a.b.config.yaml", "a.b-2.config.yaml", "a.b-3.config.yaml"]),
    ],
)
def test_each_gets_a_number_of_its_own(tmp_path: Path, name: str, end: str, names: list[str]) -> None:
    path = tmp_path / name
    assert find_numbered(path, end) == []
    assert [make_numbered(path, end).name for _ in names] == names
    assert [each.name for each in find_numbered(path, end)] == names
    assert [each.read_bytes() for each in find_numbered(path, end)] == [b""] * 3


def test_a_number_that_is_free_is_used(tmp_path: Path) -> None:
    for name in ("log-2.csv", "log-10.csv"):
        (tmp_path / name).touch()
    (tmp_path / "log-3.csv").mkdir()
    assert [make_numbered(tmp_path / "log.csv").name for _ in range(2)] == ["log.csv", "log-4.csv"]
    found = [each.name for each in find_numbered(tmp_path / "log.csv")]
    assert found == ["log.csv", "log-2.csv", "log-4.csv", "log-10.csv"]


def test_others_of_like_names_are_left_alone(tmp_path: Path) -> None:
    for name in ("log[1].csv", "log[1]-final.csv", "log1-2.csv", "log[1]-2.csv.tmp", "log[1]-2.txt"):
        (tmp_path / name).touch()
    assert find_numbered(tmp_path / "log[1].csv") == [tmp_path / "log[1].csv"]
