"""`python -m heliograph watch RUN ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..command import local_path

if TYPE_CHECKING:
    from .run_list import RunList


def watch(arguments: Sequence[str]) -> int:
    """Show runs while they train: a page with their curves, requests and checkpoints."""
    parser = argparse.ArgumentParser(
        prog="heliograph watch",
        description="Serves a page on this machine, made from recordings, until Ctrl-C. "
        "Exit status 0: served or shown; 2: a file is not a recording, the port is taken, or rich is not installed.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=local_path,
        help="a recording, or a folder with recordings; without --once it may not exist yet",
    )
    parser.add_argument("--port", type=_port, default=0, help="the port of the page; by default a free one")
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    parser.add_argument("--terminal", action="store_true", help="show a text screen here instead of a page")
    parser.add_argument("--once", action="store_true", help="print one text screen, and exit")
    parser.add_argument("--json", action="store_true", help="with --once: print one JSON object")
    options = parser.parse_args(arguments)
    if options.json and not options.once:
        parser.error("--json prints the state of the runs once: add --once")
    if options.once and (options.open or options.port or options.terminal):
        parser.error("--once prints, and exits: remove --open, --port and --terminal")

    from heliograph.spi import as_json, printable, require

    from .run_list import RunList

    try:
        runs = RunList(options.runs)
        for path in runs.missing():
            if options.once:
                raise FileNotFoundError(f"{printable(path)} does not exist.")
            print(f"heliograph watch: {printable(path)} does not exist yet: watching for it.", file=sys.stderr)
        if options.json:
            print(as_json({"schema": "heliograph.watch/1", "runs": [run.recorded_facts() for run in runs.runs()]}))
            return 0
        if not (options.terminal or options.once):
            return _serve(runs, options)
        from .terminal import show

        require("rich", "watch --terminal", extra="watch")
        with suppress(KeyboardInterrupt):
            show(runs, once=options.once)
        return 0
    except (OSError, ValueError, ImportError) as error:
        print(f"heliograph watch: {error}", file=sys.stderr)
        return 2


def _serve(runs: RunList, options: argparse.Namespace) -> int:
    from .server import WatchServer

    try:
        server = WatchServer(runs, options.port)
    except OSError as error:
        raise OSError(f"port {options.port} cannot be used: {error.strerror}; give another --port.") from None
    with server:
        print(f"{server.url} (Ctrl-C ends it)", flush=True)
        with _browser(server.url) if options.open else nullcontext():
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print()
    return 0


@contextmanager
def _browser(url: str) -> Iterator[None]:
    """Open an address in a browser, through a private file: other users can see the arguments of a process."""
    import webbrowser
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile("w", suffix=".html") as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={url}">')
        file.flush()
        if not webbrowser.open(Path(file.name).as_uri()):
            print(f"heliograph watch: no browser could be started: open {url}", file=sys.stderr)
        yield


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, got {text!r}")
    return int(text)
