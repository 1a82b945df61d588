"""The log history that rules read, with the metric names of fms-hf-tuning, and windows of the newest values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph import Log, PredictEnd, Run, StepEnd, TestEnd, ValidationEnd
from heliograph.events import Event
from heliograph.spi import is_whole_number

from ..base import RuleMetric
from ..errors import RuleTypeError, show

PREFIXES = {"train": "", "validation": "eval_", "test": "test_", "predict": "predict_"}


def ancestor_name(name: str) -> str:
    # validation/<set>/loss is eval_<set>_loss, train/loss is loss; other names stay.
    split, _, metric = name.partition("/")
    if split not in PREFIXES or not metric:
        return name
    if split == "train":
        return "grad_norm" if metric == "gradient_norm" else metric
    return PREFIXES[split] + metric.replace("/", "_")


def under_both_names(metrics: Mapping[str, float]) -> dict[str, float]:
    renamed = {ancestor_name(name): float(value) for name, value in metrics.items()}
    return renamed | {name: float(value) for name, value in metrics.items()}


def fractional_epoch(run: Run, event: Event) -> float:
    progress, length = run.progress, run.length.batches_per_epoch
    if not length:
        return float(progress.epoch)
    done = progress.batch + isinstance(event, StepEnd)  # the batch is counted when it ends
    return progress.epoch + min(1.0, done / length)


Entry = dict[str, float]
LOGGED = (Log, ValidationEnd, TestEnd, PredictEnd)
LONGEST = 1000


def is_new(seen: dict[str, int], run: Run, event: Event) -> bool:
    # Ignores an event that is repeated at the same batch, for example after a resume.
    place = run.progress.batches
    if seen.get(event.name) == place:
        return False
    seen[event.name] = place
    return True


def entry_of(run: Run, event: Log | ValidationEnd | TestEnd | PredictEnd) -> Entry:
    named = {ancestor_name(name): float(value) for name, value in event.metrics.items()}
    return named | {"epoch": fractional_epoch(run, event), "step": run.progress.steps}


def has_loss(entry: Mapping[str, float]) -> bool:
    # Several optimizers have `<name>_loss`.
    return any(name == "loss" or name.endswith("_loss") for name in entry)


class LogHistory:
    """The newest 1,000 log entries, the newest last; `entries` is a new list after each entry."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._seen: dict[str, int] = {}

    def handle(self, run: Run, event: Event) -> None:
        if isinstance(event, LOGGED) and is_new(self._seen, run, event):
            self.entries = [*self.entries, entry_of(run, event)][-LONGEST:]

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [dict(entry) for entry in self.entries], "heard": dict(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.entries, self._seen = [dict(entry) for entry in state["entries"]], dict(state["heard"])


class Window:
    """The newest values of several names; a negative size keeps all of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.lists: dict[str, list[float]] = {}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.lists[name] = self._newest([*self.lists.get(name, ()), value])

    def load(self, lists: Mapping[str, list[float]]) -> None:
        self.lists = {name: self._newest(values) for name, values in lists.items()}

    def _newest(self, values: list[float]) -> list[float]:
        return values if self._size < 0 else values[max(0, len(values) - self._size) :]


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
            "training_loss": dict(self._training.lists),
            "metrics": dict(self._metrics.lists),
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
            "training_loss": _add_aliases(none | self._training.lists),
            "metrics": _add_aliases(self._metrics.lists),
        }


def _add_aliases(lists: dict[str, list[float]]) -> dict[str, list[float]]:
    aliases = {ancestor_name(name): values for name, values in lists.items()}
    if "steps" in lists:
        aliases["global_step"] = lists["steps"]
    return aliases | lists
