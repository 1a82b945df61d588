"""The tail of an error sentence about an unknown name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def known_names(given: str, allowed: Iterable[str]) -> str:
    """Return the nearest of the allowed names as a question, then all of them."""
    names = sorted(allowed)
    near = get_close_matches(given, names, n=1)
    question = f" Did you mean {near[0]!r}?" if near else ""
    return f"{question} Known: {', '.join(names) or 'none'}."
