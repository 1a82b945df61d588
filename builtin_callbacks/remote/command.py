"""`python -m heliograph ask RUN stop --reason "..."`: ask a run that lives for something."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import RemoteAnswer, RemoteRun

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

PLAIN = {
    "stop": "stop the run",
    "save": "write a checkpoint",
    "validate": "validate",
    "log": "log",
    "end-epoch": "end the epoch",
}
EXITS = "Exit status 0: accepted, and with --wait served; 1: refused, taken back, or the run ended before; 2: there is no such run, or it cannot be reached; 3: no answer in time, or the connection ended."  # noqa: E501


def add_command(commands: Commands) -> None:
    """Add the command to those of a parser."""
    ask = commands.add_parser(
        "ask", help="ask a run that lives to stop, save, validate, change its learning rate, ...", description=EXITS
    )
    ask.add_argument("address", metavar="RUN", help="the folder of the run, its socket, or host:port")
    verbs = ask.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in PLAIN.items():
        _add_request(verbs.add_parser(verb, help=text, description=EXITS))
    rate = verbs.add_parser("set-lr", help="set the learning rate", description=EXITS)
    rate.add_argument("rate", type=float, help="of the first parameter group; the others keep their ratio to it")
    rate.add_argument("--optimizer", metavar="NAME", default="", help="the one that is meant, of several")
    _add_request(rate)
    for verb in ("enable", "disable"):
        switch = verbs.add_parser(verb, help=f"{verb} a plugin", description=EXITS)
        switch.add_argument("plugin", help="its name")
        _add_request(switch)
    verbs.add_parser("status", help="print where the run is, as JSON", description=EXITS)
    ask.set_defaults(run=run_ask)
    for each in verbs.choices.values():
        each.add_argument(
            "--token-file", metavar="FILE", type=Path, help="the token of a run over TCP; else $HELIOGRAPH_TOKEN"
        )


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", required=True, help="why, for the history of the run")
    parser.add_argument("--wait", action="store_true", help="until it is known what became of it")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="wait no longer than that")


def run_ask(options: argparse.Namespace) -> int:
    """Ask, print the answer, and return the exit status.

    Args:
        options: parsed by the parser of `add_command`.
    """
    from ...core.system.extras import printable
    from .client import attach

    try:
        token = None if options.token_file is None else options.token_file.read_text(encoding="ascii").strip()
        run = attach(options.address, token=token)
        answer = _status(run) if options.verb == "status" else _ask(run, options)
    except (LookupError, OSError, ValueError) as error:
        text = error.args[0] if isinstance(error, LookupError) else error  # its own text has quotes around it
        print(f"heliograph ask: {printable(text)}", file=sys.stderr)
        return 2
    if isinstance(answer, str):
        print(answer)
        return 0
    print(printable(answer))
    if answer.state == "accepted" and options.wait:  # the time was over
        return 3
    return {"accepted": 0, "served": 0, "refused": 1, "unserved": 1}.get(answer.state, 3)


def _status(run: RemoteRun) -> str:
    import json

    return json.dumps(run.status(), indent=2)  # escapes what is not ASCII


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
