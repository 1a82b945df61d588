"""`python -m heliograph plugins` and `python -m heliograph new-plugin my_plugin`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from heliograph.plugins.discovery import NOT_INSTALLED, discover

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: Commands) -> None:
    """Add the commands to those of a parser."""
    plugins = commands.add_parser(
        "plugins",
        help="list the installed plugins and what they do, or show the options of one",
        description="Exit status 1: with --check, a plugin is broken; or heliograph itself is not installed. "
        "2: there is no such plugin, or it cannot be imported.",
    )
    plugins.set_defaults(run=show_plugins)
    plugins.add_argument("name", nargs="?", metavar="NAME", help="of one plugin or its class: show its options")
    plugins.add_argument("-v", "--verbose", action="store_true", help="with package, version, class and events")
    plugins.add_argument(
        "--check", action="store_true", help="import those of other packages, each in a process of its own"
    )
    new = commands.add_parser("new-plugin", help="write a package with a plugin, its tests and a readme")
    new.set_defaults(run=write_plugin)
    new.add_argument("name", help="of the plugin, such as loss_report: the package is heliograph-loss-report")
    new.add_argument("--folder", type=Path, default=Path(), help="where to make its folder (the current one)")


def show_plugins(options: argparse.Namespace) -> int:
    """Print one plugin in full, or all installed ones in brief; return the exit status."""
    if options.name is None:
        return list_plugins(options)
    from .plugin_page import plugin_page

    try:
        if options.verbose or options.check:
            raise ValueError(f"-v and --check are for the list of all plugins: leave {options.name} or these out.")
        print(plugin_page(options.name))
    except (ValueError, LookupError, ImportError) as error:
        print(f"heliograph plugins: {error}", file=sys.stderr)
        return 2
    return 0


def list_plugins(options: argparse.Namespace) -> int:
    """Print the installed plugins, and return the exit status."""
    from .health import health_of
    from .plugin_table import plugin_details, plugin_list

    found = discover()
    states = health_of(found, check=options.check)
    if options.verbose:
        print(plugin_details(found, states))
    else:
        print(plugin_list(found, states, get_terminal_size().columns if sys.stdout.isatty() else None))
    if not any(each.package == "heliograph" for each in found):
        print(f"heliograph plugins: {NOT_INSTALLED}", file=sys.stderr)
        return 1
    return int(options.check and any(state.word == "broken" for state in states))


def write_plugin(options: argparse.Namespace) -> int:
    """Write a package, say what to do with it, and return the exit status."""
    from .new_package import write_package

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
