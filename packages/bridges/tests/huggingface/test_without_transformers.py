"""The bridge is there without transformers, which is imported when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from heliograph_bridges.huggingface import from_huggingface


def test_importing_the_bridge_imports_no_transformers() -> None:
    code = "import sys, heliograph_bridges.huggingface; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_it_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"from_huggingface needs transformers.*pip install 'heliograph\[transformers\]'"
    ):
        from_huggingface(None)
