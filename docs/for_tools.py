"""Write the files for tools and language models: `.venv/bin/python docs/for_tools.py`.

`docs/reference/names.md` has all public names with their signatures, `docs/reference/packages.md` the packages, and
`docs/llms.txt` all pages with a sentence.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NAMES, PAGES, PACKAGES = DOCS / "reference/names.md", DOCS / "llms.txt", DOCS / "reference/packages.md"
DOORS = ("learn", "howto", "reference", "explanation", "packages", "developers")
HEAD = """# All names and signatures

One page for editors, search and language models, written by `docs/for_tools.py`.
Import a name from the module in its heading.
"""
PACKAGES_HEAD = """# Packages

The packages of this repository, written by `docs/for_tools.py`.
Install `heliograph-NAME` with `pip install ./packages/NAME`.
A package of another author has [the same prefix](../learn/publish_a_plugin.md#names).

```text
"""
METHODS_OF = {"Trainer", "TrainRun", "Run", "Control", "Plugin", "Plugins", "Task", "Bus", "RunResult"}


def pages() -> str:
    """Return the index of all pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = [f"# Heliograph\n\n> {_first_sentence(readme)}\n"]
    for door in DOORS:
        lines = [_entry(path) for path in sorted((DOCS / door).glob("*.md"))]
        parts.append("\n".join([f"## {door.capitalize()}\n", *lines]) + "\n")
    return "\n".join(parts)


def _entry(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    sentence = _first_sentence(text)
    title = text.partition("\n")[0].removeprefix("# ")
    return f"- [{title}]({path.relative_to(DOCS)})" + (f": {sentence}" if sentence else "")


def _first_sentence(text: str) -> str:
    prose = re.sub(r"^```.*?^```|^[#|!<].*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraph = next((part for part in prose.split("\n\n") if part.strip()), "").replace("\n", " ").strip()
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.split(r"(?<=[.:])\s", paragraph)[0])


def packages() -> str:
    """Return the page of the packages in this repository, with their entry points."""
    files = sorted(ROOT.glob("packages/*/pyproject.toml"))
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return PACKAGES_HEAD + "\n".join(line for project in projects for line in _package(project)) + "\n```\n"


def _package(project: dict[str, Any]) -> Iterator[str]:
    yield project["name"]
    points = {group.removeprefix("heliograph."): names for group, names in project.get("entry-points", {}).items()}
    lists = [f"{group}: {', '.join(points[group])}" for group in ("plugins", "engines", "commands") if group in points]
    for text in (project["description"], *lists):
        yield from wrap(text, 88, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False)


def names() -> str:
    """Return the page of all public names."""
    parts = [HEAD]
    for group, members in _groups((ROOT / "__init__.pyi").read_text(encoding="utf-8")):
        parts.append(_section(f"`heliograph`: {group}", import_module("heliograph"), members))
    for name in ("tuning", "events", "plugins"):
        module = import_module(f"heliograph.{name}")
        parts.append(_section(f"`heliograph.{name}`", module, sorted(getattr(module, "__all__", ()) or dir(module))))
    return "\n".join(parts)


def _groups(stub: str) -> Iterator[tuple[str, list[str]]]:
    for group, body in re.findall(r"^# (?!isort)([^\n]+)\n((?:from [^\n]+\n)+)", stub, re.MULTILINE):
        yield group, re.findall(r" as (\w+)$", body, re.MULTILINE)


def _section(title: str, module: Any, names: list[str]) -> str:
    shown = [(name, getattr(module, name)) for name in names if not name.startswith("_")]
    lines = [line for name, value in shown if not inspect.ismodule(value) for line in _lines(name, value)]
    return "\n".join([f"## {title}\n", "```pyi", *lines, "```\n"])


def _lines(name: str, value: Any) -> Iterator[str]:
    yield from _line(name, value)
    if name in METHODS_OF:
        for method, function in vars(value).items():
            if not method.startswith("_") and callable(getattr(value, method, None)):
                yield from _line(f"    .{method}", getattr(value, method), function)


def _line(name: str, value: Any, raw: Any = None) -> Iterator[str]:
    summary = (inspect.getdoc(value) or "").partition("\n")[0] if callable(value) else ""
    yield f"{name}{_signature(value, raw)}" + (f"  # {summary}" if summary else "")


def _signature(value: Any, raw: Any) -> str:
    if not callable(value) or raw is value is None:
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [
        parameter.replace(annotation=_Annotation.of(parameter.annotation))
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    returned = inspect.Signature.empty if inspect.isclass(value) else _Annotation.of(signature.return_annotation)
    text = str(signature.replace(parameters=parameters, return_annotation=returned))
    return re.sub(r"(?:heliograph|typing|collections\.abc|pathlib|torch)\.(?:[\w]+\.)*(?=[A-Z])", "", text)


class _Annotation(str):
    """Shown without quotes."""

    __slots__ = ()

    @classmethod
    def of(cls, annotation: Any) -> Any:
        if annotation is inspect.Signature.empty:
            return annotation
        return cls(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))

    def __repr__(self) -> str:
        return str(self)


if __name__ == "__main__":
    NAMES.write_text(names(), encoding="utf-8")
    PACKAGES.write_text(packages(), encoding="utf-8")
    PAGES.write_text(pages(), encoding="utf-8")
