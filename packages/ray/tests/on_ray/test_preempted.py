"""A machine is announced to be taken away: the run saves, exits, and continues on another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
from heliograph.packages.ray.tests.on_ray.clusters import drain, in_thread, several_nodes, used_nodes
from heliograph.packages.ray.tests.on_ray.fault_runs import (
    Scenario,
    count_batches,
    read_lines,
    read_samples,
    train,
    wait_for_held,
)
from heliograph_ray import RayLauncher
from heliograph_ray.launcher.attempts import Work


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_a_run_moves_from_a_drained_node_and_repeats_nothing(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "preempted", holds=((20, 2),))
    whole = replace(scenario, folder=tmp_path / "whole", holds=())
    for each in (scenario, whole):
        each.folder.mkdir()

    with several_nodes(3) as (cluster, others):
        running = in_thread(RayLauncher(2, storage_path=tmp_path / "storage", name="spot").run, train, scenario)
        wait_for_held(scenario.folder, 20, 2)
        drained = next(each.node_id for each in others if each.node_id in used_nodes())
        drain(cluster.address, drained)
        values = running.result(timeout=100)

    assert list(values) == list(h.launch(train, whole, nprocs=2))
    assert read_samples(scenario.folder) == read_samples(whole.folder)
    assert len(list(read_lines(scenario.folder))) == count_batches(scenario.epochs)
    first, second = values.attempts
    assert (first.kind, first.lost) == ("preempted", Work())
    assert second.kind == "completed"
    assert second.resumed_at in (Work(40, 20), Work(42, 21))
    assert drained in first.nodes
    assert drained not in second.nodes
