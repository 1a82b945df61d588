"""Random generators as plain state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from heliograph.core.checkpoint.checks import check_plain
from heliograph.core.data import rng
from heliograph.core.system.plain_pickle import pack


def draw() -> tuple[Any, ...]:
    normal = random.gauss(0, 1), float(np.random.randn())
    return (*normal, random.random(), float(np.random.rand()), *torch.rand(3).tolist(), torch.randn(1).item())


def test_seed_all() -> None:
    rng.seed_all(5)
    first = draw()
    rng.seed_all(5)
    second = draw()
    rng.seed_all(6)

    assert first == second
    assert not set(first) & set(draw())


def test_a_seed_beyond_numpy_s_range() -> None:
    rng.seed_all(2**32 + 5)
    numpy = np.random.rand()
    np.random.seed(5)

    assert numpy == np.random.rand()


def test_the_seed_gets_another_name_and_the_stream_stays() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4), torch.randn(4)
    torch.manual_seed(5)
    first = torch.rand(4)
    rng.name_seed(2**64 - 3)

    assert torch.initial_seed() == 2**64 - 3
    assert torch.equal(first, expected[0])
    assert torch.equal(torch.randn(4), expected[1])


def test_capture_and_restore() -> None:
    rng.seed_all(1)
    draw()  # the second normal number of a pair is in hand now
    state = rng.capture()
    first = draw(), draw()
    rng.seed_all(2)
    rng.restore(state)

    assert (draw(), draw()) == first


def test_capture_is_a_copy() -> None:
    rng.seed_all(1)
    state = rng.capture()
    first = draw()
    rng.restore(state)
    draw()
    rng.restore(state)

    assert draw() == first


def test_the_state_has_few_values_to_look_at() -> None:
    state, count = [rng.capture()], 0
    while state:
        each = state.pop()
        count += 1
        state += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()

    assert count < 30


def test_python_s_words_are_the_same_on_every_machine() -> None:
    rng.seed_all(1)
    words = random.getstate()[1]

    assert rng.capture()["python"][1][:8] == words[0].to_bytes(4, "little") + words[1].to_bytes(4, "little")


def test_the_state_is_plain_and_loads_safely(tmp_path: Path) -> None:
    rng.seed_all(1)
    state = rng.capture()
    check_plain(state, "state")
    torch.save(state, tmp_path / "rng.pth")
    first = draw()
    rng.restore(torch.load(tmp_path / "rng.pth", weights_only=True))

    assert draw() == first
    assert state["cuda"] == [] or torch.cuda.is_available()


def test_cuda_states_are_left_out_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    rng.restore(rng.capture() | {"cuda": [torch.zeros(16, dtype=torch.uint8)]})

    assert given == []


def test_cuda_states_go_to_the_devices_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["a", "b"])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    state = rng.capture()
    assert state["cuda"] == ["a", "b"]
    rng.restore(state | {"cuda": ["a", "b", "c"]})
    rng.restore(state | {"cuda": []})

    assert given == [["a", "b"]]


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpy_generators(kind: str) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(7))
    generator.integers(0, 10, 3, dtype=np.int32)  # half of a 64-bit draw is in hand now
    state = rng.generator_state(generator)
    check_plain(state, "state")
    first = generator.integers(0, 1000, 5, dtype=np.int32).tolist(), generator.normal(size=3).tolist()
    rng.set_generator_state(generator, state)

    assert (generator.integers(0, 1000, 5, dtype=np.int32).tolist(), generator.normal(size=3).tolist()) == first


@pytest.mark.parametrize("entropy", [3, 2**127 + 1, [1, 2, 3], np.arange(3), [np.uint32(5)]])
def test_bit_generators_and_seed_sequences(entropy: Any) -> None:
    bits, sequence = (
        np.random.SFC64(1),
        np.random.SeedSequence(entropy, spawn_key=(1, cast("int", np.uint32(2))), pool_size=8),
    )
    bits.random_raw(3)
    sequence.spawn(2)
    states = [rng.generator_state(each) for each in (bits, sequence)]
    check_plain(states, "states")
    pack(states)
    numbers = bits.random_raw(), sequence.spawn(1)[0].generate_state(4).tolist()
    other_bits, other = np.random.SFC64(2), np.random.SeedSequence(9)
    rng.set_generator_state(other_bits, states[0])
    rng.set_generator_state(other, states[1])

    assert (other_bits.random_raw(), other.spawn(1)[0].generate_state(4).tolist()) == numbers
