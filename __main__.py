"""The command line: `python -m heliograph demo | plugins | events | explain | timeline | replay | rules | ...`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from heliograph.builtin_callbacks.recorder import command as explain_command
from heliograph.builtin_callbacks.recorder.replay import command as replay_command
from heliograph.builtin_callbacks.rules import command as rules
from heliograph.core.system.extras import printable
from heliograph.events import CATALOGUE
from heliograph.plugins.discovery import discover
from heliograph.plugins.installed import states_of
from heliograph.testing import command as verify_resume


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show is spelt out
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or python would complain at its exit
        return 128 + 13
    return status


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="heliograph", description="An event-bus callback framework for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small network on real handwritten digits")
    demo.add_argument("--folder", type=Path, default=Path("runs/digits"), help="where to leave files (%(default)s)")
    demo.add_argument("--epochs", type=int, default=60, help="at most so many (%(default)s)")
    commands.add_parser("plugins", help="list the installed plugins")
    commands.add_parser("events", help="list the events in the order in which the loop emits them")
    for module in (explain_command, replay_command, rules, verify_resume):
        module.add_command(commands)
    commands.add_parser("checkpoint", help="inspect, verify, migrate, consolidate or prune checkpoints", add_help=False)
    if arguments[:1] == ["checkpoint"]:
        from heliograph.builtin_callbacks.checkpoint import command as checkpoint

        return checkpoint.main(arguments[1:])
    options = parser.parse_args(arguments)
    if options.command == "plugins":
        print(plugin_table())
    elif options.command == "events":
        print(event_list())
    elif options.command == "demo":
        return _demo(options.folder, options.epochs)
    else:
        return int(options.run(options))
    return 0


def plugin_table() -> str:
    """Return name, package, version, state and events of every installed plugin; a broken one with its error."""
    found = discover()
    states = states_of(found)
    rows = [["NAME", "PACKAGE", "VERSION", "STATE", "EVENTS"]]
    rows += [[each.name, each.package, each.version, *states[number]] for number, each in enumerate(found)]
    rows = [list(map(printable, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[4]]) for row in rows)


def event_list() -> str:
    """Return every event with its fields and what it means."""
    lines = []
    for event in CATALOGUE:
        fields = ", ".join(
            f"{name}: {kind}" for name, kind in event.__annotations__.items() if not kind.startswith("ClassVar")
        )
        lines.append(f"{event.__name__}({fields})")
        lines.append(fill(str(event.__doc__), 100, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


def _demo(folder: Path, epochs: int) -> int:
    from heliograph.demo.digits import run_demo

    try:
        return 0 if run_demo(folder, epochs) else 1
    except (ImportError, ValueError) as error:  # a missing package or a bad argument: the sentence says what to do
        print(f"heliograph demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
