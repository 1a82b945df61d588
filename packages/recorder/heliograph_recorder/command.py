"""The commands `explain` and `timeline`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def explain(arguments: Sequence[str]) -> int:
    """Explain a recorded run: its end, the requests, and the saved and pruned checkpoints."""
    parser = _parser("explain", "Exit status 0: explained; 2: the recording is missing or unreadable.")
    options = parser.parse_args(arguments)
    from .explain.story import story  # after the parser: torch is slow to import
    from .format.reader import gc_paused, is_being_written, read

    try:
        with gc_paused():
            recording = read(options.recording)
            text = story(recording, is_running=is_being_written(recording.path))
    except (OSError, ValueError) as error:
        return _print_error("explain", error)
    print(text)  # outside the try, since an OSError here is that of the terminal or pipe
    return 0


def timeline(arguments: Sequence[str]) -> int:
    """Write a page with the curves, decisions and checkpoints of a recorded run, and a trace."""
    parser = _parser(
        "timeline",
        "Exit status 0: written; 2: the recording is missing or unreadable, a file cannot be written, or no browser "
        "can be started.",
    )
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    parser.add_argument("--output", metavar="FILE", type=Path, help="the page; by default <recording>.html")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="the trace for Perfetto; by default <recording>.trace.json"
    )
    options = parser.parse_args(arguments)
    from .format.reader import read  # after the parser: torch is slow to import
    from .timeline.page import write_timeline
    from .timeline.trace import write_trace

    try:
        recording = read(options.recording)
        page = options.output or recording.path.with_suffix(".html")
        trace = options.trace or recording.path.with_suffix(".trace.json")
        _check_files(page, trace)
        write_timeline(recording, page)
        write_trace(recording, trace)
    except (OSError, ValueError) as error:
        return _print_error("timeline", error)
    print(f"{page}\n{trace}")
    return _show(page) if options.open else 0


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"heliograph {name}", description=description)
    parser.add_argument("recording", metavar="RUN", type=Path, help="a recording, or a folder: the newest in it")
    return parser


def _show(page: Path) -> int:
    import webbrowser

    if webbrowser.open(page.resolve().as_uri()):
        return 0
    return _print_error("timeline", OSError(f"no browser could be started: open {page} with one."))


def _check_files(page: Path, trace: Path) -> None:
    from .format.reader import SUFFIX

    for file in (page, trace):
        if SUFFIX in file.suffixes:
            raise ValueError(f"{file} has the name of a recording: give one with another suffix, such as .html.")


def _print_error(command: str, error: Exception) -> int:
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename} cannot be read or written: {error.strerror}."
    print(f"heliograph {command}: {text}", file=sys.stderr)
    return 2
