"""Every example that keeps checkpoints: killed within an epoch and started again, it ends as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heliograph.packages.tests.examples.running import final_weights, kill_example, run_example


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("byol.py", 100),
        ("distilbert.py", 130),
        ("gan.py", 2000),
        ("gpt.py", 40),
        ("multi_task.py", 100),
        ("ppo.py", 300),
    ],
)
def test_a_killed_example_ends_with_the_same_weights(name: str, steps: int, tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    alone.mkdir()
    killed.mkdir()
    printed = run_example(name, alone)
    kill_example(name, killed, steps)

    assert run_example(name, killed).splitlines()[-1] == printed.splitlines()[-1]
    torch.testing.assert_close(final_weights(killed), final_weights(alone), rtol=0, atol=0)
