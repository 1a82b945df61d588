"""Code of the user's that often makes a resumed run another one, found before anything differs."""

from __future__ import annotations

from typing import Any

from heliograph.core.trainer import Trainer
from heliograph.events import EpochStart
from torch.utils.data import DataLoader


def is_own(thing: object) -> bool:
    """Return whether something is neither heliograph's nor torch's."""
    return type(thing).__module__.partition(".")[0] not in ("heliograph", "torch")


def hearing_epoch_start(trainer: Trainer) -> tuple[str, ...]:
    """Return, in words, the plugins and functions of the user's own that hear `EpochStart`."""
    names, plugins = set(trainer.plugins.names()), trainer.plugins
    owners = dict.fromkeys(seat.owner for seat in trainer.bus.signal(EpochStart).seats.values() if not seat.paused)
    return tuple(
        f"plugin {str(owner)!r}" if owner in names else str(owner)
        for owner in owners
        if owner not in names or is_own(plugins[owner])
    )


def of_workers(loader: Any) -> list[str]:
    """Return a sentence where each worker process of a loader is made another than the others by the user."""
    if not isinstance(loader, DataLoader) or not loader.num_workers or loader.worker_init_fn is None:
        return []
    name = getattr(loader.worker_init_fn, "__qualname__", type(loader.worker_init_fn).__name__)
    return [
        f"worker_init_fn={name} may make workers differ, and after a resume amid an epoch another worker loads a "
        f"batch: let it do the same in each, whatever the worker's number"
    ]
