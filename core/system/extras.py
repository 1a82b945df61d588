"""Optional packages, imported where they are used; texts for a terminal."""

from __future__ import annotations

import importlib
import os
import re
import sys
import tomllib
import warnings
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NAME = "heliograph"


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


@cache  # reading it takes longer than a save
def version() -> str:
    """Return the version of this package: a checkout's own, which need not be the one that is installed."""
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return str(project["version"])
    except FileNotFoundError:  # only a checkout has it
        pass
    try:
        return installed_version(NAME)
    except PackageNotFoundError:
        return "unknown"  # a copy of the folder


def warn_if_shadowing() -> None:
    """Warn where this package was imported only because Python was started in its parent folder.

    Another copy is installed then, and is not used. A folder that PYTHONPATH names was chosen on purpose.
    """
    folder, named = str(ROOT.parent), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    other = _other_copy()
    if other is None or os.path.realpath(folder) in [os.path.realpath(each) for each in named if each]:
        return
    warnings.warn(
        f"`import {NAME}` takes the folder {ROOT}, because Python looks first in {folder}, the folder of the script or "
        f"the current one. The installed copy in {other} is not used. Work in another folder, give this one another "
        f"name, or install it with `pip install -e {ROOT}`.",
        RuntimeWarning,
        stacklevel=3,
    )


def _other_copy() -> Path | None:
    """Return the folder of the package that would be imported if the first place of `sys.path` were not searched."""
    for finder in sys.meta_path:
        find: Any = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(NAME, sys.path[1:] if finder is PathFinder else None) if find else None
        if spec is not None and spec.origin is not None:
            folder = Path(os.path.realpath(spec.origin)).parent
            if folder != Path(os.path.realpath(ROOT)):
                return folder
    return None


def printable_lines(text: str) -> str:
    """Return a text of several lines, with control characters escaped."""
    from ...events.checks import printable  # needs blinker: a checkout announces itself without libraries

    return "\n".join(map(printable, text.split("\n")))


_VOWEL = re.compile(r"[AEIOaeio]|[Uu]n(?![ie])|[FHLMNRSX](?=[A-Z])")  # of what is spelled: an LSTM


def with_article(name: str) -> str:
    """Return the name of a class or the like with its article: `a Linear`, `an Episodes`, `an SGD`."""
    return f"{'an' if _VOWEL.match(name) else 'a'} {name}"


def kind_of(value: object) -> str:
    """Return the name of a value's class with its article."""
    return with_article(type(value).__name__)
