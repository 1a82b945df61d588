"""What a rule file may say, and what is reported where it says something else."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from heliograph.packages.rules.tests.scripted import written
from heliograph_rules.errors import RuleError, RuleKeyError, RuleTypeError
from heliograph_rules.files.config import Problems, read_rules
from heliograph_rules.files.specs import RulePart, RulePatience, RuleSet, RuleSpec

WHOLE = """\
controller_metrics:
  - name: window
    class: HistoryBasedMetric
    arguments:
      window_size: 2
operations:
  - name: reporter
    class: LogControl
    arguments: {log_format: "{window}", log_level: info}
controllers:
  - name: first
    triggers: [on_log, on_evaluate]
    rule: window["window_size"] == 2
    patience:
      patience_threshold: 3
      mode: no_reset_on_failure
    config:
      trigger_log_level: WARNING
    on_error: raise
    operations:
      - reporter.should_log
      - hfcontrols.should_training_stop
  - name: second
    triggers:
      - on_step_end
    rule: true
    operations: [hfcontrols.should_save]
"""
SET = RuleSet(
    metrics=[RulePart("window", "HistoryBasedMetric", {"window_size": 2})],
    operations=[RulePart("reporter", "LogControl", {"log_format": "{window}", "log_level": "info"})],
    controllers=[
        RuleSpec(
            "first",
            ["on_log", "on_evaluate"],
            'window["window_size"] == 2',
            ["reporter.should_log", "hfcontrols.should_training_stop"],
            RulePatience(3, "no_reset_on_failure"),
            "raise",
            "warning",
        ),
        RuleSpec("second", ["on_step_end"], "True", ["hfcontrols.should_save"]),
    ],
)
MAPPING: dict[str, Any] = {
    "controller_metrics": [{"name": "loss", "class": "Loss"}],
    "controllers": [
        {"name": "a", "triggers": ["on_log"], "rule": "True", "operations": ["hfcontrols.should_save"], "patience": {}}
    ],
}


def parts(rules: RuleSet) -> tuple[list[Any], list[Any], list[Any]]:
    return list(rules.controllers), list(rules.metrics), list(rules.operations)


def test_a_file_a_mapping_and_objects_say_the_same(tmp_path: Path) -> None:
    import yaml

    path = written(tmp_path, WHOLE)
    from_file = read_rules(path)
    assert parts(from_file) == parts(read_rules(str(path))) == parts(read_rules(yaml.safe_load(WHOLE))) == parts(SET)
    assert parts(read_rules(SET)) == parts(SET)
    assert read_rules(SET.controllers).controllers == SET.controllers
    assert from_file.file == str(path)
    assert [each.line for each in (*from_file.metrics, *from_file.operations)] == [2, 7]
    assert [each.line for each in from_file.controllers] == [11, 23]
    assert from_file.controllers[0].lines == {
        "rule": 13,
        "on_log": 12,
        "on_evaluate": 12,
        "reporter.should_log": 21,
        "hfcontrols.should_training_stop": 22,
    }


@pytest.mark.parametrize("key", ["controller_metrics", "controller-metrics"])
def test_metrics_are_found_with_an_underscore_and_with_a_dash(key: str) -> None:
    rules = read_rules({key: MAPPING["controller_metrics"], "controllers": MAPPING["controllers"]})
    assert [part.name for part in rules.metrics] == ["loss"]


def test_what_is_given_is_not_changed() -> None:
    """F-CFG-1: the ancestor appended its defaults to the mapping that it was given."""
    given = deepcopy(MAPPING) | {
        "operations": [{"name": "x", "class": "LogControl", "arguments": {"log_format": ["a"]}}]
    }
    before = deepcopy(given)
    rules = read_rules(given)
    rules.operations[0].arguments["log_format"].append("b")
    assert given == before


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("controllers:\n  - {name: a, triggers: [on_log]}\n  - 5\n", 3),
        ("controllers: [5]\ncontroller_metrics:\n  - x\n", 3),
        (f"{WHOLE}    patience:\n", 28),
    ],
    ids=["controller", "metric", "patience"],
)
def test_the_line_of_what_is_no_mapping_is_reported(tmp_path: Path, text: str, line: int) -> None:
    problems = Problems(collects=True)
    read_rules(written(tmp_path, text), problems)
    reported = [error.line for error in problems.errors if "mapping with the keys" in str(error)]
    assert line in reported


def test_empty_sections_are_as_if_they_were_not_there() -> None:
    rules = read_rules(MAPPING | {"operations": None, "controller_metrics": None})
    assert (rules.metrics, rules.operations) == ([], [])


def test_a_patience_without_keys_is_the_default_one() -> None:
    assert read_rules(MAPPING).controllers[0].patience == RulePatience(1, "reset_on_failure")


def changed(**changes: Any) -> dict[str, Any]:
    """Return a mapping whose controller has other values; ... takes a key away."""
    own = {key: value for key, value in {**MAPPING["controllers"][0], **changes}.items() if value is not ...}
    return MAPPING | {"controllers": [own]}


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (MAPPING | {"controler": []}, RuleKeyError, "Did you mean 'controllers'?"),
        (MAPPING | {"controllers": [{"name": "a"}]}, RuleKeyError, "keys 'triggers', 'rule', 'operations'."),
        (MAPPING | {"controllers": [{}]}, RuleKeyError, "'name', 'triggers', 'rule', 'operations'."),
        ({"controller_metrics": []}, RuleKeyError, "lacks the key 'controllers'."),
        (MAPPING | {"controllers": []}, RuleError, "There is no controller"),
        (MAPPING | {"controllers": {"a": 1}}, RuleTypeError, "list, got {'a': 1}."),
        (MAPPING | {"operations": "x"}, RuleTypeError, "list, got 'x'."),
        (MAPPING | {"controller-metrics": []}, RuleError, "the same key"),
        (MAPPING | {"controllers": ["a"]}, RuleTypeError, "the keys name, triggers,"),
        (changed(name=...), RuleKeyError, "lacks the key 'name'."),
        (changed(name=5), RuleTypeError, "be text, got 5."),
        (changed(triggers=...), RuleKeyError, "lacks the key 'triggers'."),
        (changed(rule=...), RuleKeyError, "lacks the key 'rule'."),
        (changed(operations=...), RuleKeyError, "lacks the key 'operations'."),
        (changed(triggers="on_log"), RuleTypeError, "[on_log], got 'on_log'."),
        (changed(triggers=[]), RuleTypeError, "a list of names"),
        (changed(triggers=["on_log", "on_log"]), RuleError, "contains 'on_log' twice."),
        (changed(operations=[3]), RuleTypeError, "[hfcontrols.should_save], got [3]."),
        (changed(rule=1), RuleTypeError, "be text, got 1."),
        (changed(rule="  "), RuleTypeError, "text, got '  '."),
        (
            changed(patience=None),
            RuleTypeError,
            "the keys patience_threshold, mode",
        ),
        (changed(patience={"threshold": 1}), RuleKeyError, "Did you mean 'patience_threshold'?"),
        (changed(patience={"patience_threshold": "2"}), RuleTypeError, "integer, got '2'."),
        (changed(patience={"patience_threshold": True}), RuleTypeError, "integer, got True."),
        (changed(patience={"patience_threshold": -1}), RuleError, "least 0, got -1."),
        (changed(patience={"mode": "reset"}), RuleError, "reset_on_failure, no_reset_on_failure, got 'reset'."),
        (changed(config={"level": "info"}), RuleKeyError, "no key 'level'."),
        (changed(config={"trigger_log_level": "loud"}), RuleError, "debug, info, warning, error"),
        (
            changed(config={"trigger_log_level": 10}),
            RuleTypeError,
            "'trigger_log_level' of the config",
        ),
        (changed(config=3), RuleTypeError, "trigger_log_level, got 3."),
        (changed(on_error="ignore"), RuleError, "warn, disable, got 'ignore'."),
        (changed(when="now"), RuleKeyError, "no key 'when'."),
        (MAPPING | {"operations": [{"name": "x"}]}, RuleKeyError, "lacks the key 'class'."),
        (MAPPING | {"operations": [{"class": "x"}]}, RuleKeyError, "lacks the key 'name'."),
        (
            MAPPING | {"controller_metrics": [{"name": "x", "class": 3}]},
            RuleTypeError,
            "'class' of a metric",
        ),
        (
            MAPPING | {"controller_metrics": [{"name": "x", "class": "Loss", "arguments": [1]}]},
            RuleTypeError,
            "values, got [1].",
        ),
        (
            MAPPING | {"controller_metrics": [{"name": "x", "class": "Loss", "args": {}}]},
            RuleKeyError,
            "Did you mean 'arguments'?",
        ),
        (
            MAPPING | {"controller_metrics": MAPPING["controller_metrics"] * 2},
            RuleError,
            "metrics are named 'loss'.",
        ),
        (MAPPING | {"controllers": MAPPING["controllers"] * 2}, RuleError, "controllers are named 'a'."),
    ],
)
def test_what_is_wrong_is_reported(source: dict[str, Any], kind: type[RuleError], message: str) -> None:
    with pytest.raises(kind) as caught:
        read_rules(source)
    assert message in str(caught.value)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("old", "new", "line", "controller"),
    [
        ("operations:\n  - name: reporter", "operation:\n  - name: reporter", 6, None),
        ("class: LogControl", "classs: LogControl", 8, None),
        ("[on_log, on_evaluate]", "on_log", 12, "first"),
        ("mode: no_reset", "mode: never", 16, "first"),
        ("patience_threshold: 3", "patience_threshold: three", 15, "first"),
        ("trigger_log_level: WARNING", "trigger_log_level: LOUD", 18, "first"),
        ("on_error: raise", "on_error: panic", 19, "first"),
        ("    rule: true\n", "", 23, "second"),
        ("name: second", "name: first", 23, None),
    ],
)
def test_an_error_says_the_file_the_line_and_the_controller(
    tmp_path: Path, old: str, new: str, line: int, controller: str | None
) -> None:
    path = written(tmp_path, WHOLE.replace(old, new, 1))
    with pytest.raises(RuleError) as caught:
        read_rules(path)
    error = caught.value
    assert (error.file, error.line, error.controller) == (str(path), line, controller)
    assert str(error).startswith(f"{path}, line {line}")


def test_all_errors_are_found_where_they_are_asked_for(tmp_path: Path) -> None:
    text = WHOLE.replace("class: LogControl", "kind: LogControl").replace("on_error: raise", "on_error: panic")
    problems = Problems(collects=True)
    rules = read_rules(written(tmp_path, text), problems)
    assert [error.line for error in problems.errors] == [8, 19]
    assert [each.name for each in rules.controllers] == ["second"]


def test_long_values_are_cut_short_in_errors() -> None:
    with pytest.raises(RuleTypeError) as caught:
        read_rules(changed(operations="x" * 10_000))
    assert len(str(caught.value)) < 400
