"""The commands `explain`, `status` and `timeline`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def explain(arguments: Sequence[str]) -> int:
    """Explain a recorded run: its end, the requests, and the saved and pruned checkpoints."""
    return _tell("explain", "Exit status 0: explained; 2: the recording is missing or unreadable.", arguments)


def status(arguments: Sequence[str]) -> int:
    """Show whether a recorded run is running, finished or killed, since when, its step and last checkpoint."""
    text = "Exit status 0: shown, whatever the state of the run; 2: the recording is missing or unreadable."
    return _tell("status", text, arguments)


def _tell(name: str, description: str, arguments: Sequence[str]) -> int:
    parser = _parser(name, description)
    parser.add_argument("--json", action="store_true", help="print all facts as one JSON object")
    options = parser.parse_args(arguments)
    from heliograph.spi import as_json  # after the parser: torch is slow to import

    from .explain.facts import describe_status, facts_of
    from .explain.story import story
    from .format.reader import gc_paused, is_being_written, read

    try:
        with gc_paused():
            recording = read(options.recording)
            is_running = is_being_written(recording.path)
            if options.json:
                text = as_json(facts_of(recording, is_running=is_running))
            elif name == "status":
                text = describe_status(facts_of(recording, is_running=is_running))
            else:
                text = story(recording, is_running=is_running)
    except (OSError, ValueError) as error:
        return _print_error(name, error)
    print(text)  # outside the try, since an OSError here is that of the terminal or pipe
    return 0


def timeline(arguments: Sequence[str]) -> int:
    """Write a page with the curves, decisions and checkpoints of a recorded run."""
    parser = _parser(
        "timeline",
        "Exit status 0: written; 2: the recording is missing or unreadable, the page cannot be written, or no browser "
        "can be started.",
    )
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    parser.add_argument("--output", metavar="FILE", type=Path, help="the page; by default <recording>.html")
    options = parser.parse_args(arguments)
    from .format.reader import SUFFIX, read  # after the parser: torch is slow to import
    from .timeline.page import write_timeline

    try:
        recording = read(options.recording)
        page = options.output or recording.path.with_suffix(".html")
        if SUFFIX in page.resolve().suffixes:
            raise ValueError(f"{page} has the name of a recording: give one with another suffix, such as .html.")
        write_timeline(recording, page)
    except (OSError, ValueError) as error:
        return _print_error("timeline", error)
    print(page)
    if not options.open:
        return 0
    import webbrowser

    if webbrowser.open(page.resolve().as_uri()):
        return 0
    return _print_error("timeline", OSError(f"no browser could be started: open {page} with one."))


def local_path(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(f"expected a recording or a folder on this machine, got {text}")
    return Path(text)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"heliograph {name}", description=description)
    parser.add_argument("recording", metavar="RUN", type=local_path, help="a recording, or a folder: the newest in it")
    return parser


def _print_error(command: str, error: Exception) -> int:
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename} cannot be read or written: {error.strerror}."
    print(f"heliograph {command}: {text}", file=sys.stderr)
    return 2
