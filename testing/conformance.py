"""What every plugin, built in or third-party, has to keep: each rule is a function, and its docstring the rule."""

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
    """Return the scheduler of the runs that a plugin is checked in."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


class CrashError(Exception):
    """Raised on purpose."""


class Asker(Plugin):
    """Asks for everything, so that a plugin under test hears every event."""

    asks = ("validation", "save", "log", "stop", "scheduler")

    @on(EpochEnd, lane=Lane.TRANSFORM)
    def ask(self, run: Run, event: EpochEnd) -> None:
        """Ask."""
        run.control.request_log("under test")
        run.control.request_validation("under test")
        run.control.request_save("under test")


class Crasher(Plugin):
    """Fails a run in its midst."""

    @on(BatchEnd, lane=Lane.REPORT, when=Every(batches=2))
    def crash(self, run: Run, event: BatchEnd) -> None:
        """Fail."""
        raise CrashError("on purpose")


class Resumer(Plugin):
    """Lets a run go on from a cut."""

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._saved = saved

    @on(TrainStart)
    def resume(self, run: Run, event: TrainStart) -> None:
        """Resume."""
        run.resume(self._saved)


class Toggler(Plugin):
    """Switches the plugin under test off and on while a run goes on."""

    def __init__(self, trainer: Trainer, name: str) -> None:
        self._trainer, self._plugin = trainer, name

    @on(BatchEnd, lane=Lane.TRANSFORM)
    def toggle(self, run: Run, event: BatchEnd) -> None:
        """Off after odd batches, on after even ones."""
        switch = self._trainer.plugins.disable if run.progress.batch % 2 else self._trainer.plugins.enable
        switch(self._plugin)


def check_plugin(
    make_plugin: MakePlugin,
    *,
    make_scheduler: MakeScheduler = step_lr,
    old_states: Mapping[int, Mapping[str, Any]] | None = None,
) -> None:
    """Check a plugin against every rule of this module.

    Args:
        make_plugin: returns a new plugin object, with the same options every time. It is put into short runs with a
            small model, two epochs, validation, saves and a scheduler.
        make_scheduler: returns the scheduler of these runs, for a plugin that needs one of a certain kind.
        old_states: for a plugin with a `state_version`, a state of each older version.

    Raises:
        AssertionError: a rule is broken; says which and how.
    """
    fit = partial(_fit, make_scheduler)
    for rule in RULES:
        with _told(rule):
            rule(make_plugin, fit)
    with _told(migrates):
        migrates(make_plugin, fit, old_states or {})


@contextmanager
def _told(rule: Callable[..., None]) -> Iterator[None]:
    """Name the rule in what it raises."""
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
    assert not trainer.bus.receiver_count, f"{name!r} left handlers behind: {trainer.plan()}"
    trainer.plugins.register(plugin)


def trains(make_plugin: MakePlugin, fit: Fit) -> None:
    """A run with the plugin ends as it should."""
    result = fit(Trainer([Asker(), make_plugin()], device="cpu"))
    assert result.status in ("completed", "stopped"), f"The run ended {result.status}: {result.reason}"


def runs_twice(make_plugin: MakePlugin, fit: Fit) -> None:
    """A second fit on the same trainer goes like the first: reset or TrainStart forgets the former run."""
    trainer = Trainer([Asker(), make_plugin()], device="cpu")
    first, second = fit(trainer), fit(trainer)
    for field in ("status", "progress", "stopped_by"):
        before, after = getattr(first, field), getattr(second, field)
        counters = (before.epoch, before.steps, before.skipped_steps) if field == "progress" else before
        again = (after.epoch, after.steps, after.skipped_steps) if field == "progress" else after
        assert counters == again, f"The second fit's {field} differs from the first's: {counters} and {again}."


def closes_after_failure(make_plugin: MakePlugin, fit: Fit) -> None:
    """A failure in mid-run leaves no handler, thread or logger behind, and the failure is the one that leaves."""
    threads, handlers = threading.active_count(), len(logging.getLogger("heliograph").handlers)
    try:
        fit(Trainer([Asker(), make_plugin(), Crasher()], device="cpu"))
    except Exception as error:  # noqa: BLE001  # judged right here
        chain = [error, error.__cause__]
        assert any(isinstance(each, CrashError) for each in chain), f"Another error left the run: {error!r}"
    else:
        raise AssertionError("The failure was swallowed.")
    assert threading.active_count() <= threads, "A thread outlives the run."
    assert len(logging.getLogger("heliograph").handlers) == handlers, "A log handler outlives the run."


def closes_unopened(make_plugin: MakePlugin, fit: Fit) -> None:
    """A plugin can be closed before it ever ran, and twice."""
    plugin = make_plugin()
    if isinstance(plugin, Plugin):
        plugin.close()
        plugin.close()


def toggles(make_plugin: MakePlugin, fit: Fit) -> None:
    """A plugin can be switched off and on in the midst of a run."""
    trainer = Trainer([Asker(), make_plugin()], device="cpu")
    trainer.plugins.register(Toggler(trainer, trainer.plugins.names()[1]))
    assert fit(trainer).status in ("completed", "stopped"), "Toggling broke the run."


def state_is_plain(make_plugin: MakePlugin, fit: Fit) -> None:
    """The state after a run consists of plain types and tensors, and is not changed by reading it."""
    plugin = make_plugin()
    fit(Trainer([Asker(), plugin], device="cpu"))
    if hasattr(plugin, "state_dict"):
        state = plugin.state_dict()
        check_plain(state, "state_dict()")
        assert _same(state, plugin.state_dict()), "Reading the state twice gives two answers."


def resumes(make_plugin: MakePlugin, fit: Fit) -> None:
    """A state that is loaded into a new plugin object in a new run is the state that was saved."""
    plugin = make_plugin()
    if not hasattr(plugin, "state_dict"):
        return
    saved, copy = _cut_of(plugin, fit), make_plugin()
    loaded: list[Any] = []
    name = getattr(plugin, "name", "")

    class Looker(Plugin):
        @on(CheckpointLoaded, lane=Lane.TRANSFORM, before=(name,))
        def look(self, run: Run, event: CheckpointLoaded) -> None:
            loaded.append(deepcopy(copy.state_dict()))

    fit(Trainer([Asker(), Resumer(saved), Looker(), copy], device="cpu"))
    assert _same(loaded[0], saved["plugins"].get(name)), (
        f"What {name!r} loaded is not what it had saved: {loaded[0]} and {saved['plugins'].get(name)}."
    )


def goes_back(make_plugin: MakePlugin, fit: Fit) -> None:
    """When a run goes back to a checkpoint, the plugin's state is what it was there, an empty one too."""
    plugin = make_plugin()
    if not hasattr(plugin, "state_dict"):
        return
    trainer = Trainer([Asker(), plugin], device="cpu")
    name = trainer.plugins.names()[1]
    cut: dict[str, Any] = {}
    found: list[Any] = []

    class Returner(Plugin):
        @on(EpochStart, lane=Lane.REPORT, after=(name,))
        def keep(self, run: Run, event: EpochStart) -> None:
            if not cut:
                cut.update(deepcopy(run.state_dict()))

        @on(BatchEnd, lane=Lane.REPORT)
        def go_back(self, run: Run, event: BatchEnd) -> None:
            if run.progress.epoch and not run.control.is_rolling_back and not found:
                run.roll_back(cut)

        @on(CheckpointLoaded, lane=Lane.TRANSFORM, before=(name,))
        def look(self, run: Run, event: CheckpointLoaded) -> None:
            found.append(deepcopy(plugin.state_dict()))

    trainer.plugins.register(Returner())
    fit(trainer)
    then = cut["plugins"].get(name)
    assert all(_same(each, then) for each in found), f"{name!r} went back to {then}, and has {found}."


def migrates(make_plugin: MakePlugin, fit: Fit, old_states: Mapping[int, Mapping[str, Any]]) -> None:
    """A run can be resumed with the plugin's state of every older version."""
    plugin = make_plugin()
    lacking = sorted({*range(1, getattr(plugin, "state_version", 1))} - old_states.keys())
    assert not lacking, (
        f"Give check_plugin a state of each older version, old_states={{1: ...}}; there is none of {lacking}."
    )
    for version, state in old_states.items():
        saved, copy = _cut_of(make_plugin(), fit), make_plugin()
        name = getattr(copy, "name", "")
        saved["plugins"][name], saved["plugin_versions"] = dict(state), {name: version}
        fit(Trainer([Asker(), Resumer(saved), copy], device="cpu"))


def survives_a_test(make_plugin: MakePlugin, fit: Fit) -> None:
    """A plugin of a training does no harm to a test on the same trainer."""
    trainer = Trainer([Asker(), make_plugin()], device="cpu")
    task = _task()
    fit(trainer, task)
    assert "test/loss" in trainer.test(task, _data()).metrics, "The test lost its metrics."


def _cut_of(plugin: Any, fit: Fit) -> dict[str, Any]:
    """Return what a run with a plugin saved at the end of its first epoch."""
    saved: dict[str, Any] = {}

    class Saver(Plugin):
        @on(EpochEnd, lane=Lane.REPORT)
        def keep(self, run: Run, event: EpochEnd) -> None:
            if not saved:
                saved.update(deepcopy(run.state_dict()))

    fit(Trainer([Asker(), plugin, Saver()], device="cpu"))
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
    goes_back,
    survives_a_test,
)
