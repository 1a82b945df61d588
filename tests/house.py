"""Measure the structure of the package: what it loads, what imports what, how large it is."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/developers/architecture.md"
ROOMS = ("events", "plugins", "core", "builtin_callbacks")
IDLE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DIALECT = re.compile(r"\b(tells?|telling|teller|told|hears?|hearing|heard|amid|legs?)\b", re.IGNORECASE)
OF_SENTENCES = re.compile(
    r"(?<!left )(?<!handler )(?<!nothing )\bbehind\b|\b(afresh|passed over|(goes?|going|went) on)\b"
)
NOT_OURS = re.compile(r'"\w+"|\.tell\(\)')  # keys of saved files, and where a file is read
NAME_PARTS = re.compile(r"_|(?<=[a-z0-9])(?=[A-Z])")
PARTS = "settings|work|hot|means|modes"
DOOR = re.compile(rf'\brun\.({PARTS})\b|\bcast\("?(RunContext|LoopEngine)\b')
PRIVATE = {"heliograph.core.context.RunContext", "heliograph.core.loop"}
TRAINING = """
import sys, tempfile, torch, heliograph as h
batches = [(torch.randn(4, 3), torch.randn(4, 1))] * 4
task = h.Supervised(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss)
h.Trainer(PLUGINS, device="cpu").fit(task, batches, optimizer=torch.optim.SGD, epochs=1)
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


@cache
def loaded_by_a_training(plugins: str) -> dict[str, int]:
    """Return the files of the package that a fresh interpreter loads for a small `fit`, with their code lines."""
    program = TRAINING.replace("PLUGINS", plugins)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    return {str(Path(line).relative_to(ROOT)): code_lines(Path(line)) for line in done.stdout.split()}


def folders() -> set[str]:
    """Return the folders of the package that hold a source file besides `__init__.py`."""
    return {path.parent.relative_to(ROOT).as_posix() for path in modules().values() if path.stem != "__init__"}


def attributes_of_a_run() -> set[str]:
    """Return the names of the attributes that `RunContext.__init__` sets."""
    tree = ast.parse((ROOT / "core/context.py").read_text(encoding="utf-8"))
    made = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "RunContext")
    init = next(node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return {node.attr for node in ast.walk(init) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def private_doors() -> list[str]:
    """Return the places where plugins use more of a run than a third party could: its parts, or a cast or an import."""
    found = list[str]()
    for path in files("builtin_callbacks"):
        lines = path.read_text(encoding="utf-8").split("\n")
        found += [f"{path.relative_to(ROOT)}:{number}" for number, line in enumerate(lines, 1) if DOOR.search(line)]
        private = PRIVATE & set(imported_names(path))
        found += [f"{path.relative_to(ROOT)} imports {name}" for name in sorted(private)]
    return found


def modules_that_name(word: str) -> set[str]:
    """Return the modules in whose text a word occurs."""
    return {name for name, path in modules().items() if word in path.read_text(encoding="utf-8")}


def gerunds() -> set[str]:
    """Return the names of files that end in -ing."""
    return {path.name for path in modules().values() if path.stem.endswith("ing")}


def dialect() -> list[str]:
    """Return the lines of the repository with words of its first dialect, also as a part of a name."""
    found, others = (
        list[str](),
        [*(ROOT / "tests").glob("**/*.py"), *(ROOT / "docs").glob("**/*.md"), ROOT / "README.md"],
    )
    for path in (path for path in [*modules().values(), *sorted(others)] if path != Path(__file__)):
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            text = NOT_OURS.sub("", line)
            if DIALECT.search(NAME_PARTS.sub(" ", text)) or OF_SENTENCES.search(text):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    return found


def print_table() -> None:
    """Print the figures that the tests of the house rules limit."""
    loaded = loaded_by_a_training("[]")
    for file, count in sorted(loaded.items(), key=lambda each: -each[1]):
        print(f"{count:6d} {file}")
    found = circles({name: imported_modules(name) for name in modules()})
    print(
        f"a minimal training loads: {sum(loaded.values())} lines in {len(loaded)} modules",
        *(f"a circle of imports: {', '.join(circle)}" for circle in found),
        f"attributes of a run: {len(attributes_of_a_run())}",
        f"private doors of plugins to a run: {len(private_doors())}",
        f"lines of core/loop.py: {code_lines(ROOT / 'core/loop.py')}",
        f"files that name cut_validation: {len(modules_that_name('cut_validation'))}",
        f"lines with tell, hear, amid, behind and the like: {len(dialect())}",
        f"files named by a word in -ing: {', '.join(sorted(gerunds()))}",
        sep="\n",
    )


if __name__ == "__main__":
    print_table()
