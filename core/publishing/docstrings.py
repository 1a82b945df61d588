"""What docstrings in Google's style say of a plugin and of its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from inspect import cleandoc
from textwrap import dedent
from typing import Any

HEADS = frozenset({"Args:", "Attributes:", "Raises:", "Returns:", "Yields:", "Note:", "Example:", "Examples:"})


def description(made_by: Callable[..., Any]) -> str:
    """Return the docstring of a class or function without its sections."""
    lines = _sections(made_by.__doc__ or "").get("", ())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def argument_texts(made_by: Callable[..., Any]) -> dict[str, str]:
    """Return what the sections `Args:` say of each argument, those of a class before those of its bases."""
    texts: dict[str, str] = {}
    for docstring in _docstrings(made_by):
        texts |= _argument_texts(_sections(docstring).get("Args:", ()))
    return texts


def _docstrings(made_by: Callable[..., Any]) -> list[str]:
    """Return the docstrings that may describe the arguments, a class's own last."""
    if not isinstance(made_by, type):
        return [made_by.__doc__ or ""]
    kinds: Sequence[Any] = made_by.__mro__[::-1]
    return [each.__doc__ or "" for kind in kinds for each in (kind, kind.__init__)]


def _sections(docstring: str) -> dict[str, list[str]]:
    """Return the lines under each head; the text itself is under no head."""
    sections, head = dict[str, list[str]](), ""
    for line in cleandoc(docstring).splitlines():
        if line in HEADS:
            head = line
            continue
        if line[:1].strip():
            head = ""
        sections.setdefault(head, []).append(line)
    return sections


def _argument_texts(lines: Iterable[str]) -> dict[str, str]:
    name, texts = "", dict[str, str]()
    for line in dedent("\n".join(lines)).splitlines():
        text = line
        if line[:1].strip():
            name, _, text = line.partition(":")
            name = name.partition("(")[0].strip("* ")
        texts[name] = f"{texts.get(name, '')} {text.strip()}".strip()
    return texts
