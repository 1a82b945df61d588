"""A transformers model with dict batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.packages.tests.examples.running import run_example


@pytest.mark.whole
def test_it_knows_the_modules_and_a_second_start_only_measures(tmp_path: Path) -> None:
    printed = run_example("distilbert.py", tmp_path)
    accuracy, *lines = printed.splitlines()

    assert float(accuracy.removeprefix("accuracy ")) > 0.7  # 0.58 of the lines are of one module
    assert {line.partition(":")[0].strip() for line in lines} <= {"argparse", "inspect"}
    assert len(lines) == 5
    assert run_example("distilbert.py", tmp_path) == printed
