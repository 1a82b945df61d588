"""Rules on the state of a plugin: reset, plain, saved, restored and migrated."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from heliograph import BatchEnd, CheckpointLoaded, EpochEnd, EpochStart, Lane, Plugin, Run, TrainEnd, Trainer, on
from heliograph.core.objects.program import plugin_options
from heliograph.spi import Tracker, as_plain, differing, encode

from .subject import Subject, Value, is_same, list_changes, name_of, resume_from, rule


@rule(
    "Reset the state of the previous run in reset(), or in a handler of TrainStart. Set affects_training = False if no "
    "bit of the training depends on the plugin."
)
def starts_fresh(subject: Subject) -> None:
    """A training starts without state or attributes of the previous one."""
    plugin = subject.make()
    trainer = subject.trainer(plugin)
    starts: list[dict[str, Value]] = []

    class Inspector(Plugin):
        @on(EpochStart, lane=Lane.TRANSFORM, before=(name_of(trainer, plugin),))
        def look(self, run: Run, event: EpochStart) -> None:
            if event.epoch == 0:
                starts.append(_observable(plugin))

    trainer.plugins.register(Inspector())
    subject.fit(trainer)
    end = _observable(plugin)
    subject.fit(trainer)
    first, second = starts
    if not _affects_training(plugin):  # new values per run are allowed, for example a file name
        renewed = {name for name, *_ in differing(second, end)}
        second = {name: value for name, value in second.items() if name not in renewed}
        first = {name: value for name, value in first.items() if name in second}
    changes = list(list_changes(first, second))
    assert not changes, f"Before the first batch of the second run, {', '.join(changes)}."


def _affects_training(plugin: Any) -> bool:
    return getattr(plugin, "policy", "critical") != "observer" and bool(getattr(plugin, "affects_training", True))


def _writes_elsewhere(plugin: Any) -> bool:
    # The page of a remote tracker is not rolled back.
    return isinstance(plugin, Tracker) and not plugin.is_local


def _observable(plugin: Any) -> dict[str, Value]:
    # Attributes are compared only if the plugin can affect the training.
    state = plugin.state_dict() if hasattr(plugin, "state_dict") else {}
    states = {f"{name!r} of its state": encode(value) for name, value in state.items()}
    return states | (plugin_options(plugin) if _affects_training(plugin) else {})


@rule("Return numbers, text, None, tensors, and lists and dicts of them, without side effects.")
def state_is_plain(subject: Subject) -> None:
    """`state_dict()` returns plain types and tensors, and the same value twice."""
    plugin = subject.make()
    subject.fit(subject.trainer(plugin))
    if hasattr(plugin, "state_dict"):
        state = plugin.state_dict()
        as_plain(state, "state_dict()")
        assert is_same(state, plugin.state_dict()), "Two calls of state_dict() return different values."


@rule(
    "Restore everything that state_dict() returns in load_state_dict(), and do not change it before the run continues."
)
def resumes(subject: Subject) -> None:
    """A new plugin object that loads a state in a new run has the saved state."""
    plugin = subject.make()
    if not hasattr(plugin, "state_dict"):
        return
    saved, copy = _state_after(subject, plugin), subject.make()
    trainer = subject.trainer(copy)
    name, loaded = name_of(trainer, copy), _watch_loads(trainer, copy)
    resume_from(trainer, saved)
    subject.fit(trainer)
    expected = _state_in(saved, name)
    assert is_same(as_plain(loaded[0], name), expected), (
        f"{name!r} loaded another state than it saved: {loaded[0]} and {expected[0]}."
    )


def _watch_loads(trainer: Trainer, plugin: Any) -> list[Any]:
    # Gets the state of the plugin after each load, before its own handlers change it.
    loaded: list[Any] = []

    class StateReader(Plugin):
        @on(CheckpointLoaded, lane=Lane.TRANSFORM, before=(name_of(trainer, plugin),))
        def read(self, run: Run, event: CheckpointLoaded) -> None:
            loaded.append(deepcopy(plugin.state_dict()))

    trainer.plugins.register(StateReader())
    return loaded


def _state_in(saved: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    # In the form that as_plain returns.
    return saved["plugins"].get(name), saved.get("number_types", {}).get("plugins", {}).get(name)


@rule("Accept an empty state in load_state_dict(), with the result of reset() and TrainStart.")
def rolls_back(subject: Subject) -> None:
    """When a run rolls back to a checkpoint, the plugin has the state of the checkpoint, even an empty one."""
    plugin = subject.make()
    if not hasattr(plugin, "state_dict") or _writes_elsewhere(plugin):
        return
    trainer = subject.trainer(plugin)
    name, loaded = name_of(trainer, plugin), _watch_loads(trainer, plugin)
    saved: dict[str, Any] = {}

    def save(run: Run, event: EpochStart) -> None:
        if not saved:
            saved.update(deepcopy(run.state_dict()))

    def roll_back(run: Run, event: BatchEnd) -> None:
        if run.progress.epoch and not run.control.is_rolling_back and not loaded:
            run.roll_back(saved)

    trainer.bus.on(EpochStart, save, lane=Lane.REPORT)
    trainer.bus.on(BatchEnd, roll_back, lane=Lane.REPORT)
    subject.fit(trainer)
    state = _state_in(saved, name)
    assert all(is_same(as_plain(loaded_state, name), state) for loaded_state in loaded), (
        f"{name!r} rolled back to {state[0]}, but has {loaded}."
    )


@rule("Convert older states in migrate_state(), and pass one of each version: old_states={1: {...}}.")
def migrates(subject: Subject) -> None:
    """A run can be resumed with a state of every older version."""
    plugin = subject.make()
    lacking = sorted({*range(1, getattr(plugin, "state_version", 1))} - subject.old_states.keys())
    assert not lacking, f"old_states has no state of version {', '.join(map(str, lacking))}."
    for version, state in subject.old_states.items():
        saved, copy = _state_after(subject, subject.make()), subject.make()
        trainer = subject.trainer(copy)
        name = name_of(trainer, copy)
        saved["plugins"][name], saved["plugin_versions"] = dict(state), {name: version}
        resume_from(trainer, saved)
        subject.fit(trainer)


def _state_after(subject: Subject, plugin: Any) -> dict[str, Any]:
    # The state at the end of the first epoch, or at an earlier stop.
    saved: dict[str, Any] = {}

    def save(run: Run, event: EpochEnd | TrainEnd) -> None:
        if not saved:
            saved.update(deepcopy(run.state_dict()))

    trainer = subject.trainer(plugin)
    for kind in (EpochEnd, TrainEnd):
        trainer.bus.on(kind, save, lane=Lane.REPORT)
    subject.fit(trainer)
    return saved
