"""Rules on the life of a plugin: registered, in a run, toggled, closed, used again."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

from heliograph import BatchEnd, Lane, Plugin, Run, TrainEnd, Trainer, on

from .rule import rule
from .subject import Batches, Subject, name_of, small_task


class CrashError(Exception):
    """Raised on purpose."""


class Crasher(Plugin):
    """Fails a run at its second batch, or at its end if it is stopped before."""

    @on(BatchEnd, TrainEnd, lane=Lane.REPORT)
    def crash(self, run: Run, event: BatchEnd | TrainEnd) -> None:
        """Raise CrashError."""
        if run.progress.batch > 1 or isinstance(event, TrainEnd):
            raise CrashError("on purpose")


class Toggler(Plugin):
    """Disables and enables the plugin under test during a run."""

    def __init__(self, trainer: Trainer, name: str) -> None:
        self._trainer, self._plugin = trainer, name

    @on(BatchEnd, lane=Lane.TRANSFORM)
    def toggle(self, run: Run, event: BatchEnd) -> None:
        """Disable it after odd batches, enable it after even ones."""
        toggle = self._trainer.plugins.disable if run.progress.batch % 2 else self._trainer.plugins.enable
        toggle(self._plugin)


@rule("Write a class with methods marked @on, a name that no other plugin has, and handlers that only it connects.")
def registers(subject: Subject) -> None:
    """A plugin has a name, can be registered, found and unregistered, and registered again."""
    trainer, plugin = Trainer(device="cpu"), subject.make()
    trainer.plugins.register(plugin)
    name = trainer.plugins.names()[0]
    assert trainer.plugins[name] is plugin, f"{name!r} is not found under its name."
    assert trainer.plugins.unregister(name) is plugin, f"{name!r} cannot be unregistered."
    assert not trainer.bus.receiver_count, f"{name!r} left handlers: {trainer.plan()}"
    trainer.plugins.register(plugin)


@rule("Let no handler fail in a plain training, or check what it needs in a handler of TrainStart and say so.")
def completes(subject: Subject) -> None:
    """A training with the plugin is completed, or stopped on purpose, and no handler of it fails."""
    result = subject.fit(subject.trainer(subject.make()))
    assert result.status in ("completed", "stopped"), f"The run ended {result.status}: {result.reason}"
    assert not result.plugin_errors, f"Its handlers failed: {next(iter(result.plugin_errors.values()))[0]}"


@rule("Forget what the former run left in reset(), or in a handler of TrainStart.")
def runs_twice(subject: Subject) -> None:
    """A second fit on the same trainer ends as the first did."""
    trainer = subject.trainer(subject.make())
    first, second = subject.fit(trainer), subject.fit(trainer)
    for field in ("status", "stopped_by"):
        before, after = getattr(first, field), getattr(second, field)
        assert before == after, f"The second fit's {field} differs from the first's: {before} and {after}."
    for field in ("epoch", "steps", "skipped_steps"):
        before, after = getattr(first.progress, field), getattr(second.progress, field)
        assert before == after, f"The second fit's progress.{field} differs from the first's: {before} and {after}."


@rule("Close in close() what the plugin opened; keep each file in an attribute until then.")
def closes_files(subject: Subject) -> None:
    """After a run, no file that the plugin opened is open."""
    before, plugin = _open_files(), subject.make()
    subject.fit(subject.trainer(plugin))
    _check_files(before)


@rule("Undo in close() what the plugin began, which is called however a run ends, and raise no other error there.")
def closes_after_failure(subject: Subject) -> None:
    """After a run that fails nothing of the plugin is left, and the error is the one that failed it."""
    before, handlers, files = set(threading.enumerate()), _log_handlers(), _open_files()
    trainer = subject.trainer(subject.make(), Crasher())
    try:
        result = subject.fit(trainer)
    except Exception as error:  # noqa: BLE001  # checked here
        chain = [error, error.__cause__]
        assert any(isinstance(each, CrashError) for each in chain), f"The run raised another error: {error!r}"
    else:
        raise AssertionError(f"A handler of another plugin raised an error, and the run ended {result.status}.")
    threads = [each.name for each in threading.enumerate() if each not in before]
    assert not threads, f"Threads are left: {_listed(threads)}."
    left = [f"{each!r}" for each in _log_handlers() if each not in handlers]
    assert not left, f"Handlers of the logger 'heliograph' are left: {_listed(left)}."
    _check_files(files)


@rule("Let close() look whether anything is open, and forget what it has closed.")
def closes_unopened(subject: Subject) -> None:
    """A plugin can be closed before it has run, and twice."""
    plugin = subject.make()
    if isinstance(plugin, Plugin):
        plugin.close()
        plugin.close()


@rule("Open files and the like when they are first needed, and do not count on having received a start event.")
def toggles(subject: Subject) -> None:
    """A plugin can be disabled and enabled during a run."""
    plugin = subject.make()
    trainer = subject.trainer(plugin)
    trainer.plugins.register(Toggler(trainer, name_of(trainer, plugin)))
    result = subject.fit(trainer)
    assert result.status in ("completed", "stopped"), f"The run ended {result.status}: {result.reason}"


@rule("Let handlers of events that a test has too look at run.phase; a test has no optimizer.")
def allows_a_test(subject: Subject) -> None:
    """A plugin of a training does not break a test or a prediction on the same trainer."""
    trainer, task = subject.trainer(subject.make()), small_task()
    subject.fit(trainer, task)
    metrics = trainer.test(task, Batches()).metrics
    assert "test/loss" in metrics, f"The test has no test/loss, only {_listed(metrics)}."
    predictions = trainer.predict(task, Batches()).predictions
    samples = sum(len(inputs) for inputs, _ in Batches())
    assert len(predictions) == samples, f"Of {samples} samples, {len(predictions)} have a prediction."


def _log_handlers() -> list[logging.Handler]:
    return logging.getLogger("heliograph").handlers.copy()


def _check_files(before: set[tuple[int, str]]) -> None:
    left = _open_files() - before
    assert not left, f"After the run {_listed(path for _, path in left)} is open."


def _open_files() -> set[tuple[int, str]]:
    """Return the open regular files of this process, as far as the system lists them: on Linux and macOS."""
    found = set()
    folder = Path("/dev/fd")
    for entry in folder.iterdir() if folder.exists() else ():
        try:
            if stat.S_ISREG(os.fstat(number := int(entry.name)).st_mode):
                found.add((number, str(entry.readlink()) if entry.is_symlink() else f"file {number}"))
        except OSError:  # the listing itself, closed by now
            continue
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
