"""The command `heliograph golden record | check`."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict

from heliograph.spi import describe_error


def golden(arguments: Sequence[str]) -> int:
    """Record the first steps of a training in a file, or compare a training with the file."""
    parser = argparse.ArgumentParser(
        prog="heliograph golden", description="Exit status 0: recorded or equal; 1: different; 2: it failed."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="train, and write the file")
    check = commands.add_parser("check", help="train the same steps, and compare them with the file")
    for command in (record, check):
        command.add_argument(
            "function", metavar="module:function", help="returns a new trainer and the keywords of its fit"
        )
        command.add_argument("file", metavar="FILE", help="for example tests/golden.json")
    record.add_argument("--steps", type=int, default=50, metavar="N", help="optimizer steps to record (%(default)s)")
    record.add_argument("--every", type=int, default=10, metavar="N", help="steps between records of all weights")
    check.add_argument("--json", action="store_true", help="print the comparison as one JSON object")
    check.add_argument("--rtol", type=float, default=0.0, metavar="X", help="relative tolerance, for other hardware")
    return _run(parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    from heliograph.spi import UsageError, find_function

    from .golden_run import check_golden, record_golden

    try:
        train = find_function(options.function)
        if options.command == "record":
            golden = record_golden(train, options.file, steps=options.steps, every=options.every)
            print(f"recorded {golden.recorded_steps} steps in {options.file}")
            return 0
        check = check_golden(train, options.file, rtol=options.rtol)
    except (UsageError, ValueError) as error:
        print(f"heliograph golden: {error}", file=sys.stderr)
        return 2
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code; status 1 means different
        traceback.print_exc()
        print(f"heliograph golden: {options.function} raised {describe_error(error)}", file=sys.stderr)
        return 2
    facts = {"schema": "heliograph.golden/1", "equal": check.is_equal, **asdict(check)}
    print(json.dumps(facts, indent=1) if options.json else check)
    return 0 if check.is_equal else 1
