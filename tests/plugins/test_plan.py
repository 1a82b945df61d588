from __future__ import annotations

from heliograph import Plugin, Trainer, on
from heliograph.events import BatchEnd, Bus, EpochEnd, Event, Lane, Run
from heliograph.plugins.states import plan


class Custom(Event):
    """A third party's event."""


class Measure(Plugin):
    @on(BatchEnd, lane=Lane.MEASURE)
    def measure(self, run: Run, event: BatchEnd) -> None: ...

    @on(Custom, EpochEnd, lane=Lane.REPORT)
    def report(self, run: Run, event: Event) -> None: ...


class Decide(Plugin):
    @on(BatchEnd)
    def decide(self, run: Run, event: BatchEnd) -> None: ...


def a_function(run: Run, event: Event) -> None: ...


def foreign(sender: object, **facts: object) -> None: ...


def test_a_plan_without_listeners() -> None:
    assert plan(Bus()) == Trainer(device="cpu").plan() == "no handlers"


def test_a_plan_lists_every_event_in_order_with_who_receives_it() -> None:
    trainer = Trainer([Decide(), Measure()], device="cpu")
    trainer.bus.signal(BatchEnd).connect(foreign)
    trainer.bus.on(BatchEnd, a_function, lane=Lane.TRANSFORM).pause()
    trainer.plugins.disable("decide")
    assert trainer.plan().splitlines() == [
        "batch_end",
        "  TRANSFORM a_function (off)",
        "  MEASURE   measure",
        "  DECIDE    decide (off)",
        "  last      foreign",
        "epoch_end",
        "  REPORT    measure",
        "custom",
        "  REPORT    measure",
    ]


def test_a_plan_forgets_what_has_left() -> None:
    trainer = Trainer([Decide()], device="cpu")
    trainer.plugins.unregister("decide")
    with trainer.bus.on(BatchEnd, a_function):
        assert trainer.plan().split() == ["batch_end", "DECIDE", "a_function"]
    assert trainer.plan() == "no handlers"
