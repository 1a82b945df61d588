"""Start several processes with one call."""

from .launcher import KeptRanks, RankValues, launch
from .queue import RankQueue, child_queue

__all__ = ["KeptRanks", "RankQueue", "RankValues", "child_queue", "launch"]
