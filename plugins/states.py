"""What plugins have to say of a run: their states, for a checkpoint; their plans before it; what was never called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from ..events import Bus, Event, Lane, Progress, Run
from ..events import catalogue as ev
from ..events.checks import PLAIN, known_names
from ..events.errors import describe_error
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


class Lines(str):
    """A text of several lines that a REPL shows as such."""

    def __repr__(self) -> str:
        return str(self)


def plan(bus: Bus) -> str:
    """Return the handlers of every event that has some, in their order."""
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
    """Return what each active plugin says that it will do in a run, by its name, where it says something."""
    texts: dict[str, str] = {}
    for entry in entries:
        if not (entry.is_active and hasattr(entry.plugin, "describe")):
            continue
        try:
            texts[entry.name] = entry.plugin.describe(run)
            if entry.gate is not None:
                texts[entry.name] = f"{texts[entry.name]}, {entry.gate.condition}".lstrip(", ")
        except BaseException as error:
            if not forgive(entry, "describe", "it cannot say what it will do", error):
                raise
    return {name: text for name, text in texts.items() if text}


Check = Callable[[Any, str], object]  # of a state and its name: raises TypeError where it cannot be saved
Forgive = Callable[[PluginEntry, str, str, BaseException], bool]


class States:
    """The states of a trainer's plugins.

    Args:
        entries: the plugins by their names.
        forgive: given a plugin, what failed, what comes of it and the error, returns whether the run continues.
    """

    def __init__(self, entries: Mapping[str, PluginEntry], forgive: Forgive) -> None:
        self._entries, self._forgive = entries, forgive

    def save(self, check: Check | None = None) -> dict[str, Any]:
        """Return a copy of every plugin's state by name; an observer's that cannot be had or saved is left out."""
        states: dict[str, Any] = {}
        for entry in self._stateful():
            with self._spared(entry, "state_dict", "its state is not saved"):
                state = copied(entry.plugin.state_dict())
                if check is not None and entry.is_observer:
                    check(state, "its state")
                states[entry.name] = state
        return states

    def versions(self) -> dict[str, int]:
        """Return the versions of the states by name, but for those of version 1."""
        return {entry.name: version for entry in self._stateful() if (version := entry.state_version) != 1}

    def load(
        self, states: Mapping[str, Any], versions: Mapping[str, int], path: Path | None, *, goes_back: bool
    ) -> tuple[list[str], list[str]]:
        """Give every plugin its saved state. `Plugins.load_state_dict` says what the arguments are."""
        missing: list[str] = []
        mine = self._stateful()
        for entry in mine:
            state = states.get(entry.name)
            if state:
                self._give(entry, state, versions.get(entry.name, 1), path)
            elif self._has_something(entry):
                if goes_back and state is not None:
                    self._empty(entry, path)
                else:
                    missing.append(entry.name)
        names = {entry.name for entry in mine}
        return missing, [name for name, state in states.items() if state and name not in names]

    def save_filters(self, origin: Progress, check: Check | None = None) -> dict[str, Any]:
        """Return the state of every handler's filter, by the plugin's name and `<method>/<event>`."""
        states: dict[str, Any] = {}
        for entry in self._entries.values():
            with self._spared(entry, "state_dict of a filter", "the states of its filters are not saved"):
                if own := {key: when.state_dict(origin) for key, when in entry.stateful_filters().items()}:
                    if check is not None and entry.is_observer:
                        check(own, "the state of its filters")
                    states[entry.name] = own
        return states

    def load_filters(self, origin: Progress, states: Mapping[str, Any]) -> None:
        """Give every handler's filter its saved state; one without begins where the run began."""
        for entry in self._entries.values():
            with self._spared(entry, "load_state_dict of a filter", "its filters begin here"):
                for key, when in entry.stateful_filters().items():
                    when.load_state_dict(origin, states.get(entry.name, {}).get(key, {}))

    def _stateful(self) -> list[PluginEntry]:
        return [entry for entry in self._entries.values() if hasattr(entry.plugin, "state_dict")]

    @contextmanager
    def _spared(self, entry: PluginEntry, what: str, consequence: str) -> Iterator[None]:
        """Continue in spite of what an observer's state raises; name the plugin in what another's raises."""
        try:
            yield
        except BaseException as error:
            if not self._forgive(entry, what, consequence, error):
                error.add_note(f"heliograph: in {what} of plugin {entry.name!r}")
                raise

    def _has_something(self, entry: PluginEntry) -> bool:
        with self._spared(entry, "state_dict", "whether it has a state is not known"):
            return bool(entry.plugin.state_dict())
        return True

    def _give(self, entry: PluginEntry, state: Any, version: int, path: Path | None) -> None:
        """Restore a plugin from a state, migrated if needed."""
        where = f"continue from its state in {path or 'the snapshot'}"
        with self._spared(entry, "load_state_dict", "it continues without its state"):
            if version > (now := entry.state_version):
                raise ValueError(
                    f"Plugin {entry.name!r} cannot {where}: that is of version {version}, and the plugin reads up to "
                    f"{now}. Update the plugin's package. {_other_name(entry)}"
                )
            state = deepcopy(state)
            if version < now:
                mend = f"It has to take a state of version {version}. {_other_name(entry)}"
                with _explained(entry, where, "migrate_state", mend):
                    state = entry.plugin.migrate_state(state, version)
            with _explained(entry, where, "load_state_dict", f"{OTHER_FORM} {_other_name(entry)}"):
                entry.plugin.load_state_dict(state)

    def _empty(self, entry: PluginEntry, path: Path | None) -> None:
        """Return a plugin to where it had nothing to remember."""
        where = f"go back to {path or 'a snapshot'}, where it had an empty state"
        with (
            self._spared(entry, "load_state_dict({})", "it keeps what it has"),
            _explained(entry, where, "load_state_dict({})", "It has to take what its state_dict returned."),
        ):
            entry.plugin.load_state_dict({})


def copied(state: Any) -> Any:
    """Return a deep copy: most states are plain values in dicts and lists, each of which `deepcopy` asks ten things."""
    return _copied(state, {})


def _copied(state: Any, memo: dict[int, Any]) -> Any:
    kind = type(state)
    if kind in PLAIN:
        return state
    if kind is not dict and kind is not list:
        return deepcopy(state, memo)
    copy: Any = memo.get(id(state))
    if copy is None:
        copy = memo[id(state)] = kind()
        if kind is list:
            copy += [each if type(each) in PLAIN else _copied(each, memo) for each in state]
        else:
            for key, each in state.items():
                copy[_copied(key, memo)] = each if type(each) in PLAIN else _copied(each, memo)
    return copy


OTHER_FORM = (
    "If its state had another form then, use the version of the plugin that saved it, or give the plugin a "
    "state_version and a migrate_state."
)


@contextmanager
def _explained(entry: PluginEntry, where: str, method: str, mend: str) -> Iterator[None]:
    """Name the plugin and the file in what one of its methods raises."""
    try:
        yield
    except Exception as error:
        what = f"Plugin {entry.name!r} cannot {where}: {method} raised {describe_error(error)}"
        raise ValueError(f"{what}. {mend}") from error


def _other_name(entry: PluginEntry) -> str:
    return f"As {type(entry.plugin).__name__}(...).named('{entry.name}_2') it starts fresh."
