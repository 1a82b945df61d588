"""The YAML of a rule file, safely read into plain Python, and the line of every part of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from heliograph.spi import require, with_article

from ..errors import RuleError, RuleTypeError

MAPPING, SEQUENCE, MERGE = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:merge"
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
LARGEST = 2**20  # bytes of a file
LONGEST_NUMBER = 400  # characters: the longest float has 309 digits before its point
MOST_MERGED = 10_000  # keys that all << of a file take in: each may name all others


class Document:
    """A mapping, and where its parts are.

    Attributes:
        content: the mapping.
        file: the file that it was read from, None where it was made in Python.
    """

    def __init__(self, content: Mapping[Any, Any], file: str | None = None) -> None:
        self.content, self.file = content, file
        self._lines: dict[tuple[int, Any], int] = {}
        self._held: list[Any] = []  # so that no other container gets the id of one of these

    def line(self, container: Any, key: Any = None) -> int | None:
        """Return the line of a mapping's key or of a list's item, else of the container itself; None if unknown.

        Args:
            container: a mapping or list of the document, the very object.
            key: one of its keys or indices; None is the container.
        """
        return self._lines.get((id(container), key))

    def note(self, container: Any, key: Any, line: int) -> None:
        """Remember a line."""
        self._held.append(container)
        self._lines[id(container), key] = line


def read_document(path: Path) -> Document:
    """Read a rule file.

    Raises:
        FileNotFoundError: there is no such file.
        IsADirectoryError: it is a folder.
        RuleError: it is not text or not YAML, has a key twice, asks for Python objects, or is too large; says the line.
        RuleTypeError: it is not a mapping.
    """
    document = Document({}, str(path))
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no rule file {str(path)!r} (looked from {Path.cwd()}).") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{str(path)!r} is a folder: give the path of a rule file.") from None
    if len(data) > LARGEST:
        raise RuleError(f"A rule file has at most {LARGEST} bytes, and this one has more.", file=str(path))
    content = _parse(data, document)
    if not isinstance(content, dict):
        kind = "empty" if content is None else with_article(type(content).__name__)
        raise RuleTypeError(f"A rule file is a mapping with the key 'controllers', this one is {kind}.", file=str(path))
    document.content = content
    return document


def _parse(data: bytes, document: Document) -> Any:
    yaml = require("yaml", "A rule file", extra="rules")
    try:
        loader = yaml.SafeLoader(data)
        try:
            node = loader.get_single_node()
            return None if node is None else _Reader(loader, document).read(node)
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        text = f"This is not text: a rule file is YAML in UTF-8 ({error.reason}, at position {error.position})."
        raise RuleError(text, file=document.file) from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = None if mark is None else mark.line + 1
        text = f"This is not YAML that can be read safely: {problem or error}."
        raise RuleError(text, file=document.file, line=line) from error
    except RecursionError:
        raise RuleError("Lists and mappings are nested too deeply.", file=document.file) from None


class _Reader:
    """Makes plain Python of YAML nodes; one that is named again (`*anchor`) is the same object again."""

    def __init__(self, loader: Any, document: Document) -> None:
        self._loader, self._document = loader, document
        self._done: dict[int, Any] = {}
        self._open: set[int] = set()
        self._merged = 0

    def read(self, node: Any) -> Any:
        """Return the value of a node.

        Raises:
            RuleError: a key is there twice, or is not a plain value; a part contains itself.
        """
        if id(node) in self._open:
            raise self._error("This part contains itself", node)
        if id(node) not in self._done:
            self._open.add(id(node))
            self._done[id(node)] = self._made(node)
            self._open.remove(id(node))
        return self._done[id(node)]

    def _made(self, node: Any) -> Any:
        if node.id == "mapping" and node.tag == MAPPING:
            return self._mapping(node)
        if node.id == "sequence" and node.tag == SEQUENCE:
            return self._sequence(node)
        if node.id != "scalar":
            raise self._error(f"A rule file holds texts, numbers, lists and mappings, and no {node.tag}", node)
        if node.tag in NUMBERS and len(node.value) > LONGEST_NUMBER:  # 1:0:0... counts in sixties, ever larger ones
            raise self._error(f"A number has at most {LONGEST_NUMBER} characters: quote what is none", node)
        try:
            return self._loader.construct_object(node)
        except (
            ValueError,
            LookupError,
            AttributeError,
            OverflowError,
        ) as error:  # what PyYAML lets through, as of the date 2026-13-01
            kind = node.tag.rpartition(":")[2]
            raise self._error(f"{node.value!r:.80} is not a valid {kind}", node) from error

    def _mapping(self, node: Any) -> dict[Hashable, Any]:
        self._check_keys([key for key, _ in node.value])
        made: dict[Hashable, Any] = {}
        self._document.note(made, None, node.start_mark.line + 1)
        for key, value in node.value:
            if key.tag == MERGE:  # not by PyYAML, which can be kept busy for years with it
                self._merge(made, key, self.read(value))
        for key, value in node.value:
            if key.tag != MERGE:
                name = self._made(key)
                made[name] = self.read(value)
                self._document.note(made, name, key.start_mark.line + 1)
        return made

    def _merge(self, made: dict[Hashable, Any], key: Any, merged: Any) -> None:
        """Take in what `<<` names, a mapping or a list of them, the first of which counts."""
        parts = merged if isinstance(merged, list) else [merged]
        if not all(isinstance(part, dict) for part in parts):
            raise self._error("What is merged by << is a mapping, or a list of mappings", key)
        self._merged += sum(len(part) for part in parts)
        if self._merged > MOST_MERGED:
            raise self._error(f"Too much is merged by <<: {MOST_MERGED} keys are allowed in a file", key)
        for part in reversed(parts):
            for name, value in part.items():
                made[name] = value
                self._document.note(made, name, self._document.line(part, name) or key.start_mark.line + 1)

    def _check_keys(self, keys: list[Any]) -> None:
        seen: set[str] = set()
        for key in keys:
            if key.id != "scalar":
                raise self._error("A key is plain text", key)
            if key.value in seen:
                raise self._error(f"The key {key.value!r} is here twice", key)
            seen.add(key.value)

    def _sequence(self, node: Any) -> list[Any]:
        made: list[Any] = []
        self._document.note(made, None, node.start_mark.line + 1)
        for index, item in enumerate(node.value):
            made.append(self.read(item))
            self._document.note(made, index, item.start_mark.line + 1)
        return made

    def _error(self, problem: str, node: Any) -> RuleError:
        return RuleError(f"{problem}.", file=self._document.file, line=node.start_mark.line + 1)
