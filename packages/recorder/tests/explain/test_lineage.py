"""Of which training a recorded one is a fork."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from heliograph.packages.recorder.tests.explain.factory import Script, recording
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder.explain.attempt_summary import Parent, ancestors, parting_clock
from heliograph_recorder.explain.story import story
from heliograph_recorder.format.records import Counters
from heliograph_recorder.timeline.page import facts


def forked(parent: Any, at: int = 4) -> Script:
    """Return a run that continues a parent from a step."""
    script = Script()
    script.emit("train_start")
    script.counters = Counters(batch=at, steps=at, samples=4 * at, seconds=2.0)
    script.emit("checkpoint_loaded", 0.3, path="p.pth", origin=asdict(script.counters), forked_from=parent)
    script.epoch(resumed=True)
    script.batches(6)
    return script


def test_a_chain_of_forks() -> None:
    grandparent = {"step": 2, "recording": "/runs/a/a.recording", "training": "x"}
    parent = {"step": 4, "recording": "/runs/b/b_1.recording", "training": "y", "forked_from": grandparent}
    found = ancestors(forked(parent).attempt())
    assert found == [Parent("/runs/b/b_1.recording", 4), Parent("/runs/a/a.recording", 2)]
    assert found[0].name == "b_1"


def test_a_fork_from_the_start_is_known_by_its_hyper_parameter() -> None:
    script = Script(hyper_parameters={"forked_from": "/runs/at step 1/a.recording at step 0"})
    assert ancestors(script.attempt()) == [Parent("/runs/at step 1/a.recording", 0)]
    assert ancestors(Script().attempt()) == []


def test_what_is_no_parent_is_none() -> None:
    assert ancestors(forked(None).attempt()) == []


@pytest.mark.parametrize(("step", "clock"), [(2, 0.0), (4, 0.4), (7, 0.4), (10, 3.4), (99, 3.4)])
def test_when_a_fork_parts(step: int, clock: float) -> None:
    attempt = forked({"step": step, "recording": "/a.recording"}).attempt()
    assert parting_clock(attempt, step) == pytest.approx(clock)


def test_the_page_has_the_parent_and_a_mark_where_they_part() -> None:
    found = facts(recording(forked({"step": 6, "recording": "/runs/x/x_1.recording"})))
    assert found["parent"]["recording"] == "/runs/x/x_1.recording"
    assert_facts(found["parent"]["text"], "fork of x_1", "step 6")
    assert found["marks"] == [["fork", 6, 0.4, found["parent"]["text"], ("/runs/x/x_1.recording",)]]


def test_what_changed_a_fork_is_named() -> None:
    script = forked({"step": 6, "recording": "/runs/x/x_1.recording"})
    script.fields["hyper_parameters"] = {"fork_change": "main.<locals>.half"}
    assert "/runs/x/x_1.recording at step 6," in story(recording(script))
    assert_facts(facts(recording(script))["parent"]["text"], "fork of x_1", "step 6", "half")
