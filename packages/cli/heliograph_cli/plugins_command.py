"""`python -m heliograph plugins`: the installed plugins and their health, and a page for each."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, cleandoc, formatannotation, signature
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from docstring_parser import parse
from heliograph import Bus
from heliograph.plugins import Discovered, Plugins, discover, marked_methods
from heliograph.spi import describe_error, find, is_first_party, printable, printable_lines, version
from packaging.requirements import Requirement

NOT_IMPORTED = "not imported"
DECLARATIONS = {"asks": "Asks for", "needs": "Needs", "exclusive": "Exclusive"}
STARS: dict[int, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


def plugins(arguments: Sequence[str]) -> int:
    """List the installed plugins and what they do, or show the options of one."""
    parser = argparse.ArgumentParser(
        prog="heliograph plugins",
        description="Exit status 1: with --check, a plugin is broken. 2: there is no such plugin, or it cannot be "
        "imported.",
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


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a plugin.

    Attributes:
        plugin: its entry point.
        word: `available`, `broken`, `switched off` or `not imported`.
        text: what the plugin does, in a sentence; or what is wrong with it.
        events: those that it handles.
    """

    plugin: Discovered
    word: str
    text: str
    events: Sequence[str] = ()

    @property
    def health(self) -> str:
        """The word and the text."""
        return f"{self.word}: {self.text}" if self.text else self.word


def _list_plugins(*, verbose: bool, check: bool) -> int:
    installed = discover()
    counts = Counter(plugin.name for plugin in installed)
    states = [_state(plugin, check=check, is_twin=counts[plugin.name] > 1) for plugin in installed]
    if verbose:
        print(_details(states))
    else:
        print(_tables(states, get_terminal_size().columns if sys.stdout.isatty() else None))
    return int(check and any(state.word == "broken" for state in states))


def _tables(states: Sequence[State], width: int | None) -> str:
    """Return a line for each first-party plugin and, in a second table, for each of the others."""
    own, others = [("NAME", "WHAT IT DOES")], [("OF OTHER PACKAGES", "VERSION", "HEALTH")]
    for state in states:
        plugin = state.plugin
        if _is_ours(plugin):
            own.append((plugin.name, state.text if state.word == "available" else state.health))
        else:
            others.append((f"{plugin.package}:{plugin.name}", plugin.version, state.health))
    lines = _table(own, width)
    if len(others) > 1:
        lines += ["", *_table(others, width)]
    if any(state.word == NOT_IMPORTED for state in states):
        lines += ["", "`python -m heliograph plugins --check` imports them."]
    return "\n".join(lines)


def _table(rows: Sequence[tuple[str, ...]], width: int | None) -> list[str]:
    """Return aligned rows, the last column as long as it is, each cut to the width."""
    cells = [tuple(map(printable, row)) for row in rows]
    columns = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([*map(str.ljust, row[:-1], columns), row[-1]]) for row in cells]
    return [line if width is None or len(line) <= width else f"{line[: width - 3].rstrip()}..." for line in lines]


def _details(states: Sequence[State]) -> str:
    lines = []
    for state in states:
        plugin = state.plugin
        lines.append(f"{plugin.name} (package {plugin.package} {plugin.version}, {state.word})")
        events = [f"events: {', '.join(state.events)}"] if state.events else []
        for text in (state.text, f"class: {plugin.target}", *events):
            lines += _wrapped(text, "    ", "    ")
    return printable_lines("\n".join(lines))


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return wrap(text, 100, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _is_ours(plugin: Discovered) -> bool:
    return is_first_party(plugin.package.replace("-", "_"))


def _state(plugin: Discovered, *, check: bool, is_twin: bool) -> State:
    if plugin.switched_off:
        state = State(plugin, "switched off", "not imported: HELIOGRAPH_PLUGINS names it")
    elif not _is_ours(plugin) and (misfit := _misfit(plugin)):
        state = State(plugin, "broken", misfit)
    elif _is_ours(plugin) or check:
        state = state_of(plugin)
    else:
        distribution = plugin.entry_point.dist
        summaries = distribution.metadata.get_all("Summary") if distribution is not None else None
        state = State(plugin, NOT_IMPORTED, (summaries or [""])[0])
    if _is_ours(plugin) or not is_twin:
        return state
    twin = f"another package has this name, too: load it as {plugin.package}:{plugin.name}"
    return State(plugin, state.word, f"{state.text} ({twin})" if state.text else twin, state.events)


def _misfit(plugin: Discovered) -> str:
    """Return which heliograph the package needs, if this is another one; else an empty text."""
    distribution = plugin.entry_point.dist
    for text in (distribution is not None and distribution.requires) or ():
        try:
            needed = Requirement(text)
            is_met = needed.specifier.contains(version(), prereleases=True)
        except ValueError:  # a requirement or a version that cannot be compared
            continue
        applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if needed.name.lower() == "heliograph" and applies and not is_met:
            return f"it needs heliograph{needed.specifier}, and this is {version()}"
    return ""


def state_of(plugin: Discovered) -> State:
    """Import a plugin; return whether that works, and what the plugin does or what is wrong with it."""
    try:
        made_by = plugin.load()
    except ImportError as error:
        return State(plugin, "broken", str(error) if error.__cause__ is None else describe_error(error.__cause__))
    if misuse := _misuse(made_by):
        return State(plugin, "broken", misuse)
    text = cleandoc(made_by.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    return State(plugin, "available", text, _events(made_by))


def _misuse(made_by: Any) -> str:
    """Return why objects of a class cannot be registered, as far as that is visible without its constructor."""
    try:
        blank = made_by.__new__(made_by)
    except TypeError:  # it needs arguments, or is a function
        return ""
    try:
        Plugins(Bus()).register(blank)
    except AttributeError:  # its constructor sets what it declares
        return ""
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _events(made_by: Callable[..., Any]) -> Sequence[str]:
    if not isinstance(made_by, type):
        return ()
    return sorted({event.name for _, marker in marked_methods(made_by) for event in marker.events})


def plugin_page(name: str) -> str:
    """Return what is known of one plugin, which is imported for it.

    Args:
        name: of its entry point, as for `load`, or of its class.

    Raises:
        LookupError: there is none, or several are meant; says the nearest.
        ImportError: it cannot be imported.
    """
    plugin = _find(name)
    made_by = plugin.load()
    off = ", switched off" * plugin.switched_off
    head = f"{plugin.name} (package {plugin.package} {plugin.version}{off})"
    parts = [head, (parse(made_by.__doc__ or "").description or "").strip()]
    try:
        options = list(signature(made_by).parameters.values())
    except (TypeError, ValueError):  # one in C may have none
        options = []
    if options:
        texts = argument_texts(made_by)
        lines = [line for option in options for line in _option(option, texts.get(option.name, ""))]
        parts.append("\n".join(["Options:", *lines]))
    required = "".join(f", {option.name}=..." for option in options if _is_required(option))
    facts = {"Events": _events(made_by)}
    facts |= {label: getattr(made_by, attribute, ()) for attribute, label in DECLARATIONS.items()}
    lines = [
        f"{label}: {', '.join(words)}" for label, words in facts.items() if isinstance(words, tuple | list) and words
    ]
    lines += [f"Class: {plugin.target}", f"In a program: trainer.plugins.load({plugin.name!r}{required})"]
    parts.append("\n".join(part for line in lines for part in _wrapped(line, "", "    ")))
    return printable_lines("\n\n".join(part for part in parts if part))


def _find(name: str) -> Discovered:
    installed = discover()
    matches = [f"{plugin.package}:{plugin.name}" for plugin in installed if plugin.entry_point.attr == name]
    if not matches or any(plugin.name == name for plugin in installed):
        return find(name)
    if len(matches) > 1:
        raise LookupError(f"Several installed plugins are of a class {name!r}: say which, one of {', '.join(matches)}.")
    return find(matches[0])


def argument_texts(made_by: Callable[..., Any]) -> dict[str, str]:
    """Return what the docstrings say of each argument, those of a class before those of its bases."""
    kinds: Sequence[Any] = made_by.__mro__[::-1] if isinstance(made_by, type) else [made_by]
    docstrings = [documented.__doc__ or "" for kind in kinds for documented in (kind, kind.__init__)]
    described = [part for docstring in docstrings for part in parse(docstring).params if part.args[0] != "attribute"]
    return {argument.arg_name.lstrip("*"): argument.description or "" for argument in described}


def _option(option: Parameter, text: str) -> list[str]:
    kind = option.annotation if isinstance(option.annotation, str) else formatannotation(option.annotation)
    typed = "" if option.annotation is Parameter.empty else f": {kind}"
    default = " (required)" if _is_required(option) else ""
    if option.default is not Parameter.empty:
        default = f" = {option.default!r}"
    head = f"    {STARS.get(option.kind, '')}{option.name}{typed}{default}"
    return [head, *_wrapped(" ".join(text.split()), " " * 8, " " * 8)]


def _is_required(option: Parameter) -> bool:
    return option.default is Parameter.empty and option.kind not in STARS
