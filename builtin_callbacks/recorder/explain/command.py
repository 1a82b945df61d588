"""`python -m heliograph explain RUN` and `python -m heliograph timeline RUN`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..format.gc_pause import collector_paused

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: Commands) -> None:
    """Add both commands to those of a parser."""
    explain = commands.add_parser(
        "explain",
        help="tell the story of a recorded run: how it ended, who asked for what, what was saved and pruned",
        description="Exit status 0: told; 2: there is no recording, or it cannot be read.",
    )
    timeline = commands.add_parser(
        "timeline",
        help="write a page with the curves, decisions and checkpoints of a recorded run, and a trace",
        description="Exit status 0: written; 2: there is no recording, it cannot be read, or a file cannot be written.",
    )
    for each, act in ((explain, run_explain), (timeline, run_timeline)):
        each.add_argument("recording", metavar="RUN", type=Path, help="a recording, or a folder: the newest in it")
        each.set_defaults(run=act)
    timeline.add_argument("--output", metavar="FILE", type=Path, help="the page; by default <recording>.html")
    timeline.add_argument(
        "--trace", metavar="FILE", type=Path, help="the trace for Perfetto; by default <recording>.trace.json"
    )


@collector_paused()
def run_explain(options: argparse.Namespace) -> int:
    """Tell the story; return the exit status.

    Args:
        options: parsed by what `add_command` added.
    """
    from ..format.reader import read
    from .story import story

    try:
        told = story(read(options.recording))
    except (OSError, ValueError) as error:
        return _refused("explain", error)
    print(told)  # behind the try: an OSError here is of who reads it
    return 0


def run_timeline(options: argparse.Namespace) -> int:
    """Write the page and the trace, print where; return the exit status.

    Args:
        options: parsed by what `add_command` added.
    """
    from ..format.reader import read
    from ..timeline.page import write_timeline
    from ..timeline.trace import write_trace

    try:
        recording = read(options.recording)
        page = options.output or recording.path.with_suffix(".html")
        trace = options.trace or recording.path.with_suffix(".trace.json")
        _check_files(recording.path, page, trace)
        write_timeline(recording, page)
        write_trace(recording, trace)
    except (OSError, ValueError) as error:
        return _refused("timeline", error)
    print(f"{page}\n{trace}")
    return 0


def _check_files(recording: Path, page: Path, trace: Path) -> None:
    """Raise ValueError where a file would be written over a recording, or both into one."""
    from ..format.reader import SUFFIX
    from ..format.tail import tail_of

    kept = {recording.resolve(), tail_of(recording).resolve()}
    for file in (page, trace):
        if file.resolve() in kept:
            raise ValueError(f"{file} is the recording itself, which nothing is written over: give another file.")
        if file.suffix == SUFFIX:
            raise ValueError(f"{file} has the name of a recording: give one that ends otherwise, such as .html.")
    if page.resolve() == trace.resolve():
        raise ValueError(f"The page and the trace cannot both be written to {page}: give two files.")


def _refused(command: str, error: Exception) -> int:
    print(f"heliograph {command}: {error}", file=sys.stderr)
    return 2
