"""The command `heliograph verify-resume module:function`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from heliograph.spi import UsageError, describe_error, find_function

NAME = "verify-resume"


def verify_resume(arguments: Sequence[str]) -> int:
    """Check that a training that is killed and resumed equals an uninterrupted one."""
    parser = argparse.ArgumentParser(
        prog=f"heliograph {NAME}",
        description="Exit status 0: bitwise identical; 1: different; 2: the check failed.",
    )
    parser.add_argument(
        "function",
        metavar="module:function",
        help="returns a new trainer and the keywords of its fit; takes no argument, or a folder to write to",
    )
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
    options = parser.parse_args(arguments)
    from .resume.check import check_resume, parse_kill_point  # imports torch

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
    except (Exception, SystemExit) as error:  # noqa: BLE001  # user code; status 1 means different
        traceback.print_exc()
        failure = f"{options.function} raised {describe_error(error)}"
        print(f"heliograph {NAME}: the check failed: {failure}", file=sys.stderr)
        return 2
    print(check)
    return 0 if check.is_exact else 1
