"""Precision and recall at every threshold, for trackers that draw lines."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

POINTS: Final = 200  # of a line, at most


def precision_recall(labels: Any, scores: Any) -> tuple[Any, Any]:
    """Return the recall and the precision where all samples with at least a score count as positive.

    Args:
        labels: of each sample whether it is positive, of shape (samples,).
        scores: of each sample its score, of shape (samples,).

    Returns:
        The recall, which rises, and the precision, each of shape (points,): one point for each different score, at most
        200, spread over them. Empty where no sample is positive.
    """
    if not labels.any():
        return np.empty(0), np.empty(0)
    order = np.argsort(-scores, kind="stable")
    positive = np.cumsum(labels[order].astype(np.int64))
    last = np.flatnonzero(np.append(np.diff(scores[order]), 1.0))  # of the samples with the same score
    chosen = last[np.linspace(0, len(last) - 1, min(POINTS, len(last))).round().astype(np.int64)]
    return positive[chosen] / positive[-1], positive[chosen] / (chosen + 1)
