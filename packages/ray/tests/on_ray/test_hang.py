"""A worker that hangs is detected, ended and replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
from heliograph.packages.ray.tests.on_ray.fault_runs import Fault, Scenario, read_samples, train
from heliograph_ray import RayLauncher
from heliograph_ray.launcher.attempts import Work


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_a_hung_rank_becomes_a_lost_worker(local_ray: None, tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "hung", faults=(Fault(1, 20, how="hang"),), timeout=8.0)
    whole = replace(scenario, folder=tmp_path / "whole", faults=())
    for each in (scenario, whole):
        each.folder.mkdir()

    values = RayLauncher(2, max_failures=1, backoff=0.01, storage_path=tmp_path / "storage").run(train, scenario)

    assert list(values) == list(h.launch(train, whole, nprocs=2))
    assert read_samples(scenario.folder) == read_samples(whole.folder)
    first, second = values.attempts
    assert (first.kind, second.kind) == ("hung", "completed")
    assert (first.resumed_at, first.lost, second.resumed_at) == (None, Work(8, 4), Work(32, 16))
    assert first.failure is not None
    assert "rank 1 hung" in first.failure
