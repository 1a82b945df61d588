"""Handlers that a training never called: none of their events came, or their filter let none through."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator

from ..events import Event
from ..events import catalogue as ev
from ..events.checks import known_names
from .conditions import ConditionGate
from .entry import PluginEntry
from .filters import Filter
from .order import Handler

# What all is well without.
OPTIONAL = frozenset({
    ev.ChangeServed, ev.CheckpointLoaded, ev.CheckpointPruned, ev.CheckpointSaved, ev.LastBoundary, ev.PluginChanged,
    ev.PluginFailed, ev.PredictBatchEnd, ev.PredictBatchStart, ev.PredictEnd, ev.PredictStart, ev.Replay,
    ev.ResumeVerified, ev.RunClosed, ev.RunFailed, ev.TestBatchEnd, ev.TestBatchStart, ev.TestEnd, ev.TestStart,
    ev.TrainEnd, ev.ValidationCut, ev.Verdict,
})  # fmt: skip
WORDS: dict[type[Event], str] = {
    ev.Log: "log",
    ev.SavePoint: "save",
    **dict.fromkeys(
        (ev.ValidationStart, ev.ValidationBatchStart, ev.ValidationBatchEnd, ev.ValidationEnd), "validation"
    ),
}
MENDS = {
    "log": "nobody requested a log: add LogSchedule(steps=50)",
    "save": "nobody requested a save: add SaveSchedule(epochs=1)",
    "validation": "there was no validation: pass validation= to fit, and add ValidationSchedule(epochs=1)",
}


def uncalled(
    entries: Collection[PluginEntry], emitted: Container[type[Event]], note: Callable[[str], None]
) -> Iterator[str]:
    """Yield a sentence for each handler that was not called, though it is not optional.

    Args:
        entries: the plugins.
        emitted: the events of the run.
        note: called with a line for each plugin whose condition never held, though nobody said that it would.
    """
    asked = {word for entry in entries if entry.is_active for word in entry.declared("asks")}
    for entry in entries:
        if not entry.is_active:
            continue
        if entry.gate is not None:
            yield from _shut(entry.name, entry.gate, note)
            if not entry.gate.passed:
                continue
        methods: dict[str, list[tuple[type[Event], Handler]]] = {}
        for event, handler in entry.handlers:
            methods.setdefault(handler.method.__name__, []).append((event, handler))
        whens = {id(handler): when for (_, handler), when in zip(entry.handlers, entry.filters, strict=True)}
        for method, handlers in methods.items():
            events = [event for event, _ in handlers if event not in OPTIONAL]
            if not events or handlers[0][1].mark.optional:
                continue
            said = f"Plugin {entry.name!r}: its handler {method} was never called"
            if not any(event in emitted for event in events):
                yield f"{said}: {_why(events, asked)}."
            elif not any(_has_passed(whens[id(handler)]) for event, handler in handlers if event in emitted):
                yield f"{said}: its filter {whens[id(handlers[0][1])]} let no {_names(events)} through."


def _shut(name: str, gate: ConditionGate, note: Callable[[str], None]) -> Iterator[str]:
    """Yield a sentence where a condition never held, or where its sets never came."""
    condition = gate.condition
    if not gate.passed:
        said = f"Plugin {name!r} was never on: it is called {condition}"
        if condition.is_planned:
            yield f"{said}."
        else:
            note(said)
    for each in condition.sets if gate.seen else ():
        if each not in gate.seen:
            yield f"Plugin {name!r} waits for batches of the set {each!r}, which came in no evaluation." + known_names(
                each, gate.seen
            )


def _has_passed(when: object) -> bool:
    """Return whether a filter let something through, as far as that can be known; time is nothing to rely on."""
    return not isinstance(when, Filter) or when.passed or when.unit == "seconds"


def _why(events: list[type[Event]], asked: Container[str]) -> str:
    for event in events:
        if event is ev.EpochEnd:
            return "the run ended within its first epoch"
        if (word := WORDS.get(event)) is not None:
            return f"no {word} was due before the run ended" if word in asked else MENDS[word]
    return f"nobody emitted {_names(events)}"


def _names(events: list[type[Event]]) -> str:
    return " or ".join(event.name for event in events)
