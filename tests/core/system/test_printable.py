"""Names that would control a terminal."""

from __future__ import annotations

from heliograph.core.system.extras import printable, printable_lines


def test_what_would_steer_a_terminal_is_spelt_out() -> None:
    assert printable("a\x1b[31mb\nc\td\u202ee") == "a\\x1b[31mb c d\\u202ee"
    assert printable("Läufe 1 µs 火") == "Läufe 1 µs 火"


def test_lines_are_kept() -> None:
    assert printable_lines("a\x1b[2J\nb\rc") == "a\\x1b[2J\nb\\rc"
