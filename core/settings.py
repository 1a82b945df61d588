"""The arguments of a run, checked before anything begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, isgeneratorfunction, signature
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch

from ..events import Phase
from ..events.checks import check_flag, check_number, check_whole_number, known_names
from ..plugins import Plugins
from .engines.options import modules_of
from .stepping.windows import SINGLE, Optimizers, make_optimizer
from .task import check_parts, check_step, check_task

if TYPE_CHECKING:
    from pathlib import Path

    from .data.loaders import EvaluationSets, LoaderParams, TrainingLoaders

MAX_SKIPPED_STEPS = 100  # as in the HF Trainer
Loader = Iterable[Any] | torch.utils.data.Dataset[Any]
Loaders = Loader | Mapping[str, Loader]
NEEDS = {
    "validation": "no plugin requests a validation: add ValidationSchedule(epochs=1); standard('runs/x') has one.",
    "stop": "the run has no end: pass epochs= or steps=, or add a plugin that stops it, such as EarlyStopping.",
    "scheduler": "no plugin steps the scheduler: add LearningRate('step') or LearningRate('epoch').",
    "save": "no plugin requests a save: add SaveSchedule(epochs=1), or give Checkpoint every=Every(epochs=1).",
    "log": "no plugin requests a log: add LogSchedule(steps=50).",
}
CALLED = {"validation": "fit was given validation data, but"}


class FitOptions(TypedDict, total=False):
    """The keywords of `Trainer.fit` and `Trainer.run`; their signatures are built from this list."""

    validation: Loaders | None
    limit_train: int | float | Mapping[str, int | float] | None
    limit_validation: int | float | Mapping[str, int | float] | None
    optimizer: Optimizers
    scheduler: Any
    epochs: int | float | None
    steps: int | None
    loader_params: LoaderParams | Mapping[str, Any] | None
    max_skipped_steps: int | None
    name: str
    hyper_parameters: Mapping[str, Any] | None
    allow_unused_parameters: bool


class EvaluationOptions(TypedDict, total=False):
    """The optional arguments of `Trainer.validate`, `test` and `predict`."""

    loader_params: LoaderParams | None
    limit: float | Mapping[str, float] | None
    name: str
    weights: str | Path | None


# The defaults of options that are not None.
DEFAULTS: dict[str, Any] = {"max_skipped_steps": MAX_SKIPPED_STEPS, "name": "run", "allow_unused_parameters": False}
_Method = TypeVar("_Method", bound=Callable[..., Any])


def shows_options(options: type) -> Callable[[_Method], _Method]:
    """Show each option of a method instead of `**options` in `inspect.signature`, and so in `fit?` in a notebook."""

    def show(method: _Method) -> _Method:
        shown, defaults = signature(method), {"optimizer": Parameter.empty, **DEFAULTS}
        parameters = [value for value in shown.parameters.values() if value.kind is not Parameter.VAR_KEYWORD]
        parameters[3:3] = [  # after self, task and the data
            Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind.__forward_arg__)
            for name, kind in options.__annotations__.items()
        ]
        method.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect reads it
        return method

    return show


@dataclass(frozen=True)
class Settings:
    """The checked arguments of one `fit`, `validate`, `test` or `predict`."""

    name: str
    task: Any
    train: Sequence[Loader] = ()
    per_sample: bool = False
    evaluations: Mapping[Phase, Mapping[str, Loader]] = field(default_factory=dict)
    limits: Mapping[str, int | float] = field(default_factory=dict)  # by evaluation set
    every: Mapping[str, int] = field(default_factory=dict)  # by set: n if only every n-th validation reads it
    streams: Sequence[Collection[str]] = ()  # the names of the streams, for each phase with streams
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    several: bool = False  # whether optimizers were given by name, each with its own loss
    epochs: float | None = None  # an int, unless there is a fraction
    steps: int | None = None
    max_skipped_steps: int | None = MAX_SKIPPED_STEPS
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    allow_unused_parameters: bool = False

    @cached_property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The modules of the task, by name."""
        return modules_of(self.task)


def training(task: Any, train: Any, options: FitOptions, world_size: int) -> Settings:
    """Return the settings of a training on `world_size` processes.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.
    """
    for unknown in options.keys() - FitOptions.__annotations__.keys():
        from ..plugins.providers import hint

        tail = hint(unknown) or known_names(unknown, FitOptions.__annotations__)
        raise TypeError(f"fit has no argument {unknown!r}.{tail}")
    options = {**DEFAULTS, **options}  # type: ignore[typeddict-item]  # the names are checked
    check_task(task, "training_step")
    loaders, params, streams = training_loaders(train, options, world_size)
    epochs, steps = check_length(options.get("epochs"), options.get("steps"))
    if (most := options["max_skipped_steps"]) is not None:
        most = check_whole_number("max_skipped_steps=", most, of="skipped steps in a row", at_least=1)
    allow_unused = options["allow_unused_parameters"]
    check_flag("allow_unused_parameters=", allow_unused)
    check_parts(task)
    several = isinstance(options.get("optimizer"), Mapping)
    if isgeneratorfunction(task.training_step) and not several:
        from .system.errors import UNNAMED_LOSSES

        raise ValueError(UNNAMED_LOSSES)
    optimizers, schedulers = _optimizers(options.get("optimizer"), task), dict[str, Any]()
    if options.get("scheduler") is not None:
        from .stepping.schedulers import make_schedulers

        schedulers = make_schedulers(options["scheduler"], optimizers, several=several)
    sets, limits, every = _validation_sets(task, options, params)
    hyper_parameters = options.get("hyper_parameters") or {}
    if not isinstance(hyper_parameters, Mapping):
        raise TypeError(f"hyper_parameters= takes a dict such as {{'lr': 0.01}}, got {hyper_parameters!r}.")
    for key in hyper_parameters:
        if not isinstance(key, str):
            raise TypeError(f"hyper_parameters= takes values by name, as in {{'lr': 0.01}}; got the key {key!r}.")
    return Settings(
        name=check_name(options["name"]),
        task=task,
        train=loaders,
        per_sample=(params or {}).get("draws_per") == "sample",
        evaluations={} if options.get("validation") is None else {"validation": sets},
        limits=limits,
        every=every,
        streams=streams,
        optimizers=optimizers,
        schedulers=schedulers,
        several=several,
        epochs=epochs,
        steps=steps,
        max_skipped_steps=most,
        hyper_parameters=dict(hyper_parameters),
        allow_unused_parameters=allow_unused,
    )


def check_length(epochs: object, steps: object) -> tuple[float | None, int | None]:
    """Return the epochs (an int unless fractional) and the steps of a run; raise ValueError unless positive."""
    if epochs is not None:
        epochs = check_number("epochs=", epochs, more_than=0)
        epochs = int(epochs) if epochs == int(epochs) else epochs
    return epochs, None if steps is None else check_whole_number("steps=", steps, at_least=1)


def _optimizers(optimizer: Any, task: Any) -> dict[str, torch.optim.Optimizer]:
    if not isinstance(optimizer, Mapping):
        return {SINGLE: make_optimizer(optimizer, task)}
    from .stepping.named_windows import make_optimizers

    return make_optimizers(optimizer, task)


def training_loaders(train: Any, options: Mapping[str, Any], world_size: int) -> TrainingLoaders:
    """Return the loader of each phase, the loader parameters of one process, and the names of streams."""
    is_plain = options.get("loader_params") is None and options.get("limit_train") is None
    if is_plain and type(train) in (list, tuple) and train:  # a list of batches
        return [train], None, ()
    from .data.loaders import loaders_of_fit

    return loaders_of_fit(train, options, world_size)


def _validation_sets(task: Any, options: FitOptions, params: LoaderParams | None) -> EvaluationSets:
    validation, limit = options.get("validation"), options.get("limit_validation")
    if validation is None:
        if limit is not None:
            raise ValueError(f"limit_validation={limit!r} has no effect: there is no validation data.")
        return {}, {}, {}
    from .data.loaders import evaluation_sets

    check_step(task, "validation_step")
    return evaluation_sets(validation, "validation", params, limit, "limit_validation")


def check_needs(settings: Settings, plugins: Plugins) -> None:
    """Raise ValueError if something that the user requested would never happen."""
    off = plugins.declared("asks", enabled=False)  # it may be enabled during the run, or be disabled on purpose
    for word, name in unmet_needs(settings, plugins):
        if word == "validation data":
            raise ValueError(f"Plugin {name!r} would never act without validation data: pass validation= to fit.")
        if word == "stop" or word not in off:
            who = CALLED.get(word, "As fit was called,") if name is None else f"Plugin {name!r} would never act:"
            remedy = (
                f"Plugin {off[word]!r} is disabled" if word in off else f"Your own plugin declares asks = ({word!r},)"
            )
            raise ValueError(f"{who} {NEEDS.get(word, f'no plugin requests {word!r}.')} {remedy}.")


def unmet_needs(settings: Settings, plugins: Plugins) -> Iterator[tuple[str, str | None]]:
    """Yield (word, None) for each need of `fit` that no enabled plugin `asks`, (word, name) for needs of plugins."""
    asked = {**plugins.declared("asks"), "validation data": ""}
    endless = settings.epochs is None and settings.steps is None
    needs = {"validation": settings.evaluations, "stop": endless, "scheduler": settings.schedulers}
    yield from ((word, None) for word, needed in needs.items() if needed and word not in asked)
    for word, name in plugins.declared("needs").items():
        if word in ("validation", "validation data") and not settings.evaluations:
            yield "validation data", name
        elif word not in asked:
            yield word, name


def check_name(name: str) -> str:
    """Return the name of a run; raise ValueError if it cannot be part of a file name."""
    if not isinstance(name, str) or not name or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"name= becomes part of file names: letters and digits, no slashes; got {name!r}.")
    return name
