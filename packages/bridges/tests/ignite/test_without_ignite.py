"""The bridge is there without Ignite, which is imported when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from heliograph_bridges.ignite import from_ignite


def test_importing_the_bridge_imports_no_ignite() -> None:
    code = "import sys, heliograph_bridges.ignite; print('ignite' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_it_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ignite", None)
    with pytest.raises(ImportError, match=r"from_ignite needs ignite.*pip install 'heliograph\[ignite\]'"):
        from_ignite(print)
