"""Turns errors of jsonargparse into one sentence: the key, the value, and what is allowed."""

from __future__ import annotations

import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from heliograph.plugins import discover
from heliograph.spi import is_first_party, known_names, with_article

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    Words = Callable[[re.Match[str]], str]

KEYS = re.compile(r'Parser key "([\w.]+)"')
UNION = re.compile(
    r"Does not validate against any of the Union subtypes\n( *)Subtypes: .*\n\1Errors:\n((?:\1  .*\n)+)"
    r"\1Given value type: .*\n\1Given value: (.*)"
)
WRONG_KIND = re.compile(
    r"(?:.*: )?(?:Expected an? |Not a valid subclass|Dict must include a class_path|Unexpected import path)"
)
INNER, OUTER = re.compile(r"given class_path '([\w.]+)'"), re.compile(r"class_path='([\w.]+)'")
OPTION = re.compile(r"NestedArg\(key='([\w.]+)', val='?(.*?)'?\)")
CLASS_ONLY = re.compile(r"Namespace\(class_path=('[\w.]+')\)")
SPEC = re.compile(r"(?:Namespace\(class_path=|\{'class_path': )'([^']+)'.*")


def innermost(text: str) -> str:
    # Of a value with several allowed types, keep the reason for the type that was probably intended.
    while match := UNION.search(text):
        indent, reasons, value = match.groups()
        alternatives = re.split(rf"^{indent}  - ", reasons, flags=re.MULTILINE)[1:]
        candidates = [reason.rstrip() for reason in alternatives if not WRONG_KIND.match(reason)]
        if not candidates:
            break
        reason = max(candidates, key=lambda reason: reason.count("Parser key"))  # the most deeply nested one
        text = f"{text[: match.start()]}{reason}. Got value: {value}{text[match.end() :]}"
    return text


def key_of(text: str) -> str:
    path = ""
    for key in dict.fromkeys(KEYS.findall(text)):
        path = key if not path or key.startswith(f"{path}.") else f"{path}.{key}"
    return path


def class_at(match: re.Match[str]) -> str | None:
    # jsonargparse names an inner class before the match, and an outer class after it.
    before, after = INNER.findall(match.string, 0, match.start()), OUTER.findall(match.string, match.end())
    return before[-1] if before else after[0] if after else None


def shown(value: str) -> str:
    value = OPTION.sub(r"only its option \1=\2", value)
    if spec := SPEC.fullmatch(value):
        return spec[1]
    value = CLASS_ONLY.sub(r"\1", value)
    if value.startswith("Namespace("):
        return f"only its options {value.removeprefix('Namespace(').removesuffix(')')}"
    return {"None": "null", "": "''"}.get(value, value)


REFUSALS = (TypeError, ValueError, LookupError, ImportError, FileNotFoundError)
UNKNOWN = re.compile(r"option '([\w.]+)'(?: is not accepted)?|arguments: (--[\w.+-]+)", re.IGNORECASE)
SUBTYPES = re.compile(r"Subtypes: \[(.+)\]$", re.MULTILINE)
GIVEN = re.compile(r"Given value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: (.*?))?(?:\. Got value: .*)?$", re.MULTILINE)
NESTED = r"\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\]"  # nested brackets
OBJECT = re.compile(r"(?:collections\.abc\.|typing\.)?Callable" + NESTED)
NO_PATH = (
    "Dict must include a class_path and optionally init_args, but got|Expected an import path or a subclass spec, but "
    "got|Expected a dot import path string:|Unexpected import path format:"
)
NO_SUBCLASS = r"(?:Import path|Expected) '?([\w.]+)'? (?:does not correspond to|to be) a subclass of (?:<class ')?(\w+)"
CLASS, NAME = re.compile(r"<class '(?:\w+\.)*(\w+)'>"), r"\1"
MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=\w)")
HINT = r"(?: Did you mean '\w+'\?| It is in heliograph-\w+: (?:from \w+ import \w+|import \w+|pip install \S+))?"
PLACES = (
    "heliograph",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torch.nn",
    "torch.nn.functional",
)  # searched for short names


class ConfigurationError(Exception):
    """A configuration is invalid; the command prints the message and exits with status 2."""


def is_refusal(error: BaseException) -> bool:
    # True for an error that Heliograph's own checks raise, not user code.
    last = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame
    return isinstance(error, REFUSALS) and last is not None and is_first_party(last.f_globals["__name__"])


def sentence(error: BaseException, parser: ArgumentParser) -> str:
    text = innermost(str(error))
    keys = key_of(text)
    where = f"{keys}: " if keys else ""
    if match := UNKNOWN.search(text):
        return _unknown(match, keys, parser)
    if SUBTYPES.search(text) and (match := EXPECTED.search(text)):
        return where + _wrong_type(match)
    for pattern, words in SENTENCES.items():
        if match := re.search(pattern, text):
            return where + words(match)
    if keys and (match := EXPECTED.search(text)):
        return where + _wrong_type(match)
    return " ".join(text.split())


def _unknown(match: re.Match[str], keys: str, parser: ArgumentParser) -> str:
    name = next(filter(None, match.groups())).removeprefix("--").rstrip("+")
    if group := re.search(r"Group '(\w+)' does not accept", match.string):
        name = f"{group[1]}.{name}"
    if keys and (path := class_at(match)):
        return f"{keys}: {_no_argument(path, name, parser)}"
    hidden = ("help", "print_", "config")
    return _no_key(name, {action.dest for action in parser._actions if not action.dest.startswith(hidden)})


def _no_argument(path: str, name: str, parser: ArgumentParser) -> str:
    first = name.partition(".")[0]
    if first == "class_path":
        return "arguments of a class must be under init_args, next to class_path."
    if first != name and first in sys.modules:
        return f"arguments of {name} must be a mapping: {{{name}: {{option: value}}}}."
    options = type(parser)().add_argument_group()
    module, _, attribute = path.rpartition(".")
    factory: Callable[..., object] = getattr(import_module(module), attribute)
    add = options.add_class_arguments if isinstance(factory, type) else options.add_function_arguments
    allowed = set(add(factory))
    if first[0].isupper() and first.lower() not in allowed and not any(option[0].isupper() for option in allowed):
        return f"{first} is not a class path.{_suggest_path(first)}"
    name = name if first in allowed else first  # a nested value was set by its full name
    return f"{path} has no option {name!r}.{known_names(name, allowed - {name})}"


def _no_key(name: str, keys: set[str]) -> str:
    groups = keys | {key.rpartition(".")[0] for key in keys}
    path, _, remainder = name.partition(".")
    while path in groups and remainder:
        part, _, remainder = remainder.partition(".")
        path = f"{path}.{part}"
    group, _, last = path.rpartition(".")
    if last in {plugin.name for plugin in discover()}:
        return f"Unknown key {path!r}: plugins belong under trainer.plugins, as trainer.plugins.{last}."
    siblings = {key for key in groups if key and key.rpartition(".")[0] == group and not key.endswith(".help")}
    return f"Unknown key {path!r}.{known_names(path, siblings)}"


def _no_module(match: re.Match[str]) -> str:
    return f"no module named {match[1]!r}.{_nearest(match[1], _modules(match[1]))}"


def _no_attribute(match: re.Match[str]) -> str:
    return f"module {match[1]!r} has no {match[2]!r}.{_nearest(match[2], dir(import_module(match[1])))}"


def _returns(match: re.Match[str]) -> str:
    return f"the function {match[1]} needs the return annotation {CLASS.sub(NAME, match[2])}."


def _no_subclass(match: re.Match[str]) -> str:
    return f"{match[1]} is neither {with_article(match[2])} nor a function whose return annotation is one."


def _no_path(match: re.Match[str]) -> str:
    value = shown(match[1])
    return f"must be a class path, got {value}.{_suggest_path(value)}"


def _suggest_path(value: str) -> str:
    if value.startswith(("{'class_path'", "{class_path")):
        return " Put arguments under init_args, next to it."
    match = re.match(r"(?:\{'?)?([A-Za-z]\w*)(?:'?:|$)", value)
    if match is None or match[1] in ("null", "init_args"):
        return ""
    for module in map(import_module, PLACES):
        for name in dir(module):
            if name.lower() == match[1].lower() and callable(getattr(module, name)):
                return f" Did you mean '{module.__name__}.{name}'?"
    return f" A class path starts with a module, for example my_module.{match[1]}."


# Messages of jsonargparse, and their replacements.
SENTENCES: dict[str, Words] = {
    r"No module named '([\w.]+)'": _no_module,
    r"module '([\w.]+)' has no attribute '(\w+)'": _no_attribute,
    rf"heliograph has no '\w+'\.{HINT}": lambda match: match[0],
    r"Not of type \w+: (.+?)(?:\. Got value|$)": lambda match: shown(match[1]),
    r"arguments are required: (.+?)(?:\. Got|$)": lambda match: f"{class_at(match) or 'it'} needs {match[1]}.",
    r"Expected '([\w.]+)' to be a function that returns (.+?)\.": _returns,
    NO_SUBCLASS: _no_subclass,
    r"Unexpected import object <?(.+?)(?: from .+?)?>?(?:\. Got|$)": _no_path,
    r"Unable to load config '(.+?)'\s": lambda match: f"must be a mapping of keys, got {match[1]}.",
    r"Key must be a string, got: (.+?)\.(?: |\.|$)": lambda match: f"keys must be words, got {shown(match[1])}.",
    rf"(?:{NO_PATH}) (.+?)(?:\. Got|$)": _no_path,
    r"argument (--[\w.+-]+): expected one argument": lambda match: f"{match[1]} needs a value: {match[1]}=VALUE.",
    r"unrecognized arguments: .+": lambda match: f"{match[0]}: options have the form --KEY=VALUE, files precede them.",
}


def _wrong_type(match: re.Match[str]) -> str:
    subtypes, values = SUBTYPES.findall(match.string), GIVEN.findall(match.string)
    kinds = OBJECT.sub("a class path", subtypes[-1] if subtypes else match[1])
    kinds = MODULES.sub("", CLASS.sub(NAME, kinds)).replace("NoneType", "null")
    if subtypes:
        kinds = " or ".join(re.findall(rf"(?:[^,\[]|{NESTED})+", kinds)).replace("  ", " ")
    value = shown(values[0] if values else match[2])
    hint = _nearest(value, re.findall(r"'([^']*)'", kinds)) or ("class path" in kinds and _suggest_path(value)) or ""
    return f"must be {kinds}, got {value}.{hint}"


def _modules(name: str) -> set[str]:
    package, _, _ = name.rpartition(".")
    if not package:
        return {module.name for module in pkgutil.iter_modules([*sys.path, "."])}
    parent = sys.modules.get(package)
    return {f"{package}.{module.name}" for module in pkgutil.iter_modules(getattr(parent, "__path__", []))}


def _nearest(name: str, names: Iterable[str]) -> str:
    return known_names(name, names).partition(" Known:")[0]
