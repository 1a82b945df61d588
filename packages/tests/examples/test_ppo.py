"""A policy that makes its own data; that a killed run ends with the same weights is in test_kills.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from heliograph.packages.tests.examples.running import run_example


@pytest.mark.whole
def test_the_pole_is_balanced_longer(tmp_path: Path) -> None:
    before, after = re.findall(r"\d+", run_example("ppo.py", tmp_path).splitlines()[-1])

    assert int(before) < 40
    assert int(after) > 150
