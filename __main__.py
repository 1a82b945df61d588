"""The command line: `python -m heliograph COMMAND ...`. Packages add commands by entry points."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import fill, indent
from typing import NoReturn

from heliograph.core.system.extras import ROOT, version
from heliograph.events import CATALOGUE
from heliograph.events.checks import did_you_mean, known_names
from heliograph.plugins.discovery import VARIABLE, Discovered, check_options, discover, find
from heliograph.plugins.providers import ENTRY_POINTS, how_to_install

# An entry point names a function that takes the arguments of its command and returns the exit status. The first line of
# its docstring is the help.
GROUP = "heliograph.commands"
KERNEL = {  # available without an installation, too
    "events": EntryPoint("events", "heliograph.__main__:events", GROUP),
    "run": EntryPoint("run", "heliograph.__main__:run", GROUP),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # escapes characters that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _dispatch(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has exited, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        return 128 + 13
    return status


def _dispatch(arguments: Sequence[str]) -> int:
    name, options = (arguments[0], arguments[1:]) if arguments else ("", ())
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"heliograph {version()} in {ROOT}")
        return 0
    packaged = {point.name for point in discover(GROUP)}
    if name not in KERNEL and name.rpartition(":")[2] not in packaged:
        return _refuse(name.rpartition(":")[2], {*KERNEL, *packaged})
    try:
        point = KERNEL[name] if name in KERNEL else find(name, GROUP)
        command = point.load()
    except (ImportError, LookupError) as error:  # LookupError: several packages have this command
        print(f"heliograph {name}: {error}", file=sys.stderr)
        return 2
    try:
        status: int = command(options) or 0
    except Exception as error:
        if isinstance(point, Discovered):
            error.add_note(f"heliograph: in the command {point.name!r} of package {point.package} {point.version}")
        raise
    return status


def _refuse(name: str, names: set[str]) -> int:
    if not name:
        print(_help(), file=sys.stderr)
    elif name in ENTRY_POINTS[GROUP]:
        print(f"heliograph has no command {name!r}. {how_to_install(ENTRY_POINTS[GROUP][name])}", file=sys.stderr)
    else:
        ours = ENTRY_POINTS[GROUP]
        near = did_you_mean(name, names | ours.keys())
        lacking = [package for command, package in ours.items() if command not in names and repr(command) in near]
        tail = f"{near} {how_to_install(lacking[0])}" if lacking else known_names(name, names)
        print(f"heliograph has no command {name!r}.{tail}", file=sys.stderr)
    return 2


def _help() -> str:
    points: dict[str, Discovered | EntryPoint] = {point.name: point for point in discover(GROUP)}
    rows = {}
    for name, point in (points | KERNEL).items():
        try:
            rows[name] = (point.load().__doc__ or "").partition("\n")[0]
        except ImportError as error:
            rows[name] = f"cannot be imported: {error}"
    width = max(map(len, rows))
    return "\n".join(
        [
            "usage: heliograph COMMAND ...   (heliograph COMMAND --help explains a command)",
            "",
            "An event-bus callback framework for PyTorch training.",
            "",
            *(f"  {name.ljust(width)}  {rows[name]}" for name in sorted(rows)),
            "",
            "  --version  show the version and the folder that it is imported from",
        ]
    )


def events(arguments: Sequence[str]) -> int:
    """List the events in the order in which the loop emits them."""
    argparse.ArgumentParser(prog="heliograph events").parse_args(arguments)
    print(event_list())
    return 0


def event_list() -> str:
    lines = []
    for event in CATALOGUE:
        fields = ", ".join(
            f"{name}: {kind}" for name, kind in event.__annotations__.items() if not kind.startswith("ClassVar")
        )
        lines.append(f"{event.__name__}({fields})")
        lines.append(indent(fill(str(event.__doc__), 96, break_on_hyphens=False), "    "))
    return "\n".join(lines)


def run(arguments: Sequence[str]) -> int:
    """Run a program with other plugins: heliograph run --disable progress train.py."""
    parser = argparse.ArgumentParser(prog="heliograph run")
    parser.add_argument("--disable", action="append", default=[], metavar="NAME", help="disable a plugin, by name")
    parser.add_argument(
        "--enable", action="append", default=[], metavar="NAME", help="add an installed plugin, by name"
    )
    parser.add_argument("script", type=Path, help="the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the program")
    options = parser.parse_args(arguments)
    if not options.script.is_file():
        print(f"heliograph run: no such file: {options.script}", file=sys.stderr)
        return 2
    try:
        for name in options.enable:
            form = partial("trainer.plugins.load({!r}, {})".format, name)
            check_options(name, find(name).load(), (), form)
    except (ImportError, LookupError, TypeError) as error:
        print(f"heliograph run: {error}", file=sys.stderr)
        return 2
    return _become(options.script, options.arguments, options.disable, options.enable)


def _become(script: Path, arguments: Sequence[str], disabled: Sequence[str], enabled: Sequence[str]) -> NoReturn:
    words = [*(f"-{name}" for name in disabled), *(f"+{name}" for name in enabled)]
    sys.stdout.flush()
    # A new process, so that signals and the exit status are those of the program.
    environment = {**os.environ, VARIABLE: ",".join([os.environ.get(VARIABLE, ""), *words])}
    os.execve(sys.executable, [sys.executable, str(script), *arguments], environment)  # noqa: S606  # no shell is meant


if __name__ == "__main__":
    sys.exit(main())
