"""Plugins at the start and end of a run: their states, their descriptions, and handlers that were never called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from ..events import Bus, Event, Lane, Progress, Run
from ..events import catalogue as ev
from ..events.checks import PLAIN, describe_error, known_names
from .conditions import ConditionGate
from .entry import Handler, PluginEntry
from .filters import Filter

# A handler of these events need not be called in a training.
OPTIONAL = frozenset({
    ev.ChangeServed, ev.CheckpointLoaded, ev.CheckpointPruned, ev.CheckpointSaved, ev.LastBoundary, ev.LateResult,
    ev.PluginChanged, ev.PluginFailed, ev.PredictBatchEnd, ev.PredictBatchStart, ev.PredictEnd, ev.PredictStart,
    ev.Replay, ev.ResumeVerified, ev.RunClosed, ev.RunFailed, ev.TestBatchEnd, ev.TestBatchStart, ev.TestEnd,
    ev.TestStart, ev.TrainEnd, ev.ValidationCut, ev.Verdict,
})  # fmt: skip
WORDS: dict[type[Event], str] = {
    ev.Log: "log",
    ev.SavePoint: "save",
    **dict.fromkeys(
        (ev.ValidationStart, ev.ValidationBatchStart, ev.ValidationBatchEnd, ev.ValidationEnd), "validation"
    ),
}
REMEDIES = {
    "log": "no plugin requested a log: add LogSchedule(steps=50)",
    "save": "no plugin requested a save: add SaveSchedule(epochs=1)",
    "validation": "there was no validation: pass validation= to fit, and add ValidationSchedule(epochs=1)",
}


def uncalled(
    entries: Collection[PluginEntry], emitted: Container[type[Event]], note: Callable[[str], None]
) -> Iterator[str]:
    """Yield a sentence for each required handler that was not called.

    Args:
        entries: the plugins.
        emitted: the events of the run.
        note: called with a line for each plugin whose condition never held and was not expected to.
    """
    asked = {word for entry in entries if entry.is_active for word in entry.declared("asks")}
    for entry in entries:
        if not entry.is_active:
            continue
        if entry.gate is not None:
            yield from _unmet_conditions(entry.name, entry.gate, note)
            if not entry.gate.passed:
                continue
        methods: dict[str, list[tuple[type[Event], Handler]]] = {}
        for event, handler in entry.handlers:
            methods.setdefault(handler.method.__name__, []).append((event, handler))
        for method, handlers in methods.items():
            events = [event for event, _ in handlers if event not in OPTIONAL]
            if not events or handlers[0][1].mark.optional:
                continue
            said = f"Plugin {entry.name!r}: its handler {method} was never called"
            if not any(event in emitted for event in events):
                yield f"{said}: {_reason(events, asked)}."
            elif not any(_has_passed(handler.when) for event, handler in handlers if event in emitted):
                yield f"{said}: its filter {handlers[0][1].when} let no {_event_names(events)} through."


def _unmet_conditions(name: str, gate: ConditionGate, note: Callable[[str], None]) -> Iterator[str]:
    condition = gate.condition
    if not gate.passed:
        said = f"Plugin {name!r} was never on: it is called {condition}"
        if condition.is_planned:
            yield f"{said}."
        else:
            note(said)
    for dataset in condition.sets if gate.seen else ():
        if dataset not in gate.seen:
            yield (
                f"Plugin {name!r} waits for batches of the set {dataset!r}, which came in no evaluation."
                + known_names(dataset, gate.seen)
            )


def _has_passed(when: object) -> bool:
    """Return whether a filter has passed an event, as far as that is known."""
    return not isinstance(when, Filter) or when.passed or when.unit == "seconds"


def _reason(events: list[type[Event]], asked: Container[str]) -> str:
    for event in events:
        if event is ev.EpochEnd:
            return "the run ended within its first epoch"
        if (word := WORDS.get(event)) is not None:
            return f"no {word} was due before the run ended" if word in asked else REMEDIES[word]
    return f"{_event_names(events)} was never emitted"


def _event_names(events: list[type[Event]]) -> str:
    return " or ".join(event.name for event in events)


class Lines(str):
    """A text of several lines that a REPL shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def plan(bus: Bus) -> str:
    lines: list[str] = []
    for signal in bus.signals():
        subscriptions = sorted(signal.subscriptions.values(), key=lambda subscription: subscription.position)
        if subscriptions:
            lines.append(signal.event.name)
        for subscription in subscriptions:
            lane = Lane(int(subscription.position[0])).name if subscription.position[0] <= max(Lane) else "last"
            marks = " (off)" * subscription.paused + " (on a condition)" * (subscription.gate is not None)
            lines.append(f"  {lane:<9} {subscription.owner}{marks}")
    return Lines("\n".join(lines) or "no handlers")


def descriptions(entries: Iterable[PluginEntry], run: Run, forgive: Forgive) -> dict[str, str]:
    texts: dict[str, str] = {}
    for entry in entries:
        if not (entry.is_active and hasattr(entry.plugin, "describe")):
            continue
        try:
            texts[entry.name] = entry.plugin.describe(run)
            if entry.gate is not None:
                texts[entry.name] = f"{texts[entry.name]}, {entry.gate.condition}".lstrip(", ")
        except BaseException as error:
            if not forgive(entry, "describe", "the plan does not describe it", error):
                raise
    return {name: text for name, text in texts.items() if text}


Check = Callable[[Any, str], object]  # called with a state and a name for it; raises TypeError if it cannot be saved
Forgive = Callable[[PluginEntry, str, str, BaseException], bool]


class States:
    """The states of a trainer's plugins.

    Args:
        entries: the plugins by name.
        forgive: called with a plugin, the failed method, the consequence and the error; returns True if the run
            continues.
    """

    def __init__(self, entries: Mapping[str, PluginEntry], forgive: Forgive) -> None:
        self._entries, self._forgive = entries, forgive

    def save(self, check: Check | None = None) -> dict[str, Any]:
        """Return a copy of every plugin's state, without observers that fail."""
        states: dict[str, Any] = {}
        for entry in self._stateful():
            with self._tolerating_errors(entry, "state_dict", "its state is not saved"):
                state = entry.plugin.state_dict()
                is_flat = type(state) is dict and PLAIN.issuperset(map(type, state.values()))
                state = state.copy() if is_flat else deepcopy(state)  # five times as fast
                if check is not None and entry.is_observer:
                    check(state, "its state")
                states[entry.name] = state
        return states

    def versions(self) -> dict[str, int]:
        return {entry.name: version for entry in self._stateful() if (version := entry.state_version) != 1}

    def load(
        self, states: Mapping[str, Any], versions: Mapping[str, int], path: Path | None, *, goes_back: bool
    ) -> tuple[list[str], list[str]]:
        """Restore the state of every plugin; see `Plugins.load_state_dict`."""
        missing: list[str] = []
        mine = self._stateful()
        for entry in mine:
            state = states.get(entry.name)
            if state:
                self._load_state(entry, state, versions.get(entry.name, 1), path)
            elif self._has_state(entry):
                if goes_back and state is not None:
                    self._clear_state(entry, path)
                else:
                    missing.append(entry.name)
        names = {entry.name for entry in mine}
        return missing, [name for name, state in states.items() if state and name not in names]

    def save_filters(self, origin: Progress, check: Check | None = None) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for entry in self._entries.values():
            with self._tolerating_errors(entry, "state_dict of a filter", "the states of its filters are not saved"):
                if filter_states := {key: when.state_dict(origin) for key, when in entry.stateful_filters().items()}:
                    if check is not None and entry.is_observer:
                        check(filter_states, "the state of its filters")
                    states[entry.name] = filter_states
        return states

    def load_filters(self, origin: Progress, states: Mapping[str, Any]) -> None:
        for entry in self._entries.values():
            with self._tolerating_errors(entry, "load_state_dict of a filter", "its filters begin here"):
                for key, when in entry.stateful_filters().items():
                    when.load_state_dict(origin, states.get(entry.name, {}).get(key, {}))

    def _stateful(self) -> list[PluginEntry]:
        return [entry for entry in self._entries.values() if hasattr(entry.plugin, "state_dict")]

    @contextmanager
    def _tolerating_errors(self, entry: PluginEntry, method: str, consequence: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not self._forgive(entry, method, consequence, error):
                error.add_note(f"heliograph: in {method} of plugin {entry.name!r}")
                raise

    def _has_state(self, entry: PluginEntry) -> bool:
        with self._tolerating_errors(entry, "state_dict", "whether it has a state is not known"):
            return bool(entry.plugin.state_dict())
        return True

    def _load_state(self, entry: PluginEntry, state: Any, version: int, path: Path | None) -> None:
        where = f"continue from its state in {path or 'the snapshot'}"
        with self._tolerating_errors(entry, "load_state_dict", "it continues without its state"):
            if version > (now := entry.state_version):
                raise ValueError(
                    f"Plugin {entry.name!r} cannot {where}: the state has version {version}, but the plugin reads "
                    f"versions up to {now}. Update the plugin's package. {_how_to_start_fresh(entry)}"
                )
            state = deepcopy(state)
            if version < now:
                remedy = f"It must accept a state of version {version}. {_how_to_start_fresh(entry)}"
                with _naming_plugin(entry, where, "migrate_state", remedy):
                    state = entry.plugin.migrate_state(state, version)
            with _naming_plugin(entry, where, "load_state_dict", f"{FORMAT_CHANGED} {_how_to_start_fresh(entry)}"):
                entry.plugin.load_state_dict(state)

    def _clear_state(self, entry: PluginEntry, path: Path | None) -> None:
        where = f"roll back to {path or 'a snapshot'}, in which its state is empty"
        with (
            self._tolerating_errors(entry, "load_state_dict({})", "its state did not change"),
            _naming_plugin(entry, where, "load_state_dict({})", "It must accept every result of its state_dict."),
        ):
            entry.plugin.load_state_dict({})


FORMAT_CHANGED = (
    "If the format has changed, use the plugin's previous version, or define state_version and migrate_state."
)


@contextmanager
def _naming_plugin(entry: PluginEntry, where: str, method: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        summary = f"Plugin {entry.name!r} cannot {where}: {method} raised {describe_error(error)}"
        raise ValueError(f"{summary}. {remedy}") from error


def _how_to_start_fresh(entry: PluginEntry) -> str:
    return f"To start it fresh, rename it: {type(entry.plugin).__name__}(...).named('{entry.name}_2')."
