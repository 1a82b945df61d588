"""Messages of each rank to all, by way of the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch.distributed.distributed_c10d import Store

BELL = "bell"


class News:
    """What all ranks post, each in its own row, read once. One look costs one question to the store.

    Args:
        store: what only this group's processes read and write.
        rank: this rank.
        world_size: how many there are.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._posted, self._read, self._rung = 0, [0] * world_size, 0

    def post(self, **message: Any) -> None:
        """Post a message of plain types; this rank reads it too."""
        self._store.set(_key(self._rank, self._posted), json.dumps(message))
        self._posted += 1
        self._store.add(BELL, 1)

    def fresh(self) -> Iterator[dict[str, Any]]:
        """Yield what was posted since the last look."""
        rung = self._store.add(BELL, 0)
        if rung == self._rung:
            return
        self._rung = rung
        for rank in range(len(self._read)):
            while self._store.check([key := _key(rank, self._read[rank])]):
                self._read[rank] += 1
                yield json.loads(self._store.get(key))


def _key(rank: int, number: int) -> str:
    return f"news/{rank}/{number}"
