"""What is shown of a run in words: metrics in order and fitted, lines that are wrapped, speed and time left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from heliograph import Progress
from heliograph.builtin_callbacks.progress_bar import (
    Pace,
    duration,
    fitted,
    in_order,
    joined_lines,
    limited,
    metric_texts,
    wrapped,
)

METRICS = {"train/loss": 0.65321, "validation/loss": 0.6164, "validation/accuracy": 2 / 3, "rate": 0.1}


def test_the_order_does_not_depend_on_when_a_metric_was_logged() -> None:
    names = [
        "train/loss", "train/generator_loss", "train/accuracy", "validation/loss", "validation/one/loss",
        "validation/accuracy", "test/loss", "gpu/memory", "rate",
    ]  # fmt: skip
    ordered = list(in_order(dict.fromkeys(names, 0.0)))
    assert list(in_order(dict.fromkeys(reversed(names), 0.0))) == ordered
    assert ordered == [
        "train/generator_loss", "train/loss", "train/accuracy", "validation/loss", "validation/one/loss",
        "validation/accuracy", "test/loss", "gpu/memory", "rate",
    ]  # fmt: skip


def test_metrics_are_fitted_and_never_cut() -> None:
    whole = "train loss=0.6532, validation loss=0.6164 accuracy=0.6667, rate=0.1"
    assert fitted(METRICS, len(whole)) == whole
    assert fitted(METRICS, len(whole) - 1) == "train loss=0.6532, validation loss=0.6164 accuracy=0.6667"
    assert fitted(METRICS, 41) == "train loss=0.6532, validation loss=0.6164"
    assert fitted(METRICS, 40) == "train loss=0.6532"
    assert fitted(METRICS, 16) == ""
    assert fitted({"rate": 0.1, "train/loss": 1.0, "other": 2.0}, 80) == "rate=0.1, train loss=1, other=2"


def test_parts_are_joined_and_never_broken() -> None:
    assert joined_lines(["run", "steps 4", *metric_texts(METRICS)], 40) == [
        "run  steps 4  train/loss 0.6532",
        "  validation/loss 0.6164",
        "  validation/accuracy 0.6667  rate 0.1",
    ]
    assert joined_lines(["a" * 50, "b"], 40) == ["a" * 50, "  b"]


def test_a_sentence_is_broken_at_blanks_only() -> None:
    path = "/" + "long/" * 10 + "file-name.pth"
    assert wrapped(f"newest checkpoint: {path}", 40) == ["newest checkpoint:", f"  {path}"]
    assert wrapped("one\x1b[31m\ntwo", 40) == ["one\\x1b[31m two"]


def test_of_many_metrics_the_first() -> None:
    assert limited(["a"] * 20) == ["a"] * 20
    assert limited(["a"] * 21) == [*["a"] * 20, "and 1 more"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "00:00"), (59.6, "01:00"), (3599.0, "59:59"), (3661.0, "1:01:01"), (1e5, "27:46:40")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def run_of(**facts: Any) -> Any:
    progress = Progress()
    progress.set_seconds(0.0)
    length = {"max_epochs": None, "max_steps": None, "batches_per_epoch": 10}
    return SimpleNamespace(progress=progress, length=SimpleNamespace(**length | facts))


def move(run: Any, seconds: float, batch: int, steps: int, epoch: int = 0) -> Any:
    run.progress.set_seconds(seconds)
    run.progress.epoch, run.progress.batch, run.progress.earlier_batches = epoch, batch, 10 * epoch
    run.progress.steps = steps
    return run


def test_the_time_left_is_that_of_the_nearer_end() -> None:
    for facts, left in (
        ({}, []),
        ({"max_steps": 20}, ["ETA 00:18"]),
        ({"max_epochs": 3}, ["ETA 00:28"]),
        ({"max_epochs": 3, "max_steps": 20}, ["ETA 00:18"]),
        ({"max_epochs": 1, "max_steps": 20}, ["ETA 00:08"]),
        ({"max_epochs": 3, "batches_per_epoch": None}, []),
        ({"max_steps": 2}, []),
    ):
        run = run_of(**facts)
        pace = Pace(run)
        assert pace.look(move(run, 2.0, 2, 2)) == ["1 steps/s", *left], facts


def test_the_speed_is_that_of_the_last_looks() -> None:
    run = run_of(max_steps=1000)
    pace = Pace(run)
    assert pace.look(run) == []
    assert pace.look(move(run, 10.0, 5, 5)) == ["2 s/step", "ETA 33:10"]
    for look in range(1, 6):
        shown = pace.look(move(run, 10.0 + look, 5, 5 + 40 * look))
    assert shown == ["40 steps/s", "ETA 00:20"]
    assert pace.whole(run) == ["13.7 steps/s"]
    assert Pace(run_of()).whole(run_of()) == []


@pytest.mark.parametrize(("steps", "shown"), [(1234, "1234 steps/s"), (999, "999 steps/s"), (12, "12 steps/s")])
def test_a_speed_has_no_exponent(steps: int, shown: str) -> None:
    run = run_of()
    assert Pace(run).look(move(run, 1.0, 1, steps)) == [shown]
