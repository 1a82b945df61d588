"""The commands `diverge RUN RUN`, `goto RUN PROGRAM --step 9` and `fork RUN PROGRAM --into FOLDER`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
RUN = "a recording, or a folder, for its newest recording"
INTERRUPTED = 130  # exit status after Ctrl-C
BANNER = """\
paused: .batch .modules .gradients .plugins .run .event .result .comparison .notes
        .next_event() .next_step() .go_to_step(n) .go_to(wanted) .within(context) .finish()"""
PROGRAM = "module:function that returns the trainer and the keywords of its fit; takes nothing, or a folder to write to"


def diverge(arguments: Sequence[str]) -> int:
    """Find and explain the first difference between two recorded runs."""
    parser = argparse.ArgumentParser(
        prog="heliograph diverge",
        description="Exit status 0: the trainings are equal; 1: they differ; 2: they could not be compared.",
    )
    parser.add_argument("one", metavar="RUN", help=RUN)
    parser.add_argument("other", metavar="RUN", help="the run to compare with")
    parser.add_argument(
        "--drill",
        action="append",
        metavar="PROGRAM",
        default=[],
        help=f"repeat the batch that differs, and name the first operator that differs: {PROGRAM}; give a second one "
        f"if the other run has another program",
    )
    parser.add_argument(
        "--change",
        action="append",
        metavar="FUNCTION",
        default=[],
        help="for --drill of a fork: the module:function that changed it; give a second one if another function "
        "changed the other run",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as one JSON object")
    options = parser.parse_args(arguments)
    from heliograph.spi import as_json

    from ..divergence.compare import Divergence, diverge
    from .drill import Drill, drill

    if len(options.drill) > 2 or len(options.change) > 2 * bool(options.drill):
        return _print_error("diverge", ValueError("--drill is given at most twice, and --change only with it."))
    changes = dict(zip(("change", "other_change"), options.change, strict=False))
    compared: Drill | Divergence | int
    if options.drill:
        compared = _attempt("diverge", drill, options.one, options.other, *options.drill, **changes)
    else:
        compared = _attempt("diverge", diverge, options.one, options.other)
    if isinstance(compared, int):
        return compared
    divergence = compared.divergence if isinstance(compared, Drill) else compared
    if options.json:
        print(as_json({"schema": "heliograph.diverge/1", "equal": divergence.is_equal, **asdict(divergence)}))
    else:
        print(compared)
    return 1 if divergence.first is not None else 0 if divergence.is_equal else 2


def goto(arguments: Sequence[str]) -> int:
    """Repeat a recorded run up to an optimizer step, and open a Python prompt there."""
    parser = argparse.ArgumentParser(
        prog="heliograph goto",
        description="Exit status 0: the prompt was opened; 2: the step could not be reached; 130: interrupted.",
    )
    parser.add_argument("recording", metavar="RUN", help=RUN)
    parser.add_argument("program", metavar="PROGRAM", help=PROGRAM)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the optimizer step, from 1")
    parser.add_argument(
        "--change", metavar="FUNCTION", help="for a fork: the module:function that changed it; called at the same step"
    )
    parser.add_argument("--inexact", action="store_true", help="continue although the rerun may differ")
    options = parser.parse_args(arguments)
    import code

    from .goto import goto

    exact = not options.inexact
    paused = _attempt(
        "goto", goto, options.recording, options.program, step=options.step, change=options.change, exact=exact
    )
    if isinstance(paused, int):
        return paused
    with paused:
        print(*paused.notes, *[str(paused.comparison)] * options.inexact, sep="\n", end="\n" * bool(paused.notes))
        code.interact(f"{paused!r}\n{BANNER}", local={"paused": paused, "run": paused.run}, exitmsg="")
    return 0


def fork(arguments: Sequence[str]) -> int:
    """Continue a recorded run from one of its steps in another folder, with something changed."""
    parser = argparse.ArgumentParser(
        prog="heliograph fork",
        description="Exit status 0: trained; 2: it could not begin, or the change failed; 130: interrupted.",
    )
    parser.add_argument("recording", metavar="RUN", help=RUN)
    parser.add_argument("program", metavar="PROGRAM", help="module:function as for goto; takes the folder to write to")
    parser.add_argument("--into", required=True, type=Path, metavar="FOLDER", help="for the new training")
    parser.add_argument("--at", type=int, metavar="N", help="the step; by default the step of the newest checkpoint")
    parser.add_argument("--change", metavar="FUNCTION", help="module:function, called with the run after that step")
    parser.add_argument("--inexact", action="store_true", help="train although the rerun may differ")
    options = parser.parse_args(arguments)
    from .fork import fork

    where = {"into": options.into, "at": options.at}
    result = _attempt(
        "fork", fork, options.recording, options.program, **where, change=options.change, exact=not options.inexact
    )
    if isinstance(result, int):
        return result
    print(result)
    return INTERRUPTED if result.status == "interrupted" else 0


def _attempt(command: str, action: Callable[..., T], *arguments: Any, **keywords: Any) -> T | int:
    """Return the result of a call, or the exit status after its error."""
    from .program import NotExact

    try:
        return action(*arguments, **keywords)
    except (OSError, ValueError, NotExact) as error:
        return _print_error(command, error)
    except KeyboardInterrupt:
        print(f"heliograph {command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _print_error(command: str, error: Exception) -> int:
    print(f"heliograph {command}: {error}", file=sys.stderr)
    return 2
