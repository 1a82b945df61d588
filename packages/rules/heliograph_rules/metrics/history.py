"""A window of the newest losses and metrics."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from heliograph import Log, Run, ValidationEnd
from heliograph.events import Event
from heliograph.spi import is_whole_number

from ..base import RuleMetric
from ..errors import RuleTypeError, show
from .log_history import ancestor_name, entry_of, fractional_epoch, has_loss, is_new


class Window:
    """The newest values of several names; a negative size keeps all of them."""

    def __init__(self, size: int) -> None:
        self._length = None if size < 0 else min(size, sys.maxsize)
        self._values: dict[str, deque[float]] = {}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._values.setdefault(name, deque(maxlen=self._length)).append(value)

    def lists(self) -> dict[str, list[float]]:
        return {name: list(values) for name, values in self._values.items()}

    def load(self, lists: Mapping[str, list[float]]) -> None:
        self._values = {name: deque(values, maxlen=self._length) for name, values in lists.items()}


class HistoryBasedMetric(RuleMetric):
    """The newest training losses and validation metrics, as a dict.

    `window_size`; `training_loss`, with lists by the names `loss`, `steps` and `epoch` (with several optimizers,
    `<name>_loss`); `metrics`, with a list per metric by both names (`validation/loss` and `eval_loss`), `steps` and
    `epoch`. `global_step` equals `steps`. A metric that appears later has a shorter list. None before the first log or
    validation.

    Args:
        name: the name that rules use.
        window_size: the number of values; negative keeps all of them, which needs memory in a long run.

    Raises:
        RuleTypeError: the size is not an integer.
    """

    events = (Log, ValidationEnd)
    when_read = True
    parts: Mapping[type[Event], tuple[str, ...]] = {Log: ("training_loss",), ValidationEnd: ("metrics",)}

    def __init__(self, name: str, window_size: int = 1) -> None:
        super().__init__(name)
        if not is_whole_number(window_size):
            raise RuleTypeError(f"window_size must be an integer, negative for no limit, got {show(window_size)}.")
        self.window_size = int(window_size)
        self._training, self._metrics = Window(window_size), Window(window_size)
        self._seen: dict[str, int] = {}
        self._value: dict[str, Any] | None = None

    def compute(self, run: Run, event: Event) -> dict[str, Any] | None:
        # The same objects until something is logged.
        if isinstance(event, Log):
            entry = entry_of(run, event)
            if has_loss(entry) and is_new(self._seen, run, event):
                losses = {name: value for name, value in entry.items() if name == "loss" or name.endswith("_loss")}
                self._training.add(losses | {"steps": entry["step"], "epoch": entry["epoch"]})
                self._value = None
        elif isinstance(event, ValidationEnd) and is_new(self._seen, run, event):
            metrics = {name: float(value) for name, value in event.metrics.items()}
            self._metrics.add(metrics | {"steps": run.progress.steps, "epoch": fractional_epoch(run, event)})
            self._value = None
        if self._value is None and self._seen:
            self._value = self._read()
        return self._value

    def state_dict(self) -> dict[str, Any]:
        return {
            "training_loss": self._training.lists(),
            "metrics": self._metrics.lists(),
            "heard": dict(self._seen),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._training.load(state["training_loss"])
        self._metrics.load(state["metrics"])
        self._seen, self._value = dict(state["heard"]), None

    def _read(self) -> dict[str, Any]:
        none: dict[str, list[float]] = {"loss": [], "steps": [], "epoch": []}
        return {
            "window_size": self.window_size,
            "training_loss": _add_aliases(none | self._training.lists()),
            "metrics": _add_aliases(self._metrics.lists()),
        }


def _add_aliases(lists: dict[str, list[float]]) -> dict[str, list[float]]:
    aliases = {ancestor_name(name): values for name, values in lists.items()}
    if "steps" in lists:
        aliases["global_step"] = lists["steps"]
    return aliases | lists
