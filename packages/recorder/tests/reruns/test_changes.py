"""The change of a fork, where the fork is done again: by the function that made it, or its name, and by no other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core.program import UsageError
from heliograph.packages.recorder.tests.reruns.test_fork import halve_rate, program, trained
from heliograph.packages.tests.facts import has_facts
from heliograph_recorder import NotExact, diverge, drill, fork, goto

HALVE_RATE = "heliograph.packages.recorder.tests.reruns.test_fork:halve_rate"


def third_of_rate(run: h.Run) -> None:
    """Change the learning rate otherwise."""
    run.optimizer.param_groups[0]["lr"] /= 3


def halve_mean(run: h.Run) -> None:
    """Change what Adam remembers."""
    for state in run.optimizer.state.values():
        state["exp_avg"] /= 2


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with a run and a changed fork of it, whose own checkpoints are gone."""
    trained(tmp_path / "x")
    fork(tmp_path / "x", program, at=5, into=tmp_path / "y", change=HALVE_RATE)
    for path in (tmp_path / "y").glob("*.pth"):
        path.unlink()  # so that the change lies on the way
    return tmp_path


def test_the_name_of_a_function_is_as_good(runs: Path) -> None:
    fork(runs / "x", program, at=5, into=runs / "z", change=halve_rate)
    assert diverge(runs / "y", runs / "z").first is None
    with goto(runs / "y", program, step=7, change=HALVE_RATE) as paused:
        assert paused.comparison.first is None
    drilled = drill(runs / "x", runs / "y", program, change=HALVE_RATE)
    assert drilled.repeats == (True, True)
    with pytest.raises(UsageError, match="no module 'nowhere'"):
        fork(runs / "x", program, at=5, into=runs / "w", change="nowhere:x")


def test_another_function_is_refused(runs: Path) -> None:
    reason = "halve_rate after step 5, .*third_of_rate"
    with pytest.raises(NotExact, match=reason):
        goto(runs / "y", program, step=7, change=third_of_rate)
    with pytest.raises(NotExact, match=reason):
        drill(runs / "x", runs / "y", program, change=third_of_rate)
    with goto(runs / "y", program, step=7, change=third_of_rate, exact=False) as paused:
        assert paused.comparison.first is not None


def test_a_drill_of_a_fork_makes_its_change_again(runs: Path) -> None:
    for runs_of_it in ((runs / "x", runs / "y"), (runs / "y", runs / "x")):
        drilled = drill(*runs_of_it, program, change=halve_rate)
        assert drilled.repeats == (True, True)
        assert "differs from its rerun" not in str(drilled)


def test_a_drill_names_the_operator_by_which_a_changed_fork_differs(tmp_path: Path) -> None:
    trained(tmp_path / "x")
    fork(tmp_path / "x", program, at=5, into=tmp_path / "y", change=halve_mean)
    drilled = drill(tmp_path / "x", tmp_path / "y", program, change=halve_mean)
    assert drilled.divergence.first is not None
    assert (drilled.divergence.first.step, drilled.divergence.first.kind) == (6, "weights")
    assert drilled.repeats == (True, True)
    assert drilled.operator is not None
    assert "lerp" in drilled.operator


def test_a_drill_of_two_forks(runs: Path) -> None:
    fork(runs / "x", program, at=5, into=runs / "z", change=third_of_rate)
    drilled = drill(runs / "y", runs / "z", program, change=halve_rate, other_change=third_of_rate)
    assert drilled.repeats == (True, True)
    with pytest.raises(NotExact, match="third_of_rate after step 5,"):
        drill(runs / "y", runs / "z", program, change=halve_rate)


def test_a_drill_of_a_fork_without_its_change_is_refused(runs: Path) -> None:
    with pytest.raises(NotExact) as caught:
        drill(runs / "x", runs / "y", program)
    text = str(caught.value)
    assert "halve_rate after step 5" in text
    assert "change= (--change" in text
    assert "exact=False" not in text  # drill has no such option


def test_a_change_for_a_drill_of_what_is_no_fork(tmp_path: Path) -> None:
    def other(folder: Path) -> Any:
        return program(folder, optimizer=partial(torch.optim.AdamW, lr=0.02))

    trained(tmp_path / "x")
    trainer, options = other(tmp_path / "z")
    trainer.fit(**options)
    with pytest.raises(ValueError, match="Neither run"):
        drill(tmp_path / "x", tmp_path / "z", program, other, change=halve_rate)


def test_a_step_before_a_fork_began_is_in_its_parent(runs: Path) -> None:
    (parent,) = (runs / "x").glob("*.recording")
    for step in (1, 3):
        with pytest.raises(ValueError, match=rf"step 3: .* {parent}\."):
            goto(runs / "y", program, step=step)
    with pytest.raises(ValueError, match="begins after step 3"):
        fork(runs / "y", program, at=2, into=runs / "z")
    with goto(runs / "y", program, step=4, change=halve_rate) as paused:
        assert paused.comparison.first is None


def test_what_is_inexact_is_noted(tmp_path: Path) -> None:
    def inexact(folder: Path) -> Any:
        trainer, options = program(folder)
        trainer.plugins.unregister("rng_capture")
        return trainer, options

    trainer, options = inexact(tmp_path)
    trainer.fit(**options)
    with pytest.raises(NotExact) as caught:
        goto(tmp_path, inexact, step=5)
    assert caught.value.reasons
    with goto(tmp_path, inexact, step=5, exact=False) as paused:
        for _ in range(2):
            for reason in caught.value.reasons:
                assert sum(has_facts(note, "may differ", reason) for note in paused.notes) == 1
            paused.next_step()
