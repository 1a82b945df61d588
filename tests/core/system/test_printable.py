"""Names that would control a terminal."""

from __future__ import annotations

import pytest
from heliograph.core.system.extras import kind_of, printable_lines, with_article
from heliograph.events.checks import printable


def test_what_would_steer_a_terminal_is_spelt_out() -> None:
    assert printable("a\x1b[31mb\nc\td\u202ee") == "a\\x1b[31mb c d\\u202ee"
    assert printable("Läufe 1 µs 火") == "Läufe 1 µs 火"


def test_lines_are_kept() -> None:
    assert printable_lines("a\x1b[2J\nb\rc") == "a\\x1b[2J\nb\\rc"


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("Episodes", "an Episodes"),
        ("int", "an int"),
        ("dict", "a dict"),
        ("OrderedDict", "an OrderedDict"),
        ("SGD", "an SGD"),
        ("LSTM", "an LSTM"),
        ("Linear", "a Linear"),
        ("NoneType", "a NoneType"),
        ("UserDict", "a UserDict"),
        ("UnknownError", "an UnknownError"),
        ("UNet", "a UNet"),
        ("_Sampler", "a _Sampler"),
    ],
)
def test_the_article_of_a_name(name: str, phrase: str) -> None:
    assert with_article(name) == phrase
    assert kind_of(type(name, (), {})()) == phrase
