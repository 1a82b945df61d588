"""The queue by which a rank sends objects to the process that launched it, while it runs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any


class RankQueue:
    """Takes objects to the process that called `launch`: to its `on_message`, or to `messages` of what it returns.

    Args:
        send: what takes a pickled object there, without waiting.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def put(self, value: Any) -> None:
        """Send an object, as it is now; wait for nobody. Those of one rank arrive in their order.

        Args:
            value: what can be pickled; a tensor is copied, and one on a GPU is better moved to the CPU first.

        Raises:
            TypeError: it cannot be pickled.
        """
        try:
            pickled = pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"The queue takes what can be pickled, and this {type(value).__qualname__} cannot: {error}. Put plain "
                f"data."
            ) from error
        self._send(pickled)


_queues: dict[int, RankQueue] = {}  # by process: one that is forked from a rank (a loader's worker, say) has none


def child_queue() -> RankQueue | None:
    """Return the queue to the process that launched this one; None where `heliograph.launch` did not."""
    return _queues.get(os.getpid())


def open_queue(send: Callable[[bytes], None]) -> None:
    """In a rank that begins: have `child_queue` return a queue."""
    _queues[os.getpid()] = RankQueue(send)
