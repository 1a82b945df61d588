"""Exceptions in words: where in a run they came up, what is missing, how many there are of something."""

from __future__ import annotations

from typing import Any


def error_text(error: BaseException) -> str:
    """Return an exception's text; one whose text cannot be had says so."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as other:  # noqa: BLE001  # said in its place
        return f"<its text raised {type(other).__name__}>"


def describe_error(error: BaseException) -> str:
    """Return an exception's type and text."""
    return f"{type(error).__name__}: {error_text(error)}".removesuffix(": ")


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is a Ctrl-C, or a group with one in it."""
    group = error if isinstance(error, BaseExceptionGroup) else None
    return isinstance(error, KeyboardInterrupt) or (group is not None and group.subgroup(KeyboardInterrupt) is not None)


def count(number: float, one: str, several: str) -> str:
    """Return how many there are of something, in words."""
    return f"{number} {one if number == 1 else several}"


def place_of(run: Any) -> str:
    """Return where a run is, in words; of an evaluation, also in which batch of which set."""
    progress, collection = run.progress, run.work.collection
    within = "" if collection is None else collection.place
    return f"in {run.phase}{within}, epoch {progress.epoch}, batch {progress.batch}, step {progress.steps}"
