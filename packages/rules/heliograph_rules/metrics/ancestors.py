"""The metrics of fms-hf-tuning by their class names, and `Metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph import Log, PredictEnd, Run, TestEnd, ValidationEnd
from heliograph.events import Event
from heliograph.spi import known_names

from ..base import EndTracker, NewestMetric, RuleMetric
from ..errors import RuleError, show
from .history import LOGGED, Entry, LogHistory, entry_of, fractional_epoch, has_loss, under_both_names

SOURCES: dict[str, tuple[type[ValidationEnd | TestEnd | PredictEnd], ...]] = {
    "on_evaluate": (ValidationEnd,),
    "validation_end": (ValidationEnd,),
    "on_predict": (TestEnd, PredictEnd),
    "test_end": (TestEnd,),
    "predict_end": (PredictEnd,),
}


class Loss(NewestMetric):
    """The newest log entry with a training loss, as a dict: `loss`, `epoch`, `step` and the rest of the entry.

    The rest is, for example, `learning_rate` and `grad_norm`. With several optimizers, `<name>_loss` replaces `loss`.
    None before the first entry.
    """

    events = (Log,)

    def measure(self, run: Run, event: Log) -> Entry | None:
        return entry if has_loss(entry := entry_of(run, event)) else None


class TrainingState(RuleMetric):
    """The progress of the training, as a dict.

    `epoch` (finished epochs plus the fraction of the current one), `global_step` and `step` (optimizer steps),
    `max_steps` and `num_train_epochs` (None without such a limit), `log_history` (the newest last),
    `best_model_checkpoint`, `is_world_process_zero`, `is_local_process_zero`, `is_final` (whether the newest save was
    requested after the end of the training), and the counters of `Progress`: `batch`, `batches`, `samples`, `tokens`,
    `skipped_steps`, `skipped_batches`, `validations`, `seconds`.
    """

    events = (*LOGGED, *EndTracker.EVENTS)
    when_read = True
    parts: Mapping[type[Event], tuple[str, ...]] = {
        **dict.fromkeys(LOGGED, ("log_history",)),
        **dict.fromkeys(EndTracker.EVENTS, ("is_final",)),
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._history, self._ending = LogHistory(), EndTracker()

    def compute(self, run: Run, event: Event) -> dict[str, Any]:
        # log_history is the same list until something is logged.
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
        return {"log_history": self._history.state_dict(), "is_final": self._ending.is_final}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._history.load_state_dict(state["log_history"])
        self._ending.is_final = state["is_final"]


class EvalMetrics(NewestMetric):
    """The metrics of the last validation, test or prediction, as a dict with `epoch` and `step`.

    Each metric has both names, for example `validation/loss` and `eval_loss`; of a named set
    `validation/<set>/loss` and `eval_<set>_loss`; of a test `test/loss` and `test_loss`. None before the first one.

    Args:
        name: the name that rules use.
        source_event: `on_evaluate` (or `validation_end`), or `on_predict` (or only one of `test_end` and
            `predict_end`).

    Raises:
        RuleError: `source_event` is unknown.
    """

    def __init__(self, name: str, source_event: str = "on_evaluate") -> None:
        super().__init__(name)
        if not isinstance(source_event, str) or source_event not in SOURCES:
            hint = known_names(show(source_event), SOURCES)
            raise RuleError(f"EvalMetrics has no source_event {show(source_event)}.{hint}")
        self.events = SOURCES[source_event]

    def measure(self, run: Run, event: ValidationEnd | TestEnd | PredictEnd) -> dict[str, float]:
        place = {"epoch": fractional_epoch(run, event), "step": run.progress.steps}
        return under_both_names(event.metrics) | place


class Metrics(RuleMetric):
    """The newest value of each metric by its Heliograph name, as a dict; None before the first."""

    events = LOGGED
    when_read = True

    def compute(self, run: Run, event: Event) -> dict[str, float] | None:
        new = event.metrics if isinstance(event, LOGGED) else {}
        return {name: float(value) for name, value in (run.metrics | new).items()} or None


class PerProcessState(RuleMetric):
    """The rank of this process, as a dict with `rank`."""

    when_read = True

    def compute(self, run: Run, event: Event) -> dict[str, int]:
        return {"rank": run.engine.rank}
