"""Ignite is imported before the tests that use it."""

from __future__ import annotations

import heliograph.tests.bridges.ignite.quietly  # noqa: F401
