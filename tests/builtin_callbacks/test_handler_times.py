"""HandlerTimes: seconds for each plugin, and no clock left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import heliograph.builtin_callbacks.times as module
import pytest
from heliograph import (
    BatchEnd,
    BatchStart,
    Every,
    GradientAccumulation,
    HandlerTimes,
    LogSchedule,
    NaNGuard,
    Plugin,
    Run,
    Trainer,
    on,
)

Make = Callable[..., Any]


class Slow(Plugin):
    """Takes two seconds a batch, by the test's clock."""

    def __init__(self, now: list[float]) -> None:
        self.now = now

    @on(BatchStart)
    def take_time(self, run: Run, event: BatchStart) -> None:
        self.now[0] += 1.5

    @on(BatchEnd)
    def take_more_time(self, run: Run, event: BatchEnd) -> None:
        self.now[0] += 0.5


def test_every_plugin_has_its_seconds(task: Make, batches: Make, sgd: Any) -> None:
    plugins = [HandlerTimes(), NaNGuard(), LogSchedule(Every(steps=1)), GradientAccumulation(2)]
    result = Trainer(plugins, device="cpu").fit(task(), batches(4), optimizer=sgd, epochs=1)

    assert set(result.plugin_seconds) >= {"nan_guard", "log_schedule", "gradient_accumulation"}
    assert all(result.plugin_seconds[name] > 0 for name in ("nan_guard", "log_schedule", "gradient_accumulation"))
    assert result.plugin_errors == {}


@pytest.mark.parametrize("first", [True, False])
def test_sums(task: Make, batches: Make, sgd: Any, monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    plugins = [HandlerTimes(), Slow(now)] if first else [Slow(now), HandlerTimes()]
    trainer = Trainer(plugins, device="cpu")
    for _ in range(2):
        assert trainer.fit(task(), batches(4), optimizer=sgd, epochs=1).plugin_seconds["slow"] == 8.0


def test_functions_are_named(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([HandlerTimes()], device="cpu")

    def receive(run: Run, event: BatchEnd) -> None:
        """Receive."""

    trainer.bus.on(BatchEnd, receive)
    result = trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)

    assert any(name.endswith("receive") and seconds > 0 for name, seconds in result.plugin_seconds.items())


def chains(trainer: Trainer) -> list[tuple[Any, ...]]:
    return [signal.chain for signal in trainer.bus.signals()]


@pytest.mark.parametrize("ending", ["completed", "failed", "interrupted", "disabled", "unregistered"])
def test_clocks_are_removed(task: Make, batches: Make, sgd: Any, ending: str) -> None:
    times = HandlerTimes()
    trainer = Trainer([times, NaNGuard()], device="cpu")
    inside: list[list[tuple[Any, ...]]] = []

    def act(run: Run, event: BatchEnd) -> None:
        inside.append(chains(trainer))
        if ending == "failed":
            raise ArithmeticError
        if ending == "interrupted":
            raise KeyboardInterrupt
        if ending == "disabled" and run.progress.batch == 2:
            trainer.plugins.disable(times)
        if ending == "unregistered" and run.progress.batch == 2:
            trainer.plugins.unregister(times)

    trainer.bus.on(BatchEnd, act)
    before = dict(zip([signal.event for signal in trainer.bus.signals()], chains(trainer), strict=True))
    if ending in ("failed", "interrupted"):
        with pytest.raises((ArithmeticError, KeyboardInterrupt)):
            trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)
    else:
        result = trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)
        assert result.plugin_seconds["nan_guard"] > 0
    after = dict(zip([signal.event for signal in trainer.bus.signals()], chains(trainer), strict=True))

    if ending in ("completed", "failed", "interrupted"):
        assert {event: chain for event, chain in after.items() if chain} == {
            event: chain for event, chain in before.items() if chain
        }
    assert after[BatchEnd] == (act,)
    assert inside[0] != list(before.values())


def test_an_error_in_a_clocked_handler_is_still_its_own(task: Make, batches: Make, sgd: Any) -> None:
    class Failing(Plugin):
        @on(BatchEnd)
        def fail(self, run: Run, event: BatchEnd) -> None:
            raise ArithmeticError

    trainer = Trainer([HandlerTimes(), Failing()], device="cpu")
    with pytest.raises(ArithmeticError) as info:
        trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)

    assert any("in failing on batch_end" in note for note in info.value.__notes__)


def test_who_asks_is_still_known(task: Make, batches: Make, sgd: Any) -> None:
    class Stopping(Plugin):
        @on(BatchEnd)
        def stop(self, run: Run, event: BatchEnd) -> None:
            run.control.stop("enough")

    result = Trainer([HandlerTimes(), Stopping()], device="cpu").fit(task(), batches(4), optimizer=sgd, epochs=1)

    assert result.stopped_by == "stopping"


def test_without_the_plugin_nothing_is_measured(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([NaNGuard()], device="cpu")

    assert trainer.fit(task(), batches(2), optimizer=sgd, epochs=1).plugin_seconds == {}
    assert trainer.test(task(), batches(2)).plugin_seconds == {}


def test_fit_then_test(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([HandlerTimes(), NaNGuard()], device="cpu")
    trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)

    assert trainer.test(task(), batches(2)).status == "completed"


def test_two_of_them_are_refused() -> None:
    with pytest.raises(ValueError, match="both claim handler_times"):
        Trainer([HandlerTimes(), HandlerTimes().named("other")], device="cpu")
