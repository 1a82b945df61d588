"""Reads the YAML of a rule file safely into plain Python, with the line of each part."""

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
MOST_MERGED = 10_000  # keys merged by all << of a file: nested merges grow exponentially


class Document:
    """A mapping and the lines of its parts; `file` is None if the mapping was created in Python."""

    def __init__(self, content: Mapping[Any, Any], file: str | None = None) -> None:
        self.content, self.file = content, file
        self._lines: dict[tuple[int, Any], int] = {}
        self._containers: list[Any] = []  # keeps the ids in use

    def line(self, container: Any, key: Any = None) -> int | None:
        # `container` is the very object of the document; without a key, its own line.
        return self._lines.get((id(container), key))

    def set_line(self, container: Any, key: Any, line: int) -> None:
        self._containers.append(container)
        self._lines[id(container), key] = line


def read_document(path: Path) -> Document:
    """Read a rule file.

    Raises:
        FileNotFoundError: the file does not exist.
        IsADirectoryError: the path is a folder.
        RuleError: the file is not UTF-8 or YAML, repeats a key, contains Python objects, or is too large.
        RuleTypeError: the file is not a mapping.
    """
    document = Document({}, str(path))
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise FileNotFoundError(f"No rule file {str(path)!r} (current folder: {Path.cwd()}).") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{str(path)!r} is a folder: give the path of a rule file.") from None
    if len(data) > LARGEST:
        raise RuleError(f"The rule file is too large: at most {LARGEST} bytes are allowed.", file=str(path))
    content = _parse(data, document)
    if not isinstance(content, dict):
        kind = "empty" if content is None else with_article(type(content).__name__)
        raise RuleTypeError(f"A rule file must be a mapping with the key 'controllers', got {kind}.", file=str(path))
    document.content = content
    return document


def _parse(data: bytes, document: Document) -> Any:
    yaml = require("yaml", "A rule file", extra="rules")
    try:
        loader = yaml.SafeLoader(data)
        try:
            node = loader.get_single_node()
            return None if node is None else _YamlReader(loader, document).read(node)
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        text = f"The file is not text: it must be YAML in UTF-8 ({error.reason}, at position {error.position})."
        raise RuleError(text, file=document.file) from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = None if mark is None else mark.line + 1
        text = f"The file is not YAML that can be read safely: {problem or error}."
        raise RuleError(text, file=document.file, line=line) from error
    except RecursionError:
        raise RuleError("Lists and mappings are nested too deeply.", file=document.file) from None


class _YamlReader:
    """Converts YAML nodes to plain Python; a node and its aliases (`*anchor`) become the same object."""

    def __init__(self, loader: Any, document: Document) -> None:
        self._loader, self._document = loader, document
        self._values: dict[int, Any] = {}
        self._open: set[int] = set()
        self._merged = 0

    def read(self, node: Any) -> Any:
        if id(node) in self._open:
            raise self._error("This part contains itself", node)
        if id(node) not in self._values:
            self._open.add(id(node))
            self._values[id(node)] = self._convert(node)
            self._open.remove(id(node))
        return self._values[id(node)]

    def _convert(self, node: Any) -> Any:
        if node.id == "mapping" and node.tag == MAPPING:
            return self._mapping(node)
        if node.id == "sequence" and node.tag == SEQUENCE:
            return self._sequence(node)
        if node.id != "scalar":
            raise self._error(f"A rule file may contain text, numbers, lists and mappings, but no {node.tag}", node)
        if node.tag in NUMBERS and len(node.value) > LONGEST_NUMBER:  # 1:0:0... is a base-60 number
            raise self._error(f"A number may have at most {LONGEST_NUMBER} characters: quote other text", node)
        try:
            return self._loader.construct_object(node)
        except (ValueError, LookupError, AttributeError, OverflowError) as error:  # for example, the date 2026-13-01
            kind = node.tag.rpartition(":")[2]
            raise self._error(f"{node.value!r:.80} is not a valid {kind}", node) from error

    def _mapping(self, node: Any) -> dict[Hashable, Any]:
        self._check_keys([key for key, _ in node.value])
        mapping: dict[Hashable, Any] = {}
        self._document.set_line(mapping, None, node.start_mark.line + 1)
        for key, value in node.value:
            if key.tag == MERGE:  # PyYAML's own merge has no limit
                self._merge(mapping, key, self.read(value))
        for key, value in node.value:
            if key.tag != MERGE:
                name = self._convert(key)
                mapping[name] = self.read(value)
                self._document.set_line(mapping, name, key.start_mark.line + 1)
        return mapping

    def _merge(self, mapping: dict[Hashable, Any], key: Any, merged: Any) -> None:
        # `<<` names a mapping or a list of mappings; the first one takes precedence.
        parts = merged if isinstance(merged, list) else [merged]
        if not all(isinstance(part, dict) for part in parts):
            raise self._error("<< must merge a mapping or a list of mappings", key)
        self._merged += sum(len(part) for part in parts)
        if self._merged > MOST_MERGED:
            raise self._error(f"<< merges too much: at most {MOST_MERGED} keys are allowed in a file", key)
        for part in reversed(parts):
            for name, value in part.items():
                mapping[name] = value
                self._document.set_line(mapping, name, self._document.line(part, name) or key.start_mark.line + 1)

    def _check_keys(self, keys: list[Any]) -> None:
        seen: set[str] = set()
        for key in keys:
            if key.id != "scalar":
                raise self._error("A key must be plain text", key)
            if key.value in seen:
                raise self._error(f"The key {key.value!r} is repeated", key)
            seen.add(key.value)

    def _sequence(self, node: Any) -> list[Any]:
        items: list[Any] = []
        self._document.set_line(items, None, node.start_mark.line + 1)
        for index, item in enumerate(node.value):
            items.append(self.read(item))
            self._document.set_line(items, index, item.start_mark.line + 1)
        return items

    def _error(self, problem: str, node: Any) -> RuleError:
        return RuleError(f"{problem}.", file=self._document.file, line=node.start_mark.line + 1)
