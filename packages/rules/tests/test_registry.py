"""Which classes and functions rule files can name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from heliograph import Event, Run
from heliograph.packages.tests.facts import assert_facts
from heliograph_rules import registry
from heliograph_rules.base import RuleMetric, RuleOperation
from heliograph_rules.errors import RuleKeyError
from heliograph_rules.metrics.ancestors import Loss
from heliograph_rules.metrics.history import HistoryBasedMetric
from heliograph_rules.metrics.measures import GradientNorm
from heliograph_rules.operations import requests as called_functions
from heliograph_rules.operations.requests import Controls, HFControls


class Mine(RuleMetric):
    def compute(self, run: Run, event: Event) -> bool:
        return True


class Act(RuleOperation):
    pass


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METRICS", dict(registry._METRICS))
    monkeypatch.setattr(registry, "_OPERATIONS", dict(registry._OPERATIONS))
    monkeypatch.setattr(called_functions, "_FUNCTIONS", {})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """Return a function that installs a package with one entry point of a group."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(package: str, group: str, line: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{line}\n")
        source = "from heliograph_rules.base import RuleMetric, RuleOperation\n"
        source += "class Far(RuleMetric): pass\nclass FarAct(RuleOperation): pass\nclass Neither: pass\n"
        (tmp_path / f"{package}.py").write_text(source)

    yield put
    for name in ("far_one", "far_two"):
        sys.modules.pop(name, None)


def test_the_built_in_ones_go_by_their_class_names() -> None:
    assert registry.metric_class("Loss") is Loss
    assert registry.metric_class("HistoryBasedMetric") is HistoryBasedMetric
    assert registry.metric_class("GradientNorm") is GradientNorm
    assert sorted(registry._METRICS) == [
        "EvalMetrics", "GradientNorm", "HistoryBasedMetric", "LearningRate", "Loss", "Memory", "Metrics",
        "PerProcessState", "Throughput", "TrainingState",
    ]  # fmt: skip
    names = ["CallFunction", "Controls", "HFControls", "LogControl", "ScaleLearningRate", "ScaleLoss"]
    assert sorted(registry._OPERATIONS) == names
    assert {"control": Controls, "hfcontrols": HFControls} == registry.DEFAULT_OPERATIONS
    assert registry.operation_class("HFControls") is HFControls


def test_a_registered_class_can_be_named() -> None:
    assert registry.register_metric(Mine) is Mine
    assert registry.register_metric(Mine) is Mine  # the same again does no harm
    assert registry.metric_class("Mine") is Mine
    assert registry.register_operation(Act) is Act
    assert registry.operation_class("Act") is Act


def test_a_class_given_to_a_controller_is_known_to_it_alone() -> None:
    assert registry.metric_class("Mine", [Mine]) is Mine
    assert registry.metric_class("Loss", [Mine]) is Loss
    with pytest.raises(RuleKeyError, match="Undefined metric handler Mine"):
        registry.metric_class("Mine")


@pytest.mark.parametrize("how", ["registered", "given"])
def test_another_class_of_a_known_name_is_refused(how: str) -> None:
    other: Any = type("Loss", (RuleMetric,), {"__module__": "elsewhere"})
    match = r"metrics\.ancestors\.Loss: rename elsewhere\.Loss"
    with pytest.raises(ValueError, match=match):
        registry.register_metric(other) if how == "registered" else registry.metric_class("Loss", [other])
    act: Any = type("HFControls", (RuleOperation,), {})
    with pytest.raises(ValueError, match="HFControls is registered already"):
        registry.register_operation(act) if how == "registered" else registry.operation_class("HFControls", [act])
    assert registry.metric_class("Loss") is Loss


@pytest.mark.parametrize("kind", [Act, Mine("mine"), 3, dict])
def test_what_is_no_metric_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match="subclass of RuleMetric,"):
        registry.register_metric(kind)
    with pytest.raises(TypeError, match="subclass of RuleMetric,"):
        registry.metric_class("Loss", [kind])


def test_an_unknown_name_is_reported_with_the_nearest() -> None:
    with pytest.raises(RuleKeyError) as caught:
        registry.metric_class("MissingMetricClass")
    assert_facts(str(caught.value), "MissingMetricClass", "Known: EvalMetrics, ")
    assert isinstance(caught.value, KeyError)
    with pytest.raises(RuleKeyError, match=r"operation handler LogControls\. Did"):
        registry.operation_class("LogControls")


def test_an_installed_class_can_be_named(install: Any) -> None:
    install("far_one", "heliograph.rule_metrics", "Far = far_one:Far")
    assert registry.metric_class("Far").__module__ == "far_one"
    assert registry.metric_class("far-one:Far").__module__ == "far_one"
    with pytest.raises(RuleKeyError, match=r"Did you mean 'Far'\?"):
        registry.metric_class("Fat")
    install("far_two", "heliograph.rule_metrics", "Far = far_two:Far")
    with pytest.raises(RuleKeyError, match=r"'Far': .*far-one:Far"):
        registry.metric_class("Far")


def test_an_installed_operation_can_be_named(install: Any) -> None:
    install("far_one", "heliograph.rule_operations", "FarAct = far_one:FarAct")
    assert registry.operation_class("FarAct").__module__ == "far_one"


@pytest.mark.parametrize(
    ("target", "error", "problem"),
    [
        ("far_one:Neither", TypeError, "RuleMetric, got <class 'far_one.Neither'>"),
        ("far_one:Missing", ImportError, "far-one 1.0 .*be imported"),
    ],
)
def test_an_installed_class_that_is_broken_is_reported(
    install: Any, target: str, error: type[Exception], problem: str
) -> None:
    install("far_one", "heliograph.rule_metrics", f"Far = {target}")
    with pytest.raises(error, match=problem):
        registry.metric_class("Far")


def test_functions_go_by_their_names() -> None:
    def report() -> None:
        raise AssertionError

    def other() -> None:
        raise AssertionError

    assert called_functions.register_function(report) is report
    assert called_functions.register_function(other, "report_other") is other
    assert called_functions.find_function("report", {}) is report
    assert called_functions.find_function("report_other", {"more": report}) is other
    assert called_functions.find_function("more", {"more": report, "report": report}) is report
    with pytest.raises(RuleKeyError, match=r"Undefined function 'repor'\. Did"):
        called_functions.find_function("repor", {})
    with pytest.raises(ValueError, match="registered as 'report'"):
        called_functions.register_function(other, "report")
    with pytest.raises(ValueError, match="registered as 'report'"):
        called_functions.find_function("report", {"report": other})
    with pytest.raises(TypeError, match="register_function takes a function"):
        called_functions.register_function(3)  # type: ignore[type-var]
