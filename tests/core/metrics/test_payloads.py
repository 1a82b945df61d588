"""What is logged besides numbers, as every tracker gets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from heliograph import Run, StepEnd, Trainer
from heliograph.core.metrics.payloads import to_image
from heliograph.events import Event, LogCurve, LogFile, LogHistogram, LogImage, LogText
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph.tests.messages import assert_each

mpl.use("agg")


def logged(log: Callable[[Run], None], *kinds: type[Event]) -> list[Any]:
    """Return the events of a training of one step that logs something."""
    seen: list[Any] = []
    trainer = Trainer(device="cpu")
    trainer.bus.on(StepEnd, lambda run, event: log(run))
    for kind in kinds:
        trainer.bus.on(kind, lambda run, event: seen.append(event))
    trainer.fit(linear_classifier(), class_batches(1), optimizer=sgd(), epochs=1)
    return seen


@pytest.mark.parametrize(
    ("image", "pixels"),
    [
        (torch.tensor([[0.0, 1.0]]), [[[0] * 3, [255] * 3]]),
        (torch.tensor([[[0.0, 0.5]], [[1.0, 2.0]], [[-1.0, torch.nan]]]), [[[0, 255, 0], [128, 255, 0]]]),
        (torch.ones(1, 1, 2, dtype=torch.bfloat16), [[[255] * 3, [255] * 3]]),
        (torch.tensor([[True, False]]), [[[255] * 3, [0] * 3]]),
        (np.array([[[1, 2, 3, 4]]], dtype=np.uint8), [[[1, 2, 3]]]),
        (np.array([[[7]]], dtype=np.uint8), [[[7] * 3]]),
    ],
    ids=["grey", "out-of-range", "bfloat16", "flags", "alpha", "one-channel"],
)
def test_an_image_is_bytes_of_height_width_and_three_colours(image: Any, pixels: list[Any]) -> None:
    found = to_image(image)
    assert (found.tolist(), found.dtype) == (pixels, np.uint8)


@pytest.mark.parametrize(
    ("image", "error", "words"),
    [
        (torch.zeros(2, 3, 4, 4), ValueError, r"\(2, 3, 4, 4\).*batch"),
        (torch.zeros(5, 4, 3), ValueError, r"got \(5, 4, 3\)"),
        (torch.zeros(0, 4), ValueError, "got"),
        (torch.zeros(2, 2, dtype=torch.long), TypeError, "to 1, got int64"),
        ("a path", TypeError, "of numbers, got str"),
    ],
)
def test_what_is_not_an_image_is_refused(image: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        to_image(image)


def test_every_kind_comes_as_an_event(tmp_path: Path) -> None:
    weights = torch.arange(4.0).reshape(2, 2).requires_grad_()
    (tmp_path / "a.txt").write_text("a")

    def log(run: Run) -> None:
        run.log_image("image", torch.zeros(2, 2))
        run.log_text("text", "words")
        run.log_histogram("histogram", weights)
        run.log_curve("curve", torch.tensor([True, False]), [0.9, 0.1])
        run.log_file("file", tmp_path / "a.txt")

    image, text, histogram, curve, file = logged(log, LogImage, LogText, LogHistogram, LogCurve, LogFile)
    assert (image.title, image.image.shape) == ("image", (2, 2, 3))
    assert text == LogText("text", "words")
    assert (histogram.title, histogram.values.tolist()) == ("histogram", [0.0, 1.0, 2.0, 3.0])
    assert (curve.labels.tolist(), curve.scores.tolist()) == ([True, False], [0.9, 0.1])
    assert file == LogFile("file", tmp_path / "a.txt")


def test_a_figure_is_an_image_of_how_it_is_now() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 1), dpi=50, facecolor="blue")
    canvas = figure.canvas

    def log(run: Run) -> None:
        run.log_figure("figure", figure)
        figure.set_facecolor("red")

    (event,) = logged(log, LogImage)
    assert (event.image.shape, event.image[0, 0].tolist()) == ((50, 100, 3), [0, 0, 255])
    assert figure.canvas is canvas


def test_nothing_is_made_where_nobody_wants_it() -> None:
    class Costly:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise AssertionError("it was made")

    assert logged(lambda run: run.log_image("image", Costly())) == []


@pytest.mark.parametrize(
    ("log", "error", "words"),
    [
        (lambda run: run.log_text("", "words"), TypeError, "got ''"),
        (lambda run: run.log_text("a", 3), TypeError, "log_text takes .*, got int"),
        (lambda run: run.log_histogram("a", []), ValueError, "at least one number, got none"),
        (lambda run: run.log_curve("a", [0, 1], [0.5]), ValueError, "got 2 labels and 1 scores"),
        (lambda run: run.log_curve("a", [0, 2], [0.5, 0.5]), ValueError, "labels that are 0 or 1"),
        (lambda run: run.log_curve("a", [0, 1], [0.5, 3]), ValueError, r"from 0 to 1, got 0\.5 to 3: use a sigmoid"),
        (lambda run: run.log_file("a", "missing.txt"), ValueError, "missing.txt"),
    ],
)
def test_what_cannot_be_shown_is_refused(log: Callable[[Run], None], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        logged(log, LogImage, LogText, LogHistogram, LogCurve, LogFile)


def test_an_image_beyond_its_range_is_warned_of() -> None:
    trainer = Trainer(device="cpu")
    trainer.bus.on(StepEnd, lambda run, event: run.log_image("bright", torch.full((2, 2), 300.0)))
    trainer.bus.on(LogImage, lambda run, event: None)
    result = trainer.fit(linear_classifier(), class_batches(2), optimizer=sgd(), epochs=1)

    assert_each(result.warnings, ("'bright'", "0 to 1", "clipped"))
