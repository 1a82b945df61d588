"""The `TrainerState` of a run, kept as the Trainer keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph import Run
from heliograph.spi import known_names, require

from .facts import epochs
from .names import their_name

LONGEST = 10_000  # rows of the log history, as in `RunResult.log_history`
SAVED = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


class StateKeeper:
    """Makes a `transformers.TrainerState` for each run, and keeps it up to date.

    Attributes:
        state: the state.
    """

    def __init__(self) -> None:
        self.state = _new()

    def begin(self, run: Run, args: Any) -> None:
        """Make the state of a training that begins."""
        self.state = _new()
        state, engine = self.state, run.engine
        state.max_steps, state.num_train_epochs = run.length.planned_steps or 0, epochs(run)
        state.train_batch_size = getattr(args, "per_device_train_batch_size", None)
        state.compute_steps(args, state.max_steps)
        state.is_world_process_zero, state.is_local_process_zero = engine.is_main, engine.is_local_main

    def refresh(self, run: Run) -> None:
        """Take the counters of the run, at the end of a step."""
        progress, fraction = run.progress, run.length.epoch_fraction
        self.state.global_step, self.state.num_input_tokens_seen = progress.steps, progress.tokens
        self.state.epoch = float(progress.epoch) if fraction is None else fraction

    def add_log(self, logs: dict[str, Any]) -> None:
        """Add `epoch` to what is logged, and keep it in the history: the newest 10,000."""
        logs["epoch"] = self.state.epoch
        history = self.state.log_history
        history.append({**logs, "step": self.state.global_step})
        del history[:-LONGEST]

    def judge(self, run: Run, args: Any, metrics: Mapping[str, float], *, is_read: bool) -> None:
        """Compare an evaluation with the best one, where `args` say by which metric.

        Args:
            run: the run, to warn where the metric is not there.
            args: what callbacks are given.
            metrics: of the evaluation, under their names in the Trainer.
            is_read: whether the callback reads anything of it.
        """
        if (metric := getattr(args, "metric_for_best_model", None)) is None:
            return
        name = their_name(metric)
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            if is_read:
                run.warn(
                    f"A validation had no metric {name!r}, which args.metric_for_best_model names, so the callback did "
                    f"not judge it.{known_names(name, metrics)}"
                )
            return
        value, best = metrics[name], self.state.best_metric
        if best is None or (value > best if args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues from."""
        return {name: getattr(self.state, name) for name in SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from it."""
        for name in SAVED:
            setattr(self.state, name, state[name])


def _new() -> Any:
    return require("transformers", "from_huggingface", extra="transformers").TrainerState()
