"""Packages that may be missing."""

from __future__ import annotations

import sys

import pytest
from heliograph import ProgressBar, TensorBoard
from heliograph.core.system.extras import require


def test_a_missing_extra_gives_the_exact_command() -> None:
    with pytest.raises(ImportError, match=r"The demo needs nowhere, which .*: pip install 'heliograph\[examples\]'$"):
        require("nowhere.at_all", "The demo", extra="examples")
    assert require("json", "nobody") is sys.modules["json"]


def test_a_missing_requirement_gives_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"TensorBoard needs tensorboard, which .*: pip install tensorboard$"):
        TensorBoard("unused")
    with pytest.raises(ImportError, match=r"ProgressBar needs tqdm, which .*: pip install tqdm$"):
        ProgressBar()
