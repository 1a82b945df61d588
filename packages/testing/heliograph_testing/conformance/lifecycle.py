"""Rules on the lifecycle of a plugin: registration, runs, toggling, closing and reuse."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

from heliograph import BatchEnd, Lane, Plugin, Run, TrainEnd, Trainer, on

from .subject import RuleBatches, Subject, name_of, rule, small_task


class CrashError(Exception):
    pass


class Crasher(Plugin):
    """Fails a run at its second batch, or at its end if it stopped before."""

    @on(BatchEnd, TrainEnd, lane=Lane.REPORT)
    def crash(self, run: Run, event: BatchEnd | TrainEnd) -> None:
        if run.progress.batch > 1 or isinstance(event, TrainEnd):
            raise CrashError("on purpose")


class Toggler(Plugin):
    """Disables and enables the plugin under test during a run."""

    def __init__(self, trainer: Trainer, name: str) -> None:
        self._trainer, self._plugin = trainer, name

    @on(BatchEnd, lane=Lane.TRANSFORM)
    def toggle(self, run: Run, event: BatchEnd) -> None:
        toggle = self._trainer.plugins.disable if run.progress.batch % 2 else self._trainer.plugins.enable
        toggle(self._plugin)


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


@rule("Close files in close(), and keep each open file in an attribute until then.")
def closes_files(subject: Subject) -> None:
    """After a run, no file that the plugin opened is open."""
    before, plugin = _open_files(), subject.make()
    subject.fit(subject.trainer(plugin))
    _check_files(before)


@rule("Release everything in close(), which is called at every end of a run, and raise no error there.")
def closes_after_failure(subject: Subject) -> None:
    """A failed run leaves no thread, log handler or open file, and raises the original error."""
    before, handlers, files = set(threading.enumerate()), _log_handlers(), _open_files()
    trainer = subject.trainer(subject.make(), Crasher())
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


@rule("In close(), check whether anything is open.")
def closes_unopened(subject: Subject) -> None:
    """A plugin can be closed before it has run, and twice."""
    plugin = subject.make()
    if isinstance(plugin, Plugin):
        plugin.close()
        plugin.close()


@rule("Open resources when they are first needed, and do not rely on a start event.")
def toggles(subject: Subject) -> None:
    """A plugin can be disabled and enabled during a run."""
    plugin = subject.make()
    trainer = subject.trainer(plugin)
    trainer.plugins.register(Toggler(trainer, name_of(trainer, plugin)))
    result = subject.fit(trainer)
    assert result.status in ("completed", "stopped"), f"The run ended {result.status}: {result.reason}"


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
