"""`python -m heliograph ask RUN stop [--reason "..."]`: send a request to a running training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

VERBS = {
    "stop": "stop the run",
    "save": "write a checkpoint",
    "validate": "validate",
    "log": "log",
    "end-epoch": "end the epoch",
    "set-lr": "set the learning rate of the first parameter group to VALUE; the ratios between groups stay the same",
    "enable": "enable the plugin VALUE",
    "disable": "disable the plugin VALUE",
    "status": "print the status of the run as JSON",
}
WITH_VALUE = ("set-lr", "enable", "disable")
EXITS = "Exit status 0: accepted, and with --wait served; 1: refused, withdrawn, or the run ended first; 2: there is no such run, or it cannot be reached; 3: no answer in time, or the connection ended; 130: interrupted by Ctrl-C."  # noqa: E501
ASKED = "asked on the command line"


def ask(arguments: Sequence[str]) -> int:
    """Ask a running training to stop, save, validate, change its learning rate and more."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if (options.value is None) == (options.verb in WITH_VALUE):
        parser.error(f"{options.verb} takes {'a value' if options.value is None else 'no value'}")
    if options.verb == "status" and (options.reason or options.wait):
        parser.error(f"status takes no {'--reason' if options.reason else '--wait'}")
    if options.verb == "set-lr":
        try:
            options.value = float(options.value)
        except ValueError:
            parser.error(f"a learning rate is a number above 0, such as 0.01; got {options.value!r}")
    try:
        return _answer(options)
    except KeyboardInterrupt:
        print("heliograph ask: interrupted; the run still serves a request that it has received", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    verbs = "".join(f"\n  {verb:<10} {text}" for verb, text in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="heliograph ask",
        description=EXITS,
        epilog=f"verbs:{verbs}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", metavar="RUN", help="the folder of the run, its socket, or host:port")
    parser.add_argument("verb", metavar="VERB", choices=VERBS, help="one of the verbs below")
    parser.add_argument("value", metavar="VALUE", nargs="?", help="a learning rate, or the name of a plugin")
    parser.add_argument("--optimizer", metavar="NAME", default="", help="needed if optimizers have different rates")
    parser.add_argument("--reason", help=f"why, for the history of the run; by default {ASKED!r}")
    parser.add_argument("--wait", action="store_true", help="wait for the outcome of the request")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="wait at most so long in all")
    parser.add_argument("--token-file", metavar="FILE", type=Path, help="the token for TCP, or $HELIOGRAPH_TOKEN")
    return parser


def _answer(options: argparse.Namespace) -> int:
    from heliograph.spi import printable

    from .client import SOON, attach

    try:
        token = None if options.token_file is None else options.token_file.read_text(encoding="ascii").strip()
        run = attach(options.address, token=token)
        if options.verb == "status":
            status = run.status(timeout=SOON if options.timeout is None else options.timeout)
            print(json.dumps(status, indent=2))  # escapes non-ASCII characters
            return 0
        is_rate = options.verb == "set-lr"
        answer = run.ask(
            options.verb,
            ASKED if options.reason is None else options.reason,
            target=options.optimizer if is_rate else options.value or "",
            value=options.value if is_rate else None,
            wait=options.wait,
            timeout=options.timeout,
        )
    except (LookupError, OSError, ValueError) as error:
        text = error.args[0] if isinstance(error, LookupError) else error  # str() of a KeyError adds quotes
        print(f"heliograph ask: {printable(text)}", file=sys.stderr)
        return 3 if isinstance(error, TimeoutError) else 2
    print(printable(answer))
    if answer.state == "accepted" and options.wait:  # timeout
        return 3
    return {"accepted": 0, "served": 0, "refused": 1, "unserved": 1}.get(answer.state, 3)
