"""The events of installed plugins. Those of other packages are imported in a separate process, which may hang."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from .discovery import Discovered, describe_failure, find
from .first_party import DISTRIBUTIONS
from .marks import marked_methods

LIMIT = 20.0  # seconds for one import
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class State:
    """What an import has shown.

    Attributes:
        word: `available`, `broken`, `switched off` or, where it was not looked at, `not imported`.
        what: what the plugin does, in a sentence; or what is wrong with it.
        events: those that it handles.
    """

    word: str
    what: str
    events: tuple[str, ...] = ()


def states_of(plugins: Sequence[Discovered], limit: float = LIMIT) -> list[State]:
    """Return whether each plugin can be imported, and what it does or what is wrong with it.

    Args:
        plugins: as `discover` found them.
        limit: seconds that the import of one may take.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda plugin: _state(plugin, limit), plugins))


def print_state(name: str) -> None:
    """Import a plugin and print its state as JSON; what its package prints goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        print(json.dumps(asdict(_imported(find(name)))), file=answer)


def _state(plugin: Discovered, limit: float) -> State:
    if plugin.switched_off:
        return State("switched off", "not imported: HELIOGRAPH_PLUGINS names it")
    if plugin.package in DISTRIBUTIONS:
        return _imported(plugin)
    code = f"from {__name__} import print_state; print_state({f'{plugin.package}:{plugin.name}'!r})"
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(  # noqa: S603  # the same interpreter
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=known, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return State("broken", f"its import did not end within {limit:g} s")
    if done.returncode != 0:
        return State("broken", f"its import ended the process, with exit status {done.returncode}")
    shown = json.loads(done.stdout)
    return State(shown["word"], shown["what"], tuple(shown["events"]))


def _imported(plugin: Discovered) -> State:
    try:
        loaded = plugin.load()
    except ImportError as error:
        return State("broken", str(error) if error.__cause__ is None else describe_failure(error.__cause__))
    if isinstance(loaded, type) and (misfit := _misfit(loaded)):
        return State("broken", misfit)
    marks = marked_methods(loaded) if isinstance(loaded, type) else ()
    what = inspect.cleandoc(loaded.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    return State("available", what, tuple(sorted({event.name for _, mark in marks for event in mark.events})))


def _misfit(kind: Any) -> str:
    """Return why objects of a class could not be registered, as far as that is seen without making one."""
    from .entry import make_entry

    try:
        blank = kind.__new__(kind)
    except TypeError:  # it takes arguments
        return ""
    try:
        make_entry(blank)
    except AttributeError:  # its constructor sets what it declares
        return ""
    except (TypeError, ValueError) as error:
        return str(error)
    return ""
