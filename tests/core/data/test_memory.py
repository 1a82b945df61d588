"""The state of Python's generator in memory, and the normal number that NumPy's generator has cached."""

from __future__ import annotations

import random
import sys
import sysconfig
from typing import Any

import numpy as np
import pytest
from heliograph.core.data import generators
from heliograph.core.data.generators import cached_normal, python_memory, set_cached_normal
from hypothesis import given
from hypothesis import strategies as st

COUNTS = st.integers(0, 1500)


@given(before=COUNTS, between=COUNTS, normal=st.booleans())
def test_pythons_words_are_all_that_it_draws_from(before: int, between: int, normal: bool) -> None:
    generator = random.Random(1)
    memory = python_memory(generator)
    assert memory is not None
    for _ in range(before):
        generator.getrandbits(32)
    saved, expected = bytes(memory), generator.getstate()
    for _ in range(between):
        generator.getrandbits(32)
    if normal:
        generator.gauss(0, 1)
    memory[:] = saved
    generator.gauss_next = None  # type: ignore[attr-defined]  # an attribute in every version

    assert generator.getstate() == expected


@pytest.mark.parametrize("normals", [0, 1, 2, 3])
def test_the_normal_number_that_numpy_has_cached(normals: int) -> None:
    before = np.random.get_state(legacy=False)
    try:
        np.random.seed(1)
        for _ in range(normals):
            np.random.randn()
        saved, expected = cached_normal(), np.random.get_state(legacy=False)
        set_cached_normal(generators.NO_NORMAL)
        found = np.random.get_state(legacy=False)
        set_cached_normal(saved)
        after = np.random.get_state(legacy=False)
    finally:
        np.random.set_state(before)

    assert expected["has_gauss"] == normals % 2
    assert (found["has_gauss"], found["gauss"]) == (0, 0.0)
    assert repr(after) == repr(expected)


class Own(random.Random):
    """A user's."""


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (sys.implementation, "name", "another"),
        (sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED"),
        (generators, "_HEAD", generators._HEAD + 4),  # the words are elsewhere
        (generators, "_HEAD", generators._HEAD + 8),  # and beyond the object
    ],
)
def test_the_memory_of_another_interpreter_is_unknown(
    where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)

    assert python_memory(random.Random(1)) is None
    assert python_memory(Own(1)) is None
