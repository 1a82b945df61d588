"""Expands the short forms of a configuration to `class_path` and `init_args` for jsonargparse."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import heliograph
from heliograph.spi import find

from .errors import ConfigurationError

ENGINES = "heliograph.engines"
PLUGINS = "trainer.plugins"
ENGINE = "trainer.engine"
TRAINER = "trainer"
OBJECTS = ("task", "data", "train", "validation", "test", "predict", "optimizer", "scheduler")
EXPANDED = (*OBJECTS, TRAINER, PLUGINS, ENGINE, f"{PLUGINS}.help")
SPEC = frozenset({"class_path", "init_args", "dict_kwargs"})
Load = Callable[[str], Any]


def full_forms(load: Load) -> Load:
    def loader(text: str) -> Any:
        return _expand_file(load(text))

    return loader


def full_arguments(arguments: Sequence[str], load: Load) -> list[str]:
    full, words = list[str](), iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        key = option.removeprefix("--")
        if not option.startswith("--") or key.removesuffix("+") not in EXPANDED:
            full.append(word)
            continue
        value = value if equals else next(words, "")
        if not value:
            raise ConfigurationError(f"{option} needs a value: {option}=VALUE.")
        if key == f"{PLUGINS}.help":
            full += [option, path_of(value)]
        else:
            expanded = _expand_key(key.removesuffix("+"), load(value))
            full.append(f"{option}={expanded if isinstance(expanded, str) else json.dumps(expanded)}")
    return full


def path_of(name: str, group: str = "heliograph.plugins") -> str:
    if "." in name:
        return name
    if name in dir(heliograph):
        return f"heliograph.{name}"
    return find(name, group).target.replace(":", ".")


def _expand_file(value: Any) -> Any:
    if isinstance(value, dict) and not SPEC & value.keys():
        value = {key: _expand_key(key, item) if key in OBJECTS else item for key, item in value.items()}
        if TRAINER in value:
            value[TRAINER] = _expand_key(TRAINER, value[TRAINER])
    return _expand(value)


def _expand_key(key: str, value: Any) -> Any:
    if key == TRAINER and (value is None or isinstance(value, dict)):
        return {name: _expand_key(f"{TRAINER}.{name}", item) for name, item in (value or {}).items()}
    if key == PLUGINS:
        return _plugins(value) if isinstance(value, list | dict | str) else value
    if key == ENGINE:
        return _expand_entry(value, ENGINES) if isinstance(value, dict) else value
    if isinstance(value, str) and key != "optimizer":  # a class or a function that returns the object
        return {"class_path": value} if "." in value else value
    if key in OBJECTS and isinstance(value, dict) and not SPEC & value.keys() and not _is_short(value):
        return {name: _expand_key(key, item) for name, item in value.items()}
    return _expand(value)


def _plugins(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [plugin for item in value for plugin in _plugins(item)]
    if isinstance(value, str):
        return [{"class_path": path_of(value)}]
    if not isinstance(value, dict):
        return [value]
    if "class_path" in value:
        return [_expand_entry({value["class_path"]: value.get("init_args")}) if "dict_kwargs" not in value else value]
    return [_expand_entry({name: arguments}) for name, arguments in value.items()]


def _expand_entry(value: dict[str, Any], group: str = "heliograph.plugins") -> Any:
    if SPEC & value.keys() or len(value) != 1:
        return value
    ((name, arguments),) = value.items()
    if arguments is not None and not isinstance(arguments, dict):
        raise ConfigurationError(
            f"{name}: options must be a mapping, {{{name}: {{option: value}}}}, got {arguments!r}."
        )
    return _spec(path_of(str(name), group), arguments)


def _expand(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _is_short(value):
        ((path, arguments),) = value.items()
        return _spec(path, arguments)
    return {key: _expand(item) for key, item in value.items()}


def _is_short(value: dict[str, Any]) -> bool:
    if len(value) != 1:
        return False
    ((path, arguments),) = value.items()
    is_path = isinstance(path, str) and "." in path and all(part.isidentifier() for part in path.split("."))
    return is_path and (arguments is None or isinstance(arguments, dict))


def _spec(path: str, arguments: Any) -> dict[str, Any]:
    # jsonargparse takes the arguments of **kwargs separately.
    if not arguments:
        return {"class_path": path}
    arguments = _expand(arguments)
    key = "dict_kwargs" if isinstance(arguments, dict) and _takes_any(path) else "init_args"
    return {"class_path": path, key: arguments}


def _takes_any(path: str) -> bool:
    module, _, name = path.rpartition(".")
    try:
        parameters = signature(getattr(import_module(module), name)).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError):  # the parser reports the error
        return False
    return any(parameter.kind is Parameter.VAR_KEYWORD and str(parameter.annotation) in ANY for parameter in parameters)


ANY = ("Any", "typing.Any", str(Parameter.empty))
