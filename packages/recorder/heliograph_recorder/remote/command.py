"""`python -m heliograph ask RUN stop [--reason "..."]`: send a request to a running training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import RemoteAnswer, RemoteRun

PLAIN = {
    "stop": "stop the run",
    "save": "write a checkpoint",
    "validate": "validate",
    "log": "log",
    "end-epoch": "end the epoch",
}
EXITS = "Exit status 0: accepted, and with --wait served; 1: refused, withdrawn, or the run ended first; 2: there is no such run, or it cannot be reached; 3: no answer in time, or the connection ended; 130: interrupted by Ctrl-C."  # noqa: E501
ASKED = "asked on the command line"


def ask(arguments: Sequence[str]) -> int:
    """Ask a running training to stop, save, validate, change its learning rate and more."""
    options = _parser().parse_args(arguments)
    try:
        return _answer(options)
    except KeyboardInterrupt:
        print("heliograph ask: interrupted; the run still serves a request that it has received", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="heliograph ask", description=EXITS)
    parser.add_argument("address", metavar="RUN", help="the folder of the run, its socket, or host:port")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in PLAIN.items():
        verbs.add_parser(verb, help=text, description=EXITS)
    rate = verbs.add_parser("set-lr", help="set the learning rate", description=EXITS)
    rate.add_argument("rate", type=float, help="of the first parameter group; the ratios between groups stay the same")
    rate.add_argument("--optimizer", metavar="NAME", default="", help="needed if optimizers have different rates")
    for verb in ("enable", "disable"):
        switch = verbs.add_parser(verb, help=f"{verb} a plugin", description=EXITS)
        switch.add_argument("plugin", help="its name")
    for verb_parser in verbs.choices.values():
        verb_parser.add_argument("--reason", default=ASKED, help="why, for the history of the run (%(default)s)")
        verb_parser.add_argument("--wait", action="store_true", help="wait for the outcome of the request")
    verbs.add_parser("status", help="print the status of the run as JSON", description=EXITS)
    for verb_parser in verbs.choices.values():
        verb_parser.add_argument("--timeout", metavar="SECONDS", type=float, help="wait at most so long in all")
        verb_parser.add_argument(
            "--token-file", metavar="FILE", type=Path, help="the token for TCP; by default $HELIOGRAPH_TOKEN"
        )
    return parser


def _answer(options: argparse.Namespace) -> int:
    from heliograph.spi import printable

    from .client import attach

    try:
        token = None if options.token_file is None else options.token_file.read_text(encoding="ascii").strip()
        run = attach(options.address, token=token)
        if options.verb == "status":
            status = run.status() if options.timeout is None else run.status(timeout=options.timeout)
        else:
            answer = _request(run, options)
    except (LookupError, OSError, ValueError) as error:
        text = error.args[0] if isinstance(error, LookupError) else error  # str() of a KeyError adds quotes
        print(f"heliograph ask: {printable(text)}", file=sys.stderr)
        return 3 if isinstance(error, TimeoutError) else 2
    if options.verb == "status":
        print(json.dumps(status, indent=2))  # escapes non-ASCII characters
        return 0
    print(printable(answer))
    if answer.state == "accepted" and options.wait:  # timeout
        return 3
    return {"accepted": 0, "served": 0, "refused": 1, "unserved": 1}.get(answer.state, 3)


def _request(run: RemoteRun, options: argparse.Namespace) -> RemoteAnswer:
    limits = {"wait": options.wait, "timeout": options.timeout}
    if options.verb == "set-lr":
        return run.set_learning_rate(options.rate, options.reason, optimizer=options.optimizer, **limits)
    names = [options.plugin] if options.verb in ("enable", "disable") else []
    answer: RemoteAnswer = getattr(run, options.verb.replace("-", "_"))(*names, options.reason, **limits)
    return answer
