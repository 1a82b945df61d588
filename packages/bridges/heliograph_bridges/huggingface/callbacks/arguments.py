"""The `args`, `model` and other objects that callbacks receive."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, TypeAlias

from heliograph import Checkpoint, Filter, LoadBest, LogSchedule, Run, SaveSchedule, ValidationSchedule
from heliograph.spi import require
from torch import nn

TrainingFacts = Mapping[str, Callable[[Run], Any]]
Schedule: TypeAlias = type[LogSchedule | SaveSchedule | ValidationSchedule]
FIXED: Mapping[str, Any] = {
    "logging_first_step": False,
    "eval_delay": 0,
    "disable_tqdm": True,
    "report_to": [],
    "push_to_hub": False,
}


def keywords(run: Run, processing_class: Any) -> dict[str, Any]:
    return {
        "model": model_of(run.modules),
        "lr_scheduler": run.scheduler,
        "train_dataloader": run.data.train_loader,
        "eval_dataloader": next(iter(run.data.validation_loaders.values()), None),
        "processing_class": processing_class,
        "optimizer": run.optimizer,
    }


def model_of(modules: Mapping[str, nn.Module]) -> nn.Module | None:
    if len(modules) == 1:
        return next(iter(modules.values()))
    return nn.ModuleDict(dict(modules)) if modules else None


def accumulation(run: Run) -> int:
    name = run.plugins.declared("exclusive").get("accumulation")
    number = None if name is None else getattr(run.plugins[name], "number", None)
    return 1 if number is None else int(number(0))


def epochs(run: Run) -> int:
    if run.length.max_epochs is not None:
        return ceil(run.length.max_epochs)
    if run.length.planned_steps is None or run.length.batches_per_epoch is None:
        return 0
    return ceil(run.length.planned_steps / ceil(run.length.batches_per_epoch / accumulation(run)))


def rate_of(run: Run) -> Any:
    return None if run.optimizer is None else run.optimizer.param_groups[0]["lr"]


class RunArguments:
    """The arguments of a run under the names of `TrainingArguments`, read lazily.

    Args:
        run: the run.
        overrides: other arguments by name, which take precedence.
    """

    def __init__(self, run: Run, overrides: Mapping[str, Any]) -> None:
        self._run, self._given = run, {**FIXED, **overrides}
        metric = self._given.setdefault("metric_for_best_model", "loss")
        self._given.setdefault("greater_is_better", not metric.endswith("loss"))

    def __getattr__(self, name: str) -> Any:
        if name in self._given:
            return self._given[name]
        if name in FACTS:
            return FACTS[name](self._run)
        raise AttributeError(
            f"A callback reads args.{name}, which a Heliograph run does not have: pass it, as in "
            f"from_huggingface(callback, args={{{name!r}: ...}}), or pass real TrainingArguments as args."
        )

    def to_dict(self) -> dict[str, Any]:
        return {**{name: read(self._run) for name, read in FACTS.items()}, **self._given}

    def to_sanitized_dict(self) -> dict[str, Any]:
        plain = (bool, int, float, str)
        return {name: value if type(value) in plain else str(value) for name, value in self.to_dict().items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)


def _plugins(run: Run, kind: type) -> list[Any]:
    return [plugin for plugin in run.plugins if isinstance(plugin, kind)]


def _checkpoint(run: Run, attribute: str) -> Any:
    checkpoints = _plugins(run, Checkpoint)
    return getattr(checkpoints[0], attribute) if checkpoints else None


def _schedules(run: Run, kind: Schedule) -> list[Filter]:
    every = [checkpoint.every for checkpoint in _plugins(run, Checkpoint)] if kind is SaveSchedule else []
    return [*(schedule.filter for schedule in _plugins(run, kind)), *(interval for interval in every if interval)]


def _interval(kind: Schedule) -> Callable[[Run], int | None]:
    def read(run: Run) -> int | None:
        intervals = [when for when in _schedules(run, kind) if when.unit == "steps"]
        return int(intervals[0].values[0]) if intervals else None

    return read


def _strategy(kind: Schedule) -> Callable[[Run], str]:
    def read(run: Run) -> str:
        units = {when.unit for when in _schedules(run, kind)}
        if units == {"epochs"}:
            return "epoch"
        return "steps" if kind.asks[0] in run.plugins.declared("asks") else "no"

    return read


def _precision(name: str) -> Callable[[Run], bool]:
    return lambda run: getattr(getattr(run.engine, "precision", None), "name", "") == name


FACTS: TrainingFacts = {
    "output_dir": lambda run: str(_checkpoint(run, "folder") or "trainer_output"),
    "run_name": lambda run: run.name or None,
    "num_train_epochs": epochs,
    "max_steps": lambda run: -1 if run.length.max_steps is None else run.length.max_steps,
    "per_device_train_batch_size": lambda run: run.data.batch_size,
    "train_batch_size": lambda run: run.data.batch_size,
    "gradient_accumulation_steps": accumulation,
    "learning_rate": rate_of,
    "logging_strategy": _strategy(LogSchedule),
    "logging_steps": _interval(LogSchedule),
    "eval_strategy": _strategy(ValidationSchedule),
    "eval_steps": _interval(ValidationSchedule),
    "save_strategy": _strategy(SaveSchedule),
    "save_steps": _interval(SaveSchedule),
    "load_best_model_at_end": lambda run: bool(_plugins(run, LoadBest)),
    "should_save": lambda run: run.engine.is_main,
    "seed": lambda run: run.data.seed,
    "device": lambda run: run.engine.device,
    "world_size": lambda run: run.engine.world_size,
    "process_index": lambda run: run.engine.rank,
    "local_process_index": lambda run: run.engine.local_rank,
    "fp16": _precision("fp16"),
    "bf16": _precision("bf16"),
}


def arguments(run: Run, args: Any) -> Any:
    if args is None or isinstance(args, Mapping):
        return RunArguments(run, args or {})
    return args


def check_given(args: Any) -> None:
    kind = require("transformers.training_args", "from_huggingface", extra="transformers").TrainingArguments
    if not (args is None or isinstance(args, Mapping | kind)):
        raise TypeError(
            f"args is a transformers.TrainingArguments or a dict of values that the callback reads, such as "
            f"{{'metric_for_best_model': 'accuracy'}}; got {args!r}."
        )
