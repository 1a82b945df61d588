"""A story's sections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A title with its lines; one without lines is left out."""

    title: str
    lines: list[str]


def join_sections(sections: Iterable[Section]) -> str:
    """Return the text of sections, with an empty line between them."""
    return "\n\n".join("\n".join([each.title, *each.lines]) for each in sections if each.lines)
