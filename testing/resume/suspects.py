"""Code of the user's that often makes a resumed run another one, found before anything differs."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def of_workers(loader: Any) -> list[str]:
    """Return a sentence where each worker process of a loader is made another than the others by the user."""
    if not isinstance(loader, DataLoader) or not loader.num_workers or loader.worker_init_fn is None:
        return []
    name = getattr(loader.worker_init_fn, "__qualname__", type(loader.worker_init_fn).__name__)
    return [
        f"worker_init_fn={name} may make workers differ, and after a resume within an epoch another worker loads a "
        f"batch: let it do the same in each, whatever the worker's number"
    ]
