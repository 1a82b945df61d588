"""The options of built-in plugins, and the numbers of `fit`: checked when they are given, NumPy's numbers welcome."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.core.objects.program import plugin_options

WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (h.Checkpoint, {"folder": ".", "keep_last": 1.5}, "keep_last must be a whole number, at least 1, or None for all"),
    (h.Checkpoint, {"folder": ".", "background": "no"}, "background is True or False, got 'no'."),
    (h.Checkpoint, {"folder": ".", "mode": "max"}, "keep_best=0, monitor=None, mode='max' do not fit together"),
    (h.Compile, {"fallback": "eager"}, "fallback is True or False, got 'eager'."),
    (
        h.FileLog,
        {"folder": ".", "level": "INFO"},
        "level, such as logging.INFO, must be a whole number, at least 0; got",
    ),
    (h.GradientAccumulation, {"n": {0: 1, "a": 2}}, "The epoch of a schedule of accumulation must be a whole number"),
    (h.GradientClipping, {"norm": "1"}, "norm must be a number, more than 0, or None; got '1'."),
    (h.GradientNorm, {"per_module": 1}, "per_module is True or False, got 1."),
    (h.ProgressBar, {"metrics": "train/loss"}, "metrics takes a list of names, got 'train/loss': give ['train/loss']."),
    (h.ProgressBar, {"plain": 1}, "plain is True or False, or None, got 1."),
    (h.RNGCapture, {"probe": 0}, "probe is True or False, got 0."),
    (h.RNGCapture, {"isolate_validation": None}, "isolate_validation is True or False, got None."),
]


@pytest.mark.parametrize(("make", "options", "words"), WRONG)
def test_a_wrong_option_is_refused_at_once(make: Callable[..., Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (
            h.EarlyStopping(monitor="validation/loss", patience=3),
            "EarlyStopping(monitor='validation/loss', patience=3)",
        ),
        (h.EarlyStopping(patience=5), "EarlyStopping(monitor='validation/loss', patience=5)"),
        (h.Checkpoint("runs/x", every=h.Every(steps=5)), "Checkpoint(folder='runs/x', every=Every(steps=5))"),
        (h.Checkpoint(Path("runs/x")), "Checkpoint(folder='runs/x')"),
        (h.LogSchedule(steps=50), "LogSchedule(steps=50)"),
        (h.ValidationSchedule(h.Every(epochs=2)), "ValidationSchedule(when=Every(epochs=2))"),
        (h.GradientClipping(1.0).named("clip"), "GradientClipping(norm=1.0).named('clip')"),
        (h.RNGCapture(), "RNGCapture()"),
    ],
)
def test_a_plugin_prints_the_arguments_that_it_was_given(plugin: h.Plugin, text: str) -> None:
    assert repr(plugin) == text
    assert repr(copy.deepcopy(plugin)) == text


def test_an_option_that_was_changed_since_is_printed_as_it_is() -> None:
    stopping = h.EarlyStopping(patience=3)
    stopping.patience = 7
    assert repr(stopping) == "EarlyStopping(monitor='validation/loss', patience=7)"


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("shy")


class Users(h.Plugin):
    def __init__(self, weights: Any, *more: Any, **options: Any) -> None:
        self.before = repr(self)
        self.hidden = weights


def test_plugins_of_users_print_short_texts_and_never_raise() -> None:
    net, many = torch.nn.Linear(3, 2), list(range(1000))
    plugin = Users(torch.zeros(4, 3), net, many, function=Shy, shy=Shy(), path=Path("a"), rate=np.float64(0.5))
    text = (
        "Users(weights=Tensor(4, 3), Linear(...), [0, 1, 2, 3, 4, 5, ...], function=Shy, shy=Shy(...), path='a', rate="
    )
    assert repr(plugin).startswith(text)
    assert plugin.before == repr(plugin)
    assert repr(Users.__new__(Users)) == "Users()"


def test_a_plugin_that_inherits_prints_the_arguments_of_its_own_constructor() -> None:
    class Patient(h.EarlyStopping):
        def __init__(self, times: int) -> None:
            super().__init__(patience=times)

    class Same(h.EarlyStopping):
        pass

    @dataclass
    class Data(h.Plugin):
        rate: float = 0.5

    class Own(h.Plugin):
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def __repr__(self) -> str:
            return "my own"

    assert repr(Patient(4)) == "Patient(times=4)"
    assert repr(Same(patience=2)) == "Same(monitor='validation/loss', patience=2)"
    assert repr(Data(0.1)).endswith("Data(rate=0.1)")
    assert repr(Own(0.1)) == "my own"


def test_the_arguments_are_kept_as_texts_and_not_compared_at_a_resume() -> None:
    weights = torch.zeros(4, 3)
    plugin = Users(weights)
    del plugin.hidden
    assert sys.getrefcount(weights) == 2
    assert plugin_options(plugin).keys() == {"before"}


@pytest.mark.parametrize(
    ("when", "text"),
    [
        (h.Every(steps=100), "Every(steps=100)"),
        (h.Every(steps=100, after=1000), "Every(steps=100, after=1000)"),
        (h.Every(seconds=0.5), "Every(seconds=0.5)"),
        (h.At(epochs=[1, 5]), "At(epochs=(1, 5))"),
        (h.At(steps=100), "At(steps=100)"),
        (h.Between(epochs=(2, 5)), "Between(epochs=(2, 5))"),
        (h.Once(), "Once()"),
    ],
)
def test_a_filter_prints_what_makes_it(when: h.Filter, text: str) -> None:
    assert repr(when) == text
    made = eval(text, vars(h) | {name: getattr(h, name) for name in ("Every", "At", "Between", "Once")})
    assert str(made) == str(when)


def test_filters_take_arrays_of_numpy() -> None:
    array: Any = np.array([2, 1])
    number: Any = np.int64(3)
    assert str(h.At(steps=array)) == str(h.At(steps=[1, 2]))
    assert str(h.Every(steps=number)) == str(h.Every(steps=3))
