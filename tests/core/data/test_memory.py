"""The global generators as memory."""

from __future__ import annotations

import random
import sys
import sysconfig
from struct import Struct
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.data import generators
from heliograph.core.data.generators import MemoryState, MethodState
from heliograph.core.data.rng import LEGACY
from hypothesis import given
from hypothesis import strategies as st

COUNTS = st.integers(0, 1500)


def test_the_memory_of_this_interpreter_numpy_and_torch_is_known() -> None:
    kept = generators.of_python(), generators.of_normal(), generators.of_torch()

    assert [type(each) for each in kept] == [MemoryState] * 3


@given(before=COUNTS, between=COUNTS, normal=st.booleans())
def test_pythons_words_are_all_that_it_draws_from(before: int, between: int, normal: bool) -> None:
    generator = random.Random(1)
    kept = MemoryState(id(generator) + generators._HEAD, generators._RANDOM_LAYOUT.size)
    for _ in range(before):
        generator.getrandbits(32)
    saved, expected = kept.save(), generator.getstate()
    for _ in range(between):
        generator.getrandbits(32)
    if normal:
        generator.gauss(0, 1)
    kept.restore(saved)
    generator.gauss_next = None  # type: ignore[attr-defined]  # an attribute in every version

    assert generator.getstate() == expected


@given(before=COUNTS, between=COUNTS, normals=st.integers(0, 3))
def test_torchs_engine_is_all_that_it_draws_from(before: int, between: int, normals: int) -> None:
    place = generators._place_in_torch()
    generator: Any = torch.Generator().manual_seed(3)
    assert place is not None
    kept = MemoryState(generator._cdata + place, generators._ENGINE_LAYOUT.size)

    def draw(number: int) -> list[float]:
        drawn = [torch.rand(number, generator=generator), torch.randn(normals, generator=generator)]
        return torch.cat([*drawn, torch.randn(normals, generator=generator, dtype=torch.float64)]).tolist()

    draw(before)
    saved, expected = kept.save(), generator.get_state().tolist()
    drawn = draw(between)
    generator.manual_seed(4)
    kept.restore(saved)

    assert generator.get_state().tolist() == expected
    assert draw(between) == drawn


@pytest.mark.parametrize("make", [generators.of_normal, lambda: None])
@pytest.mark.parametrize("normals", [0, 1, 2, 3])
def test_the_normal_number_that_numpy_has_in_hand(make: Any, normals: int) -> None:
    kept: Any = make() or MethodState(
        lambda: generators._normal(LEGACY), lambda state: generators._set_normal(LEGACY, state)
    )
    before = np.random.get_state(legacy=False)
    try:
        np.random.seed(1)
        for _ in range(normals):
            np.random.randn()
        saved, expected = kept.save(), np.random.get_state(legacy=False)
        kept.restore(generators.NO_NORMAL)
        found = np.random.get_state(legacy=False)
        kept.restore(saved)
        after = np.random.get_state(legacy=False)
    finally:
        np.random.set_state(before)

    assert expected["has_gauss"] == normals % 2
    assert (found["has_gauss"], found["gauss"]) == (0, 0.0)
    assert repr(after) == repr(expected)


class Own(random.Random):
    """A user's."""


class OwnLegacy(np.random.RandomState):
    """A user's."""


ELSEWHERE: Any = torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (sys.implementation, "name", "another"),
        (sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED"),
        (generators, "PYTHON", Own(1)),
        (generators, "_HEAD", generators._HEAD + 4),  # the words lie elsewhere
        (generators, "_HEAD", generators._HEAD + 8),  # and beyond the object
    ],
)
def test_another_interpreter_is_asked(where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, value)

    assert isinstance(generators.of_python(), MethodState)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (sys.implementation, "name", "another"),
        (generators, "LEGACY", OwnLegacy(1)),
        (generators, "_normal", lambda generator: b"what lies elsewhere"),
    ],
)
def test_another_numpy_is_asked(where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, value)

    assert isinstance(generators.of_normal(), MethodState)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_FARTHEST", 16),  # the engine is not found
        ("TORCH", object()),  # nor where the object lies
        ("TORCH", None),  # the global generator holds it elsewhere
        ("_ENGINE_LAYOUT", Struct("=Qi4xI4x624I8x16x")),  # the words lie elsewhere
        ("_ENGINE_LAYOUT", Struct("=Qi4xI624I")),  # and the normal numbers are left out
    ],
)
def test_another_torch_is_asked(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        _cdata = ELSEWHERE._cdata

        def initial_seed(self) -> int:
            return 2

    monkeypatch.setattr(generators, name, value or Elsewhere())

    assert generators._place_in_torch() is None
