"""The parser of `heliograph fit`: keys with their types and help, filters, and options of one plugin."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from heliograph import At, Between, Every, Filter, Once, Trainer
from heliograph.core.settings import FitOptions
from heliograph.plugins import discover
from heliograph.spi import known_names, require

from .errors import ConfigurationError
from .names import ENGINES, OBJECTS, PLUGINS, TRAINER, Load, full_arguments, full_forms, path_of
from .texts import check_file, load_unique, read_yaml

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

FORM = (
    "A filter is written as {epochs: 1} for Every(epochs=1), {steps: [10, 100]} for At(steps=[10, 100]), "
    "{Between: {epochs: [2, 5]}} for Between(epochs=(2, 5)), {Once: {}} for Once()"
)
NAMED_FILTERS: dict[str, Callable[..., Filter]] = {"Between": Between, "Once": Once}


def filter_of(value: Any) -> Filter:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{FORM}, got {value!r}.")
    name, arguments = next(iter(value.items()))
    if len(value) == 1 and name in NAMED_FILTERS and (arguments is None or isinstance(arguments, dict)):
        return NAMED_FILTERS[name](**(arguments or {}))
    if value.keys() & NAMED_FILTERS:
        raise ValueError(f"{FORM}, got {value!r}.")
    several = any(isinstance(item, list) for item in value.values())
    return At(**value) if several else Every(**value)


def plain_form(value: Filter) -> dict[str, Any]:
    if isinstance(value, Once):
        return {"Once": {}}
    if isinstance(value, Between):
        return {"Between": {value.unit: value.values}}
    if isinstance(value, Every):
        return {value.unit: value.values[0]} | ({} if value.after is None else {"after": value.after})
    return {value.unit: value.values}


OPTION = f"--{PLUGINS}"


@dataclass
class PluginSpec:
    spec: Any
    options: list[str] = field(default_factory=list)


def by_name(arguments: Sequence[str], load: Load) -> list[str]:
    plugins: list[PluginSpec] = []
    remaining, words, added, named = list[str](), iter(arguments), False, ""
    for word in words:
        option, equals, value = word.partition("=")
        is_named = option.startswith(f"{OPTION}.") and option != f"{OPTION}.help"
        if not is_named and option not in ("--config", f"--{TRAINER}", OPTION, f"{OPTION}+"):
            remaining.append(word)
            continue
        value = value if equals else next(words, "")
        if is_named:
            entry, key = _addressed(option.removeprefix(f"{OPTION}."), plugins, added=added)
            named = f"{OPTION}.{key}={value}"
            entry.options.append(named)
            continue
        remaining.append(f"{option}={value}")
        specs = _specs(option, value, load)
        if not isinstance(specs, list):
            continue
        if option == f"{OPTION}+":
            specs = [*plugins, *map(PluginSpec, specs)]
        elif named:
            raise ConfigurationError(f"{named} has no effect, as the plugins are replaced later: move it to the end.")
        else:
            specs = [*map(PluginSpec, specs)]
        plugins, added = specs, added or option in (OPTION, f"{OPTION}+")
    return [*remaining, *_in_order(plugins)] if named else remaining


def _specs(option: str, value: str, load: Load) -> Any:
    if option == "--config":
        check_file(Path(value))
        config = load(Path(value).read_text(encoding="utf-8")).get(TRAINER)
    else:
        config = load(value)
    if option.startswith(OPTION):
        return config
    return config.get("plugins") if isinstance(config, dict) else None


def _in_order(plugins: Iterable[PluginSpec]) -> list[str]:
    words, sign = list[str](), ""
    for entry in plugins:
        words += [f"{OPTION}{sign}={json.dumps([entry.spec])}", *entry.options]
        sign = "+"
    return words


def _addressed(words: str, plugins: Sequence[PluginSpec], *, added: bool) -> tuple[PluginSpec, str]:
    # An option of a plugin that was just added needs no name.
    parts = words.split(".")
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        for entry in reversed(plugins):
            if isinstance(entry.spec, dict) and entry.spec.get("class_path") == _path_or_none(name):
                return entry, ".".join(parts[count:])
    if added and plugins:
        return plugins[-1], words
    names = {plugin.target.replace(":", "."): plugin.name for plugin in discover()}
    paths = [entry.spec["class_path"] for entry in plugins if isinstance(entry.spec, dict)]
    hint = known_names(parts[0], {names.get(path, path) for path in paths})
    raise ConfigurationError(
        f"{OPTION}.{words} names no plugin of this configuration: write {OPTION}.NAME.OPTION=VALUE, or add a plugin "
        f"first by {OPTION}+=NAME.{hint}"
    )


def _path_or_none(name: str) -> str | None:
    try:
        return path_of(name)
    except LookupError:
        return None


Verb = Literal["fit", "validate", "test", "predict"]
MODE = "heliograph"  # the loader in jsonargparse
DESCRIPTIONS: Mapping[Verb, str] = {
    "fit": "Train the task of a configuration.",
    "validate": "Validate the task of a configuration.",
    "test": "Test the task of a configuration.",
    "predict": "Predict with the task of a configuration; PredictionWriter among the plugins takes the outputs.",
}
END = (
    "A configuration calls every class and function that it names: use only files that you trust. "
    "Exit status 0: success; 1: failure; 2: the configuration is invalid; others are set by plugins. "
    "--trainer.plugins.help NAME shows the options of a plugin."
)


class Object(ABC):
    """Accepts every class; the created object is checked where it is used."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return True

    @abstractmethod
    def use(self) -> None:
        # Abstract, so that this class itself cannot be created.
        pass


class Optimizer(Object):
    """Accepts every optimizer."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return issubclass(other, torch.optim.Optimizer)


class LRScheduler(Object):
    """Accepts every scheduler."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return issubclass(other, torch.optim.lr_scheduler.LRScheduler)


Made = Callable[[], Object]
MadeOptimizer = Callable[[Iterable[Any]], Optimizer]
MadeScheduler = Callable[[Optimizer], LRScheduler]
KINDS: dict[str, tuple[Any, str]] = {
    "task": (Made, "the task: a class path, or the path of a function that returns a task"),
    "data": (Made | None, "a DataModule, instead of train, validation, test and predict"),
    "train": (Made | dict[str, Made] | None, "the train argument of fit; also several by name"),
    "validation": (Made | dict[str, Made] | None, "the validation argument of fit and validate; also several by name"),
    "test": (Made | dict[str, Made] | None, "the data of test; also several by name"),
    "predict": (Made | dict[str, Made] | None, "the data of predict; also several by name"),
    "optimizer": (
        MadeOptimizer | dict[str, MadeOptimizer] | None,
        "an optimizer class, or a function of the task's parameters; also several by name",
    ),
    "scheduler": (
        MadeScheduler | dict[str, MadeScheduler] | None,
        "a scheduler class, or a function such as heliograph.warmup_cosine; also by the names of optimizers",
    ),
}


def make_parser(verb: Verb) -> ArgumentParser:
    jsonargparse = require("jsonargparse", f"heliograph {verb}", extra="cli")
    yaml = require("yaml", f"heliograph {verb}", extra="cli")
    jsonargparse.set_parsing_settings(validate_subclass_spec_in_any=True, instantiate_subclass_spec_in_any=True)
    jsonargparse.set_loader(MODE, full_forms(load_unique), (yaml.YAMLError,))
    jsonargparse.typing.register_type(Filter, plain_form, filter_of, type_check=isinstance)
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
    parser.add_argument("--seed", type=int | None, help="seed of all random generators, set before objects are created")
    parser.add_argument("--ranks", type=int | None, help="number of processes on this machine, as with launch")
    parser.add_argument(
        "--folder", type=str | None, help="where the configuration is saved; by default the folder of the checkpoints"
    )
    objects = parser.add_argument_group("task, data and optimizer")
    for key in OBJECTS:
        kind, text = KINDS[key]
        objects.add_argument(f"--{key}", type=kind, help=text)
    if verb != "fit":
        more = parser.add_argument_group("evaluation")
        more.add_argument("--weights", type=str | None, help="`best`, `last`, or the path of a file or folder")
        more.add_argument("--limit", type=int | float | dict[str, Any], help="number of batches, or a fraction")
    parser.add_function_arguments(_fit_options, skip=set(OBJECTS))
    described = require("docstring_parser", f"heliograph {verb}", extra="cli").parse(Trainer.fit.__doc__).params
    texts = {parameter.arg_name: parameter.description for parameter in described}
    for action in parser._actions:
        action.help = action.help or texts.get(action.dest)
    parser.add_class_arguments(Trainer, "trainer", skip={"plugins", "engine"})
    installed = ", ".join(plugin.name for plugin in discover())
    parser.add_argument(
        "--trainer.plugins",
        type=list[Made],
        help=f"a list of plugins, each by name, class path, or as {{NAME: {{option: value}}}}; installed: {installed}",
    )
    parser.add_argument(
        "--trainer.engine",
        type=Made | Literal[tuple(engine.name for engine in discover(ENGINES))] | None,
        help="an engine: the name of an installed one, its class path, or {NAME: {option: value}}",
    )
    return parser


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    words = list(arguments)
    count = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    files = [f"--config={path}" for path in words[:count]]
    options = full_arguments(words[count:], read_yaml)
    config = parser.parse_args(by_name([*files, *options], full_forms(load_unique)))
    _check_nulls(parser, config)
    return config


def _check_nulls(parser: ArgumentParser, config: Namespace) -> None:
    # jsonargparse does not check a null whose default is None.
    from jsonargparse import set_parsing_settings

    values = config.clone()
    for action in parser._actions:
        if action.default is None and values.get(action.dest) is None:
            values.pop(action.dest, None)
    set_parsing_settings(unset_sentinel=True)
    try:
        parser.validate(values)
    except TypeError as error:
        raise ArgumentError(None, str(error)) from error
    finally:
        set_parsing_settings(unset_sentinel=False)


def _fit_options(*, on_interrupt: Literal["raise", "return"] = "raise", **options: Unpack[FitOptions]) -> None:
    pass
