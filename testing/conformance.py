"""The rules for all plugins, built-in or third-party: each is a function, whose docstring is the rule."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from heliograph.core.checkpoint.state.schema import check_plain
from heliograph.core.result import RunResult
from heliograph.core.task import Supervised
from heliograph.core.trainer import Trainer
from heliograph.events import BatchEnd, CheckpointLoaded, EpochEnd, EpochStart, Lane, Run, TrainStart
from heliograph.events.errors import describe_error
from heliograph.plugins import Plugin, on
from heliograph.plugins.filters import Every
from torch import nn

MakePlugin = Callable[[], Any]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
Fit = Callable[..., RunResult]


def step_lr(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    """Return the default scheduler of the runs that check a plugin."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


class CrashError(Exception):
    """Raised on purpose."""


class Requester(Plugin):
    """Requests everything, so that every event is emitted."""

    asks = ("validation", "save", "log", "stop", "scheduler")

    @on(EpochEnd, lane=Lane.TRANSFORM)
    def request(self, run: Run, event: EpochEnd) -> None:
        """Make all requests."""
        run.control.request_log("under test")
        run.control.request_validation("under test")
        run.control.request_save("under test")


class Crasher(Plugin):
    """Fails a run at its second batch."""

    @on(BatchEnd, lane=Lane.REPORT, when=Every(batches=2))
    def crash(self, run: Run, event: BatchEnd) -> None:
        """Raise CrashError."""
        raise CrashError("on purpose")


class Resumer(Plugin):
    """Resumes a run from a saved state."""

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._saved = saved

    @on(TrainStart)
    def resume(self, run: Run, event: TrainStart) -> None:
        """Resume from the saved state."""
        run.resume(self._saved)


class Toggler(Plugin):
    """Disables and enables the plugin under test during a run."""

    def __init__(self, trainer: Trainer, name: str) -> None:
        self._trainer, self._plugin = trainer, name

    @on(BatchEnd, lane=Lane.TRANSFORM)
    def toggle(self, run: Run, event: BatchEnd) -> None:
        """Disable it after odd batches, enable it after even ones."""
        toggle = self._trainer.plugins.disable if run.progress.batch % 2 else self._trainer.plugins.enable
        toggle(self._plugin)


def check_plugin(
    make_plugin: MakePlugin,
    *,
    make_scheduler: MakeScheduler = step_lr,
    old_states: Mapping[int, Mapping[str, Any]] | None = None,
) -> None:
    """Check a plugin against every rule of this module.

    Args:
        make_plugin: returns a new plugin object, with the same options every time. It is used in short runs with a
            small model, two epochs, validation, saves and a scheduler.
        make_scheduler: returns the scheduler of these runs, for a plugin that needs a certain one.
        old_states: for a plugin with a `state_version`, a state of each older version.

    Raises:
        AssertionError: a rule is broken; says which and how.
    """
    fit = partial(_fit, make_scheduler)
    for rule in RULES:
        with _rule_named(rule):
            rule(make_plugin, fit)
    with _rule_named(migrates):
        migrates(make_plugin, fit, old_states or {})


@contextmanager
def _rule_named(rule: Callable[..., None]) -> Iterator[None]:
    """Raise any error as an AssertionError that names the rule."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{rule.__doc__} It raised {describe_error(error)}") from error


def registers(make_plugin: MakePlugin, fit: Fit) -> None:
    """A plugin has a name, can be registered once, found, unregistered, and registered again."""
    trainer, plugin = Trainer(device="cpu"), make_plugin()
    trainer.plugins.register(plugin)
    name = trainer.plugins.names()[0]
    assert trainer.plugins[name] is plugin, f"{name!r} is not found under its name."
    assert trainer.plugins.unregister(name) is plugin, f"{name!r} cannot be unregistered."
    assert not trainer.bus.receiver_count, f"{name!r} left handlers: {trainer.plan()}"
    trainer.plugins.register(plugin)


def trains(make_plugin: MakePlugin, fit: Fit) -> None:
    """A run with the plugin ends as it should."""
    result = fit(Trainer([Requester(), make_plugin()], device="cpu"))
    assert result.status in ("completed", "stopped"), f"The run ended {result.status}: {result.reason}"


def runs_twice(make_plugin: MakePlugin, fit: Fit) -> None:
    """A second fit on the same trainer equals the first: reset or TrainStart clears the state of the former run."""
    trainer = Trainer([Requester(), make_plugin()], device="cpu")
    first, second = fit(trainer), fit(trainer)
    for field in ("status", "progress", "stopped_by"):
        before, after = getattr(first, field), getattr(second, field)
        counters = (before.epoch, before.steps, before.skipped_steps) if field == "progress" else before
        again = (after.epoch, after.steps, after.skipped_steps) if field == "progress" else after
        assert counters == again, f"The second fit's {field} differs from the first's: {counters} and {again}."


def closes_after_failure(make_plugin: MakePlugin, fit: Fit) -> None:
    """After a failure during a run there is no handler, thread or logger left, and the error is the original one."""
    threads, handlers = threading.active_count(), len(logging.getLogger("heliograph").handlers)
    try:
        fit(Trainer([Requester(), make_plugin(), Crasher()], device="cpu"))
    except Exception as error:  # noqa: BLE001  # checked here
        chain = [error, error.__cause__]
        assert any(isinstance(each, CrashError) for each in chain), f"The run raised another error: {error!r}"
    else:
        raise AssertionError("The failure was swallowed.")
    assert threading.active_count() <= threads, "A thread outlives the run."
    assert len(logging.getLogger("heliograph").handlers) == handlers, "A log handler outlives the run."


def closes_unopened(make_plugin: MakePlugin, fit: Fit) -> None:
    """A plugin can be closed before it has run, and twice."""
    plugin = make_plugin()
    if isinstance(plugin, Plugin):
        plugin.close()
        plugin.close()


def toggles(make_plugin: MakePlugin, fit: Fit) -> None:
    """A plugin can be disabled and enabled during a run."""
    trainer = Trainer([Requester(), make_plugin()], device="cpu")
    trainer.plugins.register(Toggler(trainer, trainer.plugins.names()[1]))
    assert fit(trainer).status in ("completed", "stopped"), "Disabling and enabling broke the run."


def state_is_plain(make_plugin: MakePlugin, fit: Fit) -> None:
    """The state after a run consists of plain types and tensors, and is not changed by reading it."""
    plugin = make_plugin()
    fit(Trainer([Requester(), plugin], device="cpu"))
    if hasattr(plugin, "state_dict"):
        state = plugin.state_dict()
        check_plain(state, "state_dict()")
        assert _same(state, plugin.state_dict()), "Reading the state twice gives two results."


def resumes(make_plugin: MakePlugin, fit: Fit) -> None:
    """A state that a new plugin object loads in a new run equals the state that was saved."""
    plugin = make_plugin()
    if not hasattr(plugin, "state_dict"):
        return
    saved, copy = _state_after(plugin, fit), make_plugin()
    loaded: list[Any] = []
    name = getattr(plugin, "name", "")

    class Reader(Plugin):
        @on(CheckpointLoaded, lane=Lane.TRANSFORM, before=(name,))
        def read(self, run: Run, event: CheckpointLoaded) -> None:
            loaded.append(deepcopy(copy.state_dict()))

    fit(Trainer([Requester(), Resumer(saved), Reader(), copy], device="cpu"))
    assert _same(loaded[0], saved["plugins"].get(name)), (
        f"The state that {name!r} loaded is not the one that it saved: {loaded[0]} and {saved['plugins'].get(name)}."
    )


def rolls_back(make_plugin: MakePlugin, fit: Fit) -> None:
    """When a run rolls back to a checkpoint, the plugin's state is that of the checkpoint, even if it is empty."""
    plugin = make_plugin()
    if not hasattr(plugin, "state_dict"):
        return
    trainer = Trainer([Requester(), plugin], device="cpu")
    name = trainer.plugins.names()[1]
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
    fit(trainer)
    state = saved["plugins"].get(name)
    assert all(_same(each, state) for each in found), f"{name!r} rolled back to {state}, but has {found}."


def migrates(make_plugin: MakePlugin, fit: Fit, old_states: Mapping[int, Mapping[str, Any]]) -> None:
    """A run can be resumed with the plugin's state of every older version."""
    plugin = make_plugin()
    lacking = sorted({*range(1, getattr(plugin, "state_version", 1))} - old_states.keys())
    assert not lacking, (
        f"Give check_plugin a state of each older version, old_states={{1: ...}}; there is none of {lacking}."
    )
    for version, state in old_states.items():
        saved, copy = _state_after(make_plugin(), fit), make_plugin()
        name = getattr(copy, "name", "")
        saved["plugins"][name], saved["plugin_versions"] = dict(state), {name: version}
        fit(Trainer([Requester(), Resumer(saved), copy], device="cpu"))


def allows_a_test(make_plugin: MakePlugin, fit: Fit) -> None:
    """A plugin of a training does not break a test on the same trainer."""
    trainer = Trainer([Requester(), make_plugin()], device="cpu")
    task = _task()
    fit(trainer, task)
    assert "test/loss" in trainer.test(task, _data()).metrics, "The test lost its metrics."


def _state_after(plugin: Any, fit: Fit) -> dict[str, Any]:
    """Return what a run with a plugin saved at the end of its first epoch."""
    saved: dict[str, Any] = {}

    class Saver(Plugin):
        @on(EpochEnd, lane=Lane.REPORT)
        def save(self, run: Run, event: EpochEnd) -> None:
            if not saved:
                saved.update(deepcopy(run.state_dict()))

    fit(Trainer([Requester(), plugin, Saver()], device="cpu"))
    return saved


def _fit(make_scheduler: MakeScheduler, trainer: Trainer, task: Supervised | None = None) -> RunResult:
    task = task or _task()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)
    scheduler = make_scheduler(optimizer)
    return trainer.fit(task, _data(), validation=_data(), optimizer=optimizer, scheduler=scheduler, epochs=2)


def _task() -> Supervised:
    torch.manual_seed(0)
    return Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 4, generator=generator), torch.tensor([0, 1, 0])) for _ in range(3)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or one != one


RULES = (
    registers,
    trains,
    runs_twice,
    closes_after_failure,
    closes_unopened,
    toggles,
    state_is_plain,
    resumes,
    rolls_back,
    allows_a_test,
)
