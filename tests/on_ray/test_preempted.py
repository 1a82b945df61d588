"""A machine that is to be taken away says so before: the run saves, leaves it, and goes on elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import heliograph as h
import pytest
from heliograph.builtin_callbacks.ray.launcher.attempts import Work
from heliograph.tests.on_ray.clusters import drain, in_thread, several_nodes, used_nodes
from heliograph.tests.on_ray.surviving import Story, held, lines, order, train, whole_order


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_a_drained_node_is_left_and_nothing_is_repeated(tmp_path: Path) -> None:
    story = Story(tmp_path / "preempted", holds=((20, 2),))
    whole = replace(story, folder=tmp_path / "whole", holds=())
    for each in (story, whole):
        each.folder.mkdir()

    with several_nodes(3) as (cluster, others):
        running = in_thread(h.RayLauncher(2, storage_path=tmp_path / "storage", name="spot").run, train, story)
        held(story.folder, 20, 2)
        drained = next(each.node_id for each in others if each.node_id in used_nodes())
        drain(cluster.address, drained)
        values = running.result(timeout=100)

    assert list(values) == list(h.launch(train, whole, nprocs=2))
    assert order(story.folder) == order(whole.folder)
    assert len(list(lines(story.folder))) == whole_order(story.epochs)
    first, second = values.attempts
    assert (first.kind, first.lost) == ("preempted", Work())
    assert second.kind == "completed"
    assert second.resumed_at in (Work(40, 20), Work(42, 21))
    assert drained in first.nodes
    assert drained not in second.nodes
