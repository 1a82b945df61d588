"""The short forms of a configuration, written out as jsonargparse reads them: with `class_path` and `init_args`."""

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
WRITTEN_OUT = (*OBJECTS, TRAINER, PLUGINS, ENGINE, f"{PLUGINS}.help")
SPEC = frozenset({"class_path", "init_args", "dict_kwargs"})
Load = Callable[[str], Any]


def full_forms(load: Load) -> Load:
    """Return a loader of texts whose values are written out, of files and of the values of options."""

    def loader(text: str) -> Any:
        return _whole(load(text))

    return loader


def full_arguments(arguments: Sequence[str], load: Load) -> list[str]:
    """Return a command line in which the values of options that take objects are written out, names included.

    Raises:
        ConfigurationError: an option has no value, or what are the arguments of a plugin is not a mapping.
        LookupError: no installed plugin has a name that is given.
    """
    full, words = list[str](), iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        key = option.removeprefix("--")
        if not option.startswith("--") or key.removesuffix("+") not in WRITTEN_OUT:
            full.append(word)
            continue
        value = value if equals else next(words, "")
        if not value:
            raise ConfigurationError(f"{option} needs a value: {option}=VALUE.")
        if key == f"{PLUGINS}.help":
            full += [option, path_of(value)]
        else:
            whole = _of_key(key.removesuffix("+"), load(value))
            full.append(f"{option}={whole if isinstance(whole, str) else json.dumps(whole)}")
    return full


def path_of(name: str, group: str = "heliograph.plugins") -> str:
    """Return the class path of an entry point, or of a public name of this package; a class path as it is.

    Raises:
        LookupError: there is no such entry point; names the nearest.
    """
    if "." in name:
        return name
    if name in dir(heliograph):
        return f"heliograph.{name}"
    return find(name, group).target.replace(":", ".")


def _whole(value: Any) -> Any:
    """Return a whole configuration, or a value in it, written out."""
    if isinstance(value, dict) and not SPEC & value.keys():
        value = {key: _of_key(key, each) if key in OBJECTS else each for key, each in value.items()}
        if TRAINER in value:
            value[TRAINER] = _of_key(TRAINER, value[TRAINER])
    return _nested(value)


def _of_key(key: str, value: Any) -> Any:
    """Return the value of a key whose value is an object, or several of them."""
    if key == TRAINER and (value is None or isinstance(value, dict)):
        return {name: _of_key(f"{TRAINER}.{name}", each) for name, each in (value or {}).items()}
    if key == PLUGINS:
        return _plugins(value) if isinstance(value, list | dict | str) else value
    if key == ENGINE:
        return _named(value, ENGINES) if isinstance(value, dict) else value
    if isinstance(value, str) and key != "optimizer":  # a function makes the object, or it is a class
        return {"class_path": value} if "." in value else value
    if key in OBJECTS and isinstance(value, dict) and not SPEC & value.keys() and not _is_short(value):
        return {name: _of_key(key, each) for name, each in value.items()}
    return _nested(value)


def _plugins(value: Any) -> list[Any]:
    """Return a list of plugins, each with its class path: of a list, of a mapping of names, or of one name."""
    if isinstance(value, list):
        return [each for item in value for each in _plugins(item)]
    if isinstance(value, str):
        return [{"class_path": path_of(value)}]
    if not isinstance(value, dict):
        return [value]
    if "class_path" in value:
        return [_named({value["class_path"]: value.get("init_args")}) if "dict_kwargs" not in value else value]
    return [_named({name: arguments}) for name, arguments in value.items()]


def _named(value: dict[str, Any], group: str = "heliograph.plugins") -> Any:
    """Return `{name: arguments}` with the class path of the name."""
    if SPEC & value.keys() or len(value) != 1:
        return value
    ((name, arguments),) = value.items()
    if arguments is not None and not isinstance(arguments, dict):
        raise ConfigurationError(
            f"{name}: its options are a mapping, {{{name}: {{option: value}}}}; got {arguments!r}."
        )
    return _spec(path_of(str(name), group), arguments)


def _nested(value: Any) -> Any:
    """Return a value in which every `{some.class.path: arguments}` is written out."""
    if isinstance(value, list):
        return [_nested(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _is_short(value):
        ((path, arguments),) = value.items()
        return _spec(path, arguments)
    return {key: _nested(each) for key, each in value.items()}


def _is_short(value: dict[str, Any]) -> bool:
    """Return whether a mapping is `{some.class.path: arguments}`."""
    if len(value) != 1:
        return False
    ((path, arguments),) = value.items()
    is_path = isinstance(path, str) and "." in path and all(part.isidentifier() for part in path.split("."))
    return is_path and (arguments is None or isinstance(arguments, dict))


def _spec(path: str, arguments: Any) -> dict[str, Any]:
    """Return a class path with its arguments; those that a `**kwargs` takes are kept apart, as jsonargparse has it."""
    if not arguments:
        return {"class_path": path}
    arguments = _nested(arguments)
    key = "dict_kwargs" if isinstance(arguments, dict) and _takes_any(path) else "init_args"
    return {"class_path": path, key: arguments}


def _takes_any(path: str) -> bool:
    """Return whether a class or function takes keywords that its signature does not name, each of any kind."""
    module, _, name = path.rpartition(".")
    try:
        parameters = signature(getattr(import_module(module), name)).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError):  # the parser says what is wrong with it
        return False
    return any(each.kind is Parameter.VAR_KEYWORD and str(each.annotation) in ANY for each in parameters)


ANY = ("Any", "typing.Any", str(Parameter.empty))
