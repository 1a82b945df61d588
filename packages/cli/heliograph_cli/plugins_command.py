"""The command `heliograph plugins`: the installed plugins with their health, and a page per plugin."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, cleandoc, formatannotation, signature
from textwrap import wrap
from typing import Any

from docstring_parser import parse
from heliograph import Bus
from heliograph.plugins import Discovered, Plugins, discover, marked_methods
from heliograph.spi import as_json, describe_error, find, is_first_party, printable_lines

from .tables import format_table, terminal_width

NOT_IMPORTED = "not imported"
WIDTH = 100  # columns, if the terminal has as many
DECLARATIONS = {"asks": "Asks for", "needs": "Needs", "exclusive": "Exclusive"}
STARS: dict[int, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


def plugins(arguments: Sequence[str]) -> int:
    """List the installed plugins and what they do, or show the options of one."""
    parser = argparse.ArgumentParser(
        prog="heliograph plugins",
        description="Exit status 1: a plugin is broken (with --check); 2: no such plugin, or it cannot be imported.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a plugin or its class, to show its options")
    parser.add_argument("-v", "--verbose", action="store_true", help="show package, version, class and events")
    parser.add_argument("--check", action="store_true", help="also import plugins of other packages")
    parser.add_argument("--json", action="store_true", help="print one JSON object; for NAME, with its options")
    options = parser.parse_args(arguments)
    if options.name is None:
        return _list_plugins(options)
    try:
        if options.verbose or options.check:
            raise ValueError(f"-v and --check apply to the list of all plugins: remove them, or {options.name}.")
        print(_as_json([_page_facts(options.name)]) if options.json else plugin_page(options.name))
    except (ValueError, LookupError, ImportError) as error:
        print(f"heliograph plugins: {error}", file=sys.stderr)
        return 2
    return 0


@dataclass(frozen=True, slots=True)
class PluginState:
    """The state of an installed plugin.

    Attributes:
        plugin: its entry point.
        word: `available`, `broken`, `switched off` or `not imported`.
        text: what the plugin does, or why it is broken.
        events: the events that it handles.
    """

    plugin: Discovered
    word: str
    text: str
    events: Sequence[str] = ()

    @property
    def health(self) -> str:
        return f"{self.word}: {self.text}" if self.text else self.word

    @property
    def facts(self) -> dict[str, Any]:
        plugin = self.plugin
        head = {"name": plugin.name, "package": plugin.package, "version": plugin.version, "class": plugin.target}
        return {**head, "state": self.word, "text": self.text, "events": list(self.events)}


def _list_plugins(options: argparse.Namespace) -> int:
    states = [_state(plugin, check=options.check) for plugin in discover()]
    if options.json:
        print(_as_json([state.facts for state in states]))
    else:
        print(_details(states) if options.verbose else _tables(states))
    return int(options.check and any(state.word == "broken" for state in states))


def _as_json(plugins: Sequence[dict[str, Any]]) -> str:
    return as_json({"schema": "heliograph.plugins/1", "plugins": plugins})


def _page_facts(name: str) -> dict[str, Any]:
    plugin = _find(name)
    factory = plugin.load()
    texts = argument_texts(factory)
    options = [
        {
            "name": option.name,
            "type": _type_of(option),
            "default": None if option.default is Parameter.empty else repr(option.default),
            "required": _is_required(option),
            "text": " ".join(texts.get(option.name, "").split()),
        }
        for option in _options(factory)
    ]
    return {**_state(plugin, check=True).facts, "options": options}


def _tables(states: Sequence[PluginState]) -> str:
    ours, foreign = [("NAME", "WHAT IT DOES")], [("OTHER PACKAGES", "VERSION", "HEALTH")]
    for state in states:
        plugin = state.plugin
        if _is_ours(plugin):
            ours.append((plugin.name, state.text if state.word == "available" else state.health))
        else:
            foreign.append((f"{plugin.package}:{plugin.name}", plugin.version, state.health))
    parts = [format_table(rows) for rows in (ours, foreign) if len(rows) > 1]
    if any(state.word == NOT_IMPORTED for state in states):
        parts.append("`python -m heliograph plugins --check` imports them.")
    return "\n\n".join(parts)


def _details(states: Sequence[PluginState]) -> str:
    lines = []
    for state in states:
        plugin = state.plugin
        lines.append(f"{plugin.name} (package {plugin.package} {plugin.version}, {state.word})")
        events = [f"events: {', '.join(state.events)}"] if state.events else []
        for text in (state.text, f"class: {plugin.target}", *events):
            lines += _wrapped(text, "    ", "    ")
    return printable_lines("\n".join(lines))


def _wrapped(text: str, first: str, indent: str) -> list[str]:
    width = min(WIDTH, terminal_width() or WIDTH)
    return wrap(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _is_ours(plugin: Discovered) -> bool:
    return is_first_party(plugin.package.replace("-", "_"))


def _state(plugin: Discovered, *, check: bool) -> PluginState:
    if plugin.switched_off:
        return PluginState(plugin, "switched off", "not imported: HELIOGRAPH_PLUGINS names it")
    if _is_ours(plugin) or check:
        return state_of(plugin)
    distribution = plugin.entry_point.dist
    summaries = distribution.metadata.get_all("Summary") if distribution is not None else None
    return PluginState(plugin, NOT_IMPORTED, (summaries or [""])[0])


def state_of(plugin: Discovered) -> PluginState:
    try:
        factory = plugin.load()
    except ImportError as error:
        return PluginState(plugin, "broken", str(error) if error.__cause__ is None else describe_error(error.__cause__))
    if misuse := _misuse(factory):
        return PluginState(plugin, "broken", misuse)
    text = cleandoc(factory.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    return PluginState(plugin, "available", text, _events(factory))


def _misuse(factory: Any) -> str:
    try:
        blank = factory.__new__(factory)
    except TypeError:  # needs arguments, or a function
        return ""
    try:
        Plugins(Bus()).register(blank)
    except AttributeError:  # its constructor sets its declarations
        return ""
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _events(factory: Callable[..., Any]) -> Sequence[str]:
    if not isinstance(factory, type):
        return ()
    return sorted({event.name for _, marker in marked_methods(factory) for event in marker.events})


def plugin_page(name: str) -> str:
    plugin = _find(name)
    factory = plugin.load()
    off = ", switched off" * plugin.switched_off
    head = f"{plugin.name} (package {plugin.package} {plugin.version}{off})"
    parts = [head, (parse(factory.__doc__ or "").description or "").strip()]
    options = _options(factory)
    if options:
        texts = argument_texts(factory)
        lines = [line for option in options for line in _option(option, texts.get(option.name, ""))]
        parts.append("\n".join(["Options:", *lines]))
    required = "".join(f", {option.name}=..." for option in options if _is_required(option))
    facts = {"Events": _events(factory)}
    facts |= {label: getattr(factory, attribute, ()) for attribute, label in DECLARATIONS.items()}
    lines = [
        f"{label}: {', '.join(words)}" for label, words in facts.items() if isinstance(words, tuple | list) and words
    ]
    lines += [f"Class: {plugin.target}", f"In a program: trainer.plugins.load({plugin.name!r}{required})"]
    parts.append("\n".join(part for line in lines for part in _wrapped(line, "", "    ")))
    return printable_lines("\n\n".join(part for part in parts if part))


def _find(name: str) -> Discovered:
    installed = discover()
    matches = [plugin for plugin in installed if plugin.entry_point.attr == name]
    return find(matches[0].name if matches and all(plugin.name != name for plugin in installed) else name)


def _options(factory: Callable[..., Any]) -> list[Parameter]:
    try:
        return list(signature(factory).parameters.values())
    except (TypeError, ValueError):  # C code may have no signature
        return []


def argument_texts(factory: Callable[..., Any]) -> dict[str, str]:
    kinds: Sequence[Any] = factory.__mro__[::-1] if isinstance(factory, type) else [factory]
    docstrings = [documented.__doc__ or "" for kind in kinds for documented in (kind, kind.__init__)]
    described = [part for docstring in docstrings for part in parse(docstring).params if part.args[0] != "attribute"]
    return {argument.arg_name.lstrip("*"): argument.description or "" for argument in described}


def _option(option: Parameter, text: str) -> list[str]:
    typed = f": {kind}" if (kind := _type_of(option)) else ""
    default = " (required)" if _is_required(option) else ""
    if option.default is not Parameter.empty:
        default = f" = {option.default!r}"
    head = _wrapped(f"{STARS.get(option.kind, '')}{option.name}{typed}{default}", " " * 4, " " * 12)
    return [*head, *_wrapped(" ".join(text.split()), " " * 8, " " * 8)]


def _type_of(option: Parameter) -> str | None:
    if option.annotation is Parameter.empty:
        return None
    return option.annotation if isinstance(option.annotation, str) else formatannotation(option.annotation)


def _is_required(option: Parameter) -> bool:
    return option.default is Parameter.empty and option.kind not in STARS
