"""Global generators that every test leaves as it found them."""

from __future__ import annotations

from heliograph.tests.builtin_callbacks.conftest import _global_generators

__all__ = ["_global_generators"]
