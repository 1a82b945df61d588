"""The plugin for a callback of the Hugging Face Trainer, and the `TrainerState` that the callback sees."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from heliograph import Lane, Plugin, Run, on
from heliograph import events as ev
from heliograph.plugins import snake_case
from heliograph.spi import ended_for_good, known_names, require

from ...own_states import OwnStates, refuse_replay
from .arguments import arguments, epochs, keywords, rate_of
from .calls import CallbackCaller, asks_of, names_in

PREFIXES = {"train": "", "validation": "eval_", "test": "test_", "predict": "test_"}
GRAD_NORM = "grad_norm"
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
    if name == "train/gradient_norm":
        return GRAD_NORM
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


STEPS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
# Events that only some methods need; all other events update the state.
NEEDED_BY: Mapping[type[ev.Event], tuple[str, ...]] = {
    ev.EpochStart: ("on_epoch_begin",),
    ev.BatchStart: ("on_step_begin",),
    ev.GradientsReady: ("on_pre_optimizer_step",),
    ev.StepEnd: ("on_optimizer_step", "on_log"),
    ev.BatchEnd: STEPS,
    ev.EpochEnd: ("on_epoch_end", "on_step_end", "on_log", "on_evaluate", "on_save"),
    ev.TrainEnd: ("on_train_end",),
    **dict.fromkeys((ev.ValidationBatchEnd, ev.TestBatchEnd, ev.PredictBatchEnd), ("on_prediction_step",)),
    **dict.fromkeys((ev.TestEnd, ev.PredictEnd), ("on_predict",)),
}
RARE = {  # methods that a training may never call, and the remedy
    "on_log": "there was no log: add LogSchedule(steps=50)",
    "on_evaluate": "there was no validation: pass validation= to fit, and add ValidationSchedule(epochs=1)",
    "on_save": "no checkpoint was written: add Checkpoint('runs/x', every=Every(epochs=1))",
}
TRACKERS = "transformers.integrations."  # these callbacks do not affect the training
REMEDY = "make it an ExportableState, or add state_dict and load_state_dict"
BEST = frozenset({"best_metric", "metric_for_best_model"})


class HuggingFacePlugin(Plugin):
    """A callback of the Hugging Face Trainer; created by `from_huggingface`.

    Args:
        callback: the callback.
        args: its `args`: `TrainingArguments`, a dict of overrides, or None.
        processing_class: its `processing_class`.
    """

    rehearses = False
    _rate: Any

    def __init__(self, callback: Any, args: Any, processing_class: Any) -> None:
        kind, names = type(callback), names_in(callback)
        self.name, self.asks = snake_case(kind.__name__), asks_of(names)
        self.affects_training = not kind.__module__.startswith(TRACKERS)
        self._reads_best = bool(names & BEST)
        base = require("transformers", "from_huggingface", extra="transformers").TrainerCallback
        self._own_states, self._keeper = OwnStates([stateful(callback)], REMEDY), StateKeeper()
        self._call = CallbackCaller(callback, base, self._own_states)
        vars(self).update(self._own_states.options)  # a resume compares the plugin's attributes
        self.ignores = tuple(event for event, methods in NEEDED_BY.items() if not self._call.has(*methods))
        self._given, self._processing_class = args, processing_class
        self._forget()

    def reset(self) -> None:
        self._own_states.reset()
        self._call.begin()
        self._forget()

    def describe(self, run: Run) -> str:
        return f"calls {self._call.kind}, a callback of the Hugging Face Trainer"

    @on(ev.TrainStart, lane=Lane.REPORT)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        self._meet(run)
        self._keeper.begin(run, self._call.args)
        self._call(run, "on_init_end", self._keeper.state)
        if not run.checkpoints.is_resuming:
            self._begin_training(run)

    @on(ev.CheckpointLoaded)
    def resume(self, run: Run, event: ev.CheckpointLoaded) -> None:
        self._keeper.refresh(run)
        self._steps = run.progress.steps
        if not self._has_begun:
            self._begin_training(run)
        self._own_states.resume(run, affects_training=self.affects_training)

    @on(ev.EpochStart)
    def begin_epoch(self, run: Run, event: ev.EpochStart) -> None:
        if not event.resumed:
            self._keeper.refresh(run)
            self._call(run, "on_epoch_begin", self._keeper.state)

    @on(ev.BatchStart)
    def begin_step(self, run: Run, event: ev.BatchStart) -> None:
        if not run.stepping.window:
            self._call(run, "on_step_begin", self._keeper.state)

    @on(ev.GradientsReady, lane=Lane.REPORT)
    def look_at_gradients(self, run: Run, event: ev.GradientsReady) -> None:
        self._call.keywords["optimizer"] = run.optimizer
        self._call(run, "on_pre_optimizer_step", self._keeper.state)

    @on(ev.StepEnd, lane=Lane.MEASURE)
    def look_at_step(self, run: Run, event: ev.StepEnd) -> None:
        self._call.keywords["optimizer"] = run.optimizer
        self._rate = rate_of(run)
        self._call(run, "on_optimizer_step", self._keeper.state)

    @on(ev.BatchEnd, lane=Lane.PERSIST)  # after the schedules, like after the Trainer's flow callback
    def end_batch(self, run: Run, event: ev.BatchEnd) -> None:
        if run.progress.steps > self._steps:
            self._end_step(run)
        elif run.stepping.window:
            self._call(run, "on_substep_end", self._keeper.state)

    @on(ev.EpochEnd, lane=Lane.PERSIST)
    def end_epoch(self, run: Run, event: ev.EpochEnd) -> None:
        if run.progress.steps > self._steps:
            self._end_step(run)
        self._keeper.refresh(run)
        self._call(run, "on_epoch_end", self._keeper.state)

    @on(ev.Log, optional=True)
    def log(self, run: Run, event: ev.Log) -> None:
        self._keeper.refresh(run)
        logs = their_names(event.metrics)
        measured_by = run.plugins.declared("exclusive").get("gradient_norm")
        latest = None if measured_by is None else getattr(run.plugins[measured_by], "latest_norm", None)
        if GRAD_NORM in logs and latest is not None:
            logs[GRAD_NORM] = float(latest)
        rate = rate_of(run) if self._rate is None else self._rate
        self._report(run, logs if rate is None else {**logs, "learning_rate": float(rate)})

    @on(ev.ValidationBatchEnd, ev.TestBatchEnd, ev.PredictBatchEnd)
    def end_prediction(self, run: Run, event: ev.ValidationBatchEnd | ev.TestBatchEnd | ev.PredictBatchEnd) -> None:
        if isinstance(event, ev.ValidationBatchEnd):
            self._call.keywords["eval_dataloader"] = run.data.validation_loaders[event.dataset]
        self._call(run, "on_prediction_step", self._keeper.state)

    @on(ev.ValidationEnd, optional=True)
    def evaluate(self, run: Run, event: ev.ValidationEnd) -> None:
        if run.optimizer is not None:
            self._keeper.refresh(run)
        metrics = self._report(run, their_names(event.metrics))
        self._call(run, "on_evaluate", self._keeper.state, metrics=metrics)
        self._keeper.judge(run, self._call.args, metrics, is_read=self._reads_best)

    @on(ev.TestEnd, ev.PredictEnd)
    def predict(self, run: Run, event: ev.TestEnd | ev.PredictEnd) -> None:
        self._call(run, "on_predict", self._keeper.state, metrics=their_names(event.metrics))

    @on(ev.CheckpointSaved)
    def save(self, run: Run, event: ev.CheckpointSaved) -> None:
        if run.checkpoints.best is not None:
            self._keeper.state.best_model_checkpoint = str(run.checkpoints.best)
        self._call(run, "on_save", self._keeper.state)

    @on(ev.TrainEnd)
    def end_training(self, run: Run, event: ev.TrainEnd) -> None:
        self._keeper.refresh(run)
        self._call(run, "on_train_end", self._keeper.state)

    @on(ev.ValidationStart, ev.TestStart, ev.PredictStart, optional=True)
    def begin_evaluation(self, run: Run, event: ev.ValidationStart | ev.TestStart | ev.PredictStart) -> None:
        if self._call.run is not run:
            self._meet(run)

    @on(ev.RunClosed)
    def end(self, run: Run, event: ev.RunClosed) -> None:
        if self._has_begun and run.checkpoints.resumed_at is None and ended_for_good(run, event.status):
            for method in self._call.uncalled(RARE):
                run.warn(f"{self._call.kind}.{method} was never called: {RARE[method]}.")

    def state_dict(self) -> dict[str, Any]:
        return {"trainer": self._keeper.state_dict(), "callback": self._own_states.state_dict(self._call.run)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            self._own_states.reset()
            return
        self._keeper.load_state_dict(state["trainer"])
        self._own_states.load_state_dict(state["callback"])

    def close(self) -> None:
        self._call.leave()

    def _forget(self) -> None:
        self._rate = None
        self._steps, self._has_begun = 0, False

    def _meet(self, run: Run) -> None:
        refuse_replay(run)
        self._call.meet(run, arguments(run, self._given), keywords(run, self._processing_class))

    def _begin_training(self, run: Run) -> None:
        self._has_begun = True
        self._call(run, "on_train_begin", self._keeper.state)

    def _end_step(self, run: Run) -> None:
        self._steps = run.progress.steps
        self._keeper.refresh(run)
        self._call(run, "on_step_end", self._keeper.state)

    def _report(self, run: Run, logs: dict[str, Any]) -> dict[str, Any]:
        self._keeper.add_log(logs)
        self._call(run, "on_log", self._keeper.state, logs=logs)
        return logs


def stateful(callback: Any) -> Any:
    base = require("transformers.trainer_callback", "from_huggingface", extra="transformers").ExportableState
    return Exported(callback, base) if isinstance(callback, base) else callback


class Exported:
    """An `ExportableState` callback with `state_dict` and `load_state_dict`; its arguments are public attributes.

    Args:
        callback: the callback.
        base: `transformers.trainer_callback.ExportableState`.
    """

    def __init__(self, callback: Any, base: Any) -> None:
        self._callback, self._base, self.__name__ = callback, base, type(callback).__name__
        self._args = deepcopy(self._part("args"))
        vars(self).update(self._args)

    def state_dict(self) -> dict[str, Any]:
        changed = {name: value for name, value in self._part("args").items() if value != self._args.get(name)}
        return {**self._part("attributes"), **changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kind, attributes = type(self._callback), dict(state)
        if "attributes" not in self._callback.state():  # all of its state is among its arguments
            attributes = {
                name: value for name, value in self._args.items() if hasattr(self._callback, name)
            } | attributes
        if kind.from_state.__func__ is not self._base.from_state.__func__:
            args = self._args | {name: state[name] for name in self._args.keys() & state.keys()}
            saved = {**self._callback.state(), "args": args}
            if "attributes" in saved:
                saved["attributes"] = {name: value for name, value in state.items() if name not in args}
            attributes = vars(kind.from_state(deepcopy(saved)))
        for name, value in attributes.items():
            setattr(self._callback, name, value)

    def _part(self, name: str) -> dict[str, Any]:
        return dict(self._callback.state().get(name, {}))
