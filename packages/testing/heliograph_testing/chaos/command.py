"""`python -m heliograph chaos train.py`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

NAME = "chaos"


class Terminated(KeyboardInterrupt):
    """The process got a SIGTERM, which ends it as a Ctrl-C does."""


def chaos(arguments: Sequence[str]) -> int:
    """Run a script with faults and kills, and check that its result is the same.

    Args:
        arguments: those of the command, and after `--` those of the script.
    """
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:at])
    return _check(options, arguments[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"heliograph {NAME}",
        usage="heliograph chaos [options] script [-- arguments]",
        description="Runs a script in a copy of the current folder, twice without faults and once with them, started "
        "again when it was ended. Exit status 0: equal, bit for bit, or differing as was noticed; 1: it differs, loses "
        "work, or does not end; 2: it could not be checked, or no fault could act.",
    )
    parser.add_argument("script", type=Path, help="the program, which resumes by itself: resume='auto'")
    parser.add_argument("--seed", type=int, default=0, help="of all choices (%(default)s)")
    parser.add_argument("--faults", type=int, default=50, metavar="N", help="how many are to act (%(default)s)")
    parser.add_argument(
        "--kinds", help="of faults, with commas between them; by default all that change no numbers", metavar="KINDS"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes of an attempt (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to run and leave all files; it must not exist")
    parser.add_argument(
        "--leave-out", action="append", default=[], metavar="NAME", help="what of the current folder is not copied"
    )
    return parser


def _check(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .check import check_script
    from .faults.fault import HARMLESS

    try:
        with _ended_by_notice():
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
    except ValueError as error:  # what a user can cause
        print(f"heliograph {NAME}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        files = "the files are removed" if options.folder is None else f"the files are in {options.folder}"
        print(f"heliograph {NAME}: interrupted; the processes are ended, and {files}", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
    print(report)
    return 1 if not report.is_good else 0 if report.acted else 2


@contextmanager
def _ended_by_notice() -> Iterator[None]:
    """Let a SIGTERM end the check as a Ctrl-C does: the processes are in groups of their own, and would not end."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
