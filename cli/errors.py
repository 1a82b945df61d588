"""What is wrong with a configuration, in one sentence: the key, what was given, what is allowed."""

from __future__ import annotations

import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from ..events.checks import known_names

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    Words = Callable[[re.Match[str]], str]

REFUSALS = (TypeError, ValueError, LookupError, ImportError)
KEYS = re.compile(r'Parser key "([\w.]+)"')
UNKNOWN = re.compile(r"option '([\w.]+)'(?: is not accepted)?|arguments: (--[\w.+-]+)", re.IGNORECASE)
INNER, OUTER = re.compile(r"given class_path '([\w.]+)'"), re.compile(r"class_path='([\w.]+)'")
SUBTYPES = re.compile(r"Subtypes: \[(.+)\]$", re.MULTILINE)
GIVEN = re.compile(r"Given value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: (.*?))?(?:\. Got value: .*)?$", re.MULTILINE)
OBJECT = re.compile(r"(?:collections\.abc\.)?Callable\[\[[^\]]*\]*, [\w.]+\]")
CLASS, NAME = re.compile(r"<class '(?:\w+\.)*(\w+)'>"), r"\1"
MODULES = re.compile(r"typing\.|collections\.abc\.")


class ConfigurationError(Exception):
    """Something in a configuration is wrong: the command ends with status 2, and says what."""


def is_refusal(error: BaseException) -> bool:
    """Return whether an error is what a check of ours raises, and not one of the user's code."""
    last = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame
    return isinstance(error, REFUSALS) and last is not None and last.f_globals["__name__"].startswith("heliograph.")


def sentence(error: BaseException, parser: ArgumentParser) -> str:
    """Return what an error of jsonargparse says, with the nearest name.

    Args:
        error: of jsonargparse, whose text names keys and classes.
        parser: which raised it.
    """
    text = str(error)
    keys = ".".join(dict.fromkeys(KEYS.findall(text)))
    where = f"{keys}: " if keys else ""
    if found := UNKNOWN.search(text):
        return _unknown(found, keys, parser)
    for pattern, words in SENTENCES.items():
        if found := re.search(pattern, text):
            return where + words(found)
    if keys and (found := EXPECTED.search(text)):
        return where + _wrong_type(found)
    return " ".join(text.split())


def _unknown(found: re.Match[str], keys: str, parser: ArgumentParser) -> str:
    """Return the sentence for a key that there is not."""
    name = next(filter(None, found.groups())).removeprefix("--").rstrip("+")
    if keys and (path := _class_at(found)):
        name = name.partition(".")[0]  # a value below it was set by its full name
        options = type(parser)().add_argument_group()
        given = _imported(path)
        add = options.add_class_arguments if isinstance(given, type) else options.add_function_arguments
        return f"{keys}: {path} has no option {name!r}.{known_names(name, add(given))}"
    if group := re.search(r"Group '(\w+)' does not accept", found.string):
        name = f"{group[1]}.{name}"
    known = {each.dest for each in parser._actions if each.dest.count(".") == name.count(".")}
    known = {each for each in known if not each.startswith(("help", "print_", "config")) and not each.endswith(".help")}
    return f"There is no key {name!r}.{known_names(name, known)}"


def _class_at(found: re.Match[str]) -> str | None:
    """Return the class path that a message is about: jsonargparse names an inner class before, an outer one after."""
    before, after = INNER.findall(found.string, 0, found.start()), OUTER.findall(found.string, found.end())
    return before[-1] if before else after[0] if after else None


def _imported(path: str) -> Callable[..., object]:
    module, _, name = path.rpartition(".")
    found: Callable[..., object] = getattr(import_module(module), name)
    return found


def _no_module(found: re.Match[str]) -> str:
    return f"there is no module {found[1]!r}.{_nearest(found[1], _modules(found[1]))}"


def _no_attribute(found: re.Match[str]) -> str:
    return f"module {found[1]!r} has no {found[2]!r}.{_nearest(found[2], dir(import_module(found[1])))}"


def _required(found: re.Match[str]) -> str:
    return f"{_class_at(found) or 'it'} needs {found[1]}."


def _returns(found: re.Match[str]) -> str:
    return f"the function {found[1]} must say in its annotation that it returns {CLASS.sub(NAME, found[2])}."


def _no_subclass(found: re.Match[str]) -> str:
    return f"{found[1]} is not a {found[2]}, nor a function that says in its annotation that it returns one."


# What jsonargparse says, and how it is said here.
SENTENCES: dict[str, Words] = {
    r"No module named '([\w.]+)'": _no_module,
    r"module '([\w.]+)' has no attribute '(\w+)'": _no_attribute,
    r"heliograph has no '\w+'\.(?: Did you mean '\w+'\?)?": lambda found: found[0],
    r"Not of type \w+: (.+)": lambda found: found[1],
    r"following arguments are required: (.+?)(?:\. Got|$)": _required,
    r"Expected '([\w.]+)' to be a function that returns (.+?)\.": _returns,
    r"Import path ([\w.]+) does not correspond to a subclass of (\w+)": _no_subclass,
    r"File does not exist: (.+)": lambda found: f"there is no file {found[1]}.",
}


def _wrong_type(found: re.Match[str]) -> str:
    """Return the sentence for a value of a wrong type."""
    subtypes, given = SUBTYPES.findall(found.string), GIVEN.findall(found.string)
    kinds = subtypes[-1] if subtypes else found[1]
    kinds = MODULES.sub("", CLASS.sub(NAME, OBJECT.sub("a class path", kinds))).replace("NoneType", "null")
    if subtypes:
        kinds = re.sub(r", (?![^\[]*\])", " or ", kinds)
    value = given[0] if given else found[2]
    choices = re.findall(r"'([^']*)'", kinds)
    return f"takes {kinds}, got {value}.{_nearest(value, choices)}"


def _modules(given: str) -> set[str]:
    """Return the modules beside the one that there is not."""
    package, _, _ = given.rpartition(".")
    if not package:
        return {each.name for each in pkgutil.iter_modules([*sys.path, "."])}
    parent = sys.modules.get(package)
    return {f"{package}.{each.name}" for each in pkgutil.iter_modules(getattr(parent, "__path__", []))}


def _nearest(given: str, names: Iterable[str]) -> str:
    """Return the nearest name as a question."""
    return known_names(given, names).partition(" Known:")[0]
