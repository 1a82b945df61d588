"""What a run is called with, checked before anything begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, isgeneratorfunction, signature
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch

from ..events.catalogue import Phase
from ..events.checks import check_flag, check_number, check_whole_number, known_names
from ..plugins import Plugins
from .data.order.sizes import check_loader, size_counter
from .engines.options import modules_of
from .stepping.optimizers import SINGLE, Optimizers, make_optimizer
from .task import check_parts, check_task

if TYPE_CHECKING:
    from .data.loaders import LoaderParams

MAX_SKIPPED_STEPS = 100  # as in the HF Trainer
Loader = Iterable[Any]
Loaders = Loader | Mapping[str, Loader]
NEEDS = {
    "validation": "no plugin ever asks for a validation: add ValidationSchedule(epochs=1).",
    "stop": "the run has no end: pass epochs= or steps=, or add a plugin that stops it, such as EarlyStopping.",
    "scheduler": "no plugin steps the scheduler: add LearningRate('step') or LearningRate('epoch').",
    "save": "no plugin ever asks for a save: add SaveSchedule(epochs=1), or give Checkpoint every=Every(epochs=1).",
    "log": "no plugin ever asks for a log: add LogSchedule(steps=50).",
}


class FitOptions(TypedDict, total=False):
    """The keywords of `Trainer.fit` and `Trainer.run`; see there. Their signatures are made from this list."""

    validation: Loaders | None
    optimizer: Optimizers
    scheduler: Any
    epochs: float | None
    steps: int | None
    loader_params: LoaderParams | None
    max_skipped_steps: int | None
    name: str
    hyper_parameters: Mapping[str, Any] | None
    allow_unused_parameters: bool


# None for those that are not named here.
DEFAULTS: dict[str, Any] = {"max_skipped_steps": MAX_SKIPPED_STEPS, "name": "run", "allow_unused_parameters": False}
_Method = TypeVar("_Method", bound=Callable[..., Any])


def shows_options(method: _Method) -> _Method:
    """Let `inspect.signature`, and so `fit?` in a notebook, show each option of a method instead of `**options`."""
    shown, defaults = signature(method), {"optimizer": Parameter.empty, **DEFAULTS}
    parameters = [each for each in shown.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    parameters[3:3] = [  # after self, task and train
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind.__forward_arg__)
        for name, kind in FitOptions.__annotations__.items()
    ]
    method.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect reads it
    return method


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
    epochs: float | None = None  # an int, unless there is a fraction
    steps: int | None = None
    max_skipped_steps: int | None = MAX_SKIPPED_STEPS
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    allow_unused_parameters: bool = False
    size_of: Callable[[Any], int] = field(init=False)

    def __post_init__(self) -> None:
        """Look up how the samples of a batch are counted: by the task's own `batch_size(batch)`, if it has one."""
        object.__setattr__(self, "size_of", size_counter(self.task))

    @cached_property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The modules of the task, by name."""
        return modules_of(self.task)


def training(task: Any, train: Any, options: FitOptions, world_size: int) -> Settings:
    """Return the settings of a training on so many processes.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of its range.
    """
    for unknown in options.keys() - FitOptions.__annotations__.keys():
        from .system.errors import hint

        tail = hint(unknown) or known_names(unknown, FitOptions.__annotations__)
        raise TypeError(f"fit has no argument {unknown!r}.{tail}")
    options = {**DEFAULTS, **options}  # type: ignore[typeddict-item]  # their names are checked
    check_task(task, "training_step")
    loaders, params = training_loaders(train, options.get("loader_params"), world_size)
    epochs, steps = check_length(options.get("epochs"), options.get("steps"))
    if (most := options["max_skipped_steps"]) is not None:
        most = check_whole_number("max_skipped_steps=", most, of="skipped steps in a row", at_least=1)
    allow_unused = options["allow_unused_parameters"]
    check_flag("allow_unused_parameters=", allow_unused)
    check_parts(task)
    several = isinstance(options.get("optimizer"), Mapping)
    if isgeneratorfunction(task.training_step) and not several:
        raise ValueError(
            f"{type(task).__name__}.training_step yields losses: give the optimizer of each by the name that it is "
            f'yielded with, optimizer={{"generator": ..., "discriminator": ...}}.'
        )
    optimizers = _optimizers(options.get("optimizer"), task)
    validation = options.get("validation")
    evaluations = {} if validation is None else evaluation(task, validation, "validation", "run", params).evaluations
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
        as_ranks=(params or {}).get("as_ranks"),
        evaluations=evaluations,
        optimizers=optimizers,
        schedulers=_schedulers(options.get("scheduler"), optimizers, several=several),
        several=several,
        epochs=epochs,
        steps=steps,
        max_skipped_steps=most,
        hyper_parameters=dict(hyper_parameters),
        allow_unused_parameters=allow_unused,
    )


def check_length(epochs: object, steps: object) -> tuple[float | None, int | None]:
    """Return the epochs, an int unless there is a fraction, and the steps of a run; ValueError unless positive."""
    if epochs is not None:
        epochs = check_number("epochs=", epochs, more_than=0)
        epochs = int(epochs) if epochs == int(epochs) else epochs
    return epochs, None if steps is None else check_whole_number("steps=", steps, at_least=1)


def _optimizers(given: Any, task: Any) -> dict[str, torch.optim.Optimizer]:
    if not isinstance(given, Mapping):
        return {SINGLE: make_optimizer(given, task)}
    from .stepping.named_windows import make_optimizers

    return make_optimizers(given, task)


def _schedulers(given: Any, optimizers: Mapping[str, torch.optim.Optimizer], *, several: bool) -> dict[str, Any]:
    if given is None:
        return {}
    from .stepping.schedulers import make_schedulers

    return make_schedulers(given, optimizers, several=several)


def training_loaders(
    train: Any, params: LoaderParams | None, world_size: int
) -> tuple[Sequence[Loader], LoaderParams | None]:
    """Return the loader of each phase, and the parameters as one process goes by them."""
    if params is None and type(train) in (list, tuple):  # of batches
        check_loader(train, "train")
        return [train], None
    from .data import loaders

    return loaders.training_loaders(train, params, world_size), loaders.params_of_one_process(params, world_size)


def evaluation(task: Any, loaders: Loaders, phase: Phase, name: str, params: LoaderParams | None = None) -> Settings:
    """Return the settings of a validation or test; a single set has the empty name."""
    from .data.loaders import evaluation_loader

    check_task(task, f"{phase}_step")
    named = dict(loaders) if isinstance(loaders, Mapping) else {"": loaders}
    for dataset, loader in named.items():
        if not isinstance(dataset, str) or "/" in dataset:
            raise ValueError(f"The name of a {phase} set becomes part of metric names: no '/' in {dataset!r}.")
        named[dataset] = evaluation_loader(loader, params, f"{phase} {dataset}".strip())
    return Settings(name=check_name(name), task=task, evaluations={phase: named})


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


def check_name(name: str) -> str:
    """Return the name of a run; ValueError where files could not have it."""
    if not isinstance(name, str) or not name or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"name= becomes part of file names: letters and digits, no slashes; got {name!r}.")
    return name
