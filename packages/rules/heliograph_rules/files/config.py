"""What a rule file may say: its keys and their types, checked with the line of whatever is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from heliograph.spi import is_whole_number, known_names

from ..errors import RuleError, RuleKeyError, RuleTypeError, show
from .document import Document, read_document
from .specs import MODES, ON_ERROR, Mode, OnError, RulePart, RulePatience, RuleSet, RuleSpec

P = ParamSpec("P")
T = TypeVar("T")


class Problems:
    """Collects the errors of the parts of a file.

    Args:
        keeps: whether errors are collected, so that the next part is looked at too; else the first one leaves.

    Attributes:
        found: the errors.
        broken: the names of metrics and operations that were left out for theirs: what uses them is not to blame.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self.found: list[RuleError] = []
        self.broken: set[str] = set()
        self._keeps = keeps

    def attempt(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what a function returns; None where it adds an error, or raises one, and errors are kept."""
        before = len(self.found)
        try:
            made = function(*args, **kwargs)
        except RuleError as error:
            self.add(error)
        return made if len(self.found) == before else None

    def add(self, error: RuleError) -> None:
        """Keep an error, or raise it."""
        if not self._keeps:
            raise error
        self.found.append(error)


class Section:
    """A mapping of a rule file; where errors are kept, a value that is wrong is an empty one.

    Args:
        document: what it is part of.
        problems: gets what is wrong.
        value: the mapping.
        what: what to call it in errors.
        keys: those that it may have.
        needed: those that it must have.
        controller: whose it is.
        line: where it is, for what is not a mapping.

    Raises:
        RuleTypeError: it is not a mapping.
        RuleKeyError: it has a key that it may not have, or lacks one.
    """

    def __init__(
        self,
        document: Document,
        problems: Problems,
        value: Any,
        what: str,
        keys: Collection[str],
        *,
        needed: Collection[str] = (),
        controller: str | None = None,
        line: int | None = None,
    ) -> None:
        self.document, self.value, self.what, self.controller = document, value, what, controller
        self.problems, self._line = problems, line
        if not isinstance(value, Mapping):
            problem = f"{what} is a mapping with the keys {', '.join(keys)}, got {show(value)}."
            raise self._error(problem, None, RuleTypeError)
        for key in value:
            if key not in keys:
                self.fail(f"{what} has no key {key!r}.{known_names(str(key), keys)}", key, RuleKeyError)
        if lacking := [repr(key) for key in needed if key not in value]:
            self.fail(f"{what} lacks the key{'s' * (len(lacking) > 1)} {', '.join(lacking)}.", kind=RuleKeyError)

    def __contains__(self, key: str) -> bool:
        return key in self.value

    def line(self, key: Any = None) -> int | None:
        """Return the line of a key, or of the section."""
        return self.document.line(self.value, key) or self.document.line(self.value) or self._line

    def fail(self, problem: str, key: Any = None, kind: type[RuleError] = RuleError) -> None:
        """Note an error about a key, or about the section."""
        self.problems.add(self._error(problem, key, kind))

    def text(self, key: str) -> str:
        """Return the text of a key."""
        value = self.value.get(key, "")
        if isinstance(value, str) and (value.strip() or key not in self):
            return value
        self.fail(f"{key!r} of {self.what} is text, got {show(value)}.", key, RuleTypeError)
        return ""

    def word(self, key: str, allowed: Collection[str], default: str | None = None) -> str | None:
        """Return the word of a key, one of those allowed."""
        if key not in self:
            return default
        if (word := self.text(key)) and word not in allowed:
            self.fail(f"{key!r} of {self.what} is one of {', '.join(allowed)}, got {word!r}.", key)
        return word

    def texts(self, key: str, example: str) -> list[str]:
        """Return the list of texts of a key, which must hold at least one."""
        if key not in self:
            return []
        value = self.value[key]
        if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) for each in value):
            problem = f"{key!r} of {self.what} is a list of names, such as [{example}], got {show(value)}."
            self.fail(problem, key, RuleTypeError)
            return []
        for index, each in enumerate(value):
            if each in value[:index]:
                self.fail(f"{key!r} of {self.what} names {each!r} twice.", key)
        return list(value)

    def items(self, key: str) -> list[tuple[Any, int | None]]:
        """Return what the list of a key holds, each with its line; nothing where the key has no value."""
        value = self.value.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            self.fail(f"{key!r} is a list, got {show(value)}.", key, RuleTypeError)
            return []
        return [(each, self.document.line(value, index)) for index, each in enumerate(value)]

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return the mapping of names to values of a key; an empty one where nothing is there."""
        value = self.value.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            problem = f"{key!r} of {self.what} is a mapping of names to values, got {show(value)}."
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
    """Return the rules of a file, of a mapping of the same form, or of Python objects; what is given is not changed.

    Args:
        source: see `RuleController`.
        problems: collects what is wrong with them; without it, the first error leaves.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: the source, or something in it, has the wrong type.
        RuleError: a key is missing, unknown or there twice, a name is taken, a value is none of those allowed; says the
            file, the line and the controller.
    """
    if isinstance(source, str | Path):
        document = read_document(Path(source))
    elif isinstance(source, Mapping):
        document = Document(source)
    elif isinstance(source, RuleSet):
        parts = {"controller_metrics": source.metrics, "operations": source.operations}
        document = Document({**parts, "controllers": source.controllers}, source.file)
    elif isinstance(source, Iterable):
        document = Document({"controllers": list(source)})
    else:
        raise TypeError(
            f"RuleController takes the path of a rule file, a mapping like one, a RuleSet or a list of RuleSpec; got "
            f"{show(source)}."
        )
    return _rule_set(document, problems or Problems())


def _rule_set(document: Document, problems: Problems) -> RuleSet:
    keys = (*METRICS, "operations", "controllers")
    top = Section(document, problems, document.content, "a rule file", keys, needed=("controllers",))
    if all(key in top for key in METRICS):
        top.fail(f"{METRICS[0]!r} and {METRICS[1]!r} are two spellings of one key: give one of them.", METRICS[1])
    if top.value.get("controllers", ...) in (None, [], ()):
        top.fail("There is no controller: give one at least.", "controllers")
    attempt = problems.attempt
    metrics = [attempt(_part, document, problems, *each, "a metric") for key in METRICS for each in top.items(key)]
    operations = [attempt(_part, document, problems, *each, "an operation") for each in top.items("operations")]
    controllers = [attempt(_controller, document, problems, *each) for each in top.items("controllers")]
    rules = RuleSet(
        controllers=[each for each in controllers if each is not None],
        metrics=[each for each in metrics if each is not None],
        operations=[each for each in operations if each is not None],
        file=document.file,
    )
    for what, named in (("metric", rules.metrics), ("operation", rules.operations), ("controller", rules.controllers)):
        _check_unique(what, named, document.file, problems)
    return rules


def _part(document: Document, problems: Problems, value: Any, line: int | None, what: str) -> RulePart:
    if isinstance(value, RulePart):
        value = {"name": value.name, "class": value.kind, "arguments": value.arguments}
    before, keys, needed = len(problems.found), ("name", "class", "arguments"), ("name", "class")
    section = Section(document, problems, value, what, keys, needed=needed, line=line)
    kind, name = section.value.get("class"), section.text("name")
    part = RulePart(
        name=name,
        kind=kind if isinstance(kind, type) else section.text("class"),
        arguments=deepcopy(dict(section.mapping("arguments"))),
        line=section.line(),
    )
    if name and len(problems.found) > before:
        problems.broken.add(name)
    return part


def _controller(document: Document, problems: Problems, value: Any, line: int | None) -> RuleSpec:
    value = _as_mapping(value) if isinstance(value, RuleSpec) else value
    name = value.get("name") if isinstance(value, Mapping) else None
    whose = name if isinstance(name, str) and name.strip() else None
    section = Section(
        document, problems, value, "a controller", CONTROLLER, needed=CONTROLLER[:4], controller=whose, line=line
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
    keys, whose = ("patience_threshold", "mode"), section.controller
    given, line = section.value["patience"], section.line("patience")
    patience = Section(section.document, section.problems, given, "the patience", keys, controller=whose, line=line)
    threshold = patience.value.get("patience_threshold", RulePatience.threshold)
    if not is_whole_number(threshold):
        problem = f"'patience_threshold' is a whole number, got {show(threshold)}."
        patience.fail(problem, "patience_threshold", RuleTypeError)
        threshold = RulePatience.threshold
    elif threshold < 0:
        patience.fail(f"'patience_threshold' is at least 0, got {threshold}.", "patience_threshold")
        threshold = RulePatience.threshold
    return RulePatience(threshold, cast(Mode, patience.word("mode", MODES, RulePatience.mode)))


def _level(section: Section) -> str:
    given, whose = section.mapping("config"), section.controller
    config = Section(section.document, section.problems, given, "the config", ("trigger_log_level",), controller=whose)
    if "trigger_log_level" not in config:
        return RuleSpec.log_level
    level = config.text("trigger_log_level")
    if level and level.lower() not in LEVELS:
        config.fail(f"'trigger_log_level' is one of {', '.join(LEVELS)}, got {level!r}.", "trigger_log_level")
    return level.lower()


def _as_mapping(controller: RuleSpec) -> dict[str, Any]:
    """Return a controller as it would be in a file."""
    mapping: dict[str, Any] = {
        "name": controller.name,
        "triggers": controller.triggers,
        "rule": controller.rule,
        "operations": controller.operations,
        "config": {"trigger_log_level": controller.log_level},
    }
    if controller.on_error is not None:
        mapping["on_error"] = controller.on_error
    if isinstance(controller.patience, RulePatience):
        mapping["patience"] = {"patience_threshold": controller.patience.threshold, "mode": controller.patience.mode}
    elif controller.patience is not None:
        mapping["patience"] = controller.patience
    return mapping


def _check_unique(what: str, named: Sequence[RulePart | RuleSpec], file: str | None, problems: Problems) -> None:
    seen: dict[str, int | None] = {}
    for each in named:
        if each.name in seen:
            first = f" (the first is in line {seen[each.name]})" if seen[each.name] else ""
            problem = f"There are two {what}s named {each.name!r}{first}."
            problems.add(RuleError(problem, file=file, line=each.line))
        seen.setdefault(each.name, each.line)
