"""What a rule must never reach: files, processes, imports, and the attributes of anything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from types import FrameType
from typing import Any

from heliograph_rules.language.limits import WORK

TOUCHED = list[str]()  # the methods of traps that something called
SPECIAL = (
    "getattribute getattr eq ne lt le gt ge hash bool len iter next contains getitem call add radd sub rsub mul rmul "
    "truediv rtruediv floordiv rfloordiv mod rmod pow rpow lshift rlshift rshift rrshift and rand or ror xor rxor neg "
    "pos abs invert round trunc floor ceil int float index complex str repr format missing reversed instancecheck "
    "subclasscheck"
)


class Sprung(BaseException):
    """A trap was touched. No `Exception`, so that nothing catches it."""


def _springing(name: str) -> Callable[..., Any]:
    def spring(*_: object, **__: object) -> Any:
        TOUCHED.append(name)
        raise Sprung(name)

    return spring


METHODS = {f"__{name}__": _springing(name) for name in SPECIAL.split()}
BEHAVIOUR: dict[str, Any] = {**METHODS, "__class__": property(_springing("class")), "item": _springing("item")}
TrapType = type("TrapType", (type,), METHODS)


def trap(base: type, *value: object) -> Any:
    """Return an object that notes whatever anybody does to it; also its class does.

    Args:
        base: what it inherits from.
        value: what the base makes it from.
    """
    kind = type.__call__(TrapType, "Trap", (base,), dict(BEHAVIOUR))
    return base.__new__(kind, *value) if base not in (list, dict, set) else _filled(kind, base, *value)


def _filled(kind: type, base: Any, *value: object) -> Any:
    made = base.__new__(kind)
    base.__init__(made, *value)
    return made


class Watch:
    """Sees what this thread does to the machine, while it is asked to."""

    def __init__(self) -> None:
        self.thread = 0
        self.seen = list[str]()
        sys.addaudithook(self._receive)  # for the process's life: idle unless watching

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        """Return the audit events of the block: files, imports, processes, sockets, code that is compiled or run."""
        self.seen, self.thread = [], get_ident()
        try:
            yield self.seen
        finally:
            self.thread = 0

    def _receive(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.thread and self.thread == get_ident():
            self.seen.append(event)


@cache
def watch() -> Watch:
    """Return the process's one watch."""
    return Watch()


@contextmanager
def few_calls() -> Iterator[None]:
    """Check that fewer functions are called in the block than a rule has units of work: no clock, no luck."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    outer = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(outer)
    assert calls < WORK, f"{calls} functions were called, and {WORK} are allowed"
