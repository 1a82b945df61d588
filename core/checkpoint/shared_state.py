"""What the main rank has read from a file, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...events import Engine
from ..distributed.ranks.failure import WorkOutcome, outcome_of, values_of_ranks
from .storage.manifest import MissingManifestError
from .storage.reader import read_manifest

T = TypeVar("T")


def share(engine: Engine, path: Path, value: T | None, read: Callable[[], T]) -> tuple[T, bool]:
    """Return on every rank what the main rank has read from a file, and whether it was sent. A collective.

    Ranks that find the very same file in that place read it; where one does not, the main rank sends what it has read.

    Args:
        engine: connects the ranks.
        path: the file.
        value: on the main rank, what is in it.
        read: reads it on the others.

    Raises:
        Exception: a rank cannot read it; on all of them.
    """
    is_sent = False
    if engine.world_size > 1:
        is_sent = len(set(engine.gather_objects(_checksum(path)))) > 1
        if is_sent:
            value = engine.broadcast(value)
        else:
            outcome = WorkOutcome(value) if engine.is_main else outcome_of(read)
            values_of_ranks(engine, WorkOutcome(error=outcome.error))
            value = outcome.value
    assert value is not None
    return value, is_sent


def _checksum(path: Path) -> str | None:
    """Return the digest in the manifest of a checkpoint, None where this rank does not see it."""
    try:
        return read_manifest(path).sha256 if path.is_file() else None
    except MissingManifestError:  # one of Helios, weights alone, or it is lost
        return f"{path.stat().st_size} bytes"
    except (OSError, ValueError):
        return None
