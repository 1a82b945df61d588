"""Reads the YAML of a rule file safely into plain Python, with the line of each part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from heliograph.spi import with_article

from ..errors import RuleError, RuleTypeError


class Document:
    """A mapping and the lines of its parts; `file` is None if the mapping was created in Python."""

    def __init__(self, content: Mapping[Any, Any], file: str | None = None) -> None:
        self.content, self.file = content, file
        self.lines: dict[tuple[int, Any], int] = {}

    def line(self, container: Any, key: Any = None) -> int | None:
        # `container` is the very object of the document; without a key, its own line.
        return self.lines.get((id(container), key))


def read_document(path: Path) -> Document:
    """Read a rule file.

    Raises:
        FileNotFoundError: the file does not exist.
        IsADirectoryError: the path is a folder.
        RuleError: the file is not YAML, repeats a key, or contains Python objects.
        RuleTypeError: the file is not a mapping.
    """
    document = Document({}, str(path))
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"No rule file {str(path)!r} (current folder: {Path.cwd()}).") from None
    try:
        content = LineLoader(data, document).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        text = f"The file is not YAML that can be read safely: {error.problem}."
        raise RuleError(text, file=document.file, line=line) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # for example, the date 2026-13-01
        raise RuleError(f"The file is not YAML that can be read: {error}.", file=document.file) from error
    if not isinstance(content, dict):
        kind = "empty" if content is None else with_article(type(content).__name__)
        raise RuleTypeError(f"A rule file must be a mapping with the key 'controllers', got {kind}.", file=str(path))
    document.content = content
    return document


class LineLoader(yaml.SafeLoader):
    """Records the line of each mapping, key, list and item; rejects repeated keys."""

    def __init__(self, data: bytes, document: Document) -> None:
        super().__init__(data)
        self._lines = document.lines

    def mapping(self, node: yaml.MappingNode) -> dict[Any, Any]:
        seen = set[Any]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is repeated", key.start_mark
                )
            seen.add(str(key.value))
        mapping = self.construct_mapping(node, deep=True)
        self._lines[id(mapping), None] = node.start_mark.line + 1
        for key, _ in node.value:
            self._lines[id(mapping), self.construct_object(key)] = key.start_mark.line + 1
        return mapping

    def sequence(self, node: yaml.SequenceNode) -> list[Any]:
        items = self.construct_sequence(node, deep=True)
        self._lines[id(items), None] = node.start_mark.line + 1
        for index, item in enumerate(node.value):
            self._lines[id(items), index] = item.start_mark.line + 1
        return items


LineLoader.add_constructor("tag:yaml.org,2002:map", LineLoader.mapping)
LineLoader.add_constructor("tag:yaml.org,2002:seq", LineLoader.sequence)
