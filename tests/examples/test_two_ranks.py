"""Two processes, a stop that one of them asks for, and the end on one."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.tests.examples.running import run_example


@pytest.mark.whole
def test_both_ranks_stop_together_and_one_process_finishes(tmp_path: Path) -> None:
    printed = run_example("two_ranks.py", tmp_path).splitlines()
    ranks, alone = [line.partition(": ")[2] for line in printed[:2]], printed[2]

    assert ranks[0] == ranks[1]
    assert ranks[0].startswith("stopped after 60 steps: this machine is given back, asked notice on rank 1; accuracy")
    assert alone.startswith("alone: completed after 300 steps: 10 epochs done; accuracy")
    assert float(alone.partition("accuracy ")[2][:6]) > 0.93
    again = run_example("two_ranks.py", tmp_path)
    assert again.partition("; ")[2].strip() == alone.partition("; ")[2]
