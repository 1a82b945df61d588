"""Optional packages, asked for where they are used."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, purpose: str, *, extra: str | None = None) -> Any:
    """Import a module that only `purpose` needs.

    Args:
        module: what to import.
        purpose: who needs it, for the error sentence.
        extra: the extra of ours that installs it; None where it is a requirement of ours, or none of our business.

    Raises:
        ImportError: it is not installed; gives the exact command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        command = f"pip install {package}" if extra is None else f"pip install 'heliograph[{extra}]'"
        raise ImportError(f"{purpose} needs {package}, which cannot be imported ({error}): {command}") from error


def printable(text: object) -> str:
    """Return somebody's text in one line, without what would steer a terminal."""
    return "".join(each if each.isprintable() else _escaped(each) for each in str(text))


def printable_lines(text: str) -> str:
    """Return a text whose lines are kept, each without what would steer a terminal."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    return " " if character in "\n\t" else character.encode("unicode_escape", "backslashreplace").decode("ascii")
