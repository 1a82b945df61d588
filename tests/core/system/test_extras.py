"""Packages that may be missing, and which copy of this one runs."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import heliograph
import pytest
from heliograph import ProgressBar, TensorBoard
from heliograph.core.system import extras
from heliograph.core.system.extras import require

ROOT = Path(heliograph.__file__).parent


def test_a_missing_extra_gives_the_exact_command() -> None:
    with pytest.raises(ImportError, match=r"demo needs nowhere.*heliograph\[examples\]'$"):
        require("nowhere.at_all", "The demo", extra="examples")
    assert require("json", "nobody") is sys.modules["json"]


def test_a_missing_requirement_gives_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("tensorboard.")]:  # another test has imported them
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="TensorBoard needs tensorboard,"):
        TensorBoard("unused")
    with pytest.raises(ImportError, match=r"ProgressBar needs tqdm.*install tqdm$"):
        ProgressBar()


def test_the_version_is_that_of_the_copy_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert heliograph.__version__ == own
    monkeypatch.setattr(extras, "ROOT", tmp_path)  # a wheel ships no pyproject.toml
    find = extras.version.__wrapped__
    assert find() == metadata.version("heliograph")
    monkeypatch.setattr(extras, "NAME", "nowhere-at-all")
    assert find() == "unknown"
    assert extras.version() == own  # found once: every save says it
