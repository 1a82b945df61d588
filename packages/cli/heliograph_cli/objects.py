"""The objects of a configuration: the trainer with its plugins, the task, the data, and what makes the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from heliograph import Trainer
from heliograph.core.settings import FitOptions
from heliograph.spi import seed_all

from .errors import ConfigurationError, is_refusal
from .names import OBJECTS
from .parser import Verb

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

NEEDED: dict[Verb, tuple[str, ...]] = {
    "fit": ("task", "data", "train", "validation", "optimizer", "scheduler"),
    "validate": ("task", "data", "validation"),
    "test": ("task", "data", "test"),
    "predict": ("task", "data", "predict"),
}
DATA: dict[Verb, str] = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
FITTED = ("optimizer", "scheduler")  # what fit makes itself, of the parameters of the task
NULLS = FitOptions.__annotations__.keys() - set(OBJECTS)  # what is left out unless it is given, a null too


@dataclass(frozen=True)
class Objects:
    """What a configuration names, made.

    Attributes:
        trainer: with its plugins.
        values: the other keys, with their objects; those that were not given are left out.
    """

    trainer: Trainer
    values: dict[str, Any]


def make(parser: ArgumentParser, config: Namespace, verb: Verb) -> Objects:
    """Make the objects that a command needs.

    Raises:
        ConfigurationError: a key is missing, or one of our own classes refuses what it is given.
        BaseException: what the user's classes and functions raise.
    """
    wanted = config.clone()
    for key in set(OBJECTS) - set(NEEDED[verb]):
        wanted.pop(key, None)
    _check(wanted, verb)
    if config.seed is not None:
        seed_all(config.seed)
    with refusals("the configuration"):
        given = parser.instantiate(wanted, instantiate_groups=False).as_dict()
    options = given.pop("trainer")
    plugins = [each for plugin in options.pop("plugins") or () for each in _flat(_made(plugin, "trainer.plugins"))]
    options["engine"] = _made(options["engine"], "trainer.engine")
    with refusals("trainer"):
        trainer = Trainer(plugins, **options)
    values = {key: value for key, value in given.items() if value is not None or key in NULLS}
    for key in values.keys() & set(NEEDED[verb]) - set(FITTED):
        values[key] = _made(values[key], key)
    return Objects(trainer, values)


def fit_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return what is given to fit by name."""
    return {key: each for key, each in values.items() if key in FitOptions.__annotations__ or key == "on_interrupt"}


def _check(config: Namespace, verb: Verb) -> None:
    name = DATA[verb]
    if config.get("task") is None:
        raise ConfigurationError("The configuration has no task: give a class path, task: my_module.MyTask.")
    if (config.get("data") is None) == (config.get(name) is None):
        raise ConfigurationError(f"{verb} needs {name}:, or a DataModule as data:, one of the two.")


def _made(value: Any, key: str) -> Any:
    """Return what a class makes; a function was called already."""
    if isinstance(value, dict):
        return {name: _made(each, f"{key}.{name}") for name, each in value.items()}
    if not isinstance(value, partial):
        return value
    with refusals(key):
        return value()


def _flat(plugin: Any) -> list[Any]:
    """Return the plugins of one entry: a function may return several."""
    return [each for one in plugin for each in _flat(one)] if isinstance(plugin, list | tuple) else [plugin]


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Turn what our own classes refuse into a mistake in the configuration; what others raise leaves with a note."""
    try:
        yield
    except Exception as error:
        root = error
        while root.__cause__ is not None and isinstance(root.__cause__, Exception):
            root = root.__cause__
        if is_refusal(root):
            raise ConfigurationError(f"{what}: {root}") from error
        root.add_note(f"heliograph: while making {what}")
        raise root from None
