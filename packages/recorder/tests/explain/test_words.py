"""Numbers, durations and tables as text."""

from __future__ import annotations

import math

import pytest
from heliograph.events.checks import printable
from heliograph_recorder.explain import words
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("number", "thing", "text"),
    [(0, "step", "0 steps"), (1, "batch", "1 batch"), (2, "batch", "2 batches"), (1204, "sample", "1,204 samples")],
)
def test_a_count_has_its_noun(number: int, thing: str, text: str) -> None:
    assert words.count_things(number, thing) == text


def test_an_irregular_plural_is_given() -> None:
    assert words.count_things(2, "veto", "vetoes") == "2 vetoes"
    assert words.count_things(1, "veto", "vetoes") == "1 veto"


def test_how_often() -> None:
    assert [words.times(number) for number in (1, 2, 3, 1500)] == ["once", "twice", "3 times", "1,500 times"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 µs"),
        (15e-6, "15 µs"),
        (0.0032, "3.2 ms"),
        (0.0995, "0.10 s"),
        (9.949, "9.95 s"),
        (9.96, "10.0 s"),
        (99.9, "99.9 s"),
        (99.96, "1 min 40 s"),
        (192.0, "3 min 12 s"),
        (3599.8, "1 h"),
        (7500.0, "2 h 5 min"),
        (86399.0, "1 d"),
        (3 * 86400 + 4 * 3600.0, "3 d 4 h"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert words.seconds(value) == text


def test_a_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ("log", "30 times", "log_schedule, step 2 to 60: every 2 steps"),
        ("a_plugin_with_a_long_name", "1", "x " * 9),
    ]
    assert words.table(rows)[0] == "  log                        30 times  log_schedule, step 2 to 60: every 2 steps"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    assert words.table(rows) == [
        "  log                        30 times",
        "    log_schedule, step 2 to 60: every 2 steps",
        "  a_plugin_with_a_long_name  1",
        "    x x x x x x x x x",
    ]


@given(st.floats(0, 1e9))
def test_every_duration_has_a_unit(value: float) -> None:
    assert words.seconds(value).split()[1] in ("µs", "ms", "s", "min", "h", "d")


def test_a_share_of_nothing_is_left_out() -> None:
    assert words.share(1.0, 8.0) == "12.5 %"
    assert words.share(0.0, 0.0) == ""


def test_nan_and_infinite_metrics() -> None:
    assert [words.number(value) for value in (0.125, 1e-7, math.nan, -math.inf)] == ["0.125", "1e-07", "nan", "-inf"]


def test_lists() -> None:
    assert [words.join_words(each) for each in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31mb\nc\td\u202ee") == "a\\x1b[31mb c d\\u202ee"


@given(st.text(max_size=300), st.integers(0, 30))
def test_no_line_is_wider_than_100_columns(text: str, indent: int) -> None:
    for line in words.lines(printable(text), " " * indent):
        assert len(line) <= 100


def test_a_table_wraps_its_last_column_only() -> None:
    rows = [("a", "1", "short"), ("long name", "20", "word " * 30)]
    text = words.table(rows, right=(1,))
    assert text[0] == "  a           1  short"
    assert text[1].startswith("  long name  20  word word")
    assert text[2].startswith(" " * 17 + "word")
    assert all(len(line) <= 100 for line in text)
    assert words.table([]) == []
    assert words.table([("a", "")]) == ["  a"]
