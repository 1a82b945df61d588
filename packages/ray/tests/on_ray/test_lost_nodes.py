"""A machine is lost and comes back: the run continues with fewer workers, then with all of them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
import torch
from heliograph.packages.ray.tests.on_ray.clusters import in_thread, several_nodes
from heliograph.packages.ray.tests.on_ray.fault_runs import Scenario, read_lines, train, wait_for_held
from heliograph_ray import RayLauncher
from heliograph_ray.launcher.attempts import Work


@pytest.mark.whole
@pytest.mark.timeout(200)
def test_from_two_workers_to_one_and_back(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "elastic", epochs=6, holds=((20, 2), (50, 1)))
    whole = replace(scenario, folder=tmp_path / "whole", holds=())
    for each in (scenario, whole):
        each.folder.mkdir()

    with several_nodes(2) as (cluster, (second,)):
        launcher = RayLauncher(
            (1, 2),
            max_failures=1,
            backoff=0.01,
            storage_path=tmp_path / "storage",
            name="elastic",
            start_timeout=5.0,
            resize_interval=1.0,
        )
        running = in_thread(launcher.run, train, scenario)
        wait_for_held(scenario.folder, 20, 2)
        cluster.remove_node(second, allow_graceful=False)
        wait_for_held(scenario.folder, 50, 1)
        cluster.add_node(num_cpus=1)
        values = running.result(timeout=120)

    for ours, theirs in zip(values[0].weights, h.launch(train, whole, nprocs=2)[0].weights, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))
    assert samples_by_step(scenario.folder) == samples_by_step(whole.folder)
    sizes = {step: size for step, _, _, size in read_lines(scenario.folder)}
    assert (sizes[10], sizes[40], sizes[60]) == (2, 1, 2)
    assert [each.kind for each in values.attempts] == ["lost", "resized", "completed"]
    assert [each.world_size for each in values.attempts] == [2, 1, 2]
    assert [each.resumed_at for each in values.attempts] == [None, Work(16, 16), Work(96, 48)]


def samples_by_step(folder: Path) -> dict[int, set[int]]:
    """Return the samples of each step, over all ranks."""
    read: dict[int, set[int]] = {}
    for step, _, samples, _ in read_lines(folder):
        read.setdefault(step, set()).update(samples)
    return read
