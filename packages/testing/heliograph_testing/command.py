"""The commands `heliograph verify-resume module:function` and `heliograph golden record | check`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from heliograph.spi import UsageError, as_json, describe_error, find_function

FUNCTION = "returns a new trainer and the keywords of its fit; takes no argument, or a folder to write to"


def verify_resume(arguments: Sequence[str]) -> int:
    """Check that a training that is killed and resumed equals an uninterrupted one."""
    parser = argparse.ArgumentParser(
        prog="heliograph verify-resume",
        description="Exit status 0: bitwise identical; 1: different; 2: the check failed.",
    )
    parser.add_argument("function", metavar="module:function", help=FUNCTION)
    parser.add_argument(
        "--kill-at",
        action="append",
        metavar="POINT",
        help="7 (after the seventh batch of the run) or validation_batch_end:3 (at the third such event); repeat for "
        "several kills; by default --resumes points are chosen",
    )
    parser.add_argument("--resumes", type=int, default=3, metavar="N", help="number of kill points (%(default)s)")
    parser.add_argument(
        "--save-every", type=int, default=3, metavar="BATCHES", help="batches between saves (%(default)s)"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a plugin or metric that is not compared; may be repeated",
    )
    _add_json(parser)
    options = parser.parse_args(arguments)
    from .resume.check import check_resume, parse_kill_point  # imports torch

    def check() -> Any:
        return check_resume(
            find_function(options.function),
            kill_at=[parse_kill_point(text) for text in options.kill_at] if options.kill_at else None,
            resumes=options.resumes,
            save_every=options.save_every,
            ignore=options.ignore,
        )

    return _compare("verify-resume", options, check)


def golden(arguments: Sequence[str]) -> int:
    """Record the first steps of a training in a file, or compare a training with the file."""
    parser = argparse.ArgumentParser(
        prog="heliograph golden", description="Exit status 0: recorded or equal; 1: different; 2: it failed."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="train, and write the file")
    check = commands.add_parser("check", help="train the same steps, and compare them with the file")
    for command in (record, check):
        command.add_argument("function", metavar="module:function", help=FUNCTION)
        command.add_argument("file", metavar="FILE", help="for example tests/golden.json")
    record.add_argument("--steps", type=int, default=50, metavar="N", help="optimizer steps to record (%(default)s)")
    record.add_argument("--every", type=int, default=10, metavar="N", help="steps between records of all weights")
    record.add_argument("--operators", action="store_true", help="also record operators; the file is much larger")
    check.add_argument("--rtol", type=float, default=0.0, metavar="X", help="relative tolerance, for other hardware")
    _add_json(check)
    options = parser.parse_args(arguments)
    from .golden_run import check_golden, record_golden  # imports torch

    def act() -> Any:
        train = find_function(options.function)
        if options.command == "check":
            return check_golden(train, options.file, rtol=options.rtol)
        golden = record_golden(
            train, options.file, steps=options.steps, every=options.every, operators=options.operators
        )
        print(f"recorded {golden.recorded_steps} steps in {options.file}")
        return None

    return _compare("golden", options, act)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the comparison as one JSON object")


def _compare(name: str, options: argparse.Namespace, act: Callable[[], Any]) -> int:
    """Print the comparison that `act` returns, if any; return the exit status."""
    try:
        check = act()
    except UsageError as error:
        print(f"heliograph {name}: {error}", file=sys.stderr)
        return 2
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code; status 1 means different
        traceback.print_exc()
        failure = f"{options.function} raised {describe_error(error)}"
        action = "recording" if "operators" in options else "check"
        print(f"heliograph {name}: the {action} failed: {failure}", file=sys.stderr)
        return 2
    if check is None:
        return 0
    facts = {"schema": f"heliograph.{name}/1", "equal": check.difference is None, **asdict(check)}
    print(as_json(facts) if options.json else check)
    return 0 if check.difference is None else 1
