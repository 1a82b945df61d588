"""What a run goes on from: looked for by the main rank, read by every rank that can."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from ...events import Engine
from .. import storage
from ..storage import State
from ..storage.reading import OfOthers
from .together import Outcome, of_each, outcome_of

logger = logging.getLogger("heliograph")


class Depot(Protocol):
    """Where checkpoints lie beside the folder of their run, such as the storage of a cluster.

    Attributes:
        patience: seconds to wait until a process that this one makes up for has let the folder go.
    """

    patience: float

    def bring(self, store: storage.Store, resume: str | Path | None) -> tuple[str | Path | None, list[str]]:
        """Put what a run is to go on from into its folder; called on the main rank.

        Args:
            store: the run's own, open.
            resume: what the run was told to resume.

        Returns:
            What it is to resume: that, or the path of what was brought; and what there is to say.
        """


@dataclass(slots=True)
class Found:
    """What there is to go on from.

    Attributes:
        path: the checkpoint, None where there is none.
        state: what is in it.
        notes: what there is to say of the search.
    """

    path: Path | None = None
    state: State | None = None
    notes: list[str] = field(default_factory=list)


def find(store: storage.Store, resume: str | Path | None, depot: Depot | None = None) -> Found:
    """Look for what a run is told to resume.

    Args:
        store: the run's own, for `auto`.
        resume: None, `auto` or a path.
        depot: where else checkpoints of the run may lie; what it has goes before.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged.
    """
    resume, notes = (resume, []) if depot is None else depot.bring(store, resume)
    if resume is None:
        return Found(notes=notes)
    if resume != "auto":
        return Found(Path(resume), storage.load(Path(resume)), notes)
    entry, state, passed_over = store.newest()
    notes += [f"passed over: {line}" for line in passed_over]
    for line in passed_over:
        logger.log(logging.INFO if isinstance(line, OfOthers) else logging.WARNING, "resume passed over: %s", line)
    if entry is not None:
        return Found(entry.path, state, notes)
    if unusable := store.count():
        note = f"begins afresh: none of the {unusable} checkpoints of {store.run_name!r} in {store.folder} can be used"
        logger.warning(note)
    else:
        note = f"begins afresh: no checkpoint of {store.run_name!r} in {store.folder}"
    return Found(notes=[*notes, note])


def shared(engine: Engine, path: Path, state: State | None) -> State:
    """Return on every rank what the main rank has read from a file. A collective.

    Ranks that find the very same checkpoint in that place read it; where one does not, the main rank sends the state,
    but no shards. These were verified by the main rank, for all.

    Args:
        engine: connects the ranks.
        path: the checkpoint.
        state: on the main rank, what is in it.

    Raises:
        ValueError: a rank cannot read it; on all of them.
    """
    if engine.world_size > 1:
        seals = engine.gather_objects(_seal(path))
        if len(set(seals)) > 1:
            state = engine.broadcast(state)
            if "shards" in state:
                raise ValueError(
                    f"Not every rank sees the checkpoint {path}: its shards must lie where all ranks read."
                )
        else:
            read = partial(storage.load, path, with_shards=False)
            outcome = Outcome(state) if engine.is_main else outcome_of(read)
            of_each(engine, Outcome(error=outcome.error))
            state = outcome.value
    assert state is not None
    return state


def _seal(path: Path) -> str | None:
    """Return the digest that the manifest of a checkpoint tells, None where this rank does not see it."""
    try:
        return storage.read_manifest(path).sha256 if path.is_file() else None
    except (OSError, ValueError):
        return None
