"""Hugging Face: callbacks as plugins, and plugins in its Trainer."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from .from_huggingface import from_huggingface as from_huggingface

if _TYPE_CHECKING:
    from .trainers.callback import HeliographCallback as HeliographCallback


def __getattr__(name: str) -> _Any:
    if name != "HeliographCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from heliograph.spi import require

    require("transformers", name, extra="transformers")
    from .trainers.callback import HeliographCallback

    return HeliographCallback
