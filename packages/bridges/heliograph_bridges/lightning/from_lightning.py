"""`from_lightning(callback)`: a callback of Lightning as a plugin."""

from __future__ import annotations

from typing import Any

from heliograph.spi import require

from .flavour import flavour_of
from .plugin import LightningCallback
from .refused import check_served


def from_lightning(callback: Any) -> LightningCallback:
    """Return a plugin that runs a callback of Lightning, of `lightning.pytorch` or of `pytorch_lightning`.

    Its hooks are called at the events of a Heliograph training, with a `trainer` and a `pl_module` that are built from
    the run. Setting `trainer.should_stop` becomes a request to stop in the plugin's name, which is `lightning_` and the
    callback's class, such as `lightning_early_stopping`; `.named(...)` gives it another. Its state is in the
    checkpoints.

    Args:
        callback: an object of a subclass of `Callback`, for one training.

    Raises:
        ImportError: Lightning is not installed.
        TypeError: it is not such an object.
        ValueError: it cannot run here; the error says why, and what of Heliograph does its work.
    """
    flavour = flavour_of(callback)
    if flavour is None:
        require("lightning.pytorch", "from_lightning", extra="lightning")
        example = "from_lightning(EarlyStopping('val_loss'))"
        raise TypeError(f"from_lightning takes a callback of Lightning, an object, as in {example}; got {callback!r}.")
    check_served(callback)
    return LightningCallback(callback, flavour)
