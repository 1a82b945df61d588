"""The installed plugins, in words."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from ...plugins.discovery import Discovered
from ...plugins.first_party import DISTRIBUTIONS
from ...plugins.installed import State
from ..system.extras import printable

NOT_IMPORTED = "not imported"
CHECK = "`python -m heliograph plugins --check` imports them, each in a process of its own."


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
