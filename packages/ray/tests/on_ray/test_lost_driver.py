"""The process that called the launcher is killed; the same call in another process resumes from the storage."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
import ray
from heliograph.packages.ray.tests.on_ray import driver
from heliograph.packages.ray.tests.on_ray.fault_runs import has_exited, read_samples, train, wait_for_held, wait_until
from heliograph_ray.launcher.attempts import Work


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_a_killed_driver_can_be_replaced(local_ray: None, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    scenario = driver.scenario(tmp_path / "killed")
    whole = replace(scenario, folder=tmp_path / "whole", holds=())
    for each in (scenario, whole):
        each.folder.mkdir()

    with (tmp_path / "output.txt").open("w") as output:
        command = [sys.executable, "-m", driver.__name__, str(scenario.folder), address]
        with subprocess.Popen(command, stdout=output, stderr=output) as process:
            workers = wait_for_held(scenario.folder, driver.HELD_AT, 2)
            process.kill()
    wait_until(lambda: all(has_exited(pid) for pid in workers))
    (scenario.folder / "open").touch()
    values = driver.call(scenario.folder, address)

    assert list(values) == list(h.launch(train, whole, nprocs=2))
    assert read_samples(scenario.folder) == read_samples(whole.folder)
    assert [(each.kind, each.resumed_at) for each in values.attempts] == [("completed", Work(32, 16))]
