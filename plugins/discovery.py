"""Plugins of installed packages, found through the entry-point group `heliograph.plugins`.

Finding reads metadata only; a plugin is imported when it is asked for. Installed is never enabled. Other groups, such
as `heliograph.engines`, are read alike.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from ..events.checks import known_names
from ..events.errors import describe_error
from .first_party import DISTRIBUTIONS
from .providers import ENTRY_POINTS, KEYWORD, how_to_install

VARIABLE = "HELIOGRAPH_PLUGINS"
OF_OTHERS = frozenset({"all", "1"})  # every plugin of another package, where it is loaded by name


def switched_off(name: str, package: str | None = None) -> bool:
    """Return whether the environment disables a plugin; `-all` disables every plugin of another package."""
    _, off = _words()
    return name in off or (bool(OF_OTHERS.intersection(off)) and package not in (None, *DISTRIBUTIONS))


def say_switched_off(name: str) -> None:
    """Warn that the variable disables a plugin, which may be forgotten."""
    warnings.warn(f"Plugin {name!r} is switched off by {VARIABLE}.", RuntimeWarning, stacklevel=3)


def say_stays_off(name: str) -> None:
    """Warn that a plugin cannot be enabled."""
    warnings.warn(f"{name!r} stays off, {VARIABLE} names it.", RuntimeWarning, stacklevel=3)


def not_loaded(names: Collection[str]) -> str:
    """Return the tail of an error sentence: which plugins are missing because the variable disables them."""
    return "".join(f" {name} was not loaded: {VARIABLE} disables it." for name in sorted(names))


def load_added(registered: Collection[str], load: Callable[[str], object]) -> None:
    """Load the plugins that the environment adds.

    Args:
        registered: the names of those that are there already: they are not added.
        load: loads one by its name.

    Raises:
        TypeError: a plugin that is added needs options.
        ValueError: the variable cannot be read.
    """
    for name in _words()[0]:
        if name.rpartition(":")[2] in registered:
            continue
        try:
            load(name)
        except Exception as error:
            error.add_note(f"heliograph: {VARIABLE} adds plugin {name!r}, with its default options")
            raise


def changes(registered: Collection[str], installed: Collection[str]) -> str:
    """Return what the environment has changed, in words.

    Args:
        registered: the names of the plugins of a trainer.
        installed: those of the installed ones.

    Raises:
        LookupError: it disables a plugin that is neither registered nor installed.
    """
    added, off = _words()
    unused = [name for name in off if name not in registered and name not in OF_OTHERS]
    for name in unused:
        if name not in installed:
            known = known_names(name, {*registered, *installed})
            raise LookupError(f"{VARIABLE} disables {name!r}, and no plugin has this name.{known}")
    parts = [f"adds {', '.join(added)}"] * bool(added) + [f"disables {', '.join(off)}"] * bool(off)
    there = f" (not in this program: {', '.join(unused)})" if unused else ""
    return f"{VARIABLE} {' and '.join(parts)}{there}"


def _words() -> tuple[list[str], list[str]]:
    """Return the plugins that the variable adds, and those that it disables.

    Raises:
        ValueError: a word begins with neither `+` nor `-`, or a plugin is both added and disabled.
    """
    words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    for word in words:
        if word[0] not in "+-" or not word[1:].strip():
            form = f"as in {VARIABLE}=-progress,+handler_times"
            raise ValueError(f"{VARIABLE} holds {word!r}: a + or a - comes before each name, {form}.")
    added, off = ([word[1:].strip() for word in words if word[0] == sign] for sign in "+-")
    for name in added:
        if name in off:
            raise ValueError(f"{VARIABLE} both adds and disables {name!r}.")
    return added, off


GROUP = "heliograph.plugins"
NOT_INSTALLED = (
    "Heliograph is imported but not installed, so that nothing is found by name, not even its own plugins. Run "
    f"`pip install -e {Path(__file__).parents[1]}`."
)


@dataclass(frozen=True, slots=True)
class Discovered:
    """An entry point: a plugin, or what its group holds, that could be loaded."""

    name: str
    package: str
    version: str
    target: str
    switched_off: bool
    entry_point: EntryPoint = field(repr=False)

    def load(self) -> Callable[..., Any]:
        """Import the class.

        Raises:
            ImportError: it cannot be imported; says which package is broken and why.
        """
        try:
            loaded: Callable[..., Any] = self.entry_point.load()
        except (Exception, SystemExit) as error:  # a broken third-party plugin harms only those who ask for it
            what = f"{self._called} {self.version} ({self.target})"
            raise ImportError(f"{what} cannot be imported: {describe_failure(error)}") from error
        if not callable(loaded):
            raise ImportError(f"{self._called} is not a class or factory: {loaded!r}.")
        return loaded

    @property
    def _called(self) -> str:
        return f"{_kind(self.entry_point.group).capitalize()} {self.name!r} of package {self.package}"


def describe_failure(error: BaseException) -> str:
    """Return why an import failed: one that calls `sys.exit(0)`, as a script does, has an error whose text is `0`."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({'' if error.code is None else repr(error.code)}) when it is imported"
    return describe_error(error)


def _field(distribution: Distribution, name: str) -> str:
    """Return a field of a package's metadata; some programs let a missing one be a KeyError."""
    found = distribution.metadata
    if name not in found:
        return "unknown"
    return found[name] or "unknown"


def _package(distribution: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", _field(distribution, "Name")).lower()


def discover(group: str = GROUP) -> list[Discovered]:
    """Return every installed plugin, or what another group holds, sorted by name; nothing is imported."""
    found: dict[tuple[str, str], Discovered] = {}
    for distribution in distributions():
        try:
            points = distribution.entry_points.select(group=group)
        except Exception as error:  # noqa: BLE001  # one package's broken metadata harms no other
            warnings.warn(
                f"The entry points of package {_package(distribution)} cannot be read: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        if not points:  # to parse the metadata of every installed package takes much longer
            continue
        package, version = _package(distribution), _field(distribution, "Version")
        for point in points:
            off = group == GROUP and switched_off(point.name, package)
            each = Discovered(point.name, package, version, point.value, off, point)
            found.setdefault((point.name, package), each)
    return [found[key] for key in sorted(found)]


def find(name: str, group: str = GROUP) -> Discovered:
    """Return the installed plugin, or what another group holds, of that name.

    `package:name` chooses where two packages use one name.

    Raises:
        LookupError: none has this name, or several have.
    """
    package, _, short = name.rpartition(":")
    package, installed = re.sub(r"[-_.]+", "-", package).lower(), discover(group)
    matches = [each for each in installed if each.name == short and package in ("", each.package)]
    if not matches:
        provider = ENTRY_POINTS.get(group, {}).get(short)
        if not any(each.package == "heliograph" for each in discover()):
            hint = f" {NOT_INSTALLED}"
        elif provider is not None and package in ("", f"heliograph-{provider}"):
            hint = f" {how_to_install(provider)}"
        else:
            hint = known_names(name, {f"{each.package}:{each.name}" if package else each.name for each in installed})
        raise LookupError(f"No installed {_kind(group)} is named {name!r}.{hint}")
    if len(matches) > 1:
        packages = ", ".join(f"{each.package}:{short}" for each in matches)
        article = "an" if _kind(group)[0] in "aeiou" else "a"
        raise LookupError(f"Several packages have {article} {_kind(group)} {short!r}: say which, one of {packages}.")
    return matches[0]


def check_options(name: str, made_by: Callable[..., Any], options: Collection[str], form: Callable[[str], str]) -> None:
    """Raise TypeError where a plugin has no such option, or needs one that is not given.

    Args:
        name: of the plugin.
        made_by: its class or factory.
        options: the names of those that are given.
        form: returns how the plugin is given with what it needs, such as `folder=...`.
    """
    try:
        parameters = signature(made_by).parameters
    except (TypeError, ValueError):  # one in C may have none
        return
    known = {key: each for key, each in parameters.items() if each.kind in KEYWORD}
    if not any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        for key in options:
            if key not in known:
                raise TypeError(f"{name} has no option {key!r}.{known_names(key, known)}")
    for key, each in known.items():
        if each.default is Parameter.empty and key not in options:
            value = "Every(steps=5)" if "Filter" in str(each.annotation) else "..."
            raise TypeError(f"{name} needs {key}=..., as in {form(f'{key}={value}')}.")


def _kind(group: str) -> str:
    """Return what a group holds, in the singular: `plugin` for `heliograph.plugins`."""
    return group.rpartition(".")[2].removesuffix("s")
