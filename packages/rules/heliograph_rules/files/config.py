"""Reads a rule file, and checks its keys and value types; errors have their lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import yaml
from heliograph.spi import is_whole_number, known_names, with_article

from ..errors import RuleError, RuleKeyError, RuleTypeError, show
from .specs import MODES, ON_ERROR, Mode, OnError, RulePart, RulePatience, RuleSet, RuleSpec


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


P = ParamSpec("P")
T = TypeVar("T")


class Problems:
    """The errors of a file: raised at once, or collected, one for each metric, operation and rule.

    Attributes:
        errors: the collected errors.
        broken: the names of metrics and operations that have errors; rules that use them are not reported.
    """

    def __init__(self, *, collects: bool = False) -> None:
        self.errors: list[RuleError] = []
        self.broken: set[str] = set()
        self._collects = collects

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except RuleError as error:
            if not self._collects:
                raise
            self.errors.append(error)
            return None


class Section:
    """A mapping of a rule file whose keys and values are checked."""

    def __init__(
        self,
        document: Document,
        value: Any,
        title: str,
        keys: Collection[str],
        *,
        needed: Collection[str] = (),
        controller: str | None = None,
        line: int | None = None,
    ) -> None:
        self.document, self.value, self.title, self.controller, self._line = document, value, title, controller, line
        if not isinstance(value, Mapping):
            problem = f"{title} must be a mapping with the keys {', '.join(keys)}, got {show(value)}."
            raise self.error(problem, kind=RuleTypeError)
        for key in value:
            if key not in keys:
                raise self.error(f"{title} has no key {key!r}.{known_names(str(key), keys)}", key, RuleKeyError)
        if lacking := [repr(key) for key in needed if key not in value]:
            keys = f"key{'s' * (len(lacking) > 1)} {', '.join(lacking)}"
            raise self.error(f"{title} lacks the {keys}.", kind=RuleKeyError)

    def line(self, key: Any = None) -> int | None:
        return self.document.line(self.value, key) or self.document.line(self.value) or self._line

    def error(self, problem: str, key: Any = None, kind: type[RuleError] = RuleError) -> RuleError:
        return kind(problem, file=self.document.file, line=self.line(key), controller=self.controller)

    def get(self, key: str, kind: type[T] | tuple[type[T], ...], allowed: str, default: T) -> T:
        value = self.value.get(key, default)
        if not isinstance(value, kind):
            raise self.error(f"{key!r} of {self.title} must be {allowed}, got {show(value)}.", key, RuleTypeError)
        return value

    def text(self, key: str) -> str:
        value = self.get(key, str, "text", "")
        if not value.strip():
            raise self.error(f"{key!r} of {self.title} must be text, got {show(value)}.", key, RuleTypeError)
        return value

    def word(self, key: str, allowed: Collection[str]) -> str:
        if (word := self.text(key).lower()) not in allowed:
            raise self.error(f"{key!r} of {self.title} must be one of {', '.join(allowed)}, got {word!r}.", key)
        return word

    def names(self, key: str, example: str) -> list[str]:
        names = self.get(key, (list, tuple), allowed := f"a list of names, for example [{example}]", [])
        if not names or not all(isinstance(name, str) for name in names):
            raise self.error(f"{key!r} of {self.title} must be {allowed}, got {show(names)}.", key, RuleTypeError)
        for index, name in enumerate(names):
            if name in names[:index]:
                raise self.error(f"{key!r} of {self.title} contains {name!r} twice.", key)
        return list(names)


Source = str | Path | Mapping[str, Any] | RuleSet | Iterable[RuleSpec]
LEVELS = ("debug", "info", "warning", "error", "critical")
METRICS = ("controller_metrics", "controller-metrics")
CONTROLLER = ("name", "triggers", "rule", "operations", "patience", "config", "on_error")


def read_rules(source: Source, problems: Problems | None = None) -> RuleSet:
    """Return the rules of a file, of a mapping of the same form, or of Python objects; the source is not changed.

    Without `problems`, the first error is raised.
    """
    problems = problems or Problems()
    if isinstance(source, RuleSet):
        rules = source
    elif isinstance(source, str | Path):
        rules = _rule_set(read_document(Path(source)), problems)
    elif isinstance(source, Mapping):
        rules = _rule_set(Document(source), problems)
    else:
        rules = RuleSet(list(source))
    for title, parts in (("metric", rules.metrics), ("operation", rules.operations), ("controller", rules.controllers)):
        problems.attempt(_check_unique, title, parts, rules.file)
    return rules


def _rule_set(document: Document, problems: Problems) -> RuleSet:
    keys = (*METRICS, "operations", "controllers")
    top = Section(document, document.content, "a rule file", keys, needed=("controllers",))
    if all(key in top.value for key in METRICS):
        raise top.error(f"{METRICS[0]!r} and {METRICS[1]!r} are the same key: use only one of them.", METRICS[1])
    if not top.value["controllers"]:
        raise top.error("There is no controller: define at least one.", "controllers")

    def items(key: str) -> Iterator[tuple[Any, int | None]]:
        values = top.get(key, (list, tuple, type(None)), "a list", None) or ()
        for index, value in enumerate(values):
            yield value, document.line(values, index)

    def parts(key: str, title: str) -> Iterator[RulePart]:
        for value, line in items(key):
            part = problems.attempt(_part, document, value, line, title)
            if part is not None:
                yield part
            elif isinstance(value, Mapping):
                problems.broken.add(str(value.get("name")))

    metrics = [part for key in METRICS for part in parts(key, "a metric")]
    operations = list(parts("operations", "an operation"))
    controllers = [problems.attempt(_controller, document, *item) for item in items("controllers")]
    return RuleSet([spec for spec in controllers if spec is not None], metrics, operations, document.file)


def _part(document: Document, value: Any, line: int | None, title: str) -> RulePart:
    keys = ("name", "class", "arguments")
    section = Section(document, value, title, keys, needed=keys[:2], line=line)
    kind = value["class"] if isinstance(value["class"], type) else section.text("class")
    arguments = value.get("arguments") or {}
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        problem = f"'arguments' of {title} must be a mapping of names to values, got {show(arguments)}."
        raise section.error(problem, "arguments", RuleTypeError)
    return RulePart(section.text("name"), kind, deepcopy(dict(arguments)), section.line())


def _controller(document: Document, value: Any, line: int | None) -> RuleSpec:
    name = value.get("name") if isinstance(value, Mapping) else None
    place: dict[str, Any] = {"controller": name if isinstance(name, str) and name.strip() else None, "line": line}
    section = Section(document, value, "a controller", CONTROLLER, needed=CONTROLLER[:4], **place)
    triggers, operations = section.names("triggers", "on_log"), section.names("operations", "hfcontrols.should_save")
    config = Section(document, value.get("config") or {}, "the config", ("trigger_log_level",), **place)
    lines = {"rule": section.line("rule")}
    for key, names in (("triggers", triggers), ("operations", operations)):
        lines |= {name: document.line(value[key], index) for index, name in enumerate(names)}
    return RuleSpec(
        name=section.text("name"),
        triggers=triggers,
        rule=str(value["rule"]) if isinstance(value["rule"], bool) else section.text("rule"),
        operations=operations,
        patience=_patience(section, place) if "patience" in value else None,
        on_error=cast(OnError, section.word("on_error", ON_ERROR)) if "on_error" in value else None,
        log_level=config.word("trigger_log_level", LEVELS) if config.value else RuleSpec.log_level,
        line=section.line(),
        lines={name: line for name, line in lines.items() if line is not None},
    )


def _patience(section: Section, place: Mapping[str, Any]) -> RulePatience:
    keys = ("patience_threshold", "mode")
    place = {**place, "line": section.line("patience")}
    patience = Section(section.document, section.value["patience"], "the patience", keys, **place)
    threshold = patience.value.get("patience_threshold", RulePatience.threshold)
    if not is_whole_number(threshold):
        problem = f"'patience_threshold' must be an integer, got {show(threshold)}."
        raise patience.error(problem, "patience_threshold", RuleTypeError)
    if threshold < 0:
        raise patience.error(f"'patience_threshold' must be at least 0, got {threshold}.", "patience_threshold")
    mode = patience.word("mode", MODES) if "mode" in patience.value else RulePatience.mode
    return RulePatience(threshold, cast(Mode, mode))


def _check_unique(title: str, parts: Sequence[RulePart | RuleSpec], file: str | None) -> None:
    seen: dict[str, int | None] = {}
    for part in parts:
        if part.name in seen:
            first = f" (first in line {seen[part.name]})" if seen[part.name] else ""
            raise RuleError(f"Two {title}s are named {part.name!r}{first}.", file=file, line=part.line)
        seen[part.name] = part.line
