"""A story's sections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A title with its lines; one without lines is left out, unless it `stands_alone`."""

    title: str
    lines: list[str]
    stands_alone: bool = False


def joined(sections: Iterable[Section]) -> str:
    """Return the text of sections, an empty line between them."""
    told = [each for each in sections if each.lines or each.stands_alone]
    return "\n\n".join("\n".join([each.title, *each.lines]) for each in told)
