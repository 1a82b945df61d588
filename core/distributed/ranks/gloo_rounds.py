"""Rounds of messages between ranks on several machines: one small all-gather each, by gloo."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

LENGTH = 2  # bytes, before a message


class GlooRounds:
    """Every rank's messages travel by all-gathers that nobody waits for until they are collected.

    gloo matches them by the order in which they were begun, with all else in the group: so there may be several at a
    time, and other collectives between.

    Args:
        group: the torch process group.

    Attributes:
        capacity: the bytes of a message at most: all are sent in this length.
    """

    capacity = 254

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._begun: deque[tuple[dist.Work, list[Tensor]]] = deque()

    def post(self, message: bytes) -> None:
        """Post this rank's message of the next round, without a wait."""
        padded = bytearray(len(message).to_bytes(LENGTH, "little") + message).ljust(LENGTH + self.capacity)
        own = torch.frombuffer(padded, dtype=torch.uint8)
        received = [torch.empty_like(own) for _ in range(self._group.size())]
        work = dist.all_gather(received, own, self._group, async_op=True)
        assert work is not None
        self._begun.append((work, received))

    def ready(self) -> list[bytes] | None:
        """Return the messages of the oldest round that is not collected, by rank; None where one is missing yet."""
        return self.collect() if self._begun[0][0].is_completed() else None

    def collect(self) -> list[bytes]:
        """Return the messages of the oldest round that is not collected, by rank.

        Raises:
            RuntimeError: a rank has left or died, or did not come in time.
        """
        work, received = self._begun.popleft()
        try:
            work.wait()
        except BaseException:
            del work, received  # kept alive by the traceback, they would keep the connections that others wait on
            raise
        return [_message(each.numpy().tobytes()) for each in received]

    def close(self) -> None:
        """Forget the group: while anything refers to it, the others keep waiting."""
        self._begun.clear()
        del self._group


def _message(sent: bytes) -> bytes:
    length = int.from_bytes(sent[:LENGTH], "little")
    return sent[LENGTH : LENGTH + length]
