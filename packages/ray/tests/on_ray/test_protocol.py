"""The steps of RaySGD's fault tolerance, and where each of them is tested, or who does it.

1. `max_retries` > 0, and a save before each pass. `max_failures` is 0 or more, or -1 for any number. `Checkpoint`
   and `SaveSchedule` decide what is saved and when; without them a run starts from the beginning: below.
2. A pool that is too small is enlarged when resources are free, but at most every 10 s. Ray's elastic policy does so,
   every `resize_interval`, and only for workers that there is room for: `test_lost_nodes`, which also counts restarts.
3. The pass is run on all workers, and each one's result is fetched: `test_launcher`, by the values of all ranks.
4. A lost worker fails the pass, and an exception of the user ends the run: `test_lost_workers`, `test_launcher`.
5. After a failure all workers are killed. Ray does so when its run ends; that they have exited: below.
6. Up to 10 times, as many workers are started as there is room for, with a pause that doubles. Ray counts the room, and
   tries to start them up to 10 times: `test_lost_nodes`. The pauses are the launcher's own: `test_ray_job`.
7. The whole pass is repeated, at most `max_retries` times. Here the work after the last checkpoint is, at most
   `max_failures` times: `test_lost_workers`, `test_ray_job`.
8. The driver must survive. Here it need not: `test_lost_driver`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
from heliograph.packages.ray.tests.on_ray.fault_runs import (
    Fault,
    Scenario,
    count_batches,
    read_lines,
    read_samples,
    train,
    train_after_others_exited,
)
from heliograph_ray import RayLauncher


@pytest.mark.timeout(20)
def test_step_1_a_number_of_failures_is_none_or_more() -> None:
    with pytest.raises(ValueError, match="max_failures"):
        RayLauncher(2, max_failures=-2)


@pytest.mark.timeout(120)
def test_steps_1_and_5_without_a_checkpoint_a_run_starts_from_the_beginning(local_ray: None, tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "afresh", epochs=2, save_every=None, faults=(Fault(0, 15),))
    whole = replace(scenario, folder=tmp_path / "whole", faults=())
    for each in (scenario, whole):
        each.folder.mkdir()

    launcher = RayLauncher(2, max_failures=1, backoff=0.01, storage_path=tmp_path / "storage")
    values = launcher.run(train_after_others_exited, scenario)

    assert list(values) == list(h.launch(train, whole, nprocs=2))
    assert read_samples(scenario.folder) == read_samples(whole.folder)
    assert len(list(read_lines(scenario.folder, "1"))) == count_batches(scenario.epochs)
    assert [each.resumed_at for each in values.attempts] == [None, None]
    assert values.result is not None
    assert any("the run starts fresh" in note for note in values.result.notes)
