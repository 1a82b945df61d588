"""The rules for plugins, in the order in which `check_plugin` checks them."""

from __future__ import annotations

import gc
import logging
import os
import stat
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from heliograph import Lane, Plugin, Run, Trainer, on
from heliograph import events as ev
from heliograph.core.objects.program import plugin_options
from heliograph.spi import Tracker, as_plain, capture, differing, encode
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .subject import (
    ConformanceRule,
    CrashError,
    MakePlugin,
    MakeScheduler,
    RuleBatches,
    Subject,
    Value,
    class_attributes,
    is_same,
    list_changes,
    name_of,
    resume_from,
    rule,
    small_task,
)

DECLARED = ("stop", "validation", "save", "log", "skip_batch", "skip_step")


@rule("In close(), check whether anything is open.")
def closes_unopened(subject: Subject) -> None:
    """A plugin can be closed before it has run, and twice."""
    plugin = subject.make()
    if isinstance(plugin, Plugin):
        plugin.close()
        plugin.close()


@rule("Write a class with methods marked @on and a unique name, and let Heliograph connect its handlers.")
def registers(subject: Subject) -> None:
    """A plugin has a name and can be registered, found, unregistered and registered again."""
    trainer, plugin = Trainer(device="cpu"), subject.make()
    trainer.plugins.register(plugin)
    name = trainer.plugins.names()[0]
    assert trainer.plugins[name] is plugin, f"trainer.plugins[{name!r}] is another object."
    assert trainer.plugins.unregister(name) is plugin, f"{name!r} cannot be unregistered."
    assert not trainer.bus.receiver_count, f"{name!r} left handlers: {trainer.plan()}"
    trainer.plugins.register(plugin)


@rule("Fix the failing handler, or check its requirements in a handler of TrainStart and raise a clear error.")
def completes(subject: Subject) -> None:
    """A training with the plugin completes, or stops on purpose, and no handler fails."""
    result = subject.fit(subject.trainer(subject.make()))
    assert result.status in ("completed", "stopped"), f"The run ended {result.status}: {result.reason}"
    assert not result.plugin_errors, f"A handler failed: {next(iter(result.plugin_errors.values()))[0]}"


@rule("Close files in close(), and keep each open file in an attribute until then.")
def closes_files(subject: Subject) -> None:
    """After a run, no file that the plugin opened is open."""
    before, plugin = _open_files(), subject.make()
    subject.fit(subject.trainer(plugin))
    _check_files(before)


@rule(
    "List all requests in asks = (...) in the class. Without it, the trainer refuses a run that only this plugin would "
    "end, and several ranks do not agree on skipped batches or steps."
)
def declares_requests(subject: Subject) -> None:
    """A plugin declares in `asks` what it requests of the loop."""
    plugin = subject.make()
    trainer = subject.trainer(plugin)
    runs: list[Run] = []

    def keep(run: Run, event: ev.TrainStart) -> None:
        runs.append(run)

    trainer.bus.on(ev.TrainStart, keep)
    subject.fit(trainer)
    name, asks = name_of(trainer, plugin), tuple(getattr(plugin, "asks", ()))
    requested = {request.verb for request in runs[0].control.history if request.by == name}
    missing = [verb for verb in DECLARED if verb in requested and verb not in asks]
    complete = tuple(verb for verb in DECLARED if verb in {*asks, *missing})
    assert not missing, f"It requested {', '.join(missing)}, but asks = {asks!r}: write asks = {complete!r}."


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
        @on(ev.EpochStart, lane=Lane.TRANSFORM, before=(name_of(trainer, plugin),))
        def look(self, run: Run, event: ev.EpochStart) -> None:
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


@rule("Reset the state of the previous run in reset(), or in a handler of TrainStart.")
def runs_twice(subject: Subject) -> None:
    """A second fit on the same trainer ends like the first."""
    trainer = subject.trainer(subject.make())
    first, second = subject.fit(trainer), subject.fit(trainer)
    for field in ("status", "stopped_by"):
        before, after = getattr(first, field), getattr(second, field)
        assert before == after, f"The second fit's {field} differs from the first: {before} and {after}."
    for field in ("epoch", "steps", "skipped_steps"):
        before, after = getattr(first.progress, field), getattr(second.progress, field)
        assert before == after, f"The second fit's progress.{field} differs from the first: {before} and {after}."


@rule(
    "Draw from a private generator, for example random.Random(seed), or make the plugin an observer (policy = "
    "'observer', draws = True), whose draws RNGCapture isolates. If it draws for the training, for example to add "
    "noise, pass draws=True to check_plugin."
)
def leaves_draws(subject: Subject) -> None:
    """A plugin does not draw from the global random generators of Python, NumPy and torch."""
    plugin = subject.make()
    is_isolated = getattr(plugin, "policy", "critical") == "observer" and getattr(plugin, "draws", True)
    if subject.draws or is_isolated:
        return
    trainer = subject.trainer(plugin)
    name, drawn = name_of(trainer, plugin), dict[str, str]()

    def watch(receiver: ev.Receiver, owner: str) -> ev.Receiver:
        def watched(run: Run, *, event: ev.Event) -> None:
            before = capture()
            receiver(run, event=event)
            for library in _changed(before, capture()):
                drawn.setdefault(library, f"a handler of {type(event).__name__}")

        return watched if owner == name else receiver

    trainer.bus.intercept(watch)
    subject.fit(trainer)
    if hasattr(plugin, "state_dict"):
        before = capture()
        plugin.state_dict()
        drawn |= dict.fromkeys(_changed(before, capture()), "state_dict()")
    changes = ", ".join(f"the generator of {library} changed in {where}" for library, where in drawn.items())
    assert not drawn, f"Random state: {changes}."


@rule("Keep a copy, made by .detach().clone(), or a mean, by run.track, instead of the tensor.")
def lets_batches_go(subject: Subject) -> None:
    """A plugin does not keep a batch, its outputs or its loss, which would keep memory and the graph."""
    plugin = subject.make()
    watch = BatchWatch(plugin)
    subject.fit(subject.trainer(watch, plugin))
    watch.look_at_all()
    assert not watch.leaks, f"After the batch, {watch.leaks[0]}."


@rule("Create lists, dicts and other mutable objects in __init__, not in the class or as default arguments.")
def shares_nothing(subject: Subject) -> None:
    """A run with one plugin object does not change another object of the same class."""
    plugin, unused = subject.make(), subject.make()
    assert plugin is not unused, "make_plugin returned the same object twice: return a new one."
    before = _state_and_attributes(unused)
    subject.fit(subject.trainer(plugin))
    changes = list(list_changes(before, _state_and_attributes(unused)))
    assert not changes, f"A run with one object changed another one: {', '.join(changes)}."


@rule("Release everything in close(), which is called at every end of a run, and raise no error there.")
def closes_after_failure(subject: Subject) -> None:
    """A failed run leaves no thread, log handler or open file, and raises the original error."""
    before, handlers, files = set(threading.enumerate()), _log_handlers(), _open_files()

    def crash(run: Run, event: ev.BatchEnd | ev.TrainEnd) -> None:  # at the end, if the plugin stopped the run before
        if run.progress.batch > 1 or isinstance(event, ev.TrainEnd):
            raise CrashError("on purpose")

    trainer = subject.trainer(subject.make())
    for kind in (ev.BatchEnd, ev.TrainEnd):
        trainer.bus.on(kind, crash, lane=Lane.REPORT)
    try:
        result = subject.fit(trainer)
    except Exception as error:  # noqa: BLE001  # checked here
        chain = [error, error.__cause__]
        assert any(isinstance(link, CrashError) for link in chain), f"The run raised another error: {error!r}"
    else:
        raise AssertionError(f"Another plugin raised an error, but the run ended {result.status}.")
    threads = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not threads, f"Threads are still running: {_join(threads)}."
    leftovers = [f"{handler!r}" for handler in _log_handlers() if handler not in handlers]
    assert not leftovers, f"Handlers of the logger 'heliograph' were not removed: {_join(leftovers)}."
    _check_files(files)


@rule("Open resources when they are first needed, and do not rely on a start event.")
def toggles(subject: Subject) -> None:
    """A plugin can be disabled and enabled during a run."""
    plugin = subject.make()
    trainer = subject.trainer(plugin)
    name = name_of(trainer, plugin)

    def toggle(run: Run, event: ev.BatchEnd) -> None:
        change = trainer.plugins.disable if run.progress.batch % 2 else trainer.plugins.enable
        change(name)

    trainer.bus.on(ev.BatchEnd, toggle, lane=Lane.TRANSFORM)
    result = subject.fit(trainer)
    assert result.status in ("completed", "stopped"), f"The run ended {result.status}: {result.reason}"


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


@rule("Accept an empty state in load_state_dict(), with the result of reset() and TrainStart.")
def rolls_back(subject: Subject) -> None:
    """When a run rolls back to a checkpoint, the plugin has the state of the checkpoint, even an empty one."""
    plugin = subject.make()
    is_remote = isinstance(plugin, Tracker) and not plugin.is_local  # its page is not rolled back
    if is_remote or not hasattr(plugin, "state_dict"):
        return
    trainer = subject.trainer(plugin)
    name, loaded = name_of(trainer, plugin), _watch_loads(trainer, plugin)
    saved: dict[str, Any] = {}

    def save(run: Run, event: ev.EpochStart) -> None:
        if not saved:
            saved.update(deepcopy(run.state_dict()))

    def roll_back(run: Run, event: ev.BatchEnd) -> None:
        if run.progress.epoch and not run.control.is_rolling_back and not loaded:
            run.roll_back(saved)

    trainer.bus.on(ev.EpochStart, save, lane=Lane.REPORT)
    trainer.bus.on(ev.BatchEnd, roll_back, lane=Lane.REPORT)
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


@rule("Check run.phase in handlers of events that also occur in a test; a test has no optimizer.")
def allows_a_test(subject: Subject) -> None:
    """A plugin of a training does not break a test or a prediction on the same trainer."""
    trainer, task = subject.trainer(subject.make()), small_task()
    subject.fit(trainer, task)
    metrics = trainer.test(task, RuleBatches()).metrics
    assert "test/loss" in metrics, f"The test has no test/loss, but {_join(metrics)}."
    predictions = trainer.predict(task, RuleBatches()).predictions
    samples = sum(len(inputs) for inputs, _ in RuleBatches())
    assert len(predictions) == samples, f"There are {len(predictions)} predictions for {samples} samples."


RULES = tuple(value for value in list(globals().values()) if isinstance(value, ConformanceRule))


def step_lr(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def check_plugin(
    make_plugin: MakePlugin,
    *,
    make_scheduler: MakeScheduler = step_lr,
    old_states: Mapping[int, Mapping[str, Any]] | None = None,
    draws: bool = False,
) -> None:
    """Check a plugin against every rule for plugins; docs/developers/plugin_rules.md lists them.

    Args:
        make_plugin: returns a new plugin object, with the same options every time. The plugin runs in short trainings
            of a small model: two epochs, with validation, saves and a scheduler.
        make_scheduler: returns the scheduler of these trainings.
        old_states: for a plugin with a `state_version`, a state of each older version.
        draws: whether the plugin draws from the global random generators on purpose, for example to add noise.

    Raises:
        AssertionError: the plugin breaks a rule; the message has the rule, what was found, and how to fix it.
    """
    subject = Subject(make_plugin, make_scheduler, old_states or {}, draws)
    for conformance_rule in RULES:
        conformance_rule.apply(subject)


def _log_handlers() -> list[logging.Handler]:
    return logging.getLogger("heliograph").handlers.copy()


def _check_files(before: set[tuple[int, str]]) -> None:
    leftovers = _open_files() - before
    assert not leftovers, f"Open after the run: {_join(path for _, path in leftovers)}."


def _open_files() -> set[tuple[int, str]]:
    # Regular files only, on Linux and macOS.
    files = set()
    folder = Path("/dev/fd")
    for entry in folder.iterdir() if folder.exists() else ():
        try:
            if stat.S_ISREG(os.fstat(number := int(entry.name)).st_mode):
                files.add((number, str(entry.readlink()) if entry.is_symlink() else f"file {number}"))
        except OSError:  # the folder listing itself is closed
            continue
    return files


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


class BatchWatch(Plugin):
    """Reports batches, outputs and losses that still exist at the end of the next batch; must be the first plugin."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self._latest: dict[str, list[tuple[str, int, Callable[[], bool]]]] = {}  # text, memory, is_gone; by phase
        self._numbers = Counter[str]()
        self.leaks: list[str] = []

    @on(ev.BatchEnd, ev.ValidationBatchEnd, lane=Lane.TRANSFORM)
    def watch(self, run: Run, event: ev.BatchEnd | ev.ValidationBatchEnd) -> None:
        self.look(run.phase)
        place = f"{run.phase} batch {self._numbers[run.phase]}"
        self._numbers[run.phase] += 1
        latest = self._latest[run.phase] = []
        for name in ("batch", "outputs"):
            for tensor in _tensors(getattr(run, name)):
                storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types
                latest.append((f"run.{name} of {place}", tensor.untyped_storage().data_ptr(), storage.expired))
        for loss in _tensors(run.loss) if isinstance(event, ev.BatchEnd) else ():  # a detached one may be kept
            alive = weakref.ref(loss)
            is_gone = partial(_is_dead, alive)
            latest.append((f"run.loss of {place}", loss.untyped_storage().data_ptr(), is_gone))

    def look(self, *phases: str) -> None:
        gc.collect()
        for text, memory, is_gone in chain.from_iterable(self._latest.get(phase, ()) for phase in phases):
            if not is_gone():
                name = self._holder(memory)
                where = "referenced outside the plugin's attributes" if name is None else f"in the attribute {name}"
                self.leaks.append(f"{text} is still {where}")

    def look_at_all(self) -> None:
        self.look(*self._latest)

    def _holder(self, memory: int) -> str | None:
        for name, value in vars(self._plugin).items():
            if any(tensor.untyped_storage().data_ptr() == memory for tensor in _tensors(value)):
                return str(name)
        return None


def _is_dead(alive: weakref.ref[Tensor]) -> bool:
    return alive() is None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _state_and_attributes(plugin: Any) -> dict[str, Value]:
    state = {"the state": encode(plugin.state_dict())} if hasattr(plugin, "state_dict") else {}
    return {**class_attributes(plugin), **plugin_options(plugin), **state}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [library for library in before if not is_same(before[library], now[library])]


def _affects_training(plugin: Any) -> bool:
    return getattr(plugin, "policy", "critical") != "observer" and bool(getattr(plugin, "affects_training", True))


def _observable(plugin: Any) -> dict[str, Value]:
    # Attributes are compared only if the plugin can affect the training.
    state = plugin.state_dict() if hasattr(plugin, "state_dict") else {}
    states = {f"{name!r} of its state": encode(value) for name, value in state.items()}
    return states | (plugin_options(plugin) if _affects_training(plugin) else {})


def _watch_loads(trainer: Trainer, plugin: Any) -> list[Any]:
    # Gets the state of the plugin after each load, before its own handlers change it.
    loaded: list[Any] = []

    class StateReader(Plugin):
        @on(ev.CheckpointLoaded, lane=Lane.TRANSFORM, before=(name_of(trainer, plugin),))
        def read(self, run: Run, event: ev.CheckpointLoaded) -> None:
            loaded.append(deepcopy(plugin.state_dict()))

    trainer.plugins.register(StateReader())
    return loaded


def _state_in(saved: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    # In the form that as_plain returns.
    return saved["plugins"].get(name), saved.get("number_types", {}).get("plugins", {}).get(name)


def _state_after(subject: Subject, plugin: Any) -> dict[str, Any]:
    # The state at the end of the first epoch, or at an earlier stop.
    saved: dict[str, Any] = {}

    def save(run: Run, event: ev.EpochEnd | ev.TrainEnd) -> None:
        if not saved:
            saved.update(deepcopy(run.state_dict()))

    trainer = subject.trainer(plugin)
    for kind in (ev.EpochEnd, ev.TrainEnd):
        trainer.bus.on(kind, save, lane=Lane.REPORT)
    subject.fit(trainer)
    return saved
