"""Precision and recall at every threshold."""

from __future__ import annotations

import numpy as np
import pytest
from heliograph_trackers.wandb import precision_recall


@pytest.mark.parametrize(
    ("labels", "scores", "points"),
    [
        ([0, 1, 1], [0.1, 0.9, 0.5], [(0.5, 1.0), (1.0, 1.0), (1.0, 2 / 3)]),
        ([1, 0, 1, 0], [0.5, 0.5, 0.5, 0.2], [(1.0, 2 / 3), (1.0, 0.5)]),
        ([1], [0.3], [(1.0, 1.0)]),
        ([0, 0], [0.3, 0.4], []),
        ([], [], []),
    ],
)
def test_a_point_for_each_score(labels: list[int], scores: list[float], points: list[tuple[float, float]]) -> None:
    recall, precision = precision_recall(np.array(labels, dtype=np.int64), np.array(scores))
    assert list(zip(recall, precision, strict=True)) == points


def test_many_points_are_thinned_out() -> None:
    scores = np.linspace(0, 1, 5000)
    recall, precision = precision_recall(scores > 0.25, scores)
    assert len(recall) == len(precision) == 200
    assert (np.diff(recall) >= 0).all()
    assert (recall[-1], precision[-1]) == (1.0, pytest.approx(0.75))
