"""Imports Ignite once, whose own warnings at that are no fault of a test."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="`torch.jit.* is deprecated")
    import ignite.handlers
    import ignite.metrics  # noqa: F401
