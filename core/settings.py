"""What a run is called with, checked before anything begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from numbers import Integral
from typing import Any, TypedDict

import torch

from ..events.catalogue import Phase
from ..events.checks import known_names
from ..plugins import Plugins
from .data.loaders import LoaderParams, evaluation_loader, training_loaders
from .task import check_parts, check_task, modules_of

Loader = Iterable[Any]
Loaders = Loader | Mapping[str, Loader]
Optimizer = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
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
    optimizer: Optimizer
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
    evaluations: Mapping[Phase, Mapping[str, Loader]] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    epochs: int | None = None
    steps: int | None = None
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)


def training(task: Any, train: Any, options: FitOptions, rank: int, world_size: int) -> Settings:
    """Return the settings of a training on one of several processes.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of its range.
    """
    for unknown in options.keys() - FitOptions.__annotations__.keys():
        raise TypeError(f"fit has no argument {unknown!r}.{known_names(unknown, FitOptions.__annotations__)}")
    check_task(task, "training_step")
    params = options.get("loader_params")
    loaders = training_loaders(train, params, rank, world_size)
    for unit in ("epochs", "steps"):
        limit = options.get(unit)
        if limit is not None and (not isinstance(limit, Integral) or isinstance(limit, bool) or limit < 1):
            raise ValueError(f"{unit}= must be a positive whole number, got {limit!r}.")
    check_parts(task)
    optimizer = _made_optimizer(options.get("optimizer"), task)
    validation = options.get("validation")
    evaluations = {} if validation is None else evaluation(task, validation, "validation", "run", params).evaluations
    return Settings(
        name=_checked_name(options.get("name", "run")),
        task=task,
        train=loaders,
        per_sample=(params or {}).get("draws_per") == "sample",
        evaluations=evaluations,
        optimizer=optimizer,
        scheduler=_made_scheduler(options.get("scheduler"), optimizer),
        epochs=options.get("epochs"),
        steps=options.get("steps"),
        hyper_parameters=dict(options.get("hyper_parameters") or {}),
    )


def evaluation(task: Any, loaders: Loaders, phase: Phase, name: str, params: LoaderParams | None = None) -> Settings:
    """Return the settings of a validation or test; a single set has the empty name."""
    check_task(task, f"{phase}_step")
    named = dict(loaders) if isinstance(loaders, Mapping) else {"": loaders}
    for dataset, loader in named.items():
        if not isinstance(dataset, str) or "/" in dataset:
            raise ValueError(f"The name of a {phase} set becomes part of metric names: no '/' in {dataset!r}.")
        named[dataset] = evaluation_loader(loader, params, f"{phase} {dataset}".strip())
    return Settings(name=_checked_name(name), task=task, evaluations={phase: named})


def check_needs(settings: Settings, plugins: Plugins) -> None:
    """Raise ValueError where something that was asked for would never happen."""
    asked = plugins.declared("asks")
    needs = {
        "validation": bool(settings.evaluations),
        "stop": settings.epochs is None and settings.steps is None,
        "scheduler": settings.scheduler is not None,
    }
    for word, needed in needs.items():
        if needed and word not in asked:
            raise ValueError(f"As fit was called, {NEEDS[word]} A plugin of yours says so with asks = ({word!r},).")
    for word, name in plugins.declared("needs").items():
        if word in ("validation", "validation data") and not settings.evaluations:
            raise ValueError(f"Plugin {name!r} would never act, there is no validation data: pass validation= to fit.")
        if word not in (*asked, "validation data"):
            raise ValueError(f"Plugin {name!r} would never act: {NEEDS.get(word, f'no plugin asks for {word!r}.')}")


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not name or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"name= becomes part of file names: letters and digits, no slashes; got {name!r}.")
    return name


def _made_optimizer(optimizer: Optimizer | None, task: Any) -> torch.optim.Optimizer:
    """Return the optimizer, made from the task's parameters where a function was given."""
    made = optimizer
    if callable(made) and not isinstance(made, torch.optim.Optimizer):
        made = made([parameter for module in modules_of(task).values() for parameter in module.parameters()])
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer= takes a torch optimizer, or a function that makes one from parameters, got {optimizer!r}."
        )
    closure = signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(f"{type(made).__name__} needs a closure for every step, which the loop does not give it.")
    trained = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    own = {id(parameter) for module in modules_of(task).values() for parameter in module.parameters()}
    if own and not own & trained:
        raise ValueError("The optimizer holds no parameter of the task: make it from the model that is trained here.")
    return made


def _made_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler, made from the optimizer where a function was given."""
    made = scheduler
    if callable(made) and not isinstance(made, type) and not hasattr(made, "step"):
        made = made(optimizer)
    if made is not None and (isinstance(made, type) or not callable(getattr(made, "step", None))):
        raise TypeError(f"scheduler= takes a scheduler, or a function that makes one from the optimizer, got {made!r}.")
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise ValueError("The scheduler belongs to another optimizer than the one that fit was given.")
    return made
