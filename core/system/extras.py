"""Optional packages, imported when needed; texts for a terminal."""

from __future__ import annotations

import importlib
import re
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from ...events.checks import printable

ROOT = Path(__file__).parents[2]
NAME = "heliograph"


def require(module: str, purpose: str, *, extra: str | None = None) -> Any:
    """Import an optional module.

    Args:
        module: the module to import.
        purpose: the feature that needs it, for the error message.
        extra: the extra of heliograph that installs it; None if it has none.

    Raises:
        ImportError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        command = f"pip install {package}" if extra is None else f"pip install 'heliograph[{extra}]'"
        raise ImportError(f"{purpose} needs {package}, which cannot be imported ({error}): {command}") from error


@cache  # reading it takes longer than a save
def version() -> str:
    """Return the version of this package; a checkout has its own, even if another one is installed."""
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return str(project["version"])
    except FileNotFoundError:  # only a checkout has this file
        pass
    try:
        return installed_version(NAME)
    except PackageNotFoundError:
        return "unknown"  # a copy of the folder


def printable_lines(text: str) -> str:
    """Return a text of several lines with escaped control characters."""
    return "\n".join(map(printable, text.split("\n")))


_VOWEL = re.compile(r"[AEIOaeio]|[Uu]n(?![ie])|[FHLMNRSX](?=[A-Z])")  # the last part is for spelled names: an LSTM


def with_article(name: str) -> str:
    """Return the name of a class with its article: `a Linear`, `an Episodes`, `an SGD`."""
    return f"{'an' if _VOWEL.match(name) else 'a'} {name}"


def kind_of(value: object) -> str:
    """Return the name of a value's class with its article."""
    return with_article(type(value).__name__)
