"""Programs by name: the function `module:function`, and the trainer that it returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import Dataset

from ..events.checks import describe, known_names
from .checkpoint.verified import record_verified
from .engines.options import modules_of
from .trainer import Trainer

TrainerAndOptions = tuple[Trainer, Mapping[str, Any]]
MakeTrainer = Callable[[], TrainerAndOptions] | Callable[[Path], TrainerAndOptions]
FORM = "{} returns a trainer and the keywords of its fit: return trainer, {{'task': ..., 'train': ..., ...}}"
FOLDER = "folder"  # a parameter of this name gets the folder even if it has a default
SHAREABLE = (list, tuple, Dataset)


class UsageError(ValueError):
    """An argument is wrong, or the program cannot be used; the training itself is not at fault."""


def find_function(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names, from the current folder or an installed module.

    Raises:
        UsageError: there is none.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"Name a function as module:function, as in train:make_trainer; got {name!r}.")
    if module_name.endswith(".py") or "/" in module_name:  # importing it would run the file
        module_name = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"Name the module, not its file: {module_name}:{function_name} instead of {name}.")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its own imports is missing
        hint = known_names(module_name, [module.name for module in iter_modules([folder])])
        raise UsageError(f"There is no module {module_name!r} in {folder}, and none is installed.{hint}") from None
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise UsageError(f"{module_name} has no function {function_name!r}.{known_names(function_name, defined)}")
    if not callable(function):
        raise UsageError(f"{name} must be a function, got {function!r}.")
    return function


class TrainerFactory:
    """Create a new trainer for every attempt.

    Args:
        make_trainer: called without arguments, or with a folder if it needs an argument or has a parameter `folder`.

    Raises:
        UsageError: it is not a function, or needs other arguments.
    """

    def __init__(self, make_trainer: MakeTrainer) -> None:
        if not callable(make_trainer):
            raise UsageError(f"make_trainer must be a function, got {make_trainer!r}.")
        parameters = signature(make_trainer).parameters
        required = [parameter.name for parameter in parameters.values() if _is_required(parameter)]
        if len(required) > 1:
            names = ", ".join(required)
            raise UsageError(f"{describe(make_trainer)} needs the arguments {names}; allowed is one, a folder.")
        self._make: Callable[..., Any] = make_trainer
        self._name = describe(make_trainer).rpartition(".")[2]
        self._takes_a_folder, self._by_name = bool(required), not required and FOLDER in parameters
        self._first: list[tuple[str, Any]] = []

    @property
    def takes_folder(self) -> bool:
        """True if `make_trainer` takes the folder to write to."""
        return self._takes_a_folder or self._by_name

    def record_verified(self, folder: Path, used: Path, run_name: str, steps: int) -> None:
        """Leave a line about an exact resume where the program usually writes its checkpoints, if that is known.

        Args:
            folder: of the checkpoints of the check.
            used: the folder that `make_trainer` got, instead of the default of its parameter `folder`.
            run_name: the name of the run.
            steps: the number of compared steps.
        """
        parameter = signature(self._make).parameters.get(FOLDER)
        usual = None if parameter is None or parameter.default is Parameter.empty else parameter.default
        if usual is not None and folder.is_relative_to(used):
            record_verified(Path(usual, folder.relative_to(used)), run_name, steps, "verify-resume")

    def __call__(self, folder: Path) -> tuple[Trainer, dict[str, Any]]:
        """Return a new trainer and the keywords of its fit.

        Args:
            folder: for the files of the run; created if it is missing.

        Raises:
            UsageError: the return value is wrong, the run has no limit, or it shares an object with the first one.
        """
        folder.mkdir(exist_ok=True)
        arguments, named = (folder,) * self._takes_a_folder, {FOLDER: folder} if self._by_name else {}
        trainer, options = _check_returned(self._make(*arguments, **named), FORM.format(self._name))
        objects = list(_objects(trainer, options))
        self._first = self._first or objects
        if objects is not self._first:
            self._check_not_shared(objects)
        return trainer, options

    def _check_not_shared(self, objects: list[tuple[str, Any]]) -> None:
        first = {id(value) for _, value in self._first}
        for name, value in objects:
            if id(value) in first:
                kind = type(value).__name__
                raise UsageError(f"{self._name} returned the same {name} twice ({kind}): create it in {self._name}.")


def _is_required(parameter: Parameter) -> bool:
    variable = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and not variable


def _check_returned(returned: Any, form: str) -> tuple[Trainer, dict[str, Any]]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UsageError(f"{form}; it returned {type(returned).__name__}.")
    trainer, options = returned
    if not isinstance(trainer, Trainer) or not isinstance(options, Mapping):
        raise UsageError(f"{form}; it returned ({type(trainer).__name__}, {type(options).__name__}).")
    for name in ("task", "train"):
        if name not in options:
            raise UsageError(f"{form}; {name!r} is missing among {', '.join(map(repr, options)) or 'none'}.")
    if options.get("epochs") is None and options.get("steps") is None:
        raise UsageError("The check trains several times: pass epochs= or steps=, so that each training ends.")
    return trainer, dict(options)


def _objects(trainer: Trainer, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # The objects that a run changes.
    yield "trainer", trainer
    yield "task", options["task"]
    for name, module in modules_of(options["task"]).items():
        yield f"module {name!r}", module
    for name, plugin in zip(trainer.plugins.names(), trainer.plugins, strict=True):
        yield f"plugin {name!r}", plugin
    if isinstance(options.get("optimizer"), Optimizer):
        yield "optimizer", options["optimizer"]
    if hasattr(options.get("scheduler"), "step"):
        yield "scheduler", options["scheduler"]
    for split in ("train", "validation"):
        data = options.get(split)
        for loader in data.values() if isinstance(data, Mapping) else [data]:
            if loader is not None and not isinstance(loader, SHAREABLE):
                yield f"{split} loader", loader
