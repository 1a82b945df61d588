"""`python -m heliograph new-plugin my_plugin`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .new_package import write_package


def new_plugin(arguments: Sequence[str]) -> int:
    """Write a package with a plugin, its tests and a readme."""
    parser = argparse.ArgumentParser(prog="heliograph new-plugin")
    parser.add_argument("name", help="of the plugin, such as loss_report: the package is heliograph-loss-report")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to make its folder (the current one)")
    return write_plugin(parser.parse_args(arguments))


def write_plugin(options: argparse.Namespace) -> int:
    """Write a package, say what to do with it, and return the exit status."""
    try:
        folder, names = write_package(options.name, options.folder)
    except (ValueError, OSError) as error:
        print(f"heliograph new-plugin: {error}", file=sys.stderr)
        return 2
    print(
        f"{folder} has the plugin {names.name!r}, with its tests. Next:\n"
        f"  cd {folder}\n"
        f"  pip install -e '.[test]'\n"
        f"  pytest\n"
        f"In a program, trainer.plugins.load({names.name!r}) uses it. How to publish it: docs/publishing.md."
    )
    return 0
