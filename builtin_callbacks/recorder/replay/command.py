"""`python -m heliograph replay RUN --plugin early_stopping:patience=2`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

NAME = "replay"


def add_command(commands: Commands) -> None:
    """Add the command to those of a parser."""
    parser = commands.add_parser(
        NAME,
        help="tell what plugins would have asked of a recorded run",
        description="Exit status 0: replayed; 1: a replayed plugin failed; 2: there is no such recording or plugin, or "
        "its options are wrong.",
    )
    parser.add_argument("recording", metavar="RUN", help="the file that Recorder wrote, or its folder")
    parser.add_argument(
        "--plugin",
        action="append",
        required=True,
        dest="plugins",
        metavar="NAME:KEY=VALUE,...",
        help="an installed plugin and its options, as in early_stopping:monitor=validation/loss,patience=2 or "
        "'log_schedule:when=Every(steps=5)'; several, in their "
        "order; the second of a name is called early_stopping_2",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replay, print the report, and return the exit status.

    Args:
        options: parsed by what `add_command` added.
    """
    from ..format.reader import read
    from .options import made_plugins
    from .replay import Session

    try:
        plugins, said = made_plugins(options.plugins)
        session = Session(read(options.recording), plugins)
    except (LookupError, ImportError, OSError, TypeError, ValueError) as error:
        told = "; ".join([str(error), *getattr(error, "__notes__", ())])
        print(f"heliograph {NAME}: {told}", file=sys.stderr)
        return 2
    replayed = session.play()
    print(replayed, *said, sep="\n")
    return 1 if replayed.failed else 0
