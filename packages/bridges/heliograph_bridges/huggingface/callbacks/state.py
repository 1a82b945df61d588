"""The `TrainerState` of a run, and metric names of the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph import Run
from heliograph.spi import known_names, require

from .arguments import epochs

PREFIXES = {"train": "", "validation": "eval_", "test": "test_", "predict": "test_"}
GRAD_NORM = "grad_norm"
RENAMED = {"train/gradient_norm": GRAD_NORM}

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


def their_name(name: str) -> str:
    if name in RENAMED:
        return RENAMED[name]
    phase, slash, metric = name.partition("/")
    if not slash or phase not in PREFIXES:
        return name
    return PREFIXES[phase] + metric.replace("/", "_")


def their_names(metrics: Mapping[str, float]) -> dict[str, Any]:
    return {their_name(name): value for name, value in metrics.items()}


class StateKeeper:
    """Creates a `transformers.TrainerState` for each run and updates it."""

    def __init__(self) -> None:
        self.state = _new()

    def begin(self, run: Run, args: Any) -> None:
        self.state = _new()
        state, engine = self.state, run.engine
        state.max_steps, state.num_train_epochs = run.length.planned_steps or 0, epochs(run)
        state.train_batch_size = getattr(args, "per_device_train_batch_size", None)
        state.compute_steps(args, state.max_steps)
        state.is_world_process_zero, state.is_local_process_zero = engine.is_main, engine.is_local_main

    def refresh(self, run: Run) -> None:
        progress, fraction = run.progress, run.length.epoch_fraction
        self.state.global_step, self.state.num_input_tokens_seen = progress.steps, progress.tokens
        self.state.epoch = float(progress.epoch) if fraction is None else fraction

    def add_log(self, logs: dict[str, Any]) -> None:
        logs["epoch"] = self.state.epoch
        history = self.state.log_history
        history.append({**logs, "step": self.state.global_step})
        del history[:-LONGEST]

    def judge(self, run: Run, args: Any, metrics: Mapping[str, float], *, is_read: bool) -> None:
        if (metric := getattr(args, "metric_for_best_model", None)) is None:
            return
        name = their_name(metric)
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            if is_read:
                run.warn(
                    f"A validation has no metric {name!r} (args.metric_for_best_model), so the callback cannot "
                    f"compare it.{known_names(name, metrics)}"
                )
            return
        value, best = metrics[name], self.state.best_metric
        if best is None or (value > best if args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.state, name) for name in SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in SAVED:
            setattr(self.state, name, state[name])


def _new() -> Any:
    return require("transformers", "from_huggingface", extra="transformers").TrainerState()
