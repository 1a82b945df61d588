"""What callbacks read in `args` where no `TrainingArguments` are given."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from heliograph import Checkpoint, Filter, LoadBest, LogSchedule, Run, SaveSchedule, ValidationSchedule
from heliograph.spi import require

from .facts import accumulation, epochs, rate_of

Facts = Mapping[str, Callable[[Run], Any]]
Schedule: TypeAlias = type[LogSchedule | SaveSchedule | ValidationSchedule]


class RunArguments:
    """The arguments of a run, under the names of `TrainingArguments`; each is read from the run when it is asked for.

    Args:
        run: the run.
        given: what else callbacks read, by name; it comes first.
    """

    def __init__(self, run: Run, given: Mapping[str, Any]) -> None:
        self._run, self._given = run, {**FIXED, **given}
        metric = self._given.setdefault("metric_for_best_model", "loss")
        self._given.setdefault("greater_is_better", not metric.endswith("loss"))

    def __getattr__(self, name: str) -> Any:
        if name in self._given:
            return self._given[name]
        if name in FACTS:
            return FACTS[name](self._run)
        raise AttributeError(
            f"A callback reads args.{name}, which a Heliograph run does not have: give it, as in "
            f"from_huggingface(callback, args={{{name!r}: ...}}), or pass real TrainingArguments as args."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments that there are, as plain data."""
        return {**{name: read(self._run) for name, read in FACTS.items()}, **self._given}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return them with what is neither a number nor text as text."""
        plain = (bool, int, float, str)
        return {name: each if type(each) in plain else str(each) for name, each in self.to_dict().items()}

    def to_json_string(self) -> str:
        """Return them as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)


def _plugins(run: Run, kind: type) -> list[Any]:
    return [] if run.report.is_replay else [each for each in run.plugins if isinstance(each, kind)]


def _checkpoint(run: Run, attribute: str) -> Any:
    found = _plugins(run, Checkpoint)
    return getattr(found[0], attribute) if found else None


def _schedules(run: Run, kind: Schedule) -> list[tuple[Filter, bool]]:
    """Return when schedules of a kind ask, and whether they do at the end, too; a `Checkpoint` can be one for saves."""
    found = [(each.filter, each.at_end) for each in _plugins(run, kind)]
    every = [each.every for each in _plugins(run, Checkpoint)] if kind is SaveSchedule else []
    return [*found, *((each, True) for each in every if each is not None)]


def last_flags(run: Run) -> set[str]:
    """Return what the Trainer sets at the last step: what schedules that do not count epochs ask for at the end."""
    kinds: dict[str, Schedule] = {"should_save": SaveSchedule}
    if run.data.validation_sets:
        kinds["should_evaluate"] = ValidationSchedule
    return {
        flag
        for flag, kind in kinds.items()
        if any(at_end and when.unit != "epochs" for when, at_end in _schedules(run, kind))
    }


def _interval(kind: Schedule) -> Callable[[Run], int | None]:
    """Return what reads every how many steps a schedule asks; None where it counts something else."""

    def read(run: Run) -> int | None:
        found = [when for when, _ in _schedules(run, kind) if when.unit == "steps"]
        return int(found[0].values[0]) if found else None

    return read


def _strategy(kind: Schedule) -> Callable[[Run], str]:
    """Return what reads by which unit something is asked for: `steps`, `epoch` or `no`."""

    def read(run: Run) -> str:
        if run.report.is_replay:
            return "steps"
        units = {when.unit for when, _ in _schedules(run, kind)}
        if units == {"epochs"}:
            return "epoch"
        return "steps" if kind.asks[0] in run.plugins.declared("asks") else "no"

    return read


def _precision(name: str) -> Callable[[Run], bool]:
    return lambda run: getattr(getattr(run.engine, "precision", None), "name", "") == name


def _batch_size(run: Run) -> int | None:
    return None if run.report.is_replay else run.data.batch_size


FIXED: Mapping[str, Any] = {
    "logging_first_step": False,
    "eval_delay": 0,
    "disable_tqdm": True,
    "report_to": [],
    "push_to_hub": False,
}
FACTS: Facts = {
    "output_dir": lambda run: str(_checkpoint(run, "folder") or "trainer_output"),
    "run_name": lambda run: run.name or None,
    "num_train_epochs": epochs,
    "max_steps": lambda run: -1 if run.length.max_steps is None else run.length.max_steps,
    "per_device_train_batch_size": _batch_size,
    "train_batch_size": _batch_size,
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
    "seed": lambda run: None if run.report.is_replay else run.data.seed,
    "device": lambda run: run.engine.device,
    "world_size": lambda run: run.engine.world_size,
    "process_index": lambda run: run.engine.rank,
    "local_process_index": lambda run: run.engine.local_rank,
    "fp16": _precision("fp16"),
    "bf16": _precision("bf16"),
}


def arguments(run: Run, given: Any) -> Any:
    """Return what is given, if it is more than a mapping, else the arguments of a run."""
    if given is None or isinstance(given, Mapping):
        return RunArguments(run, given or {})
    return given


def check_given(given: Any) -> None:
    """Raise TypeError unless the arguments can be used: None, a mapping, or `TrainingArguments`."""
    kind = require("transformers.training_args", "from_huggingface", extra="transformers").TrainingArguments
    if not (given is None or isinstance(given, Mapping | kind)):
        raise TypeError(
            f"args is a transformers.TrainingArguments or a dict of what the callback reads, such as "
            f"{{'metric_for_best_model': 'accuracy'}}; got {given!r}."
        )
