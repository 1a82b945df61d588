"""The metrics of the ancestors' rules, by their class names, and the newest of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph import Log, PredictEnd, Run, TestEnd, ValidationEnd
from heliograph.events import Event
from heliograph.spi import known_names

from ..base import Ending, RuleMetric
from ..errors import RuleError, show
from .log_history import LOGGED, Entry, LogHistory, entry_of, fractional_epoch, has_loss, under_both_names

SOURCES: dict[str, tuple[type[ValidationEnd | TestEnd | PredictEnd], ...]] = {
    "on_evaluate": (ValidationEnd,),
    "validation_end": (ValidationEnd,),
    "on_predict": (TestEnd, PredictEnd),
    "test_end": (TestEnd,),
    "predict_end": (PredictEnd,),
}


class Loss(RuleMetric):
    """The newest log entry with a training loss, a dict: `loss`, `epoch`, `step` and whatever was logged with it.

    Such as `learning_rate` and `grad_norm`. Of several optimizers, `<name>_loss` instead of `loss`. None before.
    """

    events = (Log,)
    when_read = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._entry: Entry | None = None

    def compute(self, run: Run, event: Event) -> Entry | None:
        """Return the entry."""
        if isinstance(event, Log) and has_loss(entry := entry_of(run, event)):
            self._entry = entry
        return self._entry

    def state_dict(self) -> dict[str, Any]:
        """Return the entry."""
        return {"entry": self._entry}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue."""
        self._entry = state["entry"]


class TrainingState(RuleMetric):
    """Where the training is, a dict, at every event.

    `epoch` (finished epochs, with the part of the current one), `global_step` and `step` (optimizer steps),
    `max_steps` and `num_train_epochs` (None where there is no such limit), `log_history` (the newest last),
    `best_model_checkpoint`, `is_world_process_zero`, `is_local_process_zero`, `is_final` (whether the newest save was
    requested after the training's end), and the counters of `Progress`: `batch`, `batches`, `samples`, `tokens`,
    `skipped_steps`, `skipped_batches`, `validations`, `seconds`.
    """

    events = (*LOGGED, *Ending.EVENTS)
    when_read = True
    parts: Mapping[type[Event], tuple[str, ...]] = {
        **dict.fromkeys(LOGGED, ("log_history",)),
        **dict.fromkeys(Ending.EVENTS, ("is_final",)),
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._history, self._ending = LogHistory(), Ending()

    def compute(self, run: Run, event: Event) -> dict[str, Any]:
        """Return the state; the log history in it is the same list until something is logged."""
        self._history.handle(run, event)
        self._ending.handle(event)
        progress, engine, best = run.progress, run.engine, run.checkpoints.best
        return {
            "epoch": fractional_epoch(run, event),
            "global_step": progress.steps,
            "step": progress.steps,
            "max_steps": run.length.max_steps,
            "num_train_epochs": run.length.max_epochs,
            "log_history": self._history.entries,
            "best_model_checkpoint": None if best is None else str(best),
            "is_world_process_zero": engine.is_main,
            "is_local_process_zero": engine.is_local_main,
            "is_final": self._ending.is_final,
            "batch": progress.batch,
            "batches": progress.batches,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "skipped_steps": progress.skipped_steps,
            "skipped_batches": progress.skipped_batches,
            "validations": progress.validations,
            "seconds": progress.seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the log history, and whether this is a final save."""
        return {"log_history": self._history.state_dict(), "is_final": self._ending.is_final}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue."""
        self._history.load_state_dict(state["log_history"])
        self._ending.is_final = state["is_final"]


class EvalMetrics(RuleMetric):
    """The metrics of the last validation, test or prediction, a dict: each by both names, `epoch` and `step`.

    Ours and the ancestors', such as `validation/loss` and `eval_loss`, and of a named set `validation/<set>/loss` and
    `eval_<set>_loss`; of a test, `test/loss` and `test_loss`. None before.

    Args:
        name: what rules call it.
        source_event: `on_evaluate` (or `validation_end`), or `on_predict` (or one of both, `test_end` and
            `predict_end`).

    Raises:
        RuleError: it is another one.
    """

    when_read = True

    def __init__(self, name: str, source_event: str = "on_evaluate") -> None:
        super().__init__(name)
        if not isinstance(source_event, str) or source_event not in SOURCES:
            got = show(source_event)
            raise RuleError(f"EvalMetrics takes the metrics of a source_event, got {got}.{known_names(got, SOURCES)}")
        self._source = SOURCES[source_event]
        self.events = self._source
        self._metrics: dict[str, float] | None = None

    def compute(self, run: Run, event: Event) -> dict[str, float] | None:
        """Return the metrics."""
        if isinstance(event, self._source):
            place = {"epoch": fractional_epoch(run, event), "step": run.progress.steps}
            self._metrics = under_both_names(event.metrics) | place
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics."""
        return {"metrics": self._metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue."""
        self._metrics = state["metrics"]


class Metrics(RuleMetric):
    """The newest value of every metric by our names, a dict such as {`train/loss`: 0.5}; None before."""

    events = LOGGED
    when_read = True

    def compute(self, run: Run, event: Event) -> dict[str, float] | None:
        """Return the metrics, including those of the event."""
        news = event.metrics if isinstance(event, LOGGED) else {}
        return {name: float(value) for name, value in (run.metrics | news).items()} or None


class PerProcessState(RuleMetric):
    """Which process this is, a dict: `rank`, from 0."""

    when_read = True

    def compute(self, run: Run, event: Event) -> dict[str, int]:
        """Return the rank."""
        return {"rank": run.engine.rank}
