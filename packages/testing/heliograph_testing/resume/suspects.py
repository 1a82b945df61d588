"""User code that often makes a resumed run differ, found before anything differs."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def worker_suspects(loader: Any) -> list[str]:
    """Return a sentence if the user's code may make the worker processes of a loader differ."""
    if not isinstance(loader, DataLoader) or not loader.num_workers or loader.worker_init_fn is None:
        return []
    name = getattr(loader.worker_init_fn, "__qualname__", type(loader.worker_init_fn).__name__)
    return [
        f"worker_init_fn={name} may make workers differ, and after a resume within an epoch another worker loads a "
        f"batch: let it do the same in each, whatever the worker's number"
    ]
