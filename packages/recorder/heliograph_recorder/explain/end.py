"""How an attempt ended, in words."""

from __future__ import annotations

from collections.abc import Iterable

from heliograph import Request
from heliograph.spi import printable

from ..format.records import RequestEntry
from . import words
from .attempt_summary import AttemptSummary


def describe_ending(attempt: AttemptSummary) -> str:
    closed = attempt.ending
    return attempt.status if closed is None else ending_text(attempt.status, closed.data["by"], closed.data["rank"])


def ending_text(status: str, by: str | None, rank: int | None) -> str:
    requester = f" by {printable(by)}" if by else ""
    return status + requester + (f" on rank {rank}" if rank is not None else "")


def reasons(attempt: AttemptSummary) -> list[str]:
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
    first = None
    for request in requests:
        if request.verb == "withdraw_stop":
            first = None
        elif request.verb == "stop" and first is None:
            first = request
    return first


def stop_requested(stop: Request) -> str:
    during = f"during {stop.event}, " if stop.event else ""
    return f"requested {during}at epoch {stop.epoch}, batch {stop.batch}, step {stop.step}"


def progress(attempt: AttemptSummary) -> str:
    if not attempt.is_fit:
        return words.count_things(attempt.last.evaluated, "batch") + " evaluated"
    return f"{words.position(attempt.last)}, {words.count_things(attempt.last.samples, 'sample')}"
