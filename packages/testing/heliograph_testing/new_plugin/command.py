"""The command `heliograph new-plugin`, which writes a package with a plugin from a template."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

import heliograph
from heliograph.plugins import discover
from heliograph.spi import is_first_party

TEMPLATE = Path(__file__).parent / "template"
LONGEST = 30  # for the line length of the template
IMPORTED = frozenset({"Any", "Mapping", "Tensor"})  # names that the template imports, in addition to heliograph's


@dataclass(frozen=True, slots=True)
class PackageNames:
    """The names of a new package.

    Attributes:
        name: the name of the plugin, `loss_report`.
        distribution: the name to install, `heliograph-loss-report`.
        module: the name to import, `heliograph_loss_report`.
        class_name: the class of the plugin, `LossReport`.
        requirement: the required version of heliograph.
    """

    name: str
    distribution: str
    module: str
    class_name: str
    requirement: str


def write_package(text: str, parent: Path) -> tuple[Path, PackageNames]:
    names = names_of(text, {plugin.name: plugin.package for plugin in discover()}.items())
    folder = parent / names.distribution
    if not parent.is_dir():
        raise NotADirectoryError(f"Cannot write {names.distribution}: {parent} is not a folder. Create it first.")
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another name or --folder, or remove it.")
    with TemporaryDirectory(prefix=".new-plugin-", dir=parent) as unfinished:
        for source, target in targets(names).items():
            path = Path(unfinished, folder.name, target)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (TEMPLATE / source).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(asdict(names)), encoding="utf-8")
        Path(unfinished, folder.name, "src", names.module, "py.typed").touch()
        Path(unfinished, folder.name).rename(folder)
    return folder, names


def targets(names: PackageNames) -> dict[str, str]:
    return {
        "pyproject.toml.in": "pyproject.toml",
        "README.md.in": "README.md",
        "gitignore.in": ".gitignore",
        "plugin.py.in": f"src/{names.module}/__init__.py",
        "test_plugin.py.in": f"tests/test_{names.name}.py",
    }


def names_of(text: str, installed: Collection[tuple[str, str]]) -> PackageNames:
    name = text.replace("-", "_").removeprefix("heliograph_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > LONGEST:
        raise ValueError(
            f"Invalid plugin name {text!r}: use lower-case letters and digits with single underscores or hyphens, a "
            f"letter first, at most {LONGEST} characters, for example loss_report or loss-report."
        )
    if is_first_party(f"heliograph_{name}"):
        raise ValueError(f"The package heliograph-{name.replace('_', '-')} is part of Heliograph: choose another name.")
    for plugin, package in installed:
        if plugin == name:
            raise ValueError(f"The plugin {name!r} exists in the package {package}: choose another name.")
    class_name = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if class_name in IMPORTED or class_name in dir(heliograph):
        raise ValueError(f"The class of {name!r} would be {class_name}, which exists already: choose another name.")
    module = f"heliograph_{name}"
    version = heliograph.__version__
    requirement = "heliograph" if version == "unknown" else f"heliograph>={version}"
    return PackageNames(name, module.replace("_", "-"), module, class_name, requirement)


def new_plugin(arguments: Sequence[str]) -> int:
    """Write a package with a plugin, its tests and a readme."""
    parser = argparse.ArgumentParser(prog="heliograph new-plugin")
    parser.add_argument(
        "name", help="name of the plugin, for example loss_report for the package heliograph-loss-report"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="parent of its folder (the current folder)")
    return write_plugin(parser.parse_args(arguments))


def write_plugin(options: argparse.Namespace) -> int:
    try:
        folder, names = write_package(options.name, options.folder)
    except (ValueError, OSError) as error:
        print(f"heliograph new-plugin: {error}", file=sys.stderr)
        return 2
    print(
        f"Wrote the plugin {names.name!r} and its tests to {folder}. Next:\n"
        f"  cd {folder}\n"
        f"  pip install -e '.[test]'\n"
        f"  pytest\n"
        f"Use it in a program: trainer.plugins.load({names.name!r}). Publish it: docs/learn/publish_a_plugin.md."
    )
    return 0
