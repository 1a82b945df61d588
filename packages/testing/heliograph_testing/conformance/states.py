"""Rules on the state of a plugin: fresh in every training, plain, saved, restored, migrated."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from heliograph import BatchEnd, CheckpointLoaded, EpochEnd, EpochStart, Lane, Plugin, Run, TrainEnd, TrainStart, on
from heliograph.core.objects.program import plugin_options
from heliograph.spi import Tracker, as_plain, differing, encode

from .attributes import Value, is_same, list_changes
from .rule import rule
from .subject import Subject, name_of


class Resumer(Plugin):
    """Resumes a run from a saved state."""

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._saved = saved

    @on(TrainStart)
    def resume(self, run: Run, event: TrainStart) -> None:
        """Resume from the saved state."""
        run.resume(self._saved)


@rule(
    "Forget the previous run in reset(), or in a handler of TrainStart. If no bit of the training depends on it, set "
    "affects_training = False on a plugin that only looks."
)
def starts_fresh(subject: Subject) -> None:
    """When a training begins, a plugin holds nothing of the former one, neither in its state nor in its attributes."""
    plugin = subject.make()
    trainer = subject.trainer(plugin)
    found: list[dict[str, Value]] = []

    class Inspector(Plugin):
        @on(EpochStart, lane=Lane.TRANSFORM, before=(name_of(trainer, plugin),))
        def look(self, run: Run, event: EpochStart) -> None:
            if event.epoch == 0:
                found.append(_held(plugin))

    trainer.plugins.register(Inspector())
    subject.fit(trainer)
    left = _held(plugin)
    subject.fit(trainer)
    first, second = found
    if not _affects_training(plugin):  # it may hold what is new in every run, such as the name of a file
        renewed = {name for name, *_ in differing(second, left)}
        second = {name: value for name, value in second.items() if name not in renewed}
        first = {name: value for name, value in first.items() if name in second}
    changes = list(list_changes(first, second))
    assert not changes, f"Before any batch, in the first run {', '.join(changes)} in the second."


def _affects_training(plugin: Any) -> bool:
    return getattr(plugin, "policy", "critical") != "observer" and bool(getattr(plugin, "affects_training", True))


def _writes_elsewhere(plugin: Any) -> bool:
    """Return whether it is a tracker whose page is not undone where the run goes back."""
    return isinstance(plugin, Tracker) and not plugin.is_local


def _held(plugin: Any) -> dict[str, Value]:
    """Return the state and the attributes of a plugin; of one that cannot affect the training the state alone."""
    state = plugin.state_dict() if hasattr(plugin, "state_dict") else {}
    states = {f"{name!r} of its state": encode(value) for name, value in state.items()}
    return states | (plugin_options(plugin) if _affects_training(plugin) else {})


@rule("Return numbers, text, None, tensors, and lists and dicts of them, and change nothing in state_dict().")
def state_is_plain(subject: Subject) -> None:
    """The state after a run consists of plain types and tensors, and is not changed by reading it."""
    plugin = subject.make()
    subject.fit(subject.trainer(plugin))
    if hasattr(plugin, "state_dict"):
        state = plugin.state_dict()
        as_plain(state, "state_dict()")
        assert is_same(state, plugin.state_dict()), "Reading the state twice gives two results."


@rule(
    "Let load_state_dict() put back all that state_dict() returns, and no handler change it before the run continues."
)
def resumes(subject: Subject) -> None:
    """A state that a new plugin object loads in a new run equals the state that was saved."""
    plugin = subject.make()
    if not hasattr(plugin, "state_dict"):
        return
    saved, copy = _state_after(subject, plugin), subject.make()
    trainer = subject.trainer(copy)
    name = name_of(trainer, copy)
    loaded: list[Any] = []

    class Reader(Plugin):
        @on(CheckpointLoaded, lane=Lane.TRANSFORM, before=(name,))
        def read(self, run: Run, event: CheckpointLoaded) -> None:
            loaded.append(deepcopy(copy.state_dict()))

    for each in (Resumer(saved), Reader()):
        trainer.plugins.register(each)
    subject.fit(trainer)
    was = _state_in(saved, name)
    assert is_same(as_plain(loaded[0], name), was), (
        f"The state that {name!r} loaded is not the one that it saved: {loaded[0]} and {was[0]}."
    )


def _state_in(saved: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Return the state of a plugin in a snapshot, as `as_plain` returns it."""
    return saved["plugins"].get(name), saved.get("number_types", {}).get("plugins", {}).get(name)


@rule("Let load_state_dict() take an empty state, too: then the plugin is as reset() and TrainStart leave it.")
def rolls_back(subject: Subject) -> None:
    """When a run rolls back to a checkpoint, the plugin's state is that of the checkpoint, even if it is empty."""
    plugin = subject.make()
    if not hasattr(plugin, "state_dict") or _writes_elsewhere(plugin):
        return
    trainer = subject.trainer(plugin)
    name = name_of(trainer, plugin)
    saved: dict[str, Any] = {}
    found: list[Any] = []

    class Rewinder(Plugin):
        @on(EpochStart, lane=Lane.REPORT, after=(name,))
        def save(self, run: Run, event: EpochStart) -> None:
            if not saved:
                saved.update(deepcopy(run.state_dict()))

        @on(BatchEnd, lane=Lane.REPORT)
        def roll_back(self, run: Run, event: BatchEnd) -> None:
            if run.progress.epoch and not run.control.is_rolling_back and not found:
                run.roll_back(saved)

        @on(CheckpointLoaded, lane=Lane.TRANSFORM, before=(name,))
        def read(self, run: Run, event: CheckpointLoaded) -> None:
            found.append(deepcopy(plugin.state_dict()))

    trainer.plugins.register(Rewinder())
    subject.fit(trainer)
    state = _state_in(saved, name)
    assert all(is_same(as_plain(each, name), state) for each in found), (
        f"{name!r} rolled back to {state[0]}, but has {found}."
    )


@rule("Convert each older state in migrate_state(), and give check_plugin one of each version: old_states={1: {...}}.")
def migrates(subject: Subject) -> None:
    """A run can be resumed with the plugin's state of every older version."""
    plugin = subject.make()
    lacking = sorted({*range(1, getattr(plugin, "state_version", 1))} - subject.old_states.keys())
    assert not lacking, f"There is no old state of version {', '.join(map(str, lacking))} to check it with."
    for version, state in subject.old_states.items():
        saved, copy = _state_after(subject, subject.make()), subject.make()
        trainer = subject.trainer(copy)
        name = name_of(trainer, copy)
        saved["plugins"][name], saved["plugin_versions"] = dict(state), {name: version}
        trainer.plugins.register(Resumer(saved))
        subject.fit(trainer)


def _state_after(subject: Subject, plugin: Any) -> dict[str, Any]:
    """Return what a run with a plugin saved at the end of its first epoch, or where it was stopped before."""
    saved: dict[str, Any] = {}

    class Saver(Plugin):
        @on(EpochEnd, TrainEnd, lane=Lane.REPORT)
        def save(self, run: Run, event: EpochEnd | TrainEnd) -> None:
            if not saved:
                saved.update(deepcopy(run.state_dict()))

    trainer = subject.trainer(plugin)
    trainer.plugins.register(Saver())
    subject.fit(trainer)
    return saved
