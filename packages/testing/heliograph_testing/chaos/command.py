"""The command `heliograph chaos train.py`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

NAME = "chaos"


def chaos(arguments: Sequence[str]) -> int:
    """Run a script with faults and kills, and check that its result is the same."""
    parser = argparse.ArgumentParser(
        prog=f"heliograph {NAME}",
        usage="heliograph chaos [options] script [-- arguments]",
        description="Runs a script in copies of the current folder, twice without faults and once with them, and "
        "restarts it after each fault. Exit status 0: bitwise identical, or all causes of a difference were noticed; "
        "1: it differs, loses work, or does not end; 2: the check failed, or no fault could act.",
    )
    parser.add_argument("script", type=Path, help="the program; it must resume: resume='auto'")
    parser.add_argument("--seed", type=int, default=0, help="seed of all choices (%(default)s)")
    parser.add_argument("--faults", type=int, default=50, metavar="N", help="number of faults (%(default)s)")
    parser.add_argument("--kinds", help="comma-separated kinds of faults; by default all that do not change numbers")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes per attempt (%(default)s)")
    parser.add_argument("--folder", type=Path, help="new folder to run in, which is kept")
    parser.add_argument(
        "--leave-out", action="append", default=[], metavar="NAME", help="a name in the current folder to exclude"
    )
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return _check(parser.parse_args(arguments[:at]), arguments[at + 1 :])


def _check(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .check import check_script
    from .fault import HARMLESS

    # The processes have their own process groups, so a SIGTERM of this one must end them, like Ctrl-C.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = check_script(
            options.script,
            arguments,
            seed=options.seed,
            faults=options.faults,
            kinds=HARMLESS if options.kinds is None else options.kinds.split(","),
            ranks=options.ranks,
            folder=options.folder,
            leave_out=options.leave_out,
            on_attempt=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except ValueError as error:  # a usage error
        print(f"heliograph {NAME}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        files = "the files were removed" if options.folder is None else f"the files are in {options.folder}"
        print(f"heliograph {NAME}: interrupted; all processes were ended, and {files}", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(report)
    return 1 if not report.is_good else 0 if report.acted else 2
