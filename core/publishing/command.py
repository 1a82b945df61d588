"""`python -m heliograph plugins`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from shutil import get_terminal_size

from ...plugins.discovery import NOT_INSTALLED, discover


def plugins(arguments: Sequence[str]) -> int:
    """List the installed plugins and what they do, or show the options of one."""
    parser = argparse.ArgumentParser(
        prog="heliograph plugins",
        description="Exit status 1: with --check, a plugin is broken; or heliograph itself is not installed. "
        "2: there is no such plugin, or it cannot be imported.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of one plugin or its class: show its options")
    parser.add_argument("-v", "--verbose", action="store_true", help="with package, version, class and events")
    parser.add_argument(
        "--check", action="store_true", help="import those of other packages, each in a process of its own"
    )
    return show_plugins(parser.parse_args(arguments))


def show_plugins(options: argparse.Namespace) -> int:
    """Print one plugin in full, or all installed ones in brief; return the exit status."""
    if options.name is None:
        return list_plugins(options)
    from .installed_plugins import plugin_page

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
    from .installed_plugins import health_of, plugin_details, plugin_list

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
