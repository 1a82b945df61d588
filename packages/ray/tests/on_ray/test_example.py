"""The example of the documentation, on this machine and on a cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray

SCRIPT = Path(__file__).parents[4] / "docs" / "examples" / "ray_digits.py"


def run(folder: Path, *arguments: str) -> str:
    """Run the script, check the accuracy, and return its output."""
    command = [sys.executable, str(SCRIPT), "--epochs", "8", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"test accuracy ([\d.]+)% after 8 epochs, 152 steps on 2 workers", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 90
    assert "A lost worker costs at most the epoch since the last checkpoint" in done.stdout
    return done.stdout


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_it_runs_here(tmp_path: Path) -> None:
    assert "attempt" not in run(tmp_path)


@pytest.mark.whole
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("local_ray")
def test_it_runs_on_a_cluster_that_loses_a_worker(tmp_path: Path) -> None:
    printed = run(tmp_path, "--address", ray.get_runtime_context().gcs_address, "--lose-a-worker")
    assert re.search(r"^attempt 1 lost.*\b7 steps", printed, re.MULTILINE), printed
