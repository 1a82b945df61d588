"""YAML texts that say one thing: what is not YAML is refused, and so is a key that is given twice."""

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

MERGE = "tag:yaml.org,2002:merge"  # of `<<`, which may be given several times


def refuse_others(load: Load) -> Load:
    """Return a loader that refuses what is not YAML with a sentence."""

    def loader(text: str) -> Any:
        import yaml

        try:
            return load(text)
        except yaml.YAMLError as error:
            raise ConfigurationError(f"{text} is not YAML: {_problem(error)}.") from error

    return loader


def check_file(path: Path) -> None:
    """Refuse a file that is not a mapping in YAML, or in which a mapping has a key twice, of which YAML keeps the last.

    Warn on standard error if another user can have written it: the command calls whatever it names.

    Args:
        path: of the file.

    Raises:
        ConfigurationError: says what is wrong, where it can the key and the line.
    """
    import yaml
    from jsonargparse import get_loader

    try:
        _warn_of_others(path)
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text)
        get_loader("yaml")(text)  # refuses what cannot be a key, and tags of Python
    except OSError as error:
        mend = " Options begin with two dashes, --KEY=VALUE." if "=" in path.name else ""
        raise ConfigurationError(f"The file {path} cannot be read: {error.strerror}.{mend}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not YAML: it is not text in UTF-8.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {_problem(error)}.") from error
    if not isinstance(node, yaml.MappingNode):
        held = "nothing" if node is None else "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        raise ConfigurationError(
            f"{path} holds {held}: a configuration is a mapping of keys, such as task: my_module.MyTask."
        )
    _check_keys(node, str(path), "")


def _warn_of_others(path: Path) -> None:
    is_first = multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
    if not is_first or not hasattr(os, "getuid"):  # Windows has neither owners nor modes
        return
    status = path.stat()
    reasons = [f"belongs to another user (uid {status.st_uid})"] * (status.st_uid != os.getuid())
    writers = [name for name, bit in (("its group", 0o020), ("everybody", 0o002)) if status.st_mode & bit]
    if writers:
        reasons.append(f"can be written by {' and '.join(writers)} (chmod go-w changes that)")
    if reasons:
        text = f"{path} {' and '.join(reasons)}: read it first, this command calls every class and function in it."
        sys.stderr.write(f"heliograph: warning: {printable(text)}\n")


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
            option, equals, value = word.partition("=")
            if not equals:
                continue
        if option == "--config":
            check_file(Path(value))
            continue
        try:
            node = yaml.compose(value)
        except yaml.YAMLError:  # a plain text; the parser says where it needs another value
            continue
        _check_keys(node, option, "")


def _problem(error: YAMLError) -> str:
    """Return what is wrong with a text, and where."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    mend = " (indent by spaces)" if "\\t" in problem else ""
    return problem + mend + ("" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}")


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
