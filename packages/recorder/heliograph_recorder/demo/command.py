"""The command `demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def demo(arguments: Sequence[str]) -> int:
    """Train a small network on real handwritten digits."""
    parser = argparse.ArgumentParser(prog="heliograph demo")
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"), help="for the files (%(default)s)")
    parser.add_argument("--epochs", type=_positive, default=60, help="the maximum (%(default)s)")
    options = parser.parse_args(arguments)
    from .digits import run_demo

    try:
        return 0 if run_demo(options.folder, options.epochs) else 1
    except (ImportError, ValueError) as error:
        print(f"heliograph demo: {error}", file=sys.stderr)
        return 1


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)
