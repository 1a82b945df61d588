"""The process that called the launcher is killed; the same call in another process goes on from the storage."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
import ray
from heliograph.builtin_callbacks.ray.launcher.attempts import Work
from heliograph.tests.on_ray import driver
from heliograph.tests.on_ray.surviving import held, is_gone, order, train, wait_until


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_the_driver_may_die_too(local_ray: None, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    told = driver.story(tmp_path / "killed")
    whole = replace(told, folder=tmp_path / "whole", holds=())
    for each in (told, whole):
        each.folder.mkdir()

    with (tmp_path / "output.txt").open("w") as output:
        command = [sys.executable, "-m", driver.__name__, str(told.folder), address]
        with subprocess.Popen(command, stdout=output, stderr=output) as process:
            workers = held(told.folder, driver.HELD_AT, 2)
            process.kill()
    wait_until(lambda: all(is_gone(pid) for pid in workers))
    (told.folder / "open").touch()
    values = driver.call(told.folder, address)

    assert list(values) == list(h.launch(train, whole, nprocs=2))
    assert order(told.folder) == order(whole.folder)
    assert [(each.kind, each.resumed_at) for each in values.attempts] == [("completed", Work(32, 16))]
