"""What was logged, as a list that rules can read."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from heliograph import Log, PredictEnd, Run, StepEnd, TestEnd, ValidationEnd
from heliograph.events import Event

PREFIXES = {"train": "", "validation": "eval_", "test": "test_", "predict": "predict_"}


def ancestor_name(name: str) -> str:
    """Return `eval_loss` for `validation/loss`, `eval_<set>_loss` for `validation/<set>/loss`, `loss` for `train/loss`.

    The norm of the gradients is `grad_norm`; what belongs to no part of the data keeps its name.
    """
    split, _, rest = name.partition("/")
    if split not in PREFIXES or not rest:
        return name
    if split == "train":
        return "grad_norm" if rest == "gradient_norm" else rest
    return PREFIXES[split] + rest.replace("/", "_")


def under_both_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics by our names and by the ancestors', as python's own numbers."""
    theirs = {ancestor_name(name): float(value) for name, value in metrics.items()}
    return theirs | {name: float(value) for name, value in metrics.items()}


def fractional_epoch(run: Run, event: Event) -> float:
    """Return the finished epochs, with the part of the current one that is done, where its length is known."""
    progress, length = run.progress, run.length.batches_per_epoch
    if not length:
        return float(progress.epoch)
    done = progress.batch + isinstance(event, StepEnd)  # the batch of a step is counted when it ends
    return progress.epoch + min(1.0, done / length)


Entry = dict[str, float]
LOGGED = (Log, ValidationEnd, TestEnd, PredictEnd)
LONGEST = 1000


def is_new(seen: dict[str, int], run: Run, event: Event) -> bool:
    """Return whether an event is not of the same place as the last of its kind; remember its place.

    Args:
        seen: the micro-batches after which each kind of event was last emitted; kept up to date.
        run: the run.
        event: what happened.
    """
    place = run.progress.batches
    if seen.get(event.name) == place:
        return False
    seen[event.name] = place
    return True


def entry_of(run: Run, event: Log | ValidationEnd | TestEnd | PredictEnd) -> Entry:
    """Return what an event logs, under the ancestors' names, with `epoch` and `step`."""
    named = {ancestor_name(name): float(value) for name, value in event.metrics.items()}
    return named | {"epoch": fractional_epoch(run, event), "step": run.progress.steps}


def has_loss(entry: Mapping[str, float]) -> bool:
    """Return whether an entry is of a log that saw batches: it has `loss`, of several optimizers `<name>_loss`."""
    return any(name == "loss" or name.endswith("_loss") for name in entry)


class LogHistory:
    """The latest 1,000 entries, the newest last; what is logged again in the same place is not a new one."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=LONGEST)
        self._list: list[Entry] = []
        self._seen: dict[str, int] = {}

    @property
    def entries(self) -> list[Entry]:
        """The entries: one list until the next of them, which comes with a new list."""
        return self._list

    def handle(self, run: Run, event: Event) -> None:
        """Add an entry, where the event logs something."""
        if isinstance(event, LOGGED) and is_new(self._seen, run, event):
            self._entries.append(entry_of(run, event))
            self._list = list(self._entries)

    def state_dict(self) -> dict[str, Any]:
        """Return the entries, and where the last were made."""
        return {"entries": [dict(entry) for entry in self._entries], "heard": dict(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue."""
        self._entries = deque((dict(entry) for entry in state["entries"]), maxlen=LONGEST)
        self._list, self._seen = list(self._entries), dict(state["heard"])
