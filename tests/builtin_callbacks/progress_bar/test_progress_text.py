"""What is shown of a run in words: metrics in order and fitted, lines that are wrapped, speed and time left."""

from __future__ import annotations

import pytest
from heliograph.builtin_callbacks.progress_bar.bars import fitted, joined_lines
from heliograph.builtin_callbacks.progress_bar.texts import duration, in_order, metric_texts, speed, wrapped

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


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "00:00"), (59.6, "01:00"), (3599.0, "59:59"), (3661.0, "1:01:01"), (1e5, "27:46:40")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("steps", "seconds", "shown"),
    [
        (1234, 1.0, ["1234 steps/s"]),
        (999, 1.0, ["999 steps/s"]),
        (12, 1.0, ["12 steps/s"]),
        (2, 4.0, ["2 s/step"]),
        (0, 4.0, []),
        (3, 0.0, []),
    ],
)
def test_a_speed_has_no_exponent(steps: int, seconds: float, shown: list[str]) -> None:
    assert speed(steps, seconds) == shown
