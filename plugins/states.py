"""Plugins at the start and end of a run: their states, their descriptions, and handlers that were never called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ..events import Bus, Event, Lane, Progress
from ..events import catalogue as ev
from ..events.checks import PLAIN
from .entry import Handler, PluginEntry
from .filters import Filter

if TYPE_CHECKING:
    from ..events import Run
    from ..events.bus import Receiver

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
            yield from entry.gate.unmet(entry.name, note)
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


@contextmanager
def isolating(run: Any) -> Iterator[None]:
    """Run handlers of observers in the context that a plugin may set at `TrainStart`."""
    Filter.plan_all(run)

    def isolate(receiver: Receiver, owner: str) -> Receiver:
        if not run.plugins.runs_apart(owner):
            return receiver

        def isolated(sender: Run, *, event: Event) -> None:
            with run.hooks.apart():
                receiver(sender, event=event)

        return isolated

    remove = run.bus.intercept(isolate)
    run.hooks.closing.callback(remove)
    yield
    if run.hooks.apart is nullcontext:
        remove()


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
        self.entries, self._forgive = entries, forgive

    def save(self, check: Check | None = None) -> dict[str, Any]:
        """Return a copy of every plugin's state, without observers that fail."""
        states: dict[str, Any] = {}
        for entry in self.stateful():
            with self.tolerating_errors(entry, "state_dict", "its state is not saved"):
                state = entry.plugin.state_dict()
                is_flat = type(state) is dict and PLAIN.issuperset(map(type, state.values()))
                state = state.copy() if is_flat else deepcopy(state)  # five times as fast
                if check is not None and entry.is_observer:
                    check(state, "its state")
                states[entry.name] = state
        return states

    def versions(self) -> dict[str, int]:
        return {entry.name: version for entry in self.stateful() if (version := entry.state_version) != 1}

    def save_filters(self, origin: Progress, check: Check | None = None) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for entry in self.entries.values():
            with self.tolerating_errors(entry, "state_dict of a filter", "the states of its filters are not saved"):
                if filter_states := {key: when.state_dict(origin) for key, when in entry.stateful_filters().items()}:
                    if check is not None and entry.is_observer:
                        check(filter_states, "the state of its filters")
                    states[entry.name] = filter_states
        return states

    def stateful(self) -> list[PluginEntry]:
        return [entry for entry in self.entries.values() if hasattr(entry.plugin, "state_dict")]

    @contextmanager
    def tolerating_errors(self, entry: PluginEntry, method: str, consequence: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not self._forgive(entry, method, consequence, error):
                error.add_note(f"heliograph: in {method} of plugin {entry.name!r}")
                raise
