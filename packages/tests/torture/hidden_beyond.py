"""State outside of every object that a run is given: only a repeated step can show it.

What is here, and nothing else, may be said to be exact and come out unequal, where no step was repeated.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from math import sin
from pathlib import Path
from typing import Any, ClassVar

from heliograph.packages.tests.torture.hidden import Hidden
from heliograph.packages.tests.torture.hidden_in_tasks import Factored
from heliograph.packages.tests.torture.parts import Parts

CALLS = [0]
LOCAL = threading.local()
VARIABLE = "HELIOGRAPH_TORTURE_CALLS"


class Outside(Factored):
    """A task that goes by what a function of its module counts."""

    count: Callable[[], int]

    def factor(self) -> float:
        return 1 + sin(type(self).count()) / 2


def _in_global() -> int:
    CALLS[0] += 1
    return CALLS[0]


def _in_local() -> int:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return int(LOCAL.calls)


def _in_environment() -> int:
    os.environ[VARIABLE] = str(int(os.environ.get(VARIABLE, "0")) + 1)
    return int(os.environ[VARIABLE])


@cache
def _the_list() -> list[int]:
    return []


def _in_cache() -> int:
    _the_list().append(0)
    return len(_the_list())


def _counting() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


_in_closure = _counting()


class Beyond(Hidden, is_base=True):
    """A counter out of sight."""

    row, place, beyond = "own", "task", True
    wants: ClassVar[dict[str, Any]] = {
        "save": ("batches", 5),
        "ends": True,
        "asks": (),
        "rules": (),
        "poison": None,  # what comes after a return is compared with what came after the same one only
    }
    count: Callable[[], int]

    def hide(self, parts: Parts) -> None:
        count = type(self).count
        parts.task = type("Outside", (Outside,), {"count": staticmethod(lambda: count())})


class Global(Beyond):
    """A global counter that a task goes by."""

    count = staticmethod(_in_global)


class ThreadLocal(Beyond):
    """A thread's own counter that a task goes by."""

    count = staticmethod(_in_local)


class Environment(Beyond):
    """A counter in the environment."""

    count = staticmethod(_in_environment)


class Cache(Beyond):
    """A counter in a function's cache."""

    count = staticmethod(_in_cache)


class Closure(Beyond):
    """A counter that a function of the module closes over."""

    count = staticmethod(_in_closure)


class File(Beyond):
    """A counter in a file."""

    def hide(self, parts: Parts) -> None:
        path = parts.folder / "counter"
        parts.task = type("Outside", (Outside,), {"count": staticmethod(lambda: _in_file(path))})


def _in_file(path: Path) -> int:
    path.write_text(str(1 + (int(path.read_text()) if path.exists() else 0)))
    return int(path.read_text())
