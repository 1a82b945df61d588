"""Record commands in a terminal, and draw what it shows as an SVG: `pip install pyte`."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import struct
import sys
import termios
import textwrap
from collections.abc import Callable
from html import escape
from pathlib import Path

import pyte

Lines = list[str]

LINES, LINE, WIDTH = 400, 18, 8.43  # of a screen; pixels of a line and of a character
TEXT = '<text x="16" y="{y:g}" fill="{color}" xml:space="preserve">{text}</text>'
COLORS = {  # of the lines that have a text
    "$ ": "#7ee787",
    "Killed": "#ff7b72",
    "Error": "#ff7b72",
    "Did you mean": "#ffd866",
    "verified": "#ffd866",
    "bit for bit": "#ffd866",
    "exact: ": "#ffd866",
    "The first difference": "#ffd866",
}


def record(
    command: str,
    folder: Path,
    columns: int = 100,
    stop: Callable[[Lines], bool] | None = None,
    how: int = signal.SIGKILL,
) -> Lines:
    """Run a command in a terminal, and return the last screen.

    Args:
        command: a command line; `python` is this interpreter.
        folder: the current folder of the command.
        columns: the width of the terminal.
        stop: returns True for the screen at which the command gets a signal.
        how: the signal.
    """
    arguments = shlex.split(command)
    if arguments[0] == "python":
        arguments[0] = sys.executable
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        os.chdir(folder)
        os.environ |= {"PYTHONWARNINGS": "ignore", "TERM": "xterm-256color"}
        os.execvp(arguments[0], arguments)  # noqa: S606 (no shell is needed)
    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    stopped = False
    while True:
        try:
            stream.feed(os.read(terminal, 4096))
        except OSError:  # the terminal of a process that ended
            break
        if stop is not None and not stopped and stop(text_of(screen)):
            os.kill(child, how)
            stopped = True
            if how == signal.SIGKILL:
                break
    os.waitpid(child, 0)
    os.close(terminal)
    return text_of(screen)


def text_of(screen: pyte.Screen) -> Lines:
    """Return the lines of a screen down to the cursor."""
    rows = (screen.buffer[number] for number in range(screen.cursor.y + 3))
    return trimmed(["".join(row[column].data for column in range(screen.columns)).rstrip() for row in rows])


def shown(*commands: str, folder: Path, columns: int = 100) -> Lines:
    """Return the prompts of some commands with their outputs, whose long lines are broken between words."""
    lines: Lines = []
    for command in commands:
        lines += [f"$ {command}", *wrapped(record(command, folder, 400), columns), ""]
    return lines


def wrapped(lines: Lines, columns: int) -> Lines:
    """Break long lines between words."""
    broken: Lines = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        broken += textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return broken


def trimmed(lines: Lines) -> Lines:
    """Return the lines without the empty ones at the end."""
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines


def svg(lines: Lines, columns: int = 60) -> str:
    """Return the picture of a terminal with these lines, and at least so many columns."""
    lines = trimmed(lines)
    columns = max(columns, *map(len, lines))
    width, height = round(columns * WIDTH) + 32, (len(lines) + 2) * LINE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-size="14" font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace">'
    )
    texts = [
        TEXT.format(y=(number + 1.5) * LINE, color=color_of(line), text=escape(line))
        for number, line in enumerate(lines)
        if line
    ]
    return "\n".join([head, f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>', *texts, "</svg>\n"])


def color_of(line: str) -> str:
    """Return the color of a line."""
    return next((color for text, color in COLORS.items() if text in line), "#e6edf3")
