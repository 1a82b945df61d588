"""`python -m heliograph plugins`: the installed plugins and their health, and a page for each."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, cleandoc, formatannotation, signature
from shutil import get_terminal_size
from textwrap import dedent, wrap
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from ...events.checks import known_names, printable
from ...plugins.discovery import NOT_INSTALLED, Discovered, describe_failure, discover, find
from ...plugins.entry import make_entry
from ...plugins.first_party import DISTRIBUTIONS
from ...plugins.marks import marked_methods
from ..system.extras import printable_lines, version

NOT_IMPORTED = "not imported"
CHECK = "`python -m heliograph plugins --check` imports them."
WIDTH, INDENT = 100, " " * 8
STARS: Mapping[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
HEADS = frozenset({"Args:", "Attributes:", "Raises:", "Returns:", "Yields:", "Note:", "Example:", "Examples:"})


def plugins(arguments: Sequence[str]) -> int:
    """List the installed plugins and what they do, or show the options of one."""
    parser = argparse.ArgumentParser(
        prog="heliograph plugins",
        description="Exit status 1: with --check, a plugin is broken; or heliograph itself is not installed. "
        "2: there is no such plugin, or it cannot be imported.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of one plugin or its class: show its options")
    parser.add_argument("-v", "--verbose", action="store_true", help="with package, version, class and events")
    parser.add_argument("--check", action="store_true", help="import those of other packages, too")
    options = parser.parse_args(arguments)
    if options.name is None:
        return _list_plugins(verbose=options.verbose, check=options.check)
    try:
        if options.verbose or options.check:
            raise ValueError(f"-v and --check are for the list of all plugins: leave {options.name} or these out.")
        print(plugin_page(options.name))
    except (ValueError, LookupError, ImportError) as error:
        print(f"heliograph plugins: {error}", file=sys.stderr)
        return 2
    return 0


def _list_plugins(*, verbose: bool, check: bool) -> int:
    found = discover()
    counts = Counter(each.name for each in found)
    states = [_state(each, check=check, is_twin=counts[each.name] > 1) for each in found]
    if verbose:
        print(plugin_details(found, states))
    else:
        print(plugin_list(found, states, get_terminal_size().columns if sys.stdout.isatty() else None))
    if not any(each.package == "heliograph" for each in found):
        print(f"heliograph plugins: {NOT_INSTALLED}", file=sys.stderr)
        return 1
    return int(check and any(state.word == "broken" for state in states))


def plugin_list(found: Sequence[Discovered], states: Sequence[State], width: int | None) -> str:
    """Return a line for each installed plugin, with what it does or what is wrong with it; others' in a second table.

    Args:
        found: the plugins.
        states: what is known of each.
        width: of the terminal, to which long lines are cut; None for lines in full.
    """
    pairs = list(zip(found, states, strict=True))
    own = [
        (each.name, state.what if state.word == "available" else _health(state))
        for each, state in pairs
        if each.package in DISTRIBUTIONS
    ]
    lines = _table([("NAME", "WHAT IT DOES"), *own], width)
    others = [
        (f"{each.package}:{each.name}", each.version, _health(state))
        for each, state in pairs
        if each.package not in DISTRIBUTIONS
    ]
    if others:
        lines += ["", *_table([("OF OTHER PACKAGES", "VERSION", "HEALTH"), *others], width)]
    if any(state.word == NOT_IMPORTED for state in states):
        lines += ["", CHECK]
    return "\n".join(lines)


def plugin_details(found: Sequence[Discovered], states: Sequence[State]) -> str:
    """Return what is known of every installed plugin: package, version, state, class, what it does, events."""
    lines = []
    for each, state in zip(found, states, strict=True):
        lines.append(printable(f"{each.name} (package {each.package} {each.version}, {state.word})"))
        events = [f"events: {', '.join(state.events)}"] if state.events else []
        for text in (state.what, f"class: {each.target}", *events):
            lines += indented(printable(text))
    return "\n".join(lines)


def indented(text: str) -> list[str]:
    """Return a text as lines of at most 100 characters, indented."""
    return wrap(text, 100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _health(state: State) -> str:
    return f"{state.word}: {state.what}" if state.what else state.word


def _table(rows: Sequence[tuple[str, ...]], width: int | None) -> list[str]:
    """Return aligned rows, the last column as long as it is, each cut to the width."""
    shown = [tuple(map(printable, row)) for row in rows]
    columns = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join([*map(str.ljust, row[:-1], columns), row[-1]]) for row in shown]
    return [line if width is None or len(line) <= width else f"{line[: width - 3].rstrip()}..." for line in lines]


@dataclass(frozen=True, slots=True)
class State:
    """What an import has shown.

    Attributes:
        word: `available`, `broken`, `switched off` or, where it was not looked at, `not imported`.
        what: what the plugin does, in a sentence; or what is wrong with it.
        events: those that it handles.
    """

    word: str
    what: str
    events: tuple[str, ...] = ()


def _state(plugin: Discovered, *, check: bool, is_twin: bool) -> State:
    is_ours, distribution = plugin.package in DISTRIBUTIONS, plugin.entry_point.dist
    if plugin.switched_off:
        state = State("switched off", "not imported: HELIOGRAPH_PLUGINS names it")
    elif not is_ours and (text := _misfit(plugin, version())):
        state = State("broken", text)
    elif is_ours or check:
        state = state_of(plugin)
    else:
        metadata = None if distribution is None else distribution.metadata
        state = State(NOT_IMPORTED, metadata["Summary"] if metadata is not None and "Summary" in metadata else "")
    if is_ours or not is_twin:
        return state
    twin = f"another package has this name, too: load it as {plugin.package}:{plugin.name}"
    return replace(state, what=f"{state.what} ({twin})" if state.what else twin)


def _misfit(plugin: Discovered, present: str) -> str:
    """Return which heliograph the package needs, where it is not this one; empty where this one will do."""
    distribution = plugin.entry_point.dist
    for text in (distribution.requires if distribution is not None else None) or ():
        try:
            needed, own = Requirement(text), Version(present)
        except (InvalidRequirement, InvalidVersion):  # it says nothing that could be compared
            continue
        applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if needed.name.lower() == "heliograph" and applies and not needed.specifier.contains(own, prereleases=True):
            return f"it needs heliograph{needed.specifier}, and this is {present}"
    return ""


def state_of(plugin: Discovered) -> State:
    """Import a plugin; return whether that works, and what the plugin does or what is wrong with it."""
    try:
        loaded = plugin.load()
    except ImportError as error:
        return State("broken", str(error) if error.__cause__ is None else describe_failure(error.__cause__))
    if isinstance(loaded, type) and (misfit := _unfit_class(loaded)):
        return State("broken", misfit)
    marks = marked_methods(loaded) if isinstance(loaded, type) else ()
    what = inspect.cleandoc(loaded.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    return State("available", what, tuple(sorted({event.name for _, mark in marks for event in mark.events})))


def _unfit_class(kind: Any) -> str:
    """Return why objects of a class could not be registered, as far as that is seen without making one."""
    try:
        blank = kind.__new__(kind)
    except TypeError:  # it takes arguments
        return ""
    try:
        make_entry(blank)
    except AttributeError:  # its constructor sets what it declares
        return ""
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def plugin_page(name: str) -> str:
    """Return what is to know of one plugin, which is imported for it.

    Args:
        name: of its entry point, as for `load`, or of its class.

    Raises:
        LookupError: there is none, or several are meant; says the nearest.
        ImportError: it cannot be imported.
    """
    found = find_plugin(name)
    made_by = found.load()
    off = ", switched off" * found.switched_off
    parts = [f"{found.name} (package {found.package} {found.version}{off})", description(made_by)]
    options = _options(made_by)
    if options:
        texts = argument_texts(made_by)
        parts.append("\n".join(["Options:", *(_option(each, texts.get(each.name, "")) for each in options)]))
    parts.append("\n".join(_facts(found, made_by, options)))
    return printable_lines("\n\n".join(part for part in parts if part))


def find_plugin(name: str) -> Discovered:
    """Return the installed plugin of that name, or whose class has it.

    Raises:
        LookupError: there is none, or several are meant; says the nearest.
    """
    installed = discover()
    classes = {f"{each.package}:{each.name}": each.entry_point.attr for each in installed}
    matches = [each for each, called in classes.items() if called == name]
    if any(each.name == name for each in installed) or not name[:1].isupper():
        return find(name)
    if not matches:
        raise LookupError(f"No installed plugin is of a class {name!r}.{known_names(name, set(classes.values()))}")
    if len(matches) > 1:
        raise LookupError(f"Several installed plugins are of a class {name!r}: say which, one of {', '.join(matches)}.")
    return find(matches[0])


def _options(made_by: Callable[..., Any]) -> list[Parameter]:
    try:
        return list(signature(made_by).parameters.values())
    except (TypeError, ValueError):  # one in C may have none
        return []


def _option(option: Parameter, text: str) -> str:
    kind = option.annotation if isinstance(option.annotation, str) else formatannotation(option.annotation)
    typed = "" if option.annotation is Parameter.empty else f": {kind}"
    default = " (required)" if _is_required(option) else ""
    if option.default is not Parameter.empty:
        default = f" = {option.default!r}"
    head = f"    {STARS.get(option.kind, '')}{option.name}{typed}{default}"
    return "\n".join(
        [head, *wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)]
    )


def _is_required(option: Parameter) -> bool:
    return option.default is Parameter.empty and option.kind not in STARS


def _facts(found: Discovered, made_by: Callable[..., Any], options: Iterable[Parameter]) -> list[str]:
    """Return lines: the events, what it declares, the class, how to load it."""
    words: dict[str, Any] = {}
    if isinstance(made_by, type):
        words["Events"] = sorted({event.name for _, mark in marked_methods(made_by) for event in mark.events})
    for head, attribute in (("Asks for", "asks"), ("Needs", "needs"), ("Exclusive", "exclusive")):
        words[head] = getattr(made_by, attribute, ())
    given = "".join(f", {each.name}=..." for each in options if _is_required(each))
    lines = [
        *(f"{head}: {', '.join(each)}" for head, each in words.items() if isinstance(each, Sequence) and each),
        f"Class: {found.target}",
        f"In a program: trainer.plugins.load({found.name!r}{given})",
    ]
    return [part for line in lines for part in wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)]


def description(made_by: Callable[..., Any]) -> str:
    """Return the docstring of a class or function without its sections."""
    lines = _sections(made_by.__doc__ or "").get("", ())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def argument_texts(made_by: Callable[..., Any]) -> dict[str, str]:
    """Return what the sections `Args:` say of each argument, those of a class before those of its bases."""
    texts: dict[str, str] = {}
    for docstring in _docstrings(made_by):
        texts |= _argument_texts(_sections(docstring).get("Args:", ()))
    return texts


def _docstrings(made_by: Callable[..., Any]) -> list[str]:
    """Return the docstrings that may describe the arguments, a class's own last."""
    if not isinstance(made_by, type):
        return [made_by.__doc__ or ""]
    kinds: Sequence[Any] = made_by.__mro__[::-1]
    return [each.__doc__ or "" for kind in kinds for each in (kind, kind.__init__)]


def _sections(docstring: str) -> dict[str, list[str]]:
    """Return the lines under each head; the text itself is under no head."""
    sections, head = dict[str, list[str]](), ""
    for line in cleandoc(docstring).splitlines():
        if line in HEADS:
            head = line
            continue
        if line[:1].strip():
            head = ""
        sections.setdefault(head, []).append(line)
    return sections


def _argument_texts(lines: Iterable[str]) -> dict[str, str]:
    name, texts = "", dict[str, str]()
    for line in dedent("\n".join(lines)).splitlines():
        text = line
        if line[:1].strip():
            name, _, text = line.partition(":")
            name = name.partition("(")[0].strip("* ")
        texts[name] = f"{texts.get(name, '')} {text.strip()}".strip()
    return texts
