"""Reads a rule file, and checks its keys and value types; errors have their lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    """The errors of a file: raised at once, or collected.

    Attributes:
        errors: the collected errors.
        broken: the names of metrics and operations that have errors; rules that use them are not reported.
    """

    def __init__(self, *, collects: bool = False) -> None:
        self.errors: list[RuleError] = []
        self.broken: set[str] = set()
        self._collects = collects

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        before = len(self.errors)
        try:
            made = function(*args, **kwargs)
        except RuleError as error:
            self.add(error)
        return made if len(self.errors) == before else None

    def add(self, error: RuleError) -> None:
        if not self._collects:
            raise error
        self.errors.append(error)


class Section:
    """A mapping of a rule file whose keys are checked; a wrong value reads as an empty one."""

    def __init__(
        self,
        document: Document,
        problems: Problems,
        value: Any,
        title: str,
        keys: Collection[str],
        *,
        needed: Collection[str] = (),
        controller: str | None = None,
        line: int | None = None,
    ) -> None:
        self.document, self.value, self.title, self.controller = document, value, title, controller
        self.problems, self._line = problems, line
        if not isinstance(value, Mapping):
            problem = f"{title} must be a mapping with the keys {', '.join(keys)}, got {show(value)}."
            raise self._error(problem, None, RuleTypeError)
        for key in value:
            if key not in keys:
                self.fail(f"{title} has no key {key!r}.{known_names(str(key), keys)}", key, RuleKeyError)
        if lacking := [repr(key) for key in needed if key not in value]:
            self.fail(f"{title} lacks the key{'s' * (len(lacking) > 1)} {', '.join(lacking)}.", kind=RuleKeyError)

    def __contains__(self, key: str) -> bool:
        return key in self.value

    def line(self, key: Any = None) -> int | None:
        return self.document.line(self.value, key) or self.document.line(self.value) or self._line

    def fail(self, problem: str, key: Any = None, kind: type[RuleError] = RuleError) -> None:
        self.problems.add(self._error(problem, key, kind))

    def text(self, key: str) -> str:
        value = self.value.get(key, "")
        if isinstance(value, str) and (value.strip() or key not in self):
            return value
        self.fail(f"{key!r} of {self.title} must be text, got {show(value)}.", key, RuleTypeError)
        return ""

    def word(self, key: str, allowed: Collection[str], default: str | None = None) -> str | None:
        if key not in self:
            return default
        if (word := self.text(key)) and word not in allowed:
            self.fail(f"{key!r} of {self.title} must be one of {', '.join(allowed)}, got {word!r}.", key)
        return word

    def texts(self, key: str, example: str) -> list[str]:
        if key not in self:
            return []
        value = self.value[key]
        if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) for text in value):
            problem = f"{key!r} of {self.title} must be a list of names, for example [{example}], got {show(value)}."
            self.fail(problem, key, RuleTypeError)
            return []
        for index, text in enumerate(value):
            if text in value[:index]:
                self.fail(f"{key!r} of {self.title} contains {text!r} twice.", key)
        return list(value)

    def items(self, key: str) -> list[tuple[Any, int | None]]:
        value = self.value.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            self.fail(f"{key!r} must be a list, got {show(value)}.", key, RuleTypeError)
            return []
        return [(item, self.document.line(value, index)) for index, item in enumerate(value)]

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.value.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            problem = f"{key!r} of {self.title} must be a mapping of names to values, got {show(value)}."
            self.fail(problem, key, RuleTypeError)
            return {}
        return value

    def _error(self, problem: str, key: Any, kind: type[RuleError]) -> RuleError:
        return kind(problem, file=self.document.file, line=self.line(key), controller=self.controller)


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
        _check_unique(title, parts, rules.file, problems)
    return rules


def _rule_set(document: Document, problems: Problems) -> RuleSet:
    keys = (*METRICS, "operations", "controllers")
    top = Section(document, problems, document.content, "a rule file", keys, needed=("controllers",))
    if all(key in top for key in METRICS):
        top.fail(f"{METRICS[0]!r} and {METRICS[1]!r} are the same key: use only one of them.", METRICS[1])
    if top.value.get("controllers", ...) in (None, [], ()):
        top.fail("There is no controller: define at least one.", "controllers")
    attempt = problems.attempt
    metrics = [attempt(_part, document, problems, *item, "a metric") for key in METRICS for item in top.items(key)]
    operations = [attempt(_part, document, problems, *item, "an operation") for item in top.items("operations")]
    controllers = [attempt(_controller, document, problems, *item) for item in top.items("controllers")]
    return RuleSet(
        controllers=[controller for controller in controllers if controller is not None],
        metrics=[metric for metric in metrics if metric is not None],
        operations=[operation for operation in operations if operation is not None],
        file=document.file,
    )


def _part(document: Document, problems: Problems, value: Any, line: int | None, title: str) -> RulePart:
    before, keys, needed = len(problems.errors), ("name", "class", "arguments"), ("name", "class")
    section = Section(document, problems, value, title, keys, needed=needed, line=line)
    kind, name = section.value.get("class"), section.text("name")
    part = RulePart(
        name=name,
        kind=kind if isinstance(kind, type) else section.text("class"),
        arguments=deepcopy(dict(section.mapping("arguments"))),
        line=section.line(),
    )
    if name and len(problems.errors) > before:
        problems.broken.add(name)
    return part


def _controller(document: Document, problems: Problems, value: Any, line: int | None) -> RuleSpec:
    name = value.get("name") if isinstance(value, Mapping) else None
    controller = name if isinstance(name, str) and name.strip() else None
    section = Section(
        document, problems, value, "a controller", CONTROLLER, needed=CONTROLLER[:4], controller=controller, line=line
    )
    triggers, operations = section.texts("triggers", "on_log"), section.texts("operations", "hfcontrols.should_save")
    rule = section.value.get("rule")
    return RuleSpec(
        name=section.text("name"),
        triggers=triggers,
        rule=str(rule) if isinstance(rule, bool) else section.text("rule"),
        operations=operations,
        patience=problems.attempt(_patience, section) if "patience" in section else None,
        on_error=cast(OnError | None, section.word("on_error", ON_ERROR)),
        log_level=_level(section),
        line=section.line(),
        lines=_lines(section, triggers, operations),
    )


def _lines(section: Section, triggers: Sequence[str], operations: Sequence[str]) -> dict[str, int]:
    document, value = section.document, section.value
    lines = {"rule": section.line("rule")}
    for key, names in (("triggers", triggers), ("operations", operations)):
        lines |= {name: document.line(value[key], index) for index, name in enumerate(names)}
    return {name: line for name, line in lines.items() if line is not None}


def _patience(section: Section) -> RulePatience:
    patience = Section(
        section.document,
        section.problems,
        section.value["patience"],
        "the patience",
        ("patience_threshold", "mode"),
        controller=section.controller,
        line=section.line("patience"),
    )
    threshold = patience.value.get("patience_threshold", RulePatience.threshold)
    if not is_whole_number(threshold):
        problem = f"'patience_threshold' must be an integer, got {show(threshold)}."
        patience.fail(problem, "patience_threshold", RuleTypeError)
        threshold = RulePatience.threshold
    elif threshold < 0:
        patience.fail(f"'patience_threshold' must be at least 0, got {threshold}.", "patience_threshold")
        threshold = RulePatience.threshold
    return RulePatience(threshold, cast(Mode, patience.word("mode", MODES, RulePatience.mode)))


def _level(section: Section) -> str:
    mapping, controller = section.mapping("config"), section.controller
    config = Section(
        section.document, section.problems, mapping, "the config", ("trigger_log_level",), controller=controller
    )
    if "trigger_log_level" not in config:
        return RuleSpec.log_level
    level = config.text("trigger_log_level")
    if level and level.lower() not in LEVELS:
        config.fail(f"'trigger_log_level' must be one of {', '.join(LEVELS)}, got {level!r}.", "trigger_log_level")
    return level.lower()


def _check_unique(title: str, parts: Sequence[RulePart | RuleSpec], file: str | None, problems: Problems) -> None:
    seen: dict[str, int | None] = {}
    for part in parts:
        if part.name in seen:
            first = f" (first in line {seen[part.name]})" if seen[part.name] else ""
            problem = f"Two {title}s are named {part.name!r}{first}."
            problems.add(RuleError(problem, file=file, line=part.line))
        seen.setdefault(part.name, part.line)
