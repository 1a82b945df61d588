"""A watched metric: its name and direction."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from heliograph.core.metrics.monitor import Monitor


@pytest.mark.parametrize(
    ("mode", "delta", "value", "best", "better"),
    [
        ("min", 0.0, 1.0, None, True),
        ("min", 0.0, 0.9, 1.0, True),
        ("min", 0.0, 1.0, 1.0, False),
        ("min", 0.0, 1.1, 1.0, False),
        ("min", 0.5, 0.5, 1.0, False),
        ("min", 0.5, 0.4, 1.0, True),
        ("max", 0.0, 1.1, 1.0, True),
        ("max", 0.0, 1.0, 1.0, False),
        ("max", 0.5, 1.5, 1.0, False),
        ("max", 0.5, 1.6, 1.0, True),
        ("min", 0.0, math.nan, None, False),
        ("max", 0.0, math.nan, 1.0, False),
        ("min", 0.0, math.inf, None, True),
        ("min", 0.0, -math.inf, 1.0, True),
        ("min", 0.0, 5.0, math.inf, True),
    ],
)
def test_improves(mode: Any, delta: float, value: float, best: float | None, better: bool) -> None:
    assert Monitor("validation/loss", mode, delta).improves(value, best) is better


def test_read() -> None:
    monitor = Monitor("validation/accuracy", "max")

    assert monitor.read({"validation/accuracy": 0.5}) == 0.5
    assert monitor.split == "validation"
    with pytest.raises(ValueError, match=r"no metric 'validation/accuracy'. Did you mean 'validation/acuracy'\? Known"):
        monitor.read({"validation/acuracy": 0.5})
    with pytest.raises(ValueError, match=r"Known: none"):
        monitor.read({})


def test_the_name_of_a_named_set() -> None:
    assert Monitor("validation/night/loss", "min").split == "validation"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("loss", "min"), "<split>/<name>"),
        ((7, "min"), "<split>/<name>"),
        (("train/b", "less"), "mode is 'min'"),
        (("train/accuracy", None), "Which way is 'train/accuracy' better"),
        (("val/loss", "min"), r"one of train/\.\.\. or validation/"),
        (("train/b", "min", -1.0), "min_delta must be a finite number, at least 0"),
        (("train/b", "min", math.inf), "min_delta must be a finite number, at least 0"),
    ],
)
def test_arguments_are_checked(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Monitor(*arguments)


def test_a_validation_metric_without_validation_data_is_never_measured() -> None:
    check = getattr(Monitor("validation/loss", "min"), "check_measured", None)
    if check is None:
        pytest.skip("checked elsewhere")
    check(SimpleNamespace(validation_sets=("",)))
    with pytest.raises(ValueError, match="no validation data: pass validation= to fit"):
        check(SimpleNamespace(validation_sets=()))
