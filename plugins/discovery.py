"""Plugins of installed packages, found by their entry points in `heliograph.plugins`, and plugins in single files.

Discovery reads metadata only: a plugin is imported when it is loaded, and never enabled just because it is installed.
Other groups, such as `heliograph.engines`, are read in the same way. A file in the folder `heliograph_plugins` beside
the program, or in a folder of the variable `HELIOGRAPH_PLUGIN_PATH`, is a plugin with the name of the file.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

from packaging.utils import canonicalize_name

from ..events import Run, RunClosed
from ..events.checks import describe_error, known_names
from .first_party import DISTRIBUTIONS
from .plugin import Plugin, on
from .providers import ENTRY_POINTS, KEYWORD, how_to_install

VARIABLE = "HELIOGRAPH_PLUGINS"
THIRD_PARTY = frozenset({"all", "1"})  # stand for every plugin of a third-party package


def switched_off(name: str, package: str | None = None) -> bool:
    """True if the environment disables a plugin. `-all` disables all third-party ones."""
    _, off = _words()
    return name in off or (bool(THIRD_PARTY.intersection(off)) and package not in (None, *DISTRIBUTIONS))


class SwitchedOff:
    """Stands in for an installed plugin that the environment disables."""

    def __init__(self, name: str) -> None:
        self.name = name

    @on(RunClosed)
    def end(self, run: Run, event: RunClosed) -> None: ...


def is_switched_off(plugin: object, name: str) -> bool:
    return isinstance(plugin, SwitchedOff) or switched_off(name)


def load_added(registered: Collection[str], load: Callable[[str], object]) -> None:
    for name in _words()[0]:
        if name.rpartition(":")[2] in registered:
            continue
        try:
            load(name)
        except Exception as error:
            error.add_note(f"heliograph: {VARIABLE} adds plugin {name!r} with its default options")
            raise


def changes(registered: Collection[str], installed: Collection[str]) -> str:
    """Return how the environment changes the plugins, as text.

    Raises:
        LookupError: it disables a plugin that is neither registered nor installed.
    """
    added, off = _words()
    unused = [name for name in off if name not in registered and name not in THIRD_PARTY]
    for name in unused:
        if name not in installed:
            names = known_names(name, {*registered, *installed})
            raise LookupError(f"{VARIABLE} disables {name!r}, but no plugin has this name.{names}")
    parts = [f"adds {', '.join(added)}"] * bool(added) + [f"disables {', '.join(off)}"] * bool(off)
    suffix = f" (not in this program: {', '.join(unused)})" if unused else ""
    return f"{VARIABLE} {' and '.join(parts)}{suffix}"


def _words() -> tuple[list[str], list[str]]:
    words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    for word in words:
        if word[0] not in "+-" or not word[1:].strip():
            form = f"as in {VARIABLE}=-progress,+handler_times"
            raise ValueError(f"{VARIABLE} contains {word!r}: write + or - before each name, {form}.")
    added, off = ([word[1:].strip() for word in words if word[0] == sign] for sign in "+-")
    for name in added:
        if name in off:
            raise ValueError(f"{VARIABLE} both adds and disables {name!r}.")
    return added, off


GROUP = "heliograph.plugins"
FOLDER, PATH_VARIABLE = "heliograph_plugins", "HELIOGRAPH_PLUGIN_PATH"
NOT_INSTALLED = f"Heliograph is imported but not installed. Run `pip install -e {Path(__file__).parents[1]}`."


class PluginFile(NamedTuple):
    """A file with one plugin class, in place of an entry point."""

    path: Path
    group: str = GROUP
    attr: str = ""
    dist: Distribution | None = None

    def load(self) -> type[Plugin]:
        """Import the file, and return its plugin class.

        Raises:
            ImportError: it has none or several.
        """
        name = f"{FOLDER}.{self.path.stem}"
        if name not in sys.modules:
            spec = spec_from_file_location(name, self.path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[name] = module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        members = vars(sys.modules[name]).values()
        classes = [kind for kind in members if isinstance(kind, type) and issubclass(kind, Plugin)]
        classes = [kind for kind in classes if kind.__module__ == name and kind.__name__[0] != "_"]
        if len(classes) != 1:
            found = ", ".join(kind.__name__ for kind in classes) or "none"
            raise ImportError(f"a file must define one subclass of heliograph.Plugin, and this one has {found}")
        return classes[0]


@dataclass(frozen=True, slots=True)
class Discovered:
    """An entry point: an installed plugin, or an object of another group."""

    name: str
    package: str
    version: str
    target: str
    switched_off: bool
    entry_point: EntryPoint | PluginFile = field(repr=False)

    def load(self) -> Callable[..., Any]:
        """Import the class or factory.

        Raises:
            ImportError: the import fails; the message names the package and the cause.
        """
        try:
            loaded: Callable[..., Any] = self.entry_point.load()
        except (Exception, SystemExit) as error:  # a broken third-party plugin must not break other programs
            subject = f"{self._called} {self.version} ({self.target})"
            raise ImportError(f"{subject} cannot be imported: {describe_error(error)}") from error
        if not callable(loaded):
            raise ImportError(f"{self._called} is not a class or factory: {loaded!r}.")
        return loaded

    @property
    def _called(self) -> str:
        return f"{_kind(self.entry_point.group).capitalize()} {self.name!r} of package {self.package}"


def _field(distribution: Distribution, name: str) -> str:
    if name not in distribution.metadata:  # whose type has no `get`
        return "unknown"
    return distribution.metadata[name]


def _package(distribution: Distribution) -> str:
    return canonicalize_name(_field(distribution, "Name"))


def discover(group: str = GROUP) -> list[Discovered]:
    """Return the installed plugins, sorted by name, without importing them.

    `group` selects another group of entry points.
    """
    discovered: dict[tuple[str, str], Discovered] = {}
    for distribution in distributions():
        try:
            points = distribution.entry_points.select(group=group)
        except Exception as error:  # noqa: BLE001  # broken metadata of one package must not hide the others
            warnings.warn(
                f"The entry points of package {_package(distribution)} cannot be read: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        if not points:  # parsing the metadata of every installed package would take much longer
            continue
        package, version = _package(distribution), _field(distribution, "Version")
        for point in points:
            off = group == GROUP and switched_off(point.name, package)
            key = point.name, package
            discovered.setdefault(key, Discovered(point.name, package, version, point.value, off, point))
    for file in _plugin_files() if group == GROUP else ():
        name, package = file.path.stem, canonicalize_name(FOLDER)
        off = switched_off(name, package)
        discovered.setdefault((name, package), Discovered(name, package, "file", str(file.path), off, file))
    return [discovered[key] for key in sorted(discovered)]


def _plugin_files() -> list[PluginFile]:
    """Return the plugins in files; those beside the program come first.

    Raises:
        ValueError: a folder in the variable does not exist.
    """
    program = getattr(sys.modules["__main__"], "__file__", None)
    folders = [Path(program).resolve().parent / FOLDER] if program else []
    for name in filter(None, os.environ.get(PATH_VARIABLE, "").split(os.pathsep)):
        if not Path(name).is_dir():
            raise ValueError(f"{PATH_VARIABLE} contains {name!r}, which is not a folder.")
        folders.append(Path(name))
    return [PluginFile(path) for folder in folders for path in sorted(folder.glob("[!_]*.py"))]


def find(name: str, group: str = GROUP) -> Discovered:
    """Return the installed plugin with this name.

    `package:name` selects one if two packages use the same name. `group` selects another group of entry points.

    Raises:
        LookupError: no package or several packages have this name.
    """
    package, _, short = name.rpartition(":")
    package, installed = canonicalize_name(package), discover(group)
    matches = [point for point in installed if point.name == short and package in ("", point.package)]
    if not matches:
        provider = ENTRY_POINTS.get(group, {}).get(short)
        if not any(point.package == "heliograph" for point in discover()):
            hint = f" {NOT_INSTALLED}"
        elif provider is not None and package in ("", f"heliograph-{provider}"):
            hint = f" {how_to_install(provider)}"
        else:
            hint = known_names(
                name, {f"{point.package}:{point.name}" if package else point.name for point in installed}
            )
        raise LookupError(f"No installed {_kind(group)} is named {name!r}.{hint}")
    if len(matches) > 1:
        packages = ", ".join(f"{point.package}:{short}" for point in matches)
        article = "an" if _kind(group)[0] in "aeiou" else "a"
        raise LookupError(f"Several packages have {article} {_kind(group)} {short!r}: choose one of {packages}.")
    return matches[0]


def check_options(name: str, made_by: Callable[..., Any], options: Collection[str], form: Callable[[str], str]) -> None:
    """Raise TypeError if an option is unknown, or a required one is missing.

    Args:
        name: the name of the plugin.
        made_by: its class or factory.
        options: the names of the passed options.
        form: called with a missing option, such as `folder=...`; returns an example of a correct call.
    """
    try:
        parameters = signature(made_by).parameters
    except (TypeError, ValueError):  # a callable written in C may have no signature
        return
    accepted = {key: parameter for key, parameter in parameters.items() if parameter.kind in KEYWORD}
    if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        for key in options:
            if key not in accepted:
                raise TypeError(f"{name} has no option {key!r}.{known_names(key, accepted)}")
    for key, parameter in accepted.items():
        if parameter.default is Parameter.empty and key not in options:
            value = "Every(steps=5)" if "Filter" in str(parameter.annotation) else "..."
            raise TypeError(f"{name} needs {key}=..., as in {form(f'{key}={value}')}.")


def _kind(group: str) -> str:
    return group.rpartition(".")[2].removesuffix("s")
