"""Ignite is imported before the tests that use it."""

from __future__ import annotations

import heliograph.packages.bridges.tests.ignite.quietly  # noqa: F401
