"""Events made anew from what is recorded of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from ....core.metrics.values import Metrics
from ....events import CATALOGUE, Event
from ..format.records import EventEntry

KINDS: Final = {kind.name: kind for kind in CATALOGUE}
EXITS: Final = {kind.__name__: kind for kind in (KeyboardInterrupt, SystemExit, GeneratorExit)}


def made(entry: EventEntry) -> Event | None:
    """Return the event of an entry; None where it is none of the catalogue's."""
    kind = KINDS.get(entry.event)
    if kind is None:
        return None
    values = {each.name: _made(each.name, entry.data) for each in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**values)


def _made(name: str, data: Mapping[str, Any]) -> Any:
    value = data[name]
    match name:
        case "path":
            return None if value is None else Path(value)
        case "metrics":
            return Metrics(value)
        case "error":
            kind, _, text = value.partition(": ")  # the text stands beside it, or behind it
            return _error(kind, data.get("text", text))
        case _:
            return value


def _error(kind: str, text: str) -> BaseException:
    """Return an exception of the recorded name that says the recorded text; it is of that type by name only."""
    base = EXITS.get(kind, Exception)
    made: BaseException = type(kind, (base,), {})(text.removeprefix(f"{kind}: "))
    return made
