"""`python -m heliograph verify-resume module:function`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from heliograph.spi import describe_error

NAME = "verify-resume"


def verify_resume(arguments: Sequence[str]) -> int:
    """Check that a training that is killed and resumed equals an uninterrupted one."""
    parser = argparse.ArgumentParser(
        prog=f"heliograph {NAME}",
        description="Exit status 0: equal, bit for bit; 1: not equal; 2: it could not be checked.",
    )
    parser.add_argument(
        "function",
        metavar="module:function",
        help="returns a new trainer and the keywords of its fit; takes nothing, or a folder to write to",
    )
    parser.add_argument(
        "--kill-at",
        action="append",
        metavar="POINT",
        help="7 (after the seventh batch of the run) or validation_batch_end:3 (at the third such event); several, for "
        "kills in a row; by default three points are chosen",
    )
    parser.add_argument("--resumes", type=int, default=3, metavar="N", help="how many points to choose (%(default)s)")
    parser.add_argument("--save-every", type=int, default=3, metavar="BATCHES", help="how often to save (%(default)s)")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a plugin or metric not to compare; several",
    )
    return run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Check, print the report, and return the exit status.

    Args:
        options: the parsed arguments.
    """
    from heliograph.spi import UsageError, find_function

    from .resume.check import check_resume
    from .resume.moments import parse_kill_point

    try:
        check = check_resume(
            find_function(options.function),
            kill_at=[parse_kill_point(text) for text in options.kill_at] if options.kill_at else None,
            resumes=options.resumes,
            save_every=options.save_every,
            ignore=options.ignore,
        )
    except UsageError as error:
        print(f"heliograph {NAME}: {error}", file=sys.stderr)
        return 2
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code; status 1 means not equal
        traceback.print_exc()
        text = describe_error(error)
        print(f"heliograph {NAME}: could not check: {options.function} failed with {text}", file=sys.stderr)
        return 2
    print(check)
    return 0 if check.is_exact else 1
