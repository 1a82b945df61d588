"""How an attempt ended."""

from __future__ import annotations

from ....core.system.extras import printable
from ..format.records import Asked
from . import words
from .attempt_summary import Leg


def ended(leg: Leg) -> str:
    """Return how an attempt ended, in a few words: `stopped by early_stopping on rank 2`."""
    closed = leg.ending
    return leg.status if closed is None else verdict(leg.status, closed.data["by"], closed.data["rank"])


def verdict(status: str, by: str | None, rank: int | None) -> str:
    """Return a status with who asked for it."""
    asker = f" by {printable(by)}" if by else ""
    return status + asker + (f" on rank {rank}" if rank is not None else "")


def circumstances(leg: Leg) -> list[str]:
    """Return why an attempt ended, and where that was asked for or went wrong; a sentence each."""
    closed = leg.ending
    if closed is None:
        return []
    said = [printable(closed.data["reason"])]
    for failed in leg.happenings("run_failed"):
        blamed = f"in {printable(failed.data['plugin'])} on {failed.data['event']}, " if failed.data["plugin"] else ""
        said.append(f"raised {blamed}in phase {failed.data['phase']}")
    asked = (entry.request for entry in leg.attempt.entries if isinstance(entry, Asked))
    stops = (request for request in asked if request.verb == "stop")
    if leg.status == "stopped" and (first := next(stops, None)) is not None:
        said.append(asked_where(first.event, first.epoch, first.batch, first.step))
    return said


def asked_where(event: str, epoch: int, batch: int, step: int) -> str:
    """Return where a stop was asked for."""
    return "asked for " + f"during {event}, " * bool(event) + f"at epoch {epoch}, batch {batch}, step {step}"


def counters(leg: Leg) -> str:
    """Return how far an attempt came."""
    if not leg.is_fit:
        return words.counted(leg.last.evaluated, "batch") + " evaluated"
    return f"{words.place(leg.last)}, {words.counted(leg.last.samples, 'sample')}"
