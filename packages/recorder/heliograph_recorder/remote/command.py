"""`python -m heliograph ask RUN stop [--reason "..."]`: ask a run that lives for something."""

from __future__ import annotations

import argparse
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
EXITS = "Exit status 0: accepted, and with --wait served; 1: refused, taken back, or the run ended before; 2: there is no such run, or it cannot be reached; 3: no answer in time, or the connection ended; 130: interrupted by Ctrl-C."  # noqa: E501
NO_OPTION = ("reason", "wait")  # of `status`
ASKED = "asked on the command line"


def ask(arguments: Sequence[str]) -> int:
    """Ask a running training to stop, save, validate, change its learning rate and more."""
    return run_ask(_parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    ask = argparse.ArgumentParser(prog="heliograph ask", description=EXITS)
    _add_options(ask, reason=None, wait=False, timeout=None, token_file=None)
    ask.add_argument("address", metavar="RUN", help="the folder of the run, its socket, or host:port")
    verbs = ask.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in PLAIN.items():
        verbs.add_parser(verb, help=text, description=EXITS)
    rate = verbs.add_parser("set-lr", help="set the learning rate", description=EXITS)
    rate.add_argument("rate", type=_rate, help="of the first parameter group; the others keep their ratio to it")
    rate.add_argument("--optimizer", metavar="NAME", default="", help="the one that is meant, of several")
    for verb in ("enable", "disable"):
        switch = verbs.add_parser(verb, help=f"{verb} a plugin", description=EXITS)
        switch.add_argument("plugin", help="its name")
    verbs.add_parser("status", help="print where the run is, as JSON", description=EXITS)
    for each in verbs.choices.values():
        each.set_defaults(parser=each)
        _add_options(each)
    return ask


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a learning rate is a number above 0, such as 0.01; got {text!r}") from None


def _add_options(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Add what may be given before the verb and after it; only the former has defaults, so that both count."""

    def add(name: str, help: str, **how: Any) -> None:  # noqa: A002  # as argparse calls it
        default = defaults.get(name.removeprefix("--").replace("-", "_"), argparse.SUPPRESS)
        parser.add_argument(name, help=help, default=default, **how)

    add("--reason", f"why, for the history of the run; by default {ASKED!r}")
    add("--wait", "until it is known what became of the request", action="store_true")
    add("--timeout", "wait no longer than that in all", metavar="SECONDS", type=float)
    add("--token-file", "the token of a run over TCP; else $HELIOGRAPH_TOKEN", metavar="FILE", type=Path)


def run_ask(options: argparse.Namespace) -> int:
    """Ask, print the answer, and return the exit status.

    Args:
        options: the parsed arguments.
    """
    _check(options)
    try:
        return _answer(options)
    except KeyboardInterrupt:
        print("heliograph ask: interrupted; what the run has received it serves all the same", file=sys.stderr)
        return 130


def _check(options: argparse.Namespace) -> None:
    """Give the reason its default; exit with the usage if an option is given that means nothing."""
    if options.verb != "status":
        options.reason = ASKED if options.reason is None else options.reason
        return
    for name in NO_OPTION:
        if getattr(options, name):
            options.parser.error(f"status takes no --{name}")


def _answer(options: argparse.Namespace) -> int:
    from heliograph.spi import printable

    from .client import attach

    try:
        token = None if options.token_file is None else options.token_file.read_text(encoding="ascii").strip()
        run = attach(options.address, token=token)
        answer = _status(run, options.timeout) if options.verb == "status" else _ask(run, options)
    except (LookupError, OSError, ValueError) as error:
        text = error.args[0] if isinstance(error, LookupError) else error  # its own text has quotes around it
        print(f"heliograph ask: {printable(text)}", file=sys.stderr)
        return 3 if isinstance(error, TimeoutError) else 2
    if isinstance(answer, str):
        print(answer)
        return 0
    print(printable(answer))
    if answer.state == "accepted" and options.wait:  # the time was over
        return 3
    return {"accepted": 0, "served": 0, "refused": 1, "unserved": 1}.get(answer.state, 3)


def _status(run: RemoteRun, timeout: float | None) -> str:
    import json

    status = run.status() if timeout is None else run.status(timeout=timeout)
    return json.dumps(status, indent=2)  # escapes what is not ASCII


def _ask(run: RemoteRun, options: argparse.Namespace) -> RemoteAnswer:
    how = {"wait": options.wait, "timeout": options.timeout}
    match options.verb:
        case "set-lr":
            return run.set_learning_rate(options.rate, options.reason, optimizer=options.optimizer, **how)
        case "enable":
            return run.enable(options.plugin, options.reason, **how)
        case "disable":
            return run.disable(options.plugin, options.reason, **how)
    answer: RemoteAnswer = getattr(run, options.verb.replace("-", "_"))(options.reason, **how)
    return answer
