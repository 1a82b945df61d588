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
from heliograph_recorder import Recorder
from heliograph_trackers import Profile

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
    (Profile, {"folder": ".", "wait": ONE, "warmup": ONE, "active": ONE, "repeat": ONE, "skip_first": ONE}),
    (h.ProgressBar, {"interval": REAL, "plain_interval": REAL}),
    (Recorder, {"folder": ".", "sample": ONE}),
    (h.RNGCapture, {"seed": np.uint64(7)}),
    (h.RollBack, {"max_times": ONE}),
]


@pytest.mark.parametrize(("make", "options"), OF_NUMPY, ids=lambda each: getattr(each, "__name__", ""))
def test_numbers_of_numpy_become_python_s(make: Callable[..., Any], options: dict[str, Any]) -> None:
    kept = vars(make(**options)).values()
    held = [each for value in kept for each in ([*value, *value.values()] if isinstance(value, dict) else [value])]
    assert not any(isinstance(each, np.generic) for each in held)


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_a_length_of_numpy_is_recorded(unit: str, tmp_path: Path) -> None:
    result = fit(Recorder(tmp_path), **{unit: np.int64(1)})
    assert result.plugin_errors == {}
    assert result.recording is not None
    assert result.recording.exists()
