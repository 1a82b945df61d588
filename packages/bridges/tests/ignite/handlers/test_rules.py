"""Bridged handlers keep every rule for plugins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from heliograph_bridges.ignite import from_ignite
from heliograph_testing import check_plugin
from ignite.engine import Engine, Events
from ignite.handlers import EarlyStopping, TerminateOnNan, Timer


def stop_early(trainer: Engine, evaluator: Engine) -> None:
    handler = EarlyStopping(1, lambda engine: engine.state.metrics["loss"], trainer)
    evaluator.add_event_handler(Events.COMPLETED, handler)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: from_ignite(stop_early),
        lambda: from_ignite(TerminateOnNan(), Events.ITERATION_COMPLETED),
        lambda: from_ignite(Timer()),
    ],
    ids=["EarlyStopping", "TerminateOnNan", "Timer"],
)
def test_handlers(make: Callable[[], object]) -> None:
    check_plugin(make)
