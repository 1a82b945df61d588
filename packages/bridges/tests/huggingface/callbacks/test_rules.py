"""A bridged callback keeps every rule for plugins."""

from __future__ import annotations

from typing import Any

from heliograph_bridges.huggingface import from_huggingface
from heliograph_testing import check_plugin
from transformers import EarlyStoppingCallback


class Asks(EarlyStoppingCallback):
    """Has a method of every step, too, and asks for all."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        control.should_log = control.should_evaluate = control.should_save = state.global_step == 2
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        return control


def test_early_stopping() -> None:
    check_plugin(lambda: from_huggingface(EarlyStoppingCallback(1)))


def test_a_callback_that_asks_for_everything() -> None:
    check_plugin(lambda: from_huggingface(Asks(1, 0.5)))
