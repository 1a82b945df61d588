"""One plugin in full: what it does, its options, its events and requests, where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, formatannotation, signature
from textwrap import wrap
from typing import Any

from ...events.checks import known_names
from ...plugins.discovery import Discovered, discover, find
from ...plugins.marks import marked_methods
from ..system.extras import printable_lines
from .docstrings import argument_texts, description

WIDTH, INDENT = 100, " " * 8
STARS: Mapping[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


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
