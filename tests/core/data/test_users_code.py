"""Which modules are the user's."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from heliograph.core.data.users_code import is_ours, is_users


@pytest.mark.parametrize(("is_installed", "expected"), [(True, False), (False, True)])
def test_a_module_beside_installed_ones_is_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool, expected: bool
) -> None:
    name = f"module_{'of_a_library' if is_installed else 'of_the_user'}"
    (tmp_path / f"{name}.py").write_text("NUMBER = 1\n")
    if is_installed:
        (tmp_path / "other-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, name, __import__(name))
    assert is_users(name) is expected


@pytest.mark.parametrize(
    ("name", "ours"), [("heliograph.core.loop", True), (__name__, False), ("torch.nn", False), ("json", False)]
)
def test_modules_of_heliograph_are_ours(name: str, ours: bool) -> None:
    assert is_ours(name) is ours


@pytest.mark.parametrize(("spec", "ours"), [("heliograph.__main__", True), ("train", False), (None, False)])
def test_the_program_is_ours_if_it_is_a_command(spec: str | None, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__spec__ = None if spec is None else ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert is_ours("__main__") is ours
