"""Measure the structure of the package: what it loads, what imports what, how large it is."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("events", "plugins", "core", "builtin_callbacks", "testing", "demo")
IDLE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
MINIMAL = """
import sys, torch, heliograph as h
batches = [(torch.randn(4, 3), torch.randn(4, 1))] * 4
task = h.Supervised(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss)
h.Trainer(device="cpu").fit(task, batches, optimizer=torch.optim.SGD, epochs=1)
names = [name for name in sys.modules if name.split(".")[0] == "heliograph"]
print("\\n".join(sys.modules[name].__file__ for name in names if getattr(sys.modules[name], "__file__", None)))
"""


def files(room: str) -> list[Path]:
    """Return the source files of a room, its folders included."""
    return sorted((ROOT / room).glob("**/*.py"))


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package, by its name; a package by that of its folder."""
    found = {"heliograph": ROOT / "__init__.py", "heliograph.__main__": ROOT / "__main__.py"}
    for room in ROOMS:
        for path in files(room):
            name = ".".join(["heliograph", *path.relative_to(ROOT).with_suffix("").parts])
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Return the absolute names of everything that a file imports, in `if TYPE_CHECKING` and functions too."""
    package, found = ["heliograph", *path.relative_to(ROOT).parent.parts], list[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{module}.{alias.name}" for alias in node.names]
    return tuple(found)


def imported_modules(name: str) -> set[str]:
    """Return the modules of the package that one of them imports."""
    known, found = modules(), set[str]()
    for each in imported_names(known[name]):
        found.add(each if each in known else each.rpartition(".")[0])
    return (found & known.keys()) - {name, "heliograph"}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, the largest first (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for following in sorted(graph[node]):
            if following not in index:
                visit(following)
                low[node] = min(low[node], low[following])
            elif following in stack:
                low[node] = min(low[node], index[following])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found, key=len, reverse=True)


def code_lines(path: Path) -> int:
    """Count the lines that hold code: no docstrings, comments or blanks."""
    source = path.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in IDLE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name of each function of a file, and the lines of its body without the docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node.name, (body[-1].end_lineno or 0) - body[0].lineno + 1


@cache
def loaded_by_a_minimal_training() -> dict[str, int]:
    """Return the files of the package that a fresh interpreter loads for the smallest `fit`, with their code lines."""
    done = subprocess.run([sys.executable, "-c", MINIMAL], capture_output=True, text=True, check=True, cwd="/")
    return {str(Path(line).relative_to(ROOT)): code_lines(Path(line)) for line in done.stdout.split()}


if __name__ == "__main__":
    loaded = loaded_by_a_minimal_training()
    for file, count in sorted(loaded.items(), key=lambda each: -each[1]):
        print(f"{count:6d} {file}")
    print(f"{sum(loaded.values()):6d} lines in {len(loaded)} modules are loaded by a minimal training")
    for circle in circles({name: imported_modules(name) for name in modules()}):
        print(f"a circle of {len(circle)} modules: {', '.join(circle)}")
