"""The command `heliograph new-plugin`, which writes a package with a plugin from a template."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

import heliograph
from heliograph.plugins import discover
from heliograph.spi import is_first_party

TEMPLATE = Path(__file__).parent / "template"
LONGEST = 30  # for the line length of the template
IMPORTED = frozenset({"Any", "Mapping", "Tensor"})  # names that the template imports, in addition to heliograph's


def write_package(text: str, parent: Path) -> tuple[Path, dict[str, str]]:
    names = names_of(text)
    folder = parent / names["distribution"]
    if not parent.is_dir():
        raise NotADirectoryError(f"Cannot write {folder.name}: {parent} is not a folder. Create it first.")
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another name or --folder, or remove it.")
    targets = {
        "pyproject.toml.in": "pyproject.toml",
        "README.md.in": "README.md",
        "gitignore.in": ".gitignore",
        "tests.yml.in": ".github/workflows/tests.yml",
        "release.yml.in": ".github/workflows/release.yml",
        "plugin.py.in": f"src/{names['module']}/__init__.py",
        "test_plugin.py.in": f"tests/test_{names['name']}.py",
    }
    with TemporaryDirectory(prefix=".new-plugin-", dir=parent) as unfinished:
        for source, target in targets.items():
            path = Path(unfinished, folder.name, target)
            path.parent.mkdir(parents=True, exist_ok=True)
            template = Template((TEMPLATE / source).read_text(encoding="utf-8"))
            path.write_text(template.substitute(names), encoding="utf-8")
        Path(unfinished, folder.name, "src", names["module"], "py.typed").touch()
        Path(unfinished, folder.name).rename(folder)
    return folder, names


def names_of(text: str) -> dict[str, str]:
    """Return the names in a template: of the plugin, its class, its module and distribution, and the requirement."""
    name = text.replace("-", "_").removeprefix("heliograph_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > LONGEST:
        raise ValueError(
            f"Invalid plugin name {text!r}: use lower-case letters and digits with single underscores or hyphens, a "
            f"letter first, at most {LONGEST} characters, for example loss_report or loss-report."
        )
    module = f"heliograph_{name}"
    distribution = module.replace("_", "-")
    if is_first_party(module):
        raise ValueError(f"The package {distribution} is part of Heliograph: choose another name.")
    for plugin in discover():
        if plugin.name == name:
            raise ValueError(f"The plugin {name!r} exists in the package {plugin.package}: choose another name.")
    class_name = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if class_name in IMPORTED or class_name in dir(heliograph):
        raise ValueError(f"The class of {name!r} would be {class_name}, which exists already: choose another name.")
    version = heliograph.__version__
    requirement = "heliograph" if version == "unknown" else f"heliograph>={version}"
    return {
        "name": name,
        "class_name": class_name,
        "module": module,
        "distribution": distribution,
        "requirement": requirement,
    }


def new_plugin(arguments: Sequence[str]) -> int:
    """Write a package with a plugin, its tests and a readme."""
    parser = argparse.ArgumentParser(prog="heliograph new-plugin")
    parser.add_argument(
        "name", help="name of the plugin, for example loss_report for the package heliograph-loss-report"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="parent of its folder (the current folder)")
    options = parser.parse_args(arguments)
    try:
        folder, names = write_package(options.name, options.folder)
    except (ValueError, OSError) as error:
        print(f"heliograph new-plugin: {error}", file=sys.stderr)
        return 2
    print(
        f"Wrote the plugin {names['name']!r} and its tests to {folder}. Next:\n"
        f"  cd {folder}\n"
        f"  pip install -e '.[test]'\n"
        f"  pytest\n"
        f"Use it in a program: trainer.plugins.load({names['name']!r}). Publish it: docs/learn/publish_a_plugin.md."
    )
    return 0
