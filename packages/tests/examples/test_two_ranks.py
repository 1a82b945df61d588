"""Two processes, a stop that one of them asks for, and the end on one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from heliograph.packages.tests.examples.running import EXAMPLES, environment, run_example
from heliograph.packages.tests.facts import assert_facts

pytestmark = pytest.mark.whole
STOPPED = "stopped after 76 steps: this machine is given back, asked notice on rank 1"
HELD_OUT = 297


def outcomes(printed: str) -> dict[str, tuple[str, float, float]]:
    """Return by process how it ended, and its accuracy and the sum over its weights."""
    # lazy: torchrun's processes write the end of a line apart, so two ranks may share one
    lines = re.findall(r"(rank \d|alone): (.*?); accuracy ([\d.]+), weights ([\d.]+)", printed)
    return {who: (how, float(accuracy), float(weights)) for who, how, accuracy, weights in lines}


def torchrun(folder: Path) -> dict[str, tuple[str, float, float]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "two_ranks.py")],
        cwd=folder,
        env=environment() | {"PYTHONWARNINGS": "default"},  # torchrun's own process warns
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return outcomes(done.stdout)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float, float]:
    """Return what one process ends with that nothing stops; where the folder is there, no ranks are started."""
    folder = tmp_path_factory.mktemp("untouched")
    (folder / "runs" / "two_ranks").mkdir(parents=True)
    return outcomes(run_example("two_ranks.py", folder))["alone"]


def assert_ranks_stopped_together(ranks: dict[str, tuple[str, float, float]]) -> None:
    assert ranks["rank 0"] == ranks["rank 1"], "weights too"
    how, accuracy, _ = ranks["rank 0"]
    assert how == STOPPED
    assert accuracy * HELD_OUT == pytest.approx(round(accuracy * HELD_OUT), abs=1e-3), "each sample counts once"


def assert_ends_as(alone: tuple[str, float, float], untouched: tuple[str, float, float]) -> None:
    """Two processes add up gradients in another order, so the last digits of the weights differ."""
    assert alone[:2] == untouched[:2]
    assert alone[2] == pytest.approx(untouched[2], rel=1e-6)


def test_both_ranks_stop_together_and_one_process_finishes(tmp_path: Path, untouched: tuple[str, float, float]) -> None:
    first = outcomes(run_example("two_ranks.py", tmp_path))

    assert_ranks_stopped_together(first)
    assert_facts(first["alone"][0], "completed after 300 steps")
    assert first["alone"][1] > 0.93
    assert_ends_as(first["alone"], untouched)
    again = outcomes(run_example("two_ranks.py", tmp_path))
    assert again.keys() == {"alone"}
    assert again["alone"][1:] == first["alone"][1:]


def test_torchrun_starts_the_same_file(tmp_path: Path, untouched: tuple[str, float, float]) -> None:
    assert_ranks_stopped_together(torchrun(tmp_path))
    assert_ends_as(outcomes(run_example("two_ranks.py", tmp_path))["alone"], untouched)
