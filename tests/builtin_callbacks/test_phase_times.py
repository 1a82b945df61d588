"""PhaseTimes against a clock that only the parts of a training move."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.builtin_callbacks import times
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph.tests.messages import assert_each

Batch = Any


class Clock:
    """Seconds, which pass only where a part of the training says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(times, "perf_counter", made)
    return made


class Loader:
    """Batches that take four seconds to load each."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.batches = clock, class_batches(count)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.clock.advance(4.0)
            yield batch


def slow_task(clock: Clock) -> h.Supervised:
    """A task of half a second forward and two seconds backward."""
    task = linear_classifier()

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        clock.advance(0.5)
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: clock.advance(2.0))  # type: ignore[no-untyped-call]
        return loss

    task.loss_fn = loss_fn
    return task


class Slow(h.Plugin):
    """Takes ten seconds in every kind of handler."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    @h.on(h.BatchStart, h.ForwardEnd, h.BackwardEnd)
    def wait(self, run: h.Run, event: h.Event) -> None:
        self.clock.advance(10.0)

    @h.on(h.GradientsReady, h.StepEnd, h.BatchEnd)
    def wait_more(self, run: h.Run, event: h.Event) -> None:
        self.clock.advance(10.0)

    @h.on(h.EpochStart, h.Log)
    def wait_seldom(self, run: h.Run, event: h.Event) -> None:
        self.clock.advance(10.0)


class SlowSGD(torch.optim.SGD):
    """Takes a second to step."""

    clock: Clock

    def step(self, closure: Any = None) -> Any:
        self.clock.advance(1.0)
        return super().step(closure)


def test_the_time_of_each_phase_per_batch_without_that_of_handlers_and_boundaries(clock: Clock) -> None:
    logged: list[dict[str, float]] = []
    trainer = h.Trainer(
        [
            h.PhaseTimes(),
            Slow(clock),
            h.GradientAccumulation(2),
            h.LogSchedule(h.Every(steps=1)),
            h.ValidationSchedule(h.Every(steps=1)),
        ],
        device="cpu",
    )
    trainer.bus.on(h.Log, lambda run, event: logged.append(dict(event.metrics)), lane=h.Lane.REPORT)
    SlowSGD.clock = clock
    trainer.fit(
        slow_task(clock),
        Loader(clock, 4),
        optimizer=lambda parameters: SlowSGD(parameters, lr=0.1),
        epochs=1,
        validation=Loader(clock, 2),
    )
    times = [{name: value for name, value in each.items() if name.endswith("_seconds")} for each in logged]
    expected = {
        "train/load_seconds": 4.0,
        "train/forward_seconds": 0.5,
        "train/backward_seconds": 2.0,
        "train/step_seconds": 0.5,  # one step for two batches
    }
    assert times == [expected, expected]


def test_several_losses_of_a_batch_add_up(clock: Clock) -> None:
    class Two(h.Task):
        def __init__(self) -> None:
            self.a, self.b = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

        def training_step(self, run: h.Run, batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for name in ("a", "b"):
                clock.advance(0.25)
                yield name, getattr(self, name)(batch[0]).mean()

    trainer = h.Trainer([h.PhaseTimes(), h.LogSchedule(h.Every(epochs=1))], device="cpu")
    result = trainer.fit(Two(), class_batches(3), optimizer={"a": sgd(), "b": sgd()}, epochs=1)
    assert result.metrics["train/forward_seconds"] == 0.5
    assert result.metrics["train/load_seconds"] == 0.0
    assert "train/wait_seconds" not in result.metrics


class Waiting(h.DeviceEngine):
    """An engine of the first of two ranks, as far as the time goes that it waits: three seconds before each batch."""

    waited = 7.0

    @property
    def waited_seconds(self) -> float:
        return self.waited


def test_how_long_a_rank_waits_is_counted_from_the_start_of_the_run() -> None:
    plugin, engine = h.PhaseTimes(), Waiting(device="cpu")
    run: Any = SimpleNamespace(engine=engine, report=SimpleNamespace(is_replay=False))
    engine.world_size = 2
    waits = []
    plugin.begin(run, h.EpochStart(0, resumed=False))
    for batches in (1, 2):
        for _ in range(batches):
            engine.waited += 3.0
            plugin.end_load(run, h.BatchStart())
        event = h.Log({})
        plugin.measure(run, event)
        waits.append(event.metrics["train/wait_seconds"])
    assert waits == [3.0, 3.0]


def test_a_device_is_waited_for_where_that_is_asked(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waits.append(device.type))

    class Elsewhere:
        device = torch.device("cuda")

    plugin = h.PhaseTimes(synchronize=True)
    plugin.end_load(type("Run", (), {"engine": Elsewhere})(), h.BatchStart())
    assert waits == ["cuda"]


def test_an_option_that_is_not_a_flag_is_refused() -> None:
    with pytest.raises(TypeError, match="synchronize"):
        h.PhaseTimes(synchronize="yes")  # type: ignore[arg-type]


def test_a_replay_leaves_the_log_as_it_is(clock: Clock) -> None:
    plugin = h.PhaseTimes()
    run = SimpleNamespace(report=SimpleNamespace(is_replay=True))
    metrics = {"train/loss": 1.0}
    plugin.measure(run, h.Log(metrics))
    assert metrics == {"train/loss": 1.0}


@pytest.mark.parametrize("logs", [True, False])
def test_times_that_nobody_logs_are_a_warning(logs: bool) -> None:
    plugins = [h.PhaseTimes(), *([h.LogSchedule(steps=2)] if logs else [])]
    result = h.Trainer(plugins, device="cpu").fit(linear_classifier(), class_batches(3), optimizer=sgd(), epochs=1)
    expected = [] if logs else [("PhaseTimes", "nothing was logged", "LogSchedule(steps=10)")]
    assert_each(result.warnings, *expected)
