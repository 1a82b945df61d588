"""The commands, one after the other, on one training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from heliograph.packages.tests.examples.running import EXAMPLES, environment
from safetensors.torch import load_file


@pytest.mark.whole
def test_every_command_shows_what_it_is_there_for(tmp_path: Path) -> None:
    kept = environment() | {"PYTHON": sys.executable}
    command = ["sh", str(EXAMPLES / "commands" / "commands.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed, runs = done.stdout.splitlines(), tmp_path / "runs"

    for line in (
        "stopped by early_stopping: validation/loss",  # the run's own result
        "HELIOGRAPH_PLUGINS adds handler_times",
        "run: stopped by early_stopping",  # explain
        "time in plugins: about",
        "early_stopping would have requested",  # replay
        "the data: seeked",  # verify-resume
    ):
        assert any(each.startswith(line) for each in printed), line
    assert sum(each.startswith("intact   runs/digits/run_epoch_") for each in printed) == 2
    weights = load_file(runs / "digits.safetensors")
    assert {name: list(each.shape) for name, each in weights.items()} == {
        "0.weight": [64, 64], "0.bias": [64], "3.weight": [10, 64], "3.bias": [10]
    }  # fmt: skip
    assert {path.name for path in runs.iterdir()} == {"digits", "digits.html", "digits.safetensors"}
    assert len(list((runs / "digits").glob("*.pth"))) == 2, "verify-resume writes elsewhere"
