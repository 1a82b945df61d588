"""Texts of exceptions, counts and positions."""

from __future__ import annotations

from typing import Any


def error_text(error: BaseException) -> str:
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001  # the text of the exception may itself be broken
        return f"<its text raised {type(failure).__name__}>"


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an exception."""
    return f"{type(error).__name__}: {error_text(error)}".removesuffix(": ")


def is_interrupt(error: BaseException) -> bool:
    group = error if isinstance(error, BaseExceptionGroup) else None
    return isinstance(error, KeyboardInterrupt) or (group is not None and group.subgroup(KeyboardInterrupt) is not None)


def count(number: float, singular: str, plural: str) -> str:
    """Return a number with its noun in singular or plural, such as `3 steps`."""
    return f"{number} {singular if number == 1 else plural}"


def place_of(run: Any) -> str:
    progress, collection = run.progress, run.work.collection
    within = "" if collection is None else collection.place
    return f"in {run.phase}{within}, epoch {progress.epoch}, batch {progress.batch}, step {progress.steps}"
