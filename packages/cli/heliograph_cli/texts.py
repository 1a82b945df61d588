"""Checks of YAML texts: invalid YAML, repeated keys, and files that other users can write."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.spi import printable

from .errors import ConfigurationError
from .names import Load

if TYPE_CHECKING:
    from yaml import Node, YAMLError

MERGE = "tag:yaml.org,2002:merge"  # `<<` may be repeated


def check_yaml(load: Load) -> Load:
    def loader(text: str) -> Any:
        import yaml

        try:
            return load(text)
        except yaml.YAMLError as error:
            raise ConfigurationError(f"{text} is not YAML: {_problem(error)}.") from error

    return loader


def check_file(path: Path) -> None:
    # YAML keeps the last of repeated keys. The command calls whatever the file names, so warn if others can write it.
    import yaml
    from jsonargparse import get_loader

    try:
        _warn_if_writable(path)
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text)
        get_loader("yaml")(text)  # rejects invalid keys and Python tags
    except OSError as error:
        hint = " Options start with two dashes: --KEY=VALUE." if "=" in path.name else ""
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}.{hint}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not YAML: it is not UTF-8 text.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {_problem(error)}.") from error
    if not isinstance(node, yaml.MappingNode):
        content = "nothing" if node is None else "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        raise ConfigurationError(
            f"{path} contains {content}: a configuration must be a mapping of keys, such as task: my_module.MyTask."
        )
    _check_keys(node, str(path), "")


def _warn_if_writable(path: Path) -> None:
    is_first = multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
    if not is_first or not hasattr(os, "getuid"):  # Windows has neither owners nor modes
        return
    status = path.stat()
    reasons = [f"belongs to another user (uid {status.st_uid})"] * (status.st_uid != os.getuid())
    writers = [name for name, bit in (("its group", 0o020), ("all users", 0o002)) if status.st_mode & bit]
    if writers:
        reasons.append(f"can be written by {' and '.join(writers)} (fix: chmod go-w)")
    if reasons:
        text = f"{path} {' and '.join(reasons)}: read it first, because this command calls everything in it."
        sys.stderr.write(f"heliograph: warning: {printable(text)}\n")


def check_options(words: Sequence[str]) -> None:
    import yaml

    option = ""
    for word in words:
        value = word
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            if not equals:
                continue
        if option == "--config":
            check_file(Path(value))
            continue
        try:
            node = yaml.compose(value)
        except yaml.YAMLError:  # plain text; the parser reports wrong values
            continue
        _check_keys(node, option, "")


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
