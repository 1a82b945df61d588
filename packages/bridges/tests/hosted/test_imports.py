"""What the room of bridges imports, and who imports it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from heliograph.tests.house import files, imported_names
from heliograph_bridges.huggingface import from_huggingface
from heliograph_bridges.ignite import from_ignite

FRAMEWORKS = ("transformers", "trl", "lightning", "ignite", "accelerate")


def test_no_framework_is_imported_with_the_package() -> None:
    code = (
        "import sys, heliograph; heliograph.Trainer; import heliograph_bridges.hosted.training; "
        "import heliograph_bridges.huggingface, heliograph_bridges.ignite, heliograph_bridges.lightning; "
        f"print([name for name in {FRAMEWORKS} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_nothing_but_the_front_door_imports_a_bridge() -> None:
    for room in ("events", "plugins", "core", "builtin_callbacks"):
        for path in files(room):
            assert not [name for name in imported_names(path) if name.startswith("heliograph_bridges")], path.name


def test_what_is_shared_by_all_bridges_knows_no_framework() -> None:
    for path in files("packages/bridges/heliograph_bridges/hosted"):
        assert not [name for name in imported_names(path) if name.split(".")[0] in FRAMEWORKS], path.name


def test_without_transformers_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"from_huggingface needs transformers.*pip install"):
        from_huggingface(None)


def test_without_ignite_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ignite", None)
    with pytest.raises(ImportError, match=r"from_ignite needs ignite.*pip install"):
        from_ignite(print)
