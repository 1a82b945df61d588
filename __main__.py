"""The command line: `python -m heliograph demo | plugins | events | explain | timeline | watch | replay | ...`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from heliograph.builtin_callbacks.recorder import command as explain_command
from heliograph.builtin_callbacks.recorder.replay import command as replay_command
from heliograph.builtin_callbacks.remote import command as ask_command
from heliograph.builtin_callbacks.rules import command as rules
from heliograph.core.system.extras import ROOT, version
from heliograph.events import CATALOGUE
from heliograph.plugins.discovery import find
from heliograph.plugins.environment import OF_RUN
from heliograph.publishing import command as publishing
from heliograph.publishing.plugin_table import indented
from heliograph.reruns import command as reruns
from heliograph.testing import command as verify_resume
from heliograph.watch import command as watch

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
    for module in (explain_command, watch, replay_command, ask_command, reruns, rules, verify_resume, publishing):
        module.add_command(commands)
    commands.add_parser("chaos", help="let a script of yours meet faults, restart it, compare its end", add_help=False)
    commands.add_parser("checkpoint", help="inspect, verify, migrate, export or prune checkpoints", add_help=False)
    for verb, text in VERBS.items():
        commands.add_parser(verb, help=text, add_help=False)
    if arguments[:1] == ["checkpoint"]:
        from heliograph.builtin_callbacks.checkpoint import command as checkpoint

        return checkpoint.main(arguments[1:])
    if arguments[:1] == ["chaos"]:
        from heliograph.testing.chaos import command as chaos

        return chaos.main(arguments[1:])
    if arguments[:1] and arguments[0] in VERBS:
        from heliograph.cli import command as configured

        return configured.main(arguments)
    options = parser.parse_args(arguments)
    if options.command == "events":
        print(event_list())
    elif options.command == "run":
        if not options.script.is_file():
            print(f"heliograph run: there is no file {options.script}", file=sys.stderr)
            return 2
        try:
            for name in options.enable:
                find(name)
        except LookupError as error:
            print(f"heliograph run: {error}", file=sys.stderr)
            return 2
        _become(options.script, options.arguments, options.disable, options.enable)
    elif options.command == "demo":
        return _demo(options.folder, options.epochs)
    else:
        return int(options.run(options))
    return 0


def event_list() -> str:
    """Return every event with its fields and what it means."""
    lines = []
    for event in CATALOGUE:
        fields = ", ".join(
            f"{name}: {kind}" for name, kind in event.__annotations__.items() if not kind.startswith("ClassVar")
        )
        lines.append(f"{event.__name__}({fields})")
        lines += indented(str(event.__doc__))
    return "\n".join(lines)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def _become(script: Path, arguments: Sequence[str], off: Sequence[str], added: Sequence[str]) -> NoReturn:
    """Replace this process by one that runs a program, so that signals and the exit status are the program's own."""
    words = [*(f"-{name}" for name in off), *(f"+{name}" for name in added)]
    sys.stdout.flush()
    environment = {**os.environ, OF_RUN: ",".join(words)}
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
