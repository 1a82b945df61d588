"""The command line: `python -m heliograph demo | plugins | events | explain | timeline | replay | rules | ...`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import NoReturn

from heliograph.builtin_callbacks.recorder import command as explain_command
from heliograph.builtin_callbacks.recorder.replay import command as replay_command
from heliograph.builtin_callbacks.rules import command as rules
from heliograph.core.system.extras import ROOT, printable, version
from heliograph.events import CATALOGUE
from heliograph.plugins.discovery import NOT_INSTALLED, Discovered, discover
from heliograph.plugins.environment import VARIABLE
from heliograph.plugins.installed import OWN, states_of
from heliograph.testing import command as verify_resume

VERBS = {
    "fit": "train as a configuration file says: heliograph fit config.yaml --epochs=3",
    "validate": "validate the task of a configuration file",
    "test": "test the task of a configuration file",
    "predict": "predict with the task of a configuration file",
}


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
    parser.add_argument("--version", action="version", version=f"heliograph {version()} in {ROOT}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small network on real handwritten digits")
    demo.add_argument("--folder", type=Path, default=Path("runs/digits"), help="where to leave files (%(default)s)")
    demo.add_argument("--epochs", type=_positive, default=60, help="at most so many (%(default)s)")
    plugins = commands.add_parser("plugins", help="list the installed plugins and what they do")
    plugins.add_argument("-v", "--verbose", action="store_true", help="with package, version, class and events")
    commands.add_parser("events", help="list the events in the order in which the loop emits them")
    run = commands.add_parser(
        "run", help="run a program with other plugins: heliograph run --disable progress train.py"
    )
    run.add_argument("--disable", action="append", default=[], metavar="NAME", help="do not call a plugin, by its name")
    run.add_argument(
        "--enable", action="append", default=[], metavar="NAME", help="add an installed plugin, by its name"
    )
    run.add_argument("script", type=Path, help="the program")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    for module in (explain_command, replay_command, rules, verify_resume):
        module.add_command(commands)
    commands.add_parser("checkpoint", help="inspect, verify, migrate, export or prune checkpoints", add_help=False)
    for verb, text in VERBS.items():
        commands.add_parser(verb, help=text, add_help=False)
    if arguments[:1] == ["checkpoint"]:
        from heliograph.builtin_callbacks.checkpoint import command as checkpoint

        return checkpoint.main(arguments[1:])
    if arguments[:1] and arguments[0] in VERBS:
        from heliograph.cli import command as configured

        return configured.main(arguments)
    options = parser.parse_args(arguments)
    if options.command == "plugins":
        return _plugins(verbose=options.verbose)
    if options.command == "events":
        print(event_list())
    elif options.command == "run":
        if not options.script.is_file():
            print(f"heliograph run: there is no file {options.script}", file=sys.stderr)
            return 2
        _become(options.script, options.arguments, options.disable, options.enable)
    elif options.command == "demo":
        return _demo(options.folder, options.epochs)
    else:
        return int(options.run(options))
    return 0


def plugin_list(found: Sequence[Discovered], width: int | None) -> str:
    """Return a line for each installed plugin: its name for `load`, and what it does or what is wrong with it.

    Args:
        found: the plugins.
        width: of the terminal, to which long lines are cut; None for lines in full.
    """
    names = [each.name if each.package == OWN else f"{each.package}:{each.name}" for each in found]
    states = [(each.word, each.what) for each in states_of(found)]
    whats = [what if word == "available" else f"{word}: {what}" for word, what in states]
    rows = [tuple(map(printable, row)) for row in [("NAME", "WHAT IT DOES"), *zip(names, whats, strict=True)]]
    column = max(len(name) for name, _ in rows)
    return "\n".join(_cut(f"{name:<{column}}  {what}", width) for name, what in rows)


def plugin_details(found: Sequence[Discovered]) -> str:
    """Return what is known of every installed plugin: package, version, state, class, what it does, events."""
    lines = []
    for each, state in zip(found, states_of(found), strict=True):
        lines.append(printable(f"{each.name} (package {each.package} {each.version}, {state.word})"))
        events = [f"events: {', '.join(state.events)}"] if state.events else []
        for text in (state.what, f"class: {each.target}", *events):
            lines += _indented(printable(text))
    return "\n".join(lines)


def _plugins(*, verbose: bool) -> int:
    found = discover()
    if verbose:
        print(plugin_details(found))
    else:
        print(plugin_list(found, get_terminal_size().columns if sys.stdout.isatty() else None))
    if any(each.package == OWN for each in found):
        return 0
    print(f"heliograph plugins: {NOT_INSTALLED}", file=sys.stderr)
    return 1


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else f"{line[: width - 3].rstrip()}..."


def _indented(text: str) -> list[str]:
    return wrap(text, 100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def event_list() -> str:
    """Return every event with its fields and what it means."""
    lines = []
    for event in CATALOGUE:
        fields = ", ".join(
            f"{name}: {kind}" for name, kind in event.__annotations__.items() if not kind.startswith("ClassVar")
        )
        lines.append(f"{event.__name__}({fields})")
        lines += _indented(str(event.__doc__))
    return "\n".join(lines)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def _become(script: Path, arguments: Sequence[str], off: Sequence[str], added: Sequence[str]) -> NoReturn:
    """Replace this process by one that runs a program, so that signals and the exit status are the program's own."""
    former = [os.environ[VARIABLE]] if os.environ.get(VARIABLE) else []
    words = [*former, *(f"-{name}" for name in off), *(f"+{name}" for name in added)]
    sys.stdout.flush()
    environment = {**os.environ, VARIABLE: ",".join(words)}
    os.execve(sys.executable, [sys.executable, str(script), *arguments], environment)  # noqa: S606  # no shell is meant


def _demo(folder: Path, epochs: int) -> int:
    from heliograph.demo.digits import run_demo

    try:
        return 0 if run_demo(folder, epochs) else 1
    except (ImportError, ValueError) as error:  # a missing package or a bad argument: the sentence says what to do
        print(f"heliograph demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
