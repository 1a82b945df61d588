"""The commands `heliograph rules check FILE` and `heliograph rules dry-run FILE RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from heliograph.spi import describe_error

if TYPE_CHECKING:
    from .errors import RuleError
    from .files.builder import CheckedRule

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
        help="show unknown names, wrong settings and bad syntax in a rule file",
        description="Exit status 0: the file is valid; 1: it has errors; 2: the file or a module cannot be read.",
    )
    dry = actions.add_parser(
        "dry-run",
        help="show when the rules would have acted in a recorded run",
        description="Exit status 0: success; 1: the file has errors, or the dry run ended before the recording, for "
        "example because a metric failed; 2: the file, the recording or a module cannot be read.",
    )
    for command, run in ((check, run_check), (dry, run_dry)):
        command.add_argument("file", metavar="FILE", type=Path, help="the rule file")
        command.add_argument(
            "--import",
            action="append",
            default=[],
            dest="modules",
            metavar="MODULE",
            help="a module of the current folder, or an installed one, that registers metrics, operations or functions",
        )
        command.set_defaults(run=run)
    dry.add_argument("recording", metavar="RUN", type=Path, help="the file that Recorder wrote, or its folder")
    return parser


def run_check(options: argparse.Namespace) -> int:
    try:
        _import(options.modules)
        ready, errors = check_file(options.file)
    except (ImportError, OSError) as error:
        return _refuse(error)
    if errors:
        return _print_errors(errors)
    for controller in ready:
        print(describe_controller(controller))
    return 0


def run_dry(options: argparse.Namespace) -> int:
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
    result = dry_run(RuleController(options.file), recording)
    print(result)
    return 1 if result.cut_short else 0


def check_file(path: Path) -> tuple[tuple[CheckedRule, ...], list[RuleError]]:
    from .errors import RuleError
    from .files.builder import Builder
    from .files.config import Problems, read_rules

    problems = Problems(collects=True)
    try:
        rules = read_rules(path, problems)
    except RuleError as error:  # no rules to check
        return (), [error]
    ready = Builder(rules, problems).blueprint().controllers
    return ready, sorted(problems.errors, key=lambda error: error.line or 0)


def describe_controller(ready: CheckedRule) -> str:
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
            raise ImportError(f"Importing module {module!r} failed: {describe_error(error)}") from error
