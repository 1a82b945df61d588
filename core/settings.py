"""What a run is called with, checked before anything begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isgeneratorfunction
from typing import Any, TypedDict

import torch

from ..events.catalogue import Phase
from ..events.checks import check_whole_number, known_names
from ..plugins import Plugins
from .data.loaders import LoaderParams, evaluation_loader, of_one_process, training_loaders
from .optimizers import Optimizers, made_optimizers, made_schedulers
from .task import check_parts, check_task

Loader = Iterable[Any]
Loaders = Loader | Mapping[str, Loader]
NEEDS = {
    "validation": "no plugin ever asks for a validation: add ValidationSchedule(Every(epochs=1)).",
    "stop": "the run has no end: pass epochs= or steps=, or add a plugin that stops it, such as EarlyStopping.",
    "scheduler": "no plugin steps the scheduler: add LearningRate('step') or LearningRate('epoch').",
    "save": "no plugin ever asks for a save: add SaveSchedule(Every(epochs=1)).",
    "log": "no plugin ever asks for a log: add LogSchedule(Every(steps=50)).",
}


class FitOptions(TypedDict, total=False):
    """The keywords of `Trainer.fit` and `Trainer.run`; see there."""

    loader_params: LoaderParams | None
    validation: Loaders | None
    optimizer: Optimizers
    scheduler: Any
    epochs: int | None
    steps: int | None
    name: str
    hyper_parameters: Mapping[str, Any] | None


@dataclass(frozen=True)
class Settings:
    """The checked form of the arguments of one `fit`, `validate` or `test`."""

    name: str
    task: Any
    train: Sequence[Loader] = ()
    per_sample: bool = False
    as_ranks: int | None = None
    evaluations: Mapping[Phase, Mapping[str, Loader]] = field(default_factory=dict)
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    several: bool = False  # the optimizers were given by name, for a loss of its own each
    epochs: int | None = None
    steps: int | None = None
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)


def training(task: Any, train: Any, options: FitOptions, world_size: int) -> Settings:
    """Return the settings of a training on so many processes.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of its range.
    """
    for unknown in options.keys() - FitOptions.__annotations__.keys():
        raise TypeError(f"fit has no argument {unknown!r}.{known_names(unknown, FitOptions.__annotations__)}")
    check_task(task, "training_step")
    params = options.get("loader_params")
    loaders = training_loaders(train, params, world_size)
    params = of_one_process(params, world_size)
    for unit in ("epochs", "steps"):
        if options.get(unit) is not None:
            check_whole_number(f"{unit}=", options.get(unit), at_least=1)
    check_parts(task)
    several = isinstance(options.get("optimizer"), Mapping)
    if isgeneratorfunction(task.training_step) and not several:
        raise ValueError(
            f"{type(task).__name__}.training_step yields losses: give the optimizer of each by the name that it is "
            f'yielded with, optimizer={{"generator": ..., "discriminator": ...}}.'
        )
    optimizers = made_optimizers(options.get("optimizer"), task)
    validation = options.get("validation")
    evaluations = {} if validation is None else evaluation(task, validation, "validation", "run", params).evaluations
    hyper_parameters = options.get("hyper_parameters") or {}
    if not isinstance(hyper_parameters, Mapping):
        raise TypeError(f"hyper_parameters= takes a dict such as {{'lr': 0.01}}, got {hyper_parameters!r}.")
    return Settings(
        name=checked_name(options.get("name", "run")),
        task=task,
        train=loaders,
        per_sample=(params or {}).get("draws_per") == "sample",
        as_ranks=(params or {}).get("as_ranks"),
        evaluations=evaluations,
        optimizers=optimizers,
        schedulers=made_schedulers(options.get("scheduler"), optimizers, several=several),
        several=several,
        epochs=options.get("epochs"),
        steps=options.get("steps"),
        hyper_parameters=dict(hyper_parameters),
    )


def evaluation(task: Any, loaders: Loaders, phase: Phase, name: str, params: LoaderParams | None = None) -> Settings:
    """Return the settings of a validation or test; a single set has the empty name."""
    check_task(task, f"{phase}_step")
    named = dict(loaders) if isinstance(loaders, Mapping) else {"": loaders}
    for dataset, loader in named.items():
        if not isinstance(dataset, str) or "/" in dataset:
            raise ValueError(f"The name of a {phase} set becomes part of metric names: no '/' in {dataset!r}.")
        named[dataset] = evaluation_loader(loader, params, f"{phase} {dataset}".strip())
    return Settings(name=checked_name(name), task=task, evaluations={phase: named})


def check_needs(settings: Settings, plugins: Plugins) -> None:
    """Raise ValueError where something that was asked for would never happen."""
    asked = plugins.declared("asks")
    needs = {
        "validation": bool(settings.evaluations),
        "stop": settings.epochs is None and settings.steps is None,
        "scheduler": bool(settings.schedulers),
    }
    for word, needed in needs.items():
        if needed and word not in asked:
            raise ValueError(f"As fit was called, {NEEDS[word]} A plugin of yours says so with asks = ({word!r},).")
    for word, name in plugins.declared("needs").items():
        if word in ("validation", "validation data") and not settings.evaluations:
            raise ValueError(f"Plugin {name!r} would never act, there is no validation data: pass validation= to fit.")
        if word not in (*asked, "validation data"):
            raise ValueError(f"Plugin {name!r} would never act: {NEEDS.get(word, f'no plugin asks for {word!r}.')}")


def checked_name(name: str) -> str:
    """Return the name of a run; ValueError where files could not have it."""
    if not isinstance(name, str) or not name or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"name= becomes part of file names: letters and digits, no slashes; got {name!r}.")
    return name
