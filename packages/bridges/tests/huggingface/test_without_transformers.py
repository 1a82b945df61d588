"""The bridge is there without transformers, which is imported when it is used."""

from __future__ import annotations

import sys

import pytest
from heliograph_bridges.huggingface import from_huggingface


def test_without_it_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"from_huggingface needs transformers.*pip install 'heliograph\[transformers\]'"
    ):
        from_huggingface(None)
