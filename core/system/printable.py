"""Somebody's texts as a terminal shows them: a name may hold what steers it, or turns the direction of writing."""

from __future__ import annotations


def printable(text: object) -> str:
    """Return somebody's text in one line, without what would steer a terminal."""
    return "".join(each if each.isprintable() else _escaped(each) for each in str(text))


def printable_lines(text: str) -> str:
    """Return a text whose lines are kept, each without what would steer a terminal."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    return " " if character in "\n\t" else character.encode("unicode_escape", "backslashreplace").decode("ascii")
