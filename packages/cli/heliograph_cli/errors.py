"""What is wrong with a configuration, in one sentence: the key, what was given, what is allowed."""

from __future__ import annotations

import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from heliograph.plugins import discover
from heliograph.spi import is_first_party, known_names

from .reasons import class_at, innermost, key_of, shown

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    Words = Callable[[re.Match[str]], str]

REFUSALS = (TypeError, ValueError, LookupError, ImportError, FileNotFoundError)
UNKNOWN = re.compile(r"option '([\w.]+)'(?: is not accepted)?|arguments: (--[\w.+-]+)", re.IGNORECASE)
SUBTYPES = re.compile(r"Subtypes: \[(.+)\]$", re.MULTILINE)
GIVEN = re.compile(r"Given value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: (.*?))?(?:\. Got value: .*)?$", re.MULTILINE)
NESTED = r"\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\]"  # brackets with brackets in them
OBJECT = re.compile(r"(?:collections\.abc\.|typing\.)?Callable" + NESTED)
NO_PATH = (
    "Dict must include a class_path and optionally init_args, but got|Expected an import path or a subclass spec, but "
    "got|Expected a dot import path string:|Unexpected import path format:"
)
NO_SUBCLASS = r"(?:Import path|Expected) '?([\w.]+)'? (?:does not correspond to|to be) a subclass of (?:<class ')?(\w+)"
CLASS, NAME = re.compile(r"<class '(?:\w+\.)*(\w+)'>"), r"\1"
MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=\w)")
HINT = r"(?: Did you mean '\w+'\?| It is in heliograph-\w+: (?:from \w+ import \w+|import \w+|pip install \S+))?"
PLACES = ("heliograph", "torch.optim", "torch.optim.lr_scheduler", "torch.nn", "torch.nn.functional")  # of short names


class ConfigurationError(Exception):
    """Something in a configuration is wrong: the command ends with status 2, and says what."""


def is_refusal(error: BaseException) -> bool:
    """Return whether an error is what a check of ours raises, and not one of the user's code."""
    last = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame
    return isinstance(error, REFUSALS) and last is not None and is_first_party(last.f_globals["__name__"])


def sentence(error: BaseException, parser: ArgumentParser) -> str:
    """Return what an error of jsonargparse says, with the nearest name.

    Args:
        error: of jsonargparse, whose text names keys and classes.
        parser: which raised it.
    """
    text = innermost(str(error))
    keys = key_of(text)
    where = f"{keys}: " if keys else ""
    if found := UNKNOWN.search(text):
        return _unknown(found, keys, parser)
    if SUBTYPES.search(text) and (found := EXPECTED.search(text)):
        return where + _wrong_type(found)
    for pattern, words in SENTENCES.items():
        if found := re.search(pattern, text):
            return where + words(found)
    if keys and (found := EXPECTED.search(text)):
        return where + _wrong_type(found)
    return " ".join(text.split())


def _unknown(found: re.Match[str], keys: str, parser: ArgumentParser) -> str:
    """Return the sentence for a key that there is not."""
    name = next(filter(None, found.groups())).removeprefix("--").rstrip("+")
    if group := re.search(r"Group '(\w+)' does not accept", found.string):
        name = f"{group[1]}.{name}"
    if keys and (path := class_at(found)):
        return f"{keys}: {_no_argument(path, name, parser)}"
    hidden = ("help", "print_", "config")
    return _no_key(name, {each.dest for each in parser._actions if not each.dest.startswith(hidden)})


def _no_argument(path: str, name: str, parser: ArgumentParser) -> str:
    """Return the sentence for an argument that a class or function does not take."""
    first = name.partition(".")[0]
    if first == "class_path":
        return "the arguments of a class are given as init_args beside class_path."
    if first != name and first in sys.modules:
        return f"the arguments of {name} are a mapping, {{{name}: {{option: value}}}}."
    options = type(parser)().add_argument_group()
    given = _imported(path)
    add = options.add_class_arguments if isinstance(given, type) else options.add_function_arguments
    known = set(add(given))
    if first[0].isupper() and first.lower() not in known and not any(each[0].isupper() for each in known):
        return f"{first} is not a class path.{_place(first)}"
    name = name if first in known else first  # a value below it was set by its full name
    return f"{path} has no option {name!r}.{known_names(name, known - {name})}"


def _no_key(name: str, keys: set[str]) -> str:
    """Return the sentence for a key of the configuration itself; of its parts, the first that there is not is wrong."""
    there = keys | {key.rpartition(".")[0] for key in keys}
    whole, _, rest = name.partition(".")
    while whole in there and rest:
        part, _, rest = rest.partition(".")
        whole = f"{whole}.{part}"
    group, _, last = whole.rpartition(".")
    if last in {each.name for each in discover()}:
        return f"There is no key {whole!r}: it is the name of a plugin, which is given as trainer.plugins.{last}."
    beside = {each for each in there if each and each.rpartition(".")[0] == group and not each.endswith(".help")}
    return f"There is no key {whole!r}.{known_names(whole, beside)}"


def _imported(path: str) -> Callable[..., object]:
    module, _, name = path.rpartition(".")
    found: Callable[..., object] = getattr(import_module(module), name)
    return found


def _no_module(found: re.Match[str]) -> str:
    return f"there is no module {found[1]!r}.{_nearest(found[1], _modules(found[1]))}"


def _no_attribute(found: re.Match[str]) -> str:
    return f"module {found[1]!r} has no {found[2]!r}.{_nearest(found[2], dir(import_module(found[1])))}"


def _required(found: re.Match[str]) -> str:
    return f"{class_at(found) or 'it'} needs {found[1]}."


def _returns(found: re.Match[str]) -> str:
    return f"the function {found[1]} must say in its annotation that it returns {CLASS.sub(NAME, found[2])}."


def _no_subclass(found: re.Match[str]) -> str:
    article = "an" if found[2][0] in "AEIOU" else "a"
    return f"{found[1]} is not {article} {found[2]}, nor a function that says in its annotation that it returns one."


def _no_option(found: re.Match[str]) -> str:
    return f"{found[1]} is not an option: options are --KEY=VALUE, and files come before all of them."


def _no_path(found: re.Match[str]) -> str:
    value = shown(found[1])
    return f"takes a class path, got {value}.{_place(value)}"


def _place(given: str) -> str:
    """Return where the class or function is that a value names without its module."""
    if given.startswith(("{'class_path'", "{class_path")):
        return " Arguments are given as init_args beside it."
    found = re.match(r"(?:\{'?)?([A-Za-z]\w*)(?:'?:|$)", given)
    if found is None or found[1] in ("null", "init_args"):
        return ""
    for place in map(import_module, PLACES):
        for name in dir(place):
            if name.lower() == found[1].lower() and callable(getattr(place, name)):
                return f" Did you mean '{place.__name__}.{name}'?"
    return f" A class path begins with a module, as in my_module.{found[1]}."


# What jsonargparse says, and how it is said here.
SENTENCES: dict[str, Words] = {
    r"No module named '([\w.]+)'": _no_module,
    r"module '([\w.]+)' has no attribute '(\w+)'": _no_attribute,
    rf"heliograph has no '\w+'\.{HINT}": lambda found: found[0],
    r"Not of type \w+: (.+?)(?:\. Got value|$)": lambda found: shown(found[1]),
    r"following arguments are required: (.+?)(?:\. Got|$)": _required,
    r"Expected '([\w.]+)' to be a function that returns (.+?)\.": _returns,
    NO_SUBCLASS: _no_subclass,
    r"Unexpected import object <?(.+?)(?: from .+?)?>?(?:\. Got|$)": _no_path,
    r"Unable to load config '(.+?)'\s": lambda found: f"takes a mapping of keys, got {found[1]}.",
    r"Key must be a string, got: (.+?)\.(?: |\.|$)": lambda found: f"keys are words, got {shown(found[1])}.",
    rf"(?:{NO_PATH}) (.+?)(?:\. Got|$)": _no_path,
    r"argument (--[\w.+-]+): expected one argument": lambda found: f"{found[1]} needs a value: {found[1]}=VALUE.",
    r"unrecognized arguments: (.+)": _no_option,
}


def _wrong_type(found: re.Match[str]) -> str:
    """Return the sentence for a value of a wrong type."""
    subtypes, given = SUBTYPES.findall(found.string), GIVEN.findall(found.string)
    kinds = OBJECT.sub("a class path", subtypes[-1] if subtypes else found[1])
    kinds = MODULES.sub("", CLASS.sub(NAME, kinds)).replace("NoneType", "null")
    if subtypes:
        kinds = " or ".join(re.findall(rf"(?:[^,\[]|{NESTED})+", kinds)).replace("  ", " ")
    value = shown(given[0] if given else found[2])
    mend = _nearest(value, re.findall(r"'([^']*)'", kinds)) or ("class path" in kinds and _place(value)) or ""
    return f"takes {kinds}, got {value}.{mend}"


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
