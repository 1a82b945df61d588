"""`python -m heliograph ask RUN stop [--reason "..."]`: send a request to a running training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    if options.verb == "status" and (options.reason or options.wait):
        options.parser.error(f"status takes no {'--reason' if options.reason else '--wait'}")
    try:
        return _answer(options)
    except KeyboardInterrupt:
        print("heliograph ask: interrupted; the run still serves a request that it has received", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="heliograph ask", description=EXITS)
    _add_options(parser, reason=None, wait=False, timeout=None, token_file=None)
    parser.add_argument("address", metavar="RUN", help="the folder of the run, its socket, or host:port")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in PLAIN.items():
        verbs.add_parser(verb, help=text, description=EXITS)
    rate = verbs.add_parser("set-lr", help="set the learning rate", description=EXITS)
    rate.add_argument("rate", type=_rate, help="of the first parameter group; the ratios between groups stay the same")
    rate.add_argument("--optimizer", metavar="NAME", default="", help="needed if optimizers have different rates")
    for verb in ("enable", "disable"):
        switch = verbs.add_parser(verb, help=f"{verb} a plugin", description=EXITS)
        switch.add_argument("plugin", help="its name")
    verbs.add_parser("status", help="print the status of the run as JSON", description=EXITS)
    for verb_parser in verbs.choices.values():
        verb_parser.set_defaults(parser=verb_parser)
        _add_options(verb_parser)
    return parser


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a learning rate is a number above 0, such as 0.01; got {text!r}") from None


def _add_options(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Add the options that are accepted before and after the verb; only the parser before it has defaults."""

    def add(name: str, help: str, **options: Any) -> None:  # noqa: A002  # as argparse calls it
        default = defaults.get(name.removeprefix("--").replace("-", "_"), argparse.SUPPRESS)
        parser.add_argument(name, help=help, default=default, **options)

    add("--reason", f"why, for the history of the run; by default {ASKED!r}")
    add("--wait", "wait for the outcome of the request", action="store_true")
    add("--timeout", "wait at most so long in all", metavar="SECONDS", type=float)
    add("--token-file", "the token for TCP; by default $HELIOGRAPH_TOKEN", metavar="FILE", type=Path)


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
    reason = ASKED if options.reason is None else options.reason
    limits = {"wait": options.wait, "timeout": options.timeout}
    match options.verb:
        case "set-lr":
            return run.set_learning_rate(options.rate, reason, optimizer=options.optimizer, **limits)
        case "enable":
            return run.enable(options.plugin, reason, **limits)
        case "disable":
            return run.disable(options.plugin, reason, **limits)
    answer: RemoteAnswer = getattr(run, options.verb.replace("-", "_"))(reason, **limits)
    return answer
