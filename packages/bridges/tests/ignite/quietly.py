"""Imports Ignite, with which torch warns of functions of its own."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings(
        "ignore", message=r"`torch\.jit\.(script|interface)` is deprecated", category=DeprecationWarning
    )
    import ignite.engine
    import ignite.handlers  # noqa: F401
