"""A package with a plugin, written from a template."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

import heliograph
from heliograph.plugins import discover
from heliograph.spi import is_first_party

TEMPLATE = Path(__file__).parent / "template"
LONGEST = 30  # else lines of the template become too long
IMPORTED = frozenset({"Any", "Mapping", "Tensor"})  # by the template, besides public names of heliograph


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a package.

    Attributes:
        name: of the plugin, to load it by: `loss_report`.
        distribution: of the package, to install it by: `heliograph-loss-report`.
        module: `heliograph_loss_report`.
        class_name: `LossReport`.
        requirement: the heliograph that it is written for.
    """

    name: str
    distribution: str
    module: str
    class_name: str
    requirement: str


def write_package(given: str, parent: Path) -> tuple[Path, Names]:
    """Write a package into a new folder, whole or not at all; return the folder, and the names.

    Args:
        given: the name of the plugin, with or without the prefix of packages.
        parent: where the folder is made.

    Raises:
        ValueError: the name cannot be used.
        FileExistsError: there is such a folder.
        NotADirectoryError: the parent is not a folder.
    """
    names = names_of(given, {each.name: each.package for each in discover()}.items())
    folder = parent / names.distribution
    if not parent.is_dir():
        raise NotADirectoryError(f"There is no folder {parent} to write {names.distribution} to: make it first.")
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: choose another name or another --folder, or remove it.")
    with TemporaryDirectory(prefix=".new-plugin-", dir=parent) as unfinished:
        for source, target in targets(names).items():
            path = Path(unfinished, folder.name, target)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (TEMPLATE / source).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(asdict(names)), encoding="utf-8")
        Path(unfinished, folder.name, "src", names.module, "py.typed").touch()
        Path(unfinished, folder.name).rename(folder)
    return folder, names


def targets(names: Names) -> dict[str, str]:
    """Return where each file of the template goes."""
    return {
        "pyproject.toml.in": "pyproject.toml",
        "README.md.in": "README.md",
        "gitignore.in": ".gitignore",
        "plugin.py.in": f"src/{names.module}/__init__.py",
        "test_plugin.py.in": f"tests/test_{names.name}.py",
    }


def names_of(given: str, installed: Collection[tuple[str, str]]) -> Names:
    """Return the names of a package.

    Args:
        given: see `write_package`.
        installed: the plugins that there are, each with its package.

    Raises:
        ValueError: it cannot be a name, or is one already.
    """
    name = given.replace("-", "_").removeprefix("heliograph_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > LONGEST:
        raise ValueError(
            f"{given!r} cannot be the name of a plugin: take small letters and digits, with single underscores or "
            f"hyphens between them, a letter first, at most {LONGEST} characters, as in loss_report or loss-report."
        )
    if is_first_party(f"heliograph_{name}"):
        raise ValueError(f"The package heliograph-{name.replace('_', '-')} is part of Heliograph: choose another name.")
    for other, package in installed:
        if other == name:
            raise ValueError(f"There is a plugin {name!r} already, of package {package}: choose another name.")
    class_name = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if class_name in IMPORTED or class_name in dir(heliograph):
        raise ValueError(f"The class of {name!r} would be called {class_name}, as another one: choose another name.")
    module = f"heliograph_{name}"
    version = heliograph.__version__
    requirement = "heliograph" if version == "unknown" else f"heliograph>={version}"
    return Names(name, module.replace("_", "-"), module, class_name, requirement)
