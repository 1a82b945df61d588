"""`from_lightning(callback)`: a callback of Lightning as a plugin."""

from __future__ import annotations

from typing import Any

from heliograph.spi import require

from .flavour import flavour_of
from .plugin import LightningCallback
from .refused import check_served


def from_lightning(callback: Any) -> LightningCallback:
    """Return a plugin that calls a callback of `lightning.pytorch` or `pytorch_lightning`.

    Its hooks are called at the events of a Heliograph training, with a `trainer` and a `pl_module` that present
    the run. Setting `trainer.should_stop` becomes a request to stop by the plugin. The plugin's name is `lightning_`
    and the callback's class, such as `lightning_early_stopping`; `.named(...)` changes it. Checkpoints contain the
    callback's state.

    Args:
        callback: an instance of a subclass of `Callback`, for one training.

    Raises:
        ImportError: Lightning is not installed.
        TypeError: the callback has the wrong type.
        ValueError: the callback is not supported; the message names an alternative.
    """
    flavour = flavour_of(callback)
    if flavour is None:
        require("lightning.pytorch", "from_lightning", extra="lightning")
        example = "from_lightning(EarlyStopping('val_loss'))"
        raise TypeError(f"from_lightning takes a callback of Lightning, an object, as in {example}; got {callback!r}.")
    check_served(callback)
    return LightningCallback(callback, flavour)
