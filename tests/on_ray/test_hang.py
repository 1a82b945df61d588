"""A worker that hangs: found out by our watch, ended, and replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
from heliograph.builtin_callbacks.ray.launcher.attempts import Work
from heliograph.tests.on_ray.surviving import Blow, Story, order, train


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_a_hung_rank_becomes_a_lost_worker(local_ray: None, tmp_path: Path) -> None:
    story = Story(tmp_path / "hung", blows=(Blow(1, 20, how="hang"),), timeout=8.0)
    whole = replace(story, folder=tmp_path / "whole", blows=())
    for each in (story, whole):
        each.folder.mkdir()

    values = h.RayLauncher(2, max_failures=1, backoff=0.01, storage_path=tmp_path / "storage").run(train, story)

    assert list(values) == list(h.launch(train, whole, nprocs=2))
    assert order(story.folder) == order(whole.folder)
    first, second = values.attempts
    assert (first.kind, second.kind) == ("hung", "completed")
    assert (first.resumed_at, first.lost, second.resumed_at) == (None, Work(8, 4), Work(32, 16))
    assert first.failure is not None
    assert "rank 1 hung" in first.failure
