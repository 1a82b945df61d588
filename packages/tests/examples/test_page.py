"""The page of the examples: every one is on it, with its lines of code."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from heliograph.packages.tests.examples.running import EXAMPLES

PAGE = EXAMPLES.parent / "examples.md"


def code_of(path: Path) -> str:
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def lines_of_code(path: Path) -> int:
    """Return the lines that are neither empty, nor comments, nor documentation."""
    code = code_of(path)
    lines = {number for number, line in enumerate(code.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    if path.suffix != ".sh":
        for node in ast.walk(ast.parse(code)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_every_example_is_on_the_page_with_its_lines_of_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = {name: int(lines) for name, lines in re.findall(r"^\| \[`(.+?)`\].* \| (\d+) \|$", page, re.MULTILINE)}
    files = [path for path in EXAMPLES.rglob("*.*") if path.suffix in (".py", ".ipynb", ".sh")]
    assert shown == {path.relative_to(EXAMPLES).as_posix(): lines_of_code(path) for path in files}
