"""Launching: several processes from one call."""

from .launcher import KeptRanks, RankValues, launch
from .queue import RankQueue, child_queue

__all__ = ["KeptRanks", "RankQueue", "RankValues", "child_queue", "launch"]
