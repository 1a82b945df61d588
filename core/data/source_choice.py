"""The choice of the source for a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from .sizes import ALONE, Share
from .source import SequenceSource

if TYPE_CHECKING:
    from ...events import Engine
    from .source import Source


def source_of(loader: Any, share: Share = ALONE, *, per_sample: bool = False, engine: Engine | None = None) -> Source:
    """Return the source that reads a process's share of a loader, or all of it if it cannot be divided.

    Raises:
        ValueError: a rank has no batch.
    """
    source: Source
    if type(loader) in (list, tuple):
        source = SequenceSource(loader, share)
    else:
        source = _choose_source(loader, share, engine, per_sample=per_sample)
    if source.length == 0 and share.world_size > 1:
        raise ValueError(
            f"The train loader has too few batches for {share.world_size} ranks: use more samples, a smaller "
            f"batch_size or drop_last=False."
        )
    return source


def _choose_source(loader: Any, share: Share, engine: Engine | None, *, per_sample: bool) -> Source:
    from .dataloader import IterableSource, MapSource, OpaqueSource
    from .dealt import order_of
    from .source import Sourced
    from .stateful import StatefulSource, is_stateful

    if isinstance(loader, DataLoader) and not is_stateful(loader) and not isinstance(loader.dataset, IterableDataset):
        return MapSource(loader, order_of(loader, share), share, per_sample=per_sample, trains=True)
    if isinstance(loader, Sourced):
        return loader.source(share, engine, fills_up=True)
    if is_stateful(loader):  # it keeps its own position
        return StatefulSource(loader, share)
    return IterableSource(loader, share) if isinstance(loader, DataLoader) else OpaqueSource(loader, share)
