"""What to use or install instead of a missing name or a wrong plugin: a package, or an equivalent."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, getmembers, isfunction, signature
from opcode import opname
from pathlib import Path
from types import FrameType
from typing import Any

from ..events.checks import did_you_mean
from .first_party import BRIDGES

KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

# The section of `hints.toml` for the arguments of a function; any other function is a plugin.
SECTIONS = dict.fromkeys(("validate", "test", "predict"), "evaluation") | dict.fromkeys(
    ("fit", "run", "standard", "Supervised"), "arguments"
)


def missing_name(name: str, names: Iterable[str], caller: FrameType) -> AttributeError | ImportError:
    """Return the error for a name that `heliograph` does not have.

    Args:
        name: the missing name.
        names: the existing names.
        caller: the frame that needs the name. An import statement gets an ImportError, because Python would replace an
            AttributeError and lose its text.
    """
    text = _in_other_module(name) or how_to_import(name) or did_you_mean(name, names).strip()
    if instead := hint(name, "classes"):
        text = f"Use{instead}. {how_to_import(instead.strip())}"
    is_import = opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"
    return (ImportError if is_import else AttributeError)(f"heliograph has no {name!r}. {text}".rstrip())


def _in_other_module(name: str) -> str:
    root = Path(__file__).parents[1]
    for module, file in (("events", "events/__init__.py"), ("tuning", "tuning.py"), ("spi", "spi.pyi")):
        if re.search(rf'\b(as|def) {name}\b|"{name}"', (root / file).read_text(encoding="utf-8")):
            return f"It is in heliograph.{module}: from heliograph.{module} import {name}"
    return ""


def hint(word: str, section: str = "arguments") -> str:
    """Return what replaces a name of another framework, or an empty text."""
    return next((f" {text}" for text, words in hints()[section].items() if word in words.split()), "")


@cache
def hints() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(Path(__file__).with_name("hints.toml").read_text(encoding="utf-8"))


def explain_call(error: TypeError, function: Callable[..., Any], count: int, options: Iterable[str]) -> str:
    """Return what is wrong with the arguments of a call, or "" for another error.

    Args:
        error: the error of the call, with the frame of the caller.
        function: the called function.
        count: the number of positional arguments.
        options: the names of the keyword arguments.
    """
    if error.__traceback__ is None:
        return ""
    parameters = signature(function).parameters
    named = [name for name, parameter in parameters.items() if parameter.kind in KEYWORD and name != "self"]
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    unknown = [word for word in options if word not in named]
    if error.__traceback__.tb_next is not None and not (unknown and "unexpected keyword argument" in str(error)):
        return ""  # raised within the function
    if unknown:
        text = did_you_mean(unknown[0], named) or hint(unknown[0], SECTIONS.get(name, "plugin"))
        return f"{name} has no argument {unknown[0]!r}.{text} Known: {', '.join(named)}."
    by_place = [name for name in parameters if parameters[name].kind is Parameter.POSITIONAL_OR_KEYWORD]
    form = ", ".join(name if name in by_place else f"{name}=..." for name in named)
    return f"{error}.{' Pass the others by name.' * (count > len(by_place))} Arguments: {form or 'none'}."


def check_without_handlers(plugin: object, *, is_plugin: bool, does_more: bool) -> None:
    """Raise TypeError for an object without handlers, unless it is a `Plugin` that has a state or makes requests."""
    kind = type(plugin)
    for name, method in getmembers(kind, isfunction):
        if list(signature(method).parameters)[1:] == ["run", "event"]:
            raise TypeError(
                f"No event calls {kind.__name__}.{name}(run, event): mark it with an event, as in\n"
                f"    @on(EpochEnd)\n"
                f"    def {name}(self, run, event): ..."
            )
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if bridge := next((BRIDGES[package] for package in sorted(packages & BRIDGES.keys())), None):
        install = "pip install ./packages/bridges"
        raise TypeError(f"{kind.__name__} is a callback of another framework: register {bridge} ({install}).")
    if isinstance(plugin, Iterable):
        raise TypeError(f"{kind.__name__} is not a plugin but a collection: pass it without brackets, or unpack it.")
    if is_plugin and does_more:
        return
    form = "an object with methods marked @on, as in\n    @on(EpochEnd)\n    def report(self, run, event): ..."
    needs = "\nA Plugin without handlers needs a state, or declares in asks what functions on the bus request."
    tail = needs if is_plugin else ""
    raise TypeError(f"{plugin!r} is not a plugin: register {form}{tail}")


def how_to_import(name: str) -> str:
    """Return how to import or install a name of a package, or an empty text."""
    package = NAMES.get(name)
    if package is None:
        return ""
    module, package = f"heliograph_{package}", package.partition(".")[0]
    if find_spec(f"heliograph_{package}") is None:
        return how_to_install(package)
    statement = f"import {module}" if name == "ray" else f"from {module} import {name}"
    return f"It is in heliograph-{package}: {statement}"


def how_to_install(package: str) -> str:
    """Return how to install a first-party package."""
    paths = [f"./packages/{name}" for name in (*NEEDS.get(package, ()), package)]
    return f"It is in heliograph-{package}: pip install {' '.join(paths)}"


def _by_name(section: str) -> dict[str, str]:
    return {name: package for package, names in PROVIDED[section].items() for name in names.split()}


PROVIDED: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("packages.toml").read_text(encoding="utf-8")
)
NAMES, COMMANDS, PLUGINS = map(_by_name, ("names", "commands", "plugins"))
NEEDS = {"rules": ("recorder",)}
ENTRY_POINTS = {
    "heliograph.commands": COMMANDS,
    "heliograph.engines": {"accelerate": "bridges"},
    "heliograph.plugins": PLUGINS,
    "heliograph.storage": {"fsspec": "storage"},
}
