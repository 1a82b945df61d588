"""Orders that can be entered anywhere."""

from __future__ import annotations

from itertools import islice
from math import isqrt

import numpy as np
import pytest
from heliograph.core.data.generators import isolated, seed_all
from heliograph.core.data.rng import digest
from heliograph.core.data.samplers import Permutation, _feistel, algorithm
from hypothesis import given, settings
from hypothesis import strategies as st

SHUFFLED = 2**20
BILLION = 1_000_000_000


def head(size: int, *key: int, start: int = 0, count: int = 6) -> list[int]:
    return list(islice(Permutation(size, *key).iter_from(start), count))


def feistel(size: int, *key: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return _feistel(size, key)(0, size)


def number_at(position: int, size: int, *key: int) -> int:
    """Return what the large algorithm must give at one position, in plain integers."""
    left_size = isqrt(size - 1) + 1
    sizes = left_size, -(-size // left_size)
    words = digest(*key, size=64, purpose=b"order")
    halves = list(divmod(position, sizes[1]))
    for turn in range(8):
        mixed = halves[1 - turn % 2] ^ int.from_bytes(words[8 * turn : 8 * turn + 8], "little")
        mixed = mixed * 0x9E3779B97F4A7C15 % 2**64
        mixed ^= mixed >> 32
        mixed = mixed * 0xD6E8FEB86659FD93 % 2**64
        side = turn % 2
        halves[side] = (halves[side] + (mixed >> 32) * sizes[side] // 2**32) % sizes[side]
    number = halves[0] * sizes[1] + halves[1]
    return number if number < size else number_at(number, size, *key)


@given(size=st.integers(1, 5000), key=st.lists(st.integers(-(2**70), 2**70), max_size=3))
@settings(deadline=None, max_examples=60)
def test_every_number_comes_once(size: int, key: list[int]) -> None:
    assert sorted(Permutation(size, *key).iter_from(0)) == list(range(size))
    assert np.array_equal(np.sort(feistel(size, *key)), np.arange(size))


@pytest.mark.parametrize("size", [SHUFFLED - 1, SHUFFLED, SHUFFLED + 1, 1_048_583, 2_000_003])
def test_every_number_comes_once_around_the_change_of_algorithm(size: int) -> None:
    numbers = np.fromiter(Permutation(size, 1).iter_from(0), np.int64, size)

    assert np.array_equal(np.sort(numbers), np.arange(size))


@given(size=st.integers(1, 3000), where=st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_entered_anywhere(size: int, where: float) -> None:
    start = int(where * size)

    assert list(Permutation(size, 3).iter_from(start)) == list(Permutation(size, 3).iter_from(0))[start:]


@pytest.mark.parametrize("start", [0, 1, 8191, 8192, 9000])
def test_entered_anywhere_across_blocks(start: int) -> None:
    whole = head(BILLION, 3, count=30_000)

    assert head(BILLION, 3, start=start, count=20_000) == whole[start : start + 20_000]


@given(position=st.integers(0, BILLION - 1), key=st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_a_block_is_what_plain_integers_give(position: int, key: int) -> None:
    assert head(BILLION, key, start=position, count=1) == [number_at(position, BILLION, key)]


@given(size=st.integers(1, 400))
@settings(deadline=None, max_examples=60)
def test_what_falls_outside_goes_round_again(size: int) -> None:
    assert feistel(size, 5).tolist() == [number_at(position, size, 5) for position in range(size)]


def test_sizes_up_to_a_million_millions() -> None:
    size = 10**12

    assert head(size, 1, start=size - 2) == [number_at(size - 2, size, 1), number_at(size - 1, size, 1)]


def test_the_end_and_nothing() -> None:
    assert head(10, 1, start=10) == []
    assert head(1, 1) == [0]
    assert len(head(BILLION, 1, start=BILLION - 3)) == 3


def test_plain_integers() -> None:
    assert {type(number) for number in head(10, 1) + head(BILLION, 1)} == {int}


# A change of these numbers is a change of the order of every run: name the algorithm again.
@pytest.mark.parametrize(
    ("size", "start", "numbers"),
    [
        (10, 0, [7, 3, 6, 1, 8, 9]),
        (SHUFFLED, 500_000, [799009, 321186, 845237, 514909, 311434, 119702]),
        (SHUFFLED + 1, 0, [302544, 98902, 717571, 909020, 970053, 535225]),
        (BILLION, 510_000_000, [456583891, 813312156, 587160892, 48533019, 245948500, 968366876]),
    ],
)
def test_golden(size: int, start: int, numbers: list[int]) -> None:
    assert head(size, 7, 2, start=start) == numbers


def test_the_name_of_the_algorithm() -> None:
    assert [algorithm(size) for size in (1, SHUFFLED, SHUFFLED + 1, BILLION)] == [
        "shuffle-1",
        "shuffle-1",
        "feistel-1",
        "feistel-1",
    ]


@pytest.mark.parametrize("size", [1000, BILLION])
def test_other_keys_give_other_orders(size: int) -> None:
    keys = [(1, 2), (2, 1), (1, 3), (-1, 2), (12,), (1, 2, 0), (2**64 + 1, 2)]
    heads = {tuple(head(size, *key)) for key in keys}

    assert len(heads) == len(keys)


def test_the_global_generators_are_not_drawn_from() -> None:
    state = np.random.get_state(legacy=False)
    head(1000, 1)
    head(BILLION, 1)

    assert repr(np.random.get_state(legacy=False)) == repr(state)


def test_the_entropy_of_the_seedless_is_not_drawn_from() -> None:
    numbers = []
    for size in (None, 1000, BILLION):
        with isolated():
            seed_all(1)
            if size:
                head(size, 1)
            numbers.append(np.random.SeedSequence().entropy)

    assert len(set(map(str, numbers))) == 1


def test_as_even_as_chance() -> None:
    """Orders of 101 numbers by the large algorithm: where numbers land, what follows what, how often one rises."""
    size, orders = 101, 4000
    numbers = np.stack([feistel(size, key) for key in range(orders)]).astype(np.int64)
    counts = np.zeros((size, size))
    for row in numbers:
        counts[np.arange(size), row] += 1
    landing = float(((counts - orders / size) ** 2).sum() / (orders / size)) / (size - 1) ** 2
    fixed = (numbers == np.arange(size)).sum(1)
    rises = (np.diff(numbers, axis=1) > 0).sum(1)
    serial = np.mean([np.corrcoef(row[:-1], row[1:])[0, 1] for row in numbers])

    assert landing == pytest.approx(1, abs=0.06)  # a chi-square over its degrees of freedom
    assert fixed.mean() == pytest.approx(1, abs=0.08)
    assert fixed.var() == pytest.approx(1, abs=0.15)
    assert rises.mean() == pytest.approx((size - 1) / 2, abs=0.25)
    assert rises.var() == pytest.approx((size + 1) / 12, rel=0.12)
    assert serial == pytest.approx(-1 / (size - 1), abs=0.006)
