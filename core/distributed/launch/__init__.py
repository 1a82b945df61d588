"""Launching: several processes from one call."""

from .launcher import RankValues, launch
from .queue import RankQueue, child_queue

__all__ = ["RankQueue", "RankValues", "child_queue", "launch"]
