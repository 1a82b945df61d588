"""The log history that rules read, with the metric names of fms-hf-tuning."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from heliograph import Log, PredictEnd, Run, StepEnd, TestEnd, ValidationEnd
from heliograph.events import Event

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
        self._entries: deque[Entry] = deque(maxlen=LONGEST)
        self._list: list[Entry] = []
        self._seen: dict[str, int] = {}

    @property
    def entries(self) -> list[Entry]:
        return self._list

    def handle(self, run: Run, event: Event) -> None:
        if isinstance(event, LOGGED) and is_new(self._seen, run, event):
            self._entries.append(entry_of(run, event))
            self._list = list(self._entries)

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [dict(entry) for entry in self._entries], "heard": dict(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entries = deque((dict(entry) for entry in state["entries"]), maxlen=LONGEST)
        self._list, self._seen = list(self._entries), dict(state["heard"])
