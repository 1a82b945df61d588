"""The curves of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph_recorder.explain.attempt_summary import summarize_attempts
from heliograph_recorder.format.records import Batches, Recording
from heliograph_recorder.timeline.curves import Axis, Curve, Point, charts, downsampled
from hypothesis import given
from hypothesis import strategies as st


def drawn(recorded: Recording) -> dict[str, list[Curve]]:
    attempts = summarize_attempts(recorded)
    return charts(recorded, attempts, Axis(attempts))


def points(values: Sequence[float]) -> list[Point]:
    return [Point(step, float(step), value, 1, False) for step, value in enumerate(values)]


def test_training_and_validation_share_a_chart() -> None:
    found = drawn(killed_and_resumed())
    assert {name: [curve.metric for curve in curves] for name, curves in found.items()} == {
        "loss": ["train/loss", "validation/loss"],
        "accuracy": ["train/accuracy", "validation/accuracy"],
    }
    assert [curve.split for curve in found["loss"]] == ["train", "validation"]


def test_lost_work_is_marked() -> None:
    (loss, _) = drawn(killed_and_resumed())["loss"]
    assert [(point.step, point.attempt, point.is_lost) for point in loss.points] == [
        (4, 1, False),
        (8, 1, True),
        (11, 1, True),
        (8, 2, False),
        (10, 2, True),
        (12, 2, False),
    ]


def test_named_validation_sets_are_curves_of_one_chart() -> None:
    script = Script(validation_sets=("clean", "noisy"))
    script.start()
    script.batches(1)
    metrics = {"validation/clean/loss": 1.0, "validation/noisy/loss": 2.0, "validation/noisy/top/5": 0.5}
    script.emit("validation_end", metrics=metrics, batches=[])
    script.emit("log", metrics={"throughput": 3.0, "train/generator/loss": 4.0}, asked=[])
    found = drawn(recording(script))
    assert {name: [curve.split for curve in curves] for name, curves in found.items()} == {
        "loss": ["validation/clean", "validation/noisy"],
        "generator/loss": ["train"],
        "throughput": [""],
        "top/5": ["validation/noisy"],
    }


def test_the_losses_of_batches_are_a_curve_too() -> None:
    script = Script(losses=True)
    script.start()
    script.batches(3, losses=(3.0, math.nan, 1.0))
    (curve,) = drawn(recording(script))["loss"]
    assert (curve.metric, curve.split) == ("train/loss of each batch", "each batch")
    assert [point.step for point in curve.points] == [1, 2, 3]
    assert [round(point.time, 6) for point in curve.points] == [0.6, 1.1, 1.6]


def test_a_skipped_batch_has_no_loss() -> None:
    script = Script(losses=True)
    script.start()
    script.batches(3, losses=(3.0, math.nan, 1.0))
    (block,) = [entry for entry in script.entries if isinstance(entry, Batches)]
    script.entries[script.entries.index(block)] = replace(block, skipped_batches=(0, 1, 1))
    (curve,) = drawn(recording(script))["loss"]
    assert [(point.step, point.value) for point in curve.points] == [(1, 3.0), (3, 1.0)]


def test_an_evaluation_without_a_training_has_no_curve() -> None:
    script = Script(phase="test")
    script.emit("test_end", metrics={"test/loss": 1.0}, batches=[])
    assert drawn(recording(script)) == {}


@given(st.lists(st.floats(), max_size=400), st.integers(40, 80))
def test_downsampling_keeps_the_ends_and_the_extremes(values: list[float], most: int) -> None:
    whole = points(values)
    kept = downsampled(whole, most)
    assert len(kept) <= most + 4
    assert [point.step for point in kept] == sorted(point.step for point in kept)
    assert set(kept) <= set(whole) or any(math.isnan(value) for value in values)
    if values:
        assert (kept[0].step, kept[-1].step) == (0, len(values) - 1)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        left = [point.value for point in kept if math.isfinite(point.value)]
        assert (min(left), max(left)) == (min(finite), max(finite))


def test_a_short_curve_is_not_downsampled() -> None:
    whole = points([1.0] * 2_000)
    assert downsampled(whole) == whole
    assert len(downsampled(points([float(step % 7) for step in range(50_000)]))) <= 2_000


def test_nan_is_kept_when_the_rest_is_downsampled() -> None:
    values = [1.0] * 5_000
    values[2_222] = math.nan
    assert [point.step for point in downsampled(points(values)) if math.isnan(point.value)] == [2_222]
