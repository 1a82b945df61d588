"""A launcher of ranks that are reused by all tests, and global generators that are restored after each test."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from heliograph.core.data import rng
from heliograph.core.distributed import launcher
from heliograph.tests.ranks_pool import Pool


class PoolLauncher:
    """Runs functions on ranks of the pool; delivers messages after they have returned."""

    def __init__(self, pool: Pool, count: int) -> None:
        self._pool, self._count = pool, count

    def run(
        self, fn: Callable[..., Any], /, *args: Any, on_message: Callable[[int, Any], object] | None = None
    ) -> list[Any]:
        results = self._pool(self._count).run(with_queue, fn, *args)
        for rank, (_, messages) in enumerate(results):
            for message in messages:
                assert on_message is not None
                on_message(rank, pickle.loads(message))
        return [value for value, _ in results]


def with_queue(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[bytes]]:
    """Call a function with a queue; return its value and the messages."""
    messages: list[bytes] = []
    launcher.open_queue(messages.append)
    try:
        return fn(*args), messages
    finally:
        del launcher._queues[os.getpid()]


@pytest.fixture
def two(ranks: Pool) -> PoolLauncher:
    """Return a launcher of two ranks."""
    return PoolLauncher(ranks, 2)


@pytest.fixture
def three(ranks: Pool) -> PoolLauncher:
    """Return a launcher of three ranks."""
    return PoolLauncher(ranks, 3)


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    state = rng.capture()
    yield
    rng.restore(state)
