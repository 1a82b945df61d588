"""Optional packages, imported where they are used; texts for a terminal."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, purpose: str, *, extra: str | None = None) -> Any:
    """Import an optional module.

    Args:
        module: the module to import.
        purpose: what needs it, for the error message.
        extra: the extra of heliograph that installs it; None if it has none.

    Raises:
        ImportError: it is not installed; the message gives the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        command = f"pip install {package}" if extra is None else f"pip install 'heliograph[{extra}]'"
        raise ImportError(f"{purpose} needs {package}, which cannot be imported ({error}): {command}") from error


def printable(text: object) -> str:
    """Return a text in one line, with control characters escaped."""
    return "".join(each if each.isprintable() else _escape(each) for each in str(text))


def printable_lines(text: str) -> str:
    """Return a text of several lines, with control characters escaped."""
    return "\n".join(map(printable, text.split("\n")))


def _escape(character: str) -> str:
    return " " if character in "\n\t" else character.encode("unicode_escape", "backslashreplace").decode("ascii")
