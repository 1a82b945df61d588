"""The bridge is there without Ignite, which is imported when it is used."""

from __future__ import annotations

import sys

import pytest
from heliograph_bridges.ignite import from_ignite


def test_without_it_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ignite", None)
    with pytest.raises(ImportError, match=r"from_ignite needs ignite.*pip install 'heliograph\[ignite\]'"):
        from_ignite(print)
