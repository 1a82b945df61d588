"""Reads YAML texts, refuses repeated keys, and warns of files that other users can write."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.spi import printable

from .errors import ConfigurationError

if TYPE_CHECKING:
    from yaml import Node, YAMLError

MERGE = "tag:yaml.org,2002:merge"  # `<<` may be repeated


def load_unique(text: str, name: str = "") -> Any:
    # YAML keeps the last of repeated keys.
    import yaml
    from jsonargparse import get_loader

    _check_keys(yaml.compose(text), name or text, "")
    return get_loader("yaml")(text)


def read_yaml(text: str, name: str = "") -> Any:
    import yaml

    try:
        return load_unique(text, name)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{name or text} is not YAML: {_problem(error)}.") from error


def check_file(path: Path) -> None:
    try:
        _warn_if_writable(path)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = " Options start with two dashes: --KEY=VALUE." if "=" in path.name else ""
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}.{hint}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not YAML: it is not UTF-8 text.") from error
    if not isinstance(read_yaml(text, str(path)), dict):
        raise ConfigurationError(f"{path} must be a mapping of keys, such as task: my_module.MyTask.")


def _warn_if_writable(path: Path) -> None:
    # The command calls whatever the file names.
    is_first = multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
    if not is_first or not hasattr(os, "getuid"):  # Windows has neither owners nor modes
        return
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        text = f"other users can write {path}: read it first, because this command calls everything in it (chmod go-w)."
        sys.stderr.write(f"heliograph: warning: {printable(text)}\n")


def _problem(error: YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    hint = " (indent by spaces)" if "\\t" in problem else ""
    return problem + hint + ("" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}")


def _check_keys(node: Node | None, name: str, path: str) -> None:
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, name, path)
    if not isinstance(node, yaml.MappingNode):
        return
    lines = dict[str, int]()
    for key, value in node.value:
        line, word = key.start_mark.line + 1, str(key.value)
        full_key = f"{path}.{word}" if path else word
        if key.tag != MERGE and word in lines:
            places = f"in line {lines[word]} and in line {line}"
            raise ConfigurationError(f"{name}: the key {full_key!r} is repeated, {places}: remove one of them.")
        lines[word] = line
        _check_keys(value, name, full_key)
