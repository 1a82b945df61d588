"""A metric that something watches: which, and which way is better."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from ...events import Event, Log, Run, ValidationBatchEnd, ValidationBatchStart, ValidationEnd, ValidationStart
from ...events.checks import check_number, known_names
from ...plugins.first_party import PACKAGES

# Plugins in these add no metrics; bridges host callbacks that may.
BUILT_INS = (
    "heliograph.builtin_callbacks.",
    *(f"heliograph_{name}." for name in PACKAGES if name not in ("bridges", "testing")),
)
VALIDATING = (ValidationStart, ValidationBatchStart, ValidationBatchEnd, ValidationEnd)


class Monitor:
    """A metric's name with its direction.

    Args:
        name: such as `validation/loss`.
        mode: `min` or `max`; None is `min` for a name that ends in `loss` or `error`.
        min_delta: improvements up to this, in the metric's units, do not count.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, name: str, mode: Literal["min", "max"] | None, min_delta: float = 0.0) -> None:
        check_number("min_delta", min_delta, at_least=0)
        if not isinstance(name, str) or "/" not in name:
            raise ValueError(f"A metric is named <split>/<name>, as in {_name_here(name)!r}, got {name!r}.")
        if name.split("/")[0] not in ("train", "validation"):
            raise ValueError(
                f"A metric to watch is one of train/... or validation/..., as in {_name_here(name)!r}, got {name!r}."
            )
        mode = "min" if mode is None and name.endswith(("loss", "error")) else mode
        if mode not in ("min", "max"):
            raise ValueError(f"Which way is {name!r} better? mode is 'min' (smaller is better) or 'max', got {mode!r}.")
        self.name, self.mode, self.min_delta = name, mode, min_delta
        self.split = name.split("/")[0]
        self._readings = self._misses = 0

    def can_come(self, run: Run) -> bool:
        """Return whether there is validation data, where the metric is one of a validation."""
        return self.split != "validation" or bool(run.data.validation_sets)

    def check_measured(self, run: Run) -> None:
        """At `TrainStart`: begin to count readings; raise ValueError where the metric cannot come.

        That is known where there is no validation data, only sets of other names, or a task that names what it measures
        (`validation_names`); unless a plugin of the user's own takes part in validations, and may add metrics.
        """
        self._readings = self._misses = 0
        if self.split != "validation":
            return
        if not self.can_come(run):
            raise ValueError(f"{self.name!r} is monitored, but there is no validation data: pass validation= to fit.")
        if run.report.is_replay or others_take_part(run):
            return
        names = getattr(run.task, "validation_names", None)
        own = names() if callable(names) else None
        prefixes = [f"validation/{dataset}/" if dataset else "validation/" for dataset in run.data.validation_sets]
        known = [prefix + name for prefix in prefixes for name in own or ("<name>",)]
        below = prefixes if own is None else [f"{each}/" for each in known]  # of a metric of several values
        if self.name in known or self.name.startswith(tuple(below)):
            return
        if all(run.data.validation_sets) and self.name.count("/") == 1:
            raise ValueError(
                f"There will be no metric {self.name!r}: the validation sets have names, which their metrics begin "
                f"with. Monitor one of these: {', '.join(known)}; as in monitor={known[0]!r}."
            )
        raise ValueError(f"There will be no metric {self.name!r}.{known_names(self.name, known)}")

    @property
    def ignores(self) -> tuple[type[Event], ...]:
        """The event that never measures this metric; where `Log` has no handlers, nothing is averaged for it."""
        return (Log,) if self.split == "validation" else (ValidationEnd,)

    def is_for(self, run: Run, event: Log | ValidationEnd) -> bool:
        """Return whether an event of a fit measured this metric.

        A log without a training loss comes of no batch, whatever plugins add to it. A metric that was measured before,
        the loss of one of several optimizers, or a metric of a set that this validation did not read, need not be
        measured each time.

        Raises:
            ValueError: it has never been measured, or is not a number; else the error lists the metrics that there are.
        """
        losses = {f"train/{run.stepping.label('loss', name)}" for name in run.optimizers}
        if not losses or self.split != ("train" if isinstance(event, Log) else "validation"):
            return False
        if isinstance(event, Log) and losses.isdisjoint(event.metrics):
            return False
        if self.name in event.metrics:
            self._readings += 1
            return True
        if self._is_left_out(run.data.validation_sets, event.metrics):
            return False
        self._misses += 1
        if not (self._readings or self.name in run.metrics or self.name in losses):
            self._check_number(run)
            self.read(event.metrics)
        return False

    def _check_number(self, run: Run) -> None:
        """At the end of a validation: raise ValueError where it has computed the metric, which is not a number."""
        name = self.name.removeprefix("validation/")
        if not run.report.is_replay and name in run.collected:
            from .means import describe_other

            raise ValueError(f"{self.name!r} cannot be monitored: {describe_other(name, run.collected[name])}.")

    def _is_left_out(self, sets: Iterable[str], metrics: Mapping[str, float]) -> bool:
        """Return whether the metric is of a named set of which there is none at all."""
        prefixes = [f"validation/{name}/" for name in sets if name and self.name.startswith(f"validation/{name}/")]
        return bool(prefixes) and not any(name.startswith(tuple(prefixes)) for name in metrics)

    def warn_unread(self, run: Run, plugin: str) -> None:
        """At `RunClosed`: warn where the metric was not measured in a run that ended well.

        One that only does the rest of another need not measure it again.

        Args:
            run: the run.
            plugin: what then never acted.
        """
        if self._readings or (self.name in run.metrics and not self._misses):
            return
        if self.split == "validation":
            mend = "validate more often, as with ValidationSchedule(epochs=1)"
        else:
            mend = "log more often, as with LogSchedule(steps=10)"
        mend = f"of {self._misses} measurements none had it" if self._misses else mend
        run.warn(f"{plugin} never acted: {self.name!r}, which it monitors, was not measured in this run; {mend}.")

    def read(self, metrics: Mapping[str, float]) -> float:
        """Return the metric's value.

        Raises:
            ValueError: there is no such metric; the error lists those that there are.
        """
        if self.name not in metrics:
            raise ValueError(f"There is no metric {self.name!r}.{known_names(self.name, metrics)}")
        return metrics[self.name]

    def improves(self, value: float, best: float | None) -> bool:
        """Return whether a value is better than the best; NaN never is."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


def _name_here(name: object) -> str:
    """Return what other frameworks' name of a metric is likely to be here: `validation/loss` for `val_loss`."""
    found = re.fullmatch(r"(?:(train|training)|validation|valid|val|eval|test)[_/](.+)", str(name))
    train, rest = found.groups() if found else (None, name if isinstance(name, str) and "/" not in name else "")
    return f"{'train' if train else 'validation'}/{rest or 'loss'}"


def others_take_part(run: Run, events: Iterable[type[Event]] = VALIDATING) -> bool:
    """Return whether anything but a plugin of this package handles events of an evaluation, and so may add metrics."""
    receivers = (receiver for event in events for receiver, _ in run.bus.signal(event).listeners())
    return any(not (each.__module__ or "").startswith(BUILT_INS) for each in receivers)
