"""How an attempt ended, in words."""

from __future__ import annotations

from collections.abc import Iterable

from heliograph.events import Request
from heliograph.spi import printable

from ..format.records import RequestEntry
from . import words
from .attempt_summary import AttemptSummary


def describe_ending(attempt: AttemptSummary) -> str:
    """Return how an attempt ended, in a few words: `stopped by early_stopping on rank 2`."""
    closed = attempt.ending
    return attempt.status if closed is None else ending_text(attempt.status, closed.data["by"], closed.data["rank"])


def ending_text(status: str, by: str | None, rank: int | None) -> str:
    """Return a status with who requested it."""
    requester = f" by {printable(by)}" if by else ""
    return status + requester + (f" on rank {rank}" if rank is not None else "")


def reasons(attempt: AttemptSummary) -> list[str]:
    """Return why an attempt ended, and where the stop was requested or the error was raised."""
    closed = attempt.ending
    if closed is None:
        return []
    texts = [printable(closed.data["reason"])]
    for failed in attempt.events("run_failed"):
        plugin = f"in {printable(failed.data['plugin'])} on {failed.data['event']}, " if failed.data["plugin"] else ""
        texts.append(f"raised {plugin}in phase {failed.data['phase']}")
    requests = (entry.request for entry in attempt.attempt.entries if isinstance(entry, RequestEntry))
    if attempt.status == "stopped" and (first := first_stop(requests)) is not None:
        texts.append(stop_requested(first))
    return texts


def first_stop(requests: Iterable[Request]) -> Request | None:
    """Return the first request to stop that was not withdrawn, if there is one."""
    first = None
    for request in requests:
        if request.verb == "withdraw_stop":
            first = None
        elif request.verb == "stop" and first is None:
            first = request
    return first


def stop_requested(stop: Request) -> str:
    """Return where a stop was requested."""
    during = f"during {stop.event}, " if stop.event else ""
    return f"requested {during}at epoch {stop.epoch}, batch {stop.batch}, step {stop.step}"


def progress(attempt: AttemptSummary) -> str:
    """Return how far an attempt came."""
    if not attempt.is_fit:
        return words.count_things(attempt.last.evaluated, "batch") + " evaluated"
    return f"{words.position(attempt.last)}, {words.count_things(attempt.last.samples, 'sample')}"
