"""YAML texts that say one thing: what is not YAML is refused, and so is a key that is given twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigurationError

if TYPE_CHECKING:
    from yaml import Node

MERGE = "tag:yaml.org,2002:merge"  # of `<<`, which may be given several times


def check_file(path: Path) -> None:
    """Refuse a file that is not YAML, or in which a mapping has a key twice, of which YAML keeps the last.

    Args:
        path: of the file; the parser says that there is none.

    Raises:
        ConfigurationError: says the key and the line.
    """
    import yaml

    if not path.is_file():
        return
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigurationError(f"{path} is not YAML: {error.problem}{place}.") from error
    _check_keys(node, str(path), "")


def check_options(words: Sequence[str]) -> None:
    """Refuse a value of an option, or a file that `--config` names, in which a mapping has a key twice.

    Args:
        words: the options of a command with their values.

    Raises:
        ConfigurationError: says the key.
    """
    import yaml

    option = ""
    for word in words:
        value = word
        if word.startswith("--"):
            option, _, value = word.partition("=")
        if option == "--config":
            check_file(Path(value))
            continue
        try:
            node = yaml.compose(value)
        except yaml.YAMLError:  # a plain text; the parser says where it needs another value
            continue
        _check_keys(node, option, "")


def _check_keys(node: Node | None, name: str, path: str) -> None:
    """Refuse a key that a mapping has twice, here and in what it holds."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_keys(each, name, path)
    if not isinstance(node, yaml.MappingNode):
        return
    lines = dict[str, int]()
    for key, value in node.value:
        line, word = key.start_mark.line + 1, str(key.value)
        whole = f"{path}.{word}" if path else word
        if key.tag != MERGE and word in lines:
            places = f"in line {lines[word]} and in line {line}"
            raise ConfigurationError(f"{name}: the key {whole!r} is given twice, {places}: keep one of them.")
        lines[word] = line
        _check_keys(value, name, whole)
