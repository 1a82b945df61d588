"""What a rule file may say: its keys and their types, checked with the line of whatever is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

from heliograph.spi import is_whole_number

from ..errors import RuleError, RuleTypeError
from ..patience import MODES, Mode, RulePatience
from ..text import show
from .document import Document, read_document
from .problems import Problems
from .sections import Section
from .specs import ON_ERROR, OnError, RulePart, RuleSet, RuleSpec

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
