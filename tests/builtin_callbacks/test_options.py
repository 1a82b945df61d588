"""The options of built-in plugins, and the numbers of `fit`: checked when they are given, NumPy's numbers welcome."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import numpy as np
import pytest
from heliograph.tests.kit import fit

WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (h.Checkpoint, {"folder": ".", "keep_last": 1.5}, "keep_last must be a whole number, at least 1, or None for all"),
    (h.Checkpoint, {"folder": ".", "background": "no"}, "background is True or False, got 'no'."),
    (h.Checkpoint, {"folder": ".", "sharded": 1}, "sharded is True or False, or None, got 1."),
    (h.Checkpoint, {"folder": ".", "restore_attributes": None}, "restore_attributes is True or False, got None."),
    (h.Checkpoint, {"folder": ".", "mode": "max"}, "mode='max' says which way monitor='validation/loss' is better"),
    (h.Compile, {"fallback": "eager"}, "fallback is True or False, got 'eager'."),
    (
        h.FileLog,
        {"folder": ".", "level": "INFO"},
        "level, such as logging.INFO, must be a whole number, at least 0; got",
    ),
    (h.FileLog, {"folder": ".", "capture_warnings": 1}, "capture_warnings is True or False, got 1."),
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


ONE, REAL = np.int64(1), np.float32(0.5)
OF_NUMPY: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (h.Checkpoint, {"folder": ".", "keep_last": ONE, "keep_best": ONE, "monitor": "validation/loss"}),
    (h.EarlyStopping, {"patience": ONE}),
    (h.FileLog, {"folder": ".", "level": np.int32(logging.INFO)}),
    (h.GradientAccumulation, {"n": {np.int32(0): ONE}}),
    (h.GradientClipping, {"norm": REAL, "value": REAL, "norm_type": REAL}),
    (h.GradientNorm, {"every": ONE, "norm_type": REAL}),
    (h.NaNGuard, {"max_skips": ONE}),
    (h.Preemption, {"deadline": REAL, "requeue": ONE}),
    (h.Profile, {"folder": ".", "wait": ONE, "warmup": ONE, "active": ONE, "repeat": ONE, "skip_first": ONE}),
    (h.ProgressBar, {"interval": REAL, "plain_interval": REAL}),
    (h.Recorder, {"folder": ".", "sample": ONE}),
    (h.RNGCapture, {"seed": np.uint64(7)}),
    (h.RollBack, {"max_times": ONE}),
]


@pytest.mark.parametrize(("make", "options"), OF_NUMPY, ids=lambda each: getattr(each, "__name__", ""))
def test_numbers_of_numpy_become_python_s(make: Callable[..., Any], options: dict[str, Any]) -> None:
    kept = vars(make(**options)).values()
    held = [each for value in kept for each in ([*value, *value.values()] if isinstance(value, dict) else [value])]
    assert not any(isinstance(each, np.generic) for each in held)


def test_filters_take_arrays_of_numpy() -> None:
    array: Any = np.array([2, 1])
    number: Any = np.int64(3)
    assert str(h.At(steps=array)) == str(h.At(steps=[1, 2]))
    assert str(h.Every(steps=number)) == str(h.Every(steps=3))


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_a_length_of_numpy_is_recorded(unit: str, tmp_path: Path) -> None:
    result = fit(h.Recorder(tmp_path), **{unit: np.int64(1)})
    assert result.plugin_errors == {}
    assert result.recording is not None
    assert result.recording.exists()
