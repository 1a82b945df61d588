"""The digest of the random generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from heliograph.core.data import rng
from heliograph_recorder.digests import collector
from numpy.random import mtrand

DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "a normal number of python": lambda: random.gauss(0, 1),
    "NumPy": np.random.rand,
    "a normal number of NumPy": np.random.randn,
    "torch": lambda: torch.rand(1),
    "normal numbers of torch": lambda: torch.randn(3),
    "one number of torch after all words": lambda: torch.rand(700),
}


@pytest.fixture(autouse=True)
def _kept() -> object:
    with rng.kept():
        yield


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_changes_it_each_time_and_a_state_put_back_has_the_same(name: str) -> None:
    generators, before = collector.GlobalDraws(), rng.capture()
    found = [generators.digest()]
    for _ in range(5):
        DRAWS[name]()
        found.append(generators.digest())
    assert len(set(found)) == len(found)
    rng.restore(before)
    assert generators.digest() == found[0]
    assert collector.GlobalDraws().digest() == found[0]


def test_other_seeds_have_other_digests() -> None:
    found = set()
    for seed in range(20):
        rng.seed_all(seed)
        found.add(collector.GlobalDraws().digest())
    assert len(found) == 20


def test_a_bit_generator_of_the_users_own_is_read_by_its_method() -> None:
    before = mtrand.get_bit_generator()
    mtrand.set_bit_generator(np.random.PCG64(1))
    try:
        generators = collector.GlobalDraws()
        first = generators.digest()
        np.random.rand()
        assert generators.digest() != first
    finally:
        mtrand.set_bit_generator(before)


def test_where_the_places_in_memory_are_not_known_methods_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "states", lambda: [SimpleNamespace(part=lambda *span: None)] * 3)
    generators = collector.GlobalDraws()
    found = [generators.digest()]
    for name in ("python", "NumPy", "torch"):
        DRAWS[name]()
        found.append(generators.digest())
    assert len(set(found)) == 4
