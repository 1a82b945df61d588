"""The same training under the real torchrun, on one machine and on two "nodes", also where a rank is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from heliograph.packages.tests.torchrun_job import train
from heliograph.tests.ranks_pool import Pool
from torch import Tensor

JOB = Path(__file__).parent / "torchrun_job.py"
LIMIT = 180  # seconds, for a machine that does much else


def agent(folder: Path, *options: str, killed: int | None) -> subprocess.Popen[str]:
    """Start one torchrun."""
    job = [str(JOB), str(folder), *([] if killed is None else [str(killed)])]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, "--max-restarts=1", *job],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*agents: subprocess.Popen[str]) -> None:
    """Wait until all agents are done with their ranks; assert that all went well."""
    outputs = ["" for _ in agents]
    try:
        outputs = [each.communicate(timeout=LIMIT)[0] for each in agents]
    finally:
        for each in agents:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                outputs.append(each.communicate()[0])
    assert [each.returncode for each in agents] == [0] * len(agents), "\n".join(outputs)


def assert_ends(folder: Path, straight: dict[str, Tensor], *, resumed: int | None, count: int = 2) -> None:
    """Assert that all ranks resumed from this step, and ended with these very weights."""
    for rank in range(count):
        step, weights = torch.load(folder / f"rank {rank}.pt")
        assert step == resumed
        assert weights.keys() == straight.keys()
        for name in straight:
            assert torch.equal(weights[name], straight[name]), name


def ends_that_nobody_killed(ranks: Pool, folder: Path, count: int) -> dict[str, Tensor]:
    """Return the weights that so many living ranks end with."""
    (folder / "straight").mkdir()
    ends: list[tuple[int | None, dict[str, Tensor]]] = ranks(count).run(train, folder / "straight")
    return ends[0][1]


@pytest.mark.whole  # a killed rank, below, is started by the same command
@pytest.mark.parametrize("count", [2, 4])
def test_torchrun_on_one_machine(ranks: Pool, tmp_path: Path, count: int) -> None:
    straight = ends_that_nobody_killed(ranks, tmp_path, count)
    finish(agent(tmp_path, "--standalone", f"--nproc-per-node={count}", killed=None))
    assert_ends(tmp_path, straight, resumed=None, count=count)


@pytest.mark.whole
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_started_again_and_ends_with_the_same_bits(ranks: Pool, tmp_path: Path, killed: int) -> None:
    straight = ends_that_nobody_killed(ranks, tmp_path, 2)
    finish(agent(tmp_path, "--standalone", "--nproc-per-node=2", killed=killed))
    assert_ends(tmp_path, straight, resumed=9)


@pytest.mark.whole
def test_a_killed_rank_of_two_nodes_is_started_again_and_ends_with_the_same_bits(ranks: Pool, tmp_path: Path) -> None:
    straight = ends_that_nobody_killed(ranks, tmp_path, 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    node = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job"]
    finish(*(agent(tmp_path, *node, f"--rdzv-conf=is_host={host}", killed=1) for host in (1, 0)))
    assert_ends(tmp_path, straight, resumed=9)
