"""RaySGD's protocol of fault tolerance, step by step: where each of its steps is tested, or who takes it.

1. `max_retries` > 0, and a save before each pass. `max_failures` is 0 or more, or -1 for any number. What is saved, and
   when, say `Checkpoint` and `SaveSchedule`; without them a run begins afresh: below.
2. A pool that is too small is made larger when something is free, but at most every 10 s. Ray's elastic policy does so,
   every `resize_interval`, and only for workers that there is room for: `test_lost_nodes`, which also counts restarts.
3. The pass is run on all workers, and each one's result is fetched: `test_launcher`, by the values of all ranks.
4. A lost worker fails the pass, and an exception of the user's ends it for good: `test_lost_workers`, `test_launcher`.
5. Upon a failure all workers are killed. Ray does so when its run ends; that they are gone: below.
6. Up to 10 times, as many workers are started as there is room for, with a pause that doubles. Ray counts the room, and
   tries to start them up to 10 times: `test_lost_nodes`. The pauses are the launcher's own: `test_ray_job`.
7. The whole pass is repeated, at most `max_retries` times. Here it is what follows the last checkpoint, at most
   `max_failures` times: `test_lost_workers`, `test_ray_job`.
8. The driver must survive. Here it need not: `test_lost_driver`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
from heliograph.tests.on_ray.surviving import (
    Blow,
    Story,
    lines,
    order,
    train,
    train_when_the_others_are_gone,
    whole_order,
)


@pytest.mark.timeout(20)
def test_step_1_a_number_of_failures_is_none_or_more() -> None:
    with pytest.raises(ValueError, match="max_failures"):
        h.RayLauncher(2, max_failures=-2)


@pytest.mark.timeout(120)
def test_steps_1_and_5_without_a_checkpoint_a_run_begins_afresh_when_all_workers_are_gone(
    local_ray: None, tmp_path: Path
) -> None:
    story = Story(tmp_path / "afresh", epochs=2, save_every=None, blows=(Blow(0, 15),))
    whole = replace(story, folder=tmp_path / "whole", blows=())
    for each in (story, whole):
        each.folder.mkdir()

    launcher = h.RayLauncher(2, max_failures=1, backoff=0.01, storage_path=tmp_path / "storage")
    values = launcher.run(train_when_the_others_are_gone, story)

    assert list(values) == list(h.launch(train, whole, nprocs=2))
    assert order(story.folder) == order(whole.folder)
    assert len(list(lines(story.folder, "1"))) == whole_order(story.epochs)
    assert [each.resumed_at for each in values.attempts] == [None, None]
    assert values.result is not None
    assert any("the run begins afresh" in note for note in values.result.notes)
