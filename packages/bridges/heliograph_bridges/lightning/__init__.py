"""Lightning: callbacks as plugins, and plugins in its Trainer."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from .from_lightning import from_lightning as from_lightning

if _TYPE_CHECKING:
    from .callback import HeliographCallback as HeliographCallback


def __getattr__(name: str) -> _Any:
    if name != "HeliographCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .callback import HeliographCallback

    return HeliographCallback
