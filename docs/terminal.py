"""Make `docs/images/resume.svg`: record the quickstart of the README in a terminal, killed and started again.

`pip install pyte`, then `.venv/bin/python docs/terminal.py`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import Callable
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

import pyte

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
COLUMNS, LINES = 86, 60
LINE, WIDTH = 18, 8.43  # pixels
TEXT = '<text x="16" y="{y}" fill="{color}" xml:space="preserve">{text}</text>'
COLORS = {"$ ": "#7ee787", "Killed": "#ff7b72", "verified": "#ffd866"}
Lines = list[str]


def main() -> None:
    """Record both starts and write the picture."""
    code = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    with TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(code, encoding="utf-8")
        killed = record(folder, is_in_epoch_8)
        resumed = record(folder)
    bars = [line for line in killed if "|" in line]
    start = next(number for number, line in enumerate(resumed) if line.startswith("completed"))
    shown = ["$ python train.py", *bars, "Killed", "", "$ python train.py", *resumed[start:]]
    (DOCS / "images/resume.svg").write_text(svg(shown), encoding="utf-8")
    print(*shown, sep="\n")


def is_in_epoch_8(lines: Lines) -> bool:
    """Return whether the training is within its eighth epoch."""
    return any(" 7/20" in line for line in lines) and any(re.search(r" 1[5-9]/30 ", line) for line in lines)


def record(folder: str, kill: Callable[[Lines], bool] | None = None) -> Lines:
    """Run `python train.py` in a terminal, kill it if `kill` says so of the screen, and return the last screen."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execv(sys.executable, [sys.executable, "train.py"])  # noqa: S606 (no shell is needed)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    while True:
        try:
            stream.feed(os.read(terminal, 4096))
        except OSError:  # the terminal of a process that ended
            break
        if kill is not None and kill(screen.display):
            os.kill(child, signal.SIGKILL)
            break
    os.waitpid(child, 0)
    return [line.rstrip() for line in screen.display]


def svg(lines: Lines) -> str:
    """Draw a terminal with these lines."""
    while lines[-1] == "":
        lines.pop()
    height = (len(lines) + 2) * LINE
    width = round(COLUMNS * WIDTH) + 32
    texts = [
        TEXT.format(y=(number + 1.5) * LINE, color=color_of(line), text=escape(line))
        for number, line in enumerate(lines)
        if line
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="14"'
            ' font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace">',
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            *texts,
            "</svg>\n",
        ]
    )


def color_of(line: str) -> str:
    """Return the color of a line."""
    return next((color for text, color in COLORS.items() if text in line), "#e6edf3")


if __name__ == "__main__":
    main()
