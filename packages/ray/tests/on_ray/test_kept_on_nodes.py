"""Workers that stay alive between calls, on clusters that change or end."""

from __future__ import annotations

import threading
from pathlib import Path

import heliograph as h
import pytest
import ray
from heliograph.packages.ray.tests.on_ray import calls
from heliograph.packages.ray.tests.on_ray.clusters import drain, several_nodes
from heliograph.packages.ray.tests.on_ray.fault_runs import Scenario, read_samples, train
from heliograph.tests.core.distributed.jobs import pid_and_sum
from heliograph.tests.core.distributed.test_launch import has_ended
from heliograph_ray import RayLauncher
from heliograph_ray.launcher import kept
from heliograph_ray.launcher.driver_loop import Fit


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_a_call_uses_the_room_that_has_come(tmp_path: Path) -> None:
    with several_nodes(1) as (cluster, _):
        workers = RayLauncher((1, 2), storage_path=tmp_path, resize_interval=1.0).keep_ranks()
        assert [len(workers.run(pid_and_sum, 1)) for _ in range(2)] == [1, 1]
        cluster.add_node(num_cpus=1)
        values = workers.run(pid_and_sum, 1)
        while len(values) == 1:  # Ray knows of the machine later than the cluster
            values = workers.run(pid_and_sum, 1)
        assert [total for _, total in values] == [3.0, 3.0]
        workers.close()


@pytest.mark.whole
@pytest.mark.timeout(200)
def test_a_machine_that_is_announced_to_be_taken_away_is_left_by_the_next_call(tmp_path: Path) -> None:
    scenario, whole = Scenario(tmp_path / "preempted"), Scenario(tmp_path / "whole")
    for each in (scenario, whole):
        each.folder.mkdir()
    with several_nodes(3) as (cluster, others):
        workers = RayLauncher(2, storage_path=tmp_path / "storage").keep_ranks()
        nodes = workers.run(pid_and_sum, 1).attempts[0].nodes
        drained = next(each.node_id for each in others if each.node_id in nodes)
        drain(cluster.address, drained)
        workers.run(calls.wait_for_notice)
        values = workers.run(train, scenario)
        assert list(values) == list(h.launch(train, whole, nprocs=2))
        assert read_samples(scenario.folder) == read_samples(whole.folder)
        assert [each.kind for each in values.attempts] == ["preempted", "completed"]
        assert drained not in values.attempts[1].nodes
        workers.close()


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_a_cluster_that_was_started_for_them_ends_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    launcher = RayLauncher(2, storage_path=tmp_path)
    workers = launcher.keep_ranks()
    first = workers.run(pid_and_sum, 1)
    assert ray.is_initialized()
    ray.shutdown()
    noticed = threading.Event()
    assert workers._fit is not None
    workers._fit.name = "of an ended cluster"  # Ray may leave it in its `get` for good
    workers._fit = Fit(noticed.wait)  # as on a busy machine, where Ray's run outlives the connection for a while
    with monkeypatch.context() as patch:
        patch.setattr(kept, "END_TIMEOUT", 0.1)
        second = workers.run(pid_and_sum, 1)
    noticed.set()
    assert not {pid for pid, _ in first} & {pid for pid, _ in second}
    third = launcher.run(pid_and_sum, 1)  # there is no room for both
    assert [total for _, total in third] == [3.0, 3.0]
    assert all(has_ended(pid) for pid, _ in second)
    assert not ray.is_initialized()
    workers.run(pid_and_sum, 1)
    workers.close()
    assert not ray.is_initialized()
