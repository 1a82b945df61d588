"""Draws of loading: keyed, and apart from those of training."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.data import generators
from heliograph.core.data.generators import OwnStream, isolated, key_generators, seed_all
from heliograph.core.data.rng import digest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import bit_generator, default_rng, mtrand

ENTROPY = vars(bit_generator)["randbits"]  # the private name that generators.py relies on


@pytest.fixture(autouse=True)
def _global_generators() -> Iterator[None]:
    """Put back what was there with plain means, not with those under test."""
    python, bits, numpy = random.getstate(), mtrand.get_bit_generator(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    mtrand.set_bit_generator(bits)
    np.random.set_state(numpy)
    vars(bit_generator)["randbits"] = ENTROPY


def draw() -> tuple[Any, ...]:
    """Draw from every source, an odd number of normal numbers too."""
    python = random.random(), random.gauss(0, 1), random.randrange(10**9)
    numpy = float(np.random.randn()), float(np.random.rand()), int(np.random.randint(10**9))
    return (*python, *numpy, *torch.rand(2).tolist(), torch.randn(1).item())


def draw_seedless() -> tuple[float, ...]:
    generators = default_rng(), np.random.default_rng(None), np.random.Generator(np.random.Philox())
    sequence = np.random.Generator(np.random.PCG64(np.random.SeedSequence()))
    return (*(float(each.random()) for each in (*generators, sequence)), float(np.random.RandomState().rand()))


def test_the_same_key_gives_the_same_draws() -> None:
    results = []
    for _ in range(2):
        seed_all(1, 2, 3)
        results.append((draw(), draw_seedless(), draw()))
        draw_seedless()

    assert results[0] == results[1]


def test_other_keys_give_other_draws() -> None:
    keys = [(1, 2), (2, 1), (1, 3), (-1, 2), (12,), (1, 2, 0), (2**64 + 1, 2), ()]
    numbers: list[float] = []
    for key in keys:
        seed_all(*key)
        numbers += [*draw(), *draw_seedless()]

    assert len(set(numbers)) == len(numbers) == 14 * len(keys)


def test_integers_of_numpy_are_keys_too() -> None:
    seed_all(7, 8)
    first = draw()
    seed_all(np.int64(7), np.int32(8))  # type: ignore[arg-type]  # it counts as an integer everywhere else too

    assert draw() == first


def test_golden() -> None:
    """A change of these numbers is a change of the draws of every run."""
    held: list[Any] = [np.random.default_rng(1), np.random.RandomState(1), random.Random(1), torch.Generator()]
    seed_all(3, 1, 4)
    key_generators(held, 3, 1, 4)

    assert random.random() == 0.9432911045652836
    assert np.random.rand() == 0.016832268550314056
    assert torch.default_generator.initial_seed() == 3644226500761834730
    assert np.random.SeedSequence().entropy == 277818690516909360050362695529232720542
    assert (held[0].random(), held[1].rand(), held[2].random()) == (
        0.9109600881252429,
        0.7343004223163508,
        0.7512642403799341,
    )
    assert held[3].initial_seed() == 15771821443994913941
    assert digest(3, 1, 4, size=8).hex() == "fb0fd5e1405312f4"
    assert digest(3, 1, 4, size=8, purpose=b"order").hex() == "84fe73f9245aa341"


@given(key=st.lists(st.integers(), max_size=5))
def test_it_is_what_the_public_functions_do(key: list[int]) -> None:
    with isolated():
        python, numpy, pytorch, _ = generators._SEEDS.unpack(digest(*key, size=36))
        random.seed(python)
        np.random.seed(numpy)
        torch.manual_seed(pytorch)
        expected = draw()
        seed_all(*key)

        assert draw() == expected


def test_what_user_code_puts_in_place_of_numpys_bit_generator_is_replaced() -> None:
    with isolated():
        seed_all(1)
        expected = draw()
        mtrand.set_bit_generator(np.random.PCG64(1))
        seed_all(1)

        assert draw() == expected


def test_this_numpy_takes_its_entropy_where_it_can_be_keyed() -> None:
    assert generators.SEEDLESS_IS_KEYED
    assert callable(ENTROPY)


def test_a_numpy_without_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(bit_generator, "randbits")
    monkeypatch.setattr(np.random, "SeedSequence", lambda: np.random.default_rng(1).bit_generator.seed_seq)
    before = draw()
    with isolated():
        seed_all(1)
        draw()

    assert not generators._is_seedless_keyed()
    assert not set(before) & set(draw())


@given(bits=st.integers(1, 2000))
@settings(deadline=None)
def test_entropy_has_the_bits_that_were_asked_for(bits: int) -> None:
    source = generators._KeyedEntropy(b"key")
    numbers = [source(bits) for _ in range(40)]

    assert max(numbers).bit_length() <= bits
    assert max(numbers).bit_length() > bits - 5
    assert len(set(numbers)) == 40 or bits < 16


def test_a_large_pool_of_entropy() -> None:
    seed_all(1)
    first, second = (np.random.SeedSequence(pool_size=32).entropy for _ in range(2))

    assert isinstance(first, int)
    assert first.bit_length() > 1000
    assert first != second


@pytest.fixture(params=[generators.MemoryState, generators.MethodState])
def kept_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keep the generators in each of the two ways."""
    if request.param is generators.MethodState:
        monkeypatch.setattr(sys.implementation, "name", "another")
        monkeypatch.setattr(generators, "_FARTHEST", 0)
    makers = {"_PYTHON": generators.of_python, "_NORMAL": generators.of_normal, "_TORCH": generators.of_torch}
    for name, make in makers.items():
        state = make()
        assert isinstance(state, request.param)
        monkeypatch.setattr(generators, name, state)


@pytest.mark.usefixtures("kept_as")
@pytest.mark.parametrize("normals", [0, 1, 2, 3])
@pytest.mark.parametrize("inside", [0, 1])
def test_isolation_leaves_the_streams_bit_exact(normals: int, inside: int) -> None:
    def stream(middle: Callable[[], None]) -> list[Any]:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        for _ in range(normals):
            np.random.randn()
            random.gauss(0, 1)
            torch.randn(1)
        middle()
        return [draw() for _ in range(3)] + [float(np.random.randn()) for _ in range(2000)]

    def load() -> None:
        for key in range(2):
            with isolated():
                seed_all(key)
                draw()
                draw_seedless()
                np.random.randn(inside)

    assert stream(load) == stream(lambda: None)


def test_a_stream_of_its_own_continues_between_the_draws_of_training() -> None:
    seed_all(1)
    alone = [draw() for _ in range(4)]
    seed_all(7, 3)
    expected = [(draw(), draw_seedless()) for _ in range(4)]

    seed_all(1)
    stream, other = OwnStream(7, 3), OwnStream(7, 4)
    training, loaded = [], []
    for _ in range(4):
        with other:
            draw()
        with stream:
            loaded.append((draw(), draw_seedless()))
        training.append(draw())

    assert loaded == expected
    assert training == alone


def test_a_stream_of_its_own_keeps_the_bit_generator_of_the_user() -> None:
    stream, twin = OwnStream(1), np.random.RandomState(np.random.PCG64(3))
    outside = mtrand.get_bit_generator()
    with stream:
        mtrand.set_bit_generator(np.random.PCG64(3))
        numbers = [np.random.rand()]
    assert mtrand.get_bit_generator() is outside
    with stream:
        numbers.append(np.random.rand())
    assert numbers == [twin.rand(), twin.rand()]


def test_isolation_puts_the_very_objects_back() -> None:
    own = np.random.MT19937(3)
    mtrand.set_bit_generator(own)
    with isolated():
        seed_all(1)
        mtrand.set_bit_generator(np.random.MT19937(4))
        assert vars(bit_generator)["randbits"] is not ENTROPY

    assert mtrand.get_bit_generator() is own
    assert vars(bit_generator)["randbits"] is ENTROPY


def test_a_bit_generator_of_another_kind_is_put_back_too() -> None:
    own, twin = np.random.PCG64(3), np.random.RandomState(np.random.PCG64(3))
    mtrand.set_bit_generator(own)
    expected = [float(twin.randn()) for _ in range(5)]
    numbers = [float(np.random.randn())]
    for key in range(4):
        with isolated():
            seed_all(key)
            np.random.randn()
        numbers.append(float(np.random.randn()))

    assert numbers == expected
    assert mtrand.get_bit_generator() is own


@pytest.mark.usefixtures("kept_as")
def test_isolation_ends_with_an_exception() -> None:
    seed_all(1)
    expected = draw()
    seed_all(1)
    before = vars(bit_generator)["randbits"]
    with pytest.raises(KeyError), isolated():
        seed_all(2)
        draw()
        raise KeyError

    assert draw() == expected
    assert vars(bit_generator)["randbits"] is before


def test_what_user_code_does_to_numpy_inside_stays_inside() -> None:
    np.random.seed(1)
    expected = [float(np.random.randn()) for _ in range(6)]
    np.random.seed(1)
    numbers = [float(np.random.randn())]
    with isolated():
        np.random.seed(4)
        state, modern = np.random.get_state(), np.random.get_state(legacy=False)
        first = np.random.randn(3).tolist()
        np.random.set_state(state)
        assert np.random.randn(3).tolist() == first
        np.random.set_state(modern)
        assert np.random.randn(3).tolist() == first
        assert np.random.RandomState(4).randn(3).tolist() == first
        mtrand.set_bit_generator(np.random.PCG64(1))
        np.random.randn()
    numbers += [float(np.random.randn()) for _ in range(5)]

    assert numbers == expected


@pytest.mark.usefixtures("kept_as")
def test_isolations_nest() -> None:
    def streams(depth: int, nest: bool) -> list[Any]:
        seed_all(depth)
        first, inner = draw(), []
        if depth and nest:
            with isolated():
                inner = streams(depth - 1, nest)
        return [(first, draw(), draw_seedless()), *inner]

    assert streams(3, nest=True) == [streams(depth, nest=False)[0] for depth in (3, 2, 1, 0)]


def test_one_thread_inside() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with isolated():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def held_draws(generators: list[Any]) -> list[Any]:
    a, b, c, d = generators
    normals = float(a.normal()), float(b.randn()), c.gauss(0, 1), torch.randn(1, generator=d).item()
    return [*normals, int(a.integers(9**9, dtype=np.uint32))]


@pytest.mark.parametrize(
    "kind", [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]
)
def test_keyed_generators(kind: Any) -> None:
    generators: list[Any] = [
        np.random.Generator(kind(1)),
        np.random.RandomState(1),
        random.Random(1),
        torch.Generator(),
    ]
    results = []
    for key in [(1, 2), (1, 2), (2, 1)]:
        held_draws(generators)  # leaves halves of draws in hand
        key_generators(generators, *key)
        results.append(held_draws(generators))

    assert results[0] == results[1]
    assert not set(results[0]) & set(results[2])


@pytest.mark.skipif(np.__version__ < "2", reason="needs NumPy 2")
def test_the_children_of_a_keyed_generator() -> None:
    generator = np.random.default_rng(1)
    numbers = []
    for key in (1, 1, 2):
        key_generators([generator], key)
        numbers.append([float(child.random()) for child in generator.spawn(2)])

    assert numbers[0] == numbers[1]
    assert not set(numbers[0]) & set(numbers[2])


def test_twins_are_keyed_apart_and_apart_from_the_global_ones() -> None:
    twins = [random.Random(1), random.Random(1)]
    key_generators(twins, 5)
    seed_all(5, 0)

    assert len({*(twin.random() for twin in twins), random.random()}) == 3


def test_keying_held_generators_leaves_the_global_ones_alone() -> None:
    seed_all(1)
    expected = draw()
    seed_all(1)
    key_generators([np.random.default_rng(1), np.random.RandomState(1), random.Random(1), torch.Generator()], 1)

    assert draw() == expected


def test_the_threads_that_there_are_where_asked_for() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with isolated(one_thread=False):
            inside = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)

    assert inside == 3


DRAWS: dict[str, Callable[[int], object]] = {
    "python": lambda number: [random.random() for _ in range(number)],
    "python's words": lambda number: random.getrandbits(32 * number),
    "python's normal": lambda _: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy's normal": np.random.randn,
    "torch": torch.rand,
    "torch's normal": torch.randn,
    "seedless": lambda _: default_rng(),
    "numpy's seed": np.random.seed,
    "torch's seed": torch.manual_seed,
    "python's seed": random.seed,
    "numpy's bits": lambda number: mtrand.set_bit_generator(np.random.MT19937(number)),
}


def global_states() -> list[Any]:
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    words = numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]
    return [random.getstate(), words, torch.get_rng_state().tolist(), vars(bit_generator)["randbits"]]


@given(
    before=st.lists(st.sampled_from(["python's normal", "numpy's normal", "torch's normal"])),
    name=st.sampled_from(sorted(DRAWS)),
    number=st.sampled_from([1, 2, 311, 312, 623, 624, 625, 1248]),
)
@settings(max_examples=200)
def test_isolation_reports_whether_its_code_drew(before: list[str], name: str, number: int) -> None:
    isolation = isolated()
    for earlier in before:  # an odd number of normal numbers leaves a cached one
        DRAWS[earlier](1)
    expected, bits = global_states(), mtrand.get_bit_generator()

    with isolation:
        pass
    assert (isolation.has_drawn, global_states()) == (False, expected)
    with isolation:
        DRAWS[name](number)
    assert (isolation.has_drawn, global_states()) == (True, expected)
    assert mtrand.get_bit_generator() is bits


def test_isolation_undoes_the_draws_before_an_error() -> None:
    isolation, expected = isolated(), global_states()

    with pytest.raises(ValueError, match="lost"), isolation:
        DRAWS["torch"](3)
        raise ValueError("lost")

    assert (isolation.has_drawn, global_states()) == (True, expected)


def test_isolation_follows_the_draws_of_the_training() -> None:
    isolation, threads = isolated(), []
    for number in range(3):
        draw()
        expected = global_states()
        with isolation:
            threads.append(torch.get_num_threads())
            DRAWS["numpy"](number)
        assert (isolation.has_drawn, global_states()) == (number > 0, expected)

    assert threads == [1, 1, 1]


def test_with_a_bit_generator_of_another_kind_nothing_detects_draws() -> None:
    isolation, own = isolated(), mtrand.get_bit_generator()
    mtrand.set_bit_generator(np.random.PCG64(1))
    with isolation:
        pass
    assert (isolation.has_drawn, isolation.detects_draws) == (True, False)

    mtrand.set_bit_generator(own)
    with isolation:
        pass
    assert (isolation.has_drawn, isolation.detects_draws) == (False, True)
