"""Conversion of a checkpoint with shards to one file, in one process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from ..state.ranks import join_shards
from . import reader
from .manifest import Entry
from .store import Store


def consolidate(path: Path | str, out: Path | str | None = None) -> Entry:
    """Convert a checkpoint with shards to one file, as other engines write it.

    Args:
        path: the data file of a checkpoint with shards.
        out: where to write; by default the former checkpoint and its shards are replaced.

    Returns:
        The entry of what was written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, has no shards or is pinned; or another process writes this run's checkpoints there.
        OSError: it could not be written; the former is as it was.
    """
    path = Path(path)
    out = path if out is None else Path(out)
    state, former = reader.load(path), reader.read_manifest(path)
    if "shards" not in state:
        raise ValueError(f"{path} has no shards: it is an ordinary checkpoint already.")
    with closing(Store(out.parent, former.family)) as store:
        store.open()
        store.write_as(former.training, former.run_name)
        if store.is_pinned(out):
            raise ValueError(
                f"{out} is pinned, and so is not replaced: remove the pin, or write elsewhere, --out FILE."
            )
        judged, place = former.judged_by, former.sequence
        return store.save(
            out.name, join_shards(state, path), judged_by=judged, sequence=place, replace_unknown=out == path
        )
