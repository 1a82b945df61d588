"""`python -m heliograph rules check FILE` and `python -m heliograph rules dry-run FILE RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import RuleError
    from .files.builder import Ready

NAME = "rules"


def rules(arguments: Sequence[str]) -> int:
    """Check a rule file, or show when its rules would have acted."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"heliograph {NAME}")
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser(
        "check",
        help="show the unknown names, the wrong settings and the bad syntax in a rule file",
        description="Exit status 0: nothing is wrong; 1: something is; 2: the file or a module cannot be read.",
    )
    dry = actions.add_parser(
        "dry-run",
        help="show when the rules would have acted in a recorded run",
        description="Exit status 0: shown; 1: something is wrong with the file, or the rules could not be asked to the "
        "end of the recording, as where a metric fails; 2: the file, the recording or a module cannot be read.",
    )
    for each, run in ((check, run_check), (dry, run_dry)):
        each.add_argument("file", metavar="FILE", type=Path, help="the rule file")
        each.add_argument(
            "--import",
            action="append",
            default=[],
            dest="modules",
            metavar="MODULE",
            help="a module of the current folder, or an installed one, that registers metrics, operations or functions",
        )
        each.set_defaults(run=run)
    dry.add_argument("recording", metavar="RUN", type=Path, help="the file that Recorder wrote, or its folder")
    return parser


def run_check(options: argparse.Namespace) -> int:
    """Check a file, print what is wrong with it or what it does, and return the exit status.

    Args:
        options: the parsed arguments.
    """
    try:
        _import(options.modules)
        ready, errors = check_file(options.file)
    except (ImportError, OSError) as error:
        return _refuse(error)
    if errors:
        return _print_errors(errors)
    for each in ready:
        print(describe_controller(each))
    return 0


def run_dry(options: argparse.Namespace) -> int:
    """Print when the rules of a file would have acted in a recorded run, and return the exit status.

    Args:
        options: the parsed arguments.
    """
    from heliograph_recorder import read

    from .controller import RuleController
    from .dry_run import dry_run

    try:
        _import(options.modules)
        _, errors = check_file(options.file)
        if errors:
            return _print_errors(errors)
        recording = read(options.recording)
    except (ImportError, OSError, ValueError) as error:
        return _refuse(error)
    print(f"dry run of {options.file} on {recording.path}")
    found = dry_run(RuleController(options.file), recording)
    print(found)
    return 1 if found.cut_short else 0


def check_file(path: Path) -> tuple[tuple[Ready, ...], list[RuleError]]:
    """Return the controllers of a rule file, and everything that is wrong with it, in the order of its lines.

    Raises:
        OSError: the file cannot be read.
        ImportError: simpleeval or yaml is not installed, or a package that the file names is broken.
    """
    from .errors import RuleError
    from .files.builder import Given, build
    from .files.config import Problems, read_rules

    problems = Problems(keeps=True)
    try:
        rules = read_rules(path, problems)
    except RuleError as error:  # there is nothing to look at
        return (), [error]
    ready = build(rules, Given(), problems).controllers
    return ready, sorted(problems.found, key=lambda error: error.line or 0)


def describe_controller(ready: Ready) -> str:
    """Return what a controller does, as a line: its triggers with their events, and its operations."""
    triggers = []
    for trigger in ready.triggers:
        events = " and ".join(kind.__name__ for kind in trigger.events)
        triggers.append(trigger.name if trigger.name == events else f"{trigger.name} ({events})")
    return f"{ready.name}: {', '.join(triggers)} -> {', '.join(ready.spec.operations)}"


def _print_errors(errors: Iterable[RuleError]) -> int:
    for error in errors:
        print(error, file=sys.stderr)
    return 1


def _refuse(error: Exception) -> int:
    print(f"heliograph {NAME}: {error}", file=sys.stderr)
    return 2


def _import(modules: Iterable[str]) -> None:
    here = str(Path.cwd())
    if modules and here not in sys.path:
        sys.path.insert(0, here)
    for module in modules:
        try:
            import_module(module)
        except (Exception, SystemExit) as error:  # the user's own code
            raise ImportError(_why(module, error)) from error


def _why(module: str, error: BaseException) -> str:
    """Return why a module cannot be imported, as a line."""
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        hint = f", leave out .py: --import {module[:-3]}" if module.endswith(".py") else ""
        return f"No module named {module!r} is in {Path.cwd()} or installed{hint}."
    return f"The module {module!r} fails while it is imported: {type(error).__name__}: {' '.join(str(error).split())}"
