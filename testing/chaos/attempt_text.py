"""What an attempt has met and how it has ended, in one line."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph.testing.chaos.journal import Entry


def describe_attempt(entries: Sequence[Entry], statuses: Sequence[int], *, hung: bool, seconds: float) -> str:
    """Return where an attempt began, which faults have acted, and how it ended.

    Args:
        entries: what its ranks have noted.
        statuses: the exit status of each rank.
        hung: whether the watchdog has ended it.
        seconds: how long it took.
    """
    resumed = next((entry["batch"] for entry in entries if entry["what"] == "resumed"), None)
    met = [f"{entry['kind']} at {entry['where']}" for entry in entries if entry["what"] == "fault"]
    how = f"ended with status {', '.join(map(str, statuses))}" if any(statuses) else "completed"
    end = f"{'ended by the watchdog' if hung else how} after {seconds:.1f} s"
    return "; ".join(["from the start" if resumed is None else f"from batch {resumed}", *met, end])
