"""Which source reads a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from ..order.shares import ALONE, Share
from .stateless import SequenceSource

if TYPE_CHECKING:
    from ....events import Engine
    from .contract import Source


def source_of(loader: Any, share: Share = ALONE, *, per_sample: bool = False, engine: Engine | None = None) -> Source:
    """Return the source that reads a process's share of a loader, or all of it where nobody can deal it out.

    Raises:
        ValueError: nothing is left for a rank.
    """
    source: Source
    if type(loader) in (list, tuple):
        source = SequenceSource(loader, share)
    else:
        source = _choose_source(loader, share, engine, per_sample=per_sample)
    if source.length == 0 and share.world_size > 1:
        raise ValueError(
            f"The train loader has no batch for each of {share.world_size} ranks: give more samples, a smaller "
            f"batch_size or drop_last=False."
        )
    return source


def _choose_source(loader: Any, share: Share, engine: Engine | None, *, per_sample: bool) -> Source:
    from ..order.choice import order_of
    from .contract import Sourced
    from .dataloader import IterableSource, MapSource, OpaqueSource
    from .stateful import StatefulSource, is_stateful

    if isinstance(loader, DataLoader) and not is_stateful(loader) and not isinstance(loader.dataset, IterableDataset):
        return MapSource(loader, order_of(loader, share), share, per_sample=per_sample, trains=True)
    if isinstance(loader, Sourced):
        return loader.source(share, engine, fills_up=True)
    if is_stateful(loader):  # which keeps a position of its own
        return StatefulSource(loader, share)
    return IterableSource(loader, share) if isinstance(loader, DataLoader) else OpaqueSource(loader, share)
