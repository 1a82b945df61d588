"""Features that are learned without labels."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.tests.examples.running import run_example


@pytest.mark.whole
def test_trained_features_need_few_labels(tmp_path: Path) -> None:
    printed = run_example("byol.py", tmp_path)
    accuracy = {name: float(value) for name, value in (line.split(": accuracy ") for line in printed.splitlines())}

    assert accuracy["trained"] > accuracy["before"] + 0.2
    assert run_example("byol.py", tmp_path) == printed
