"""The parser of `python -m heliograph fit`: the keys of a configuration, with the types and texts of the functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from heliograph import Filter, Trainer
from heliograph.core.settings import FitOptions
from heliograph.plugins import discover
from heliograph.spi import require

from . import filters
from .names import ENGINES, OBJECTS, full_arguments, full_forms
from .plugin_options import by_name
from .texts import check_file, check_options, refuse_others

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

Verb = Literal["fit", "validate", "test", "predict"]
MODE = "heliograph"  # of loading texts, in jsonargparse
DESCRIPTIONS: Mapping[Verb, str] = {
    "fit": "Train as a configuration says.",
    "validate": "Validate the task of a configuration.",
    "test": "Test the task of a configuration.",
    "predict": "Predict with the task of a configuration; PredictionWriter among the plugins takes the outputs.",
}
END = (
    "A configuration calls every class and function that it names: use only files that you trust. "
    "Exit status 0: done; 1: it failed; 2: the configuration is wrong; others as plugins ask for. "
    "--trainer.plugins.help NAME shows the options of a plugin."
)


class Object(ABC):
    """Stands for every class: what is made is checked by who takes it."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        """Return True."""
        return True

    @abstractmethod
    def use(self) -> None:
        """Keep this class itself from being made."""


class Optimizer(Object):
    """Stands for every optimizer."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        """Return whether a class is one of optimizers."""
        return issubclass(other, torch.optim.Optimizer)


class LRScheduler(Object):
    """Stands for every scheduler."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        """Return whether a class is one of schedulers."""
        return issubclass(other, torch.optim.lr_scheduler.LRScheduler)


Made = Callable[[], Object]
MadeOptimizer = Callable[[Iterable[Any]], Optimizer]
MadeScheduler = Callable[[Optimizer], LRScheduler]
KINDS: dict[str, tuple[Any, str]] = {
    "task": (Made, "the task: a class path, or that of a function that returns one"),
    "data": (Made | None, "a DataModule, instead of train, validation, test and predict"),
    "train": (Made | dict[str, Made] | None, "what fit takes as train; also several by name"),
    "validation": (Made | dict[str, Made] | None, "what fit and validate take as validation; also several by name"),
    "test": (Made | dict[str, Made] | None, "what test takes; also several by name"),
    "predict": (Made | dict[str, Made] | None, "what predict takes; also several by name"),
    "optimizer": (
        MadeOptimizer | dict[str, MadeOptimizer] | None,
        "a class of optimizers, whose parameters are the task's, or a function of them; also several by name",
    ),
    "scheduler": (
        MadeScheduler | dict[str, MadeScheduler] | None,
        "a class of schedulers, a function such as heliograph.warmup_cosine; also by the names of the optimizers",
    ),
}


def make_parser(verb: Verb) -> ArgumentParser:
    """Return the parser of a command.

    Raises:
        ImportError: jsonargparse is not installed.
    """
    jsonargparse = require("jsonargparse", f"heliograph {verb}", extra="cli")
    yaml = require("yaml", f"heliograph {verb}", extra="cli")
    jsonargparse.set_parsing_settings(validate_subclass_spec_in_any=True, instantiate_subclass_spec_in_any=True)
    jsonargparse.set_loader(MODE, full_forms(jsonargparse.get_loader("yaml")), (yaml.YAMLError,))
    jsonargparse.typing.register_type(Filter, filters.plain_form, filters.filter_of, type_check=isinstance)
    return _parser(jsonargparse, verb)


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Return the configuration that the arguments of a command say.

    Args:
        parser: of the command.
        arguments: files, which are read in their order, and options, which come after them.

    Raises:
        ArgumentError: a file or an option is wrong.
        ConfigurationError: a file or a value is not YAML, a key is given twice, or an option names a plugin that is
            not there.
        LookupError: a plugin of this name is not installed.
        SystemExit: what was asked for, such as the help, was printed.
    """
    from jsonargparse import get_loader

    words = list(arguments)
    count = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    for path in map(Path, words[:count]):
        check_file(path)
    check_options(words[count:])
    files = [word for path in words[:count] for word in ("--config", path)]
    options = full_arguments(words[count:], refuse_others(get_loader("yaml")))
    config = parser.parse_args([*files, *by_name(map(Path, words[:count]), options, get_loader(MODE))])
    _check_nulls(parser, config)
    return config


def _check_nulls(parser: ArgumentParser, config: Namespace) -> None:
    """Refuse a null where a type has no None; jsonargparse looks at these only where None does not mean 'not given'."""
    from jsonargparse import set_parsing_settings

    given = config.clone()
    for action in parser._actions:
        if action.default is None and given.get(action.dest) is None:
            given.pop(action.dest, None)
    set_parsing_settings(unset_sentinel=True)
    try:
        parser.validate(given)
    except TypeError as error:
        raise ArgumentError(None, str(error)) from error
    finally:
        set_parsing_settings(unset_sentinel=False)


def _parser(jsonargparse: Any, verb: Verb) -> ArgumentParser:
    parser: ArgumentParser = jsonargparse.ArgumentParser(
        prog=f"heliograph {verb}",
        usage=f"heliograph {verb} CONFIG.yaml ... [--KEY=VALUE ...]",
        description=DESCRIPTIONS[verb],
        epilog=END,
        parser_mode=MODE,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="a file; the same as CONFIG.yaml before all options")
    parser.add_argument("--seed", type=int | None, help="seeds every random generator before anything is made")
    parser.add_argument("--ranks", type=int | None, help="start so many processes on this machine, as launch does")
    parser.add_argument(
        "--folder", type=str | None, help="where the configuration is saved; by default that of the checkpoints"
    )
    objects = parser.add_argument_group("what is trained, on what")
    for key in OBJECTS:
        kind, text = KINDS[key]
        objects.add_argument(f"--{key}", type=kind, help=text)
    if verb != "fit":
        more = parser.add_argument_group("how it is evaluated")
        more.add_argument("--weights", type=str | None, help="`best`, `last`, or the path of a file or folder")
        more.add_argument("--limit", type=int | float | dict[str, Any], help="how many batches, or which fraction")
    parser.add_function_arguments(_fit_options, skip=set(OBJECTS))
    described = require("docstring_parser", f"heliograph {verb}", extra="cli").parse(Trainer.fit.__doc__).params
    texts = {each.arg_name: each.description for each in described}
    for action in parser._actions:
        action.help = action.help or texts.get(action.dest)
    parser.add_class_arguments(Trainer, "trainer", skip={"plugins", "engine"})
    _add_trainer(parser)
    return parser


def _fit_options(*, on_interrupt: Literal["raise", "return"] = "raise", **options: Unpack[FitOptions]) -> None:
    """What fit is given by name."""


def _add_trainer(parser: ArgumentParser) -> None:
    installed = ", ".join(each.name for each in discover())
    parser.add_argument(
        "--trainer.plugins",
        type=list[Made],
        help=f"a list of plugins, each by name, class path, or as {{NAME: {{option: value}}}}; installed: {installed}",
    )
    parser.add_argument(
        "--trainer.engine",
        type=Made | Literal[tuple(each.name for each in discover(ENGINES))] | None,
        help="an engine: the name of an installed one, its class path, or {NAME: {option: value}}",
    )
