"""Features that are learned without labels."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from heliograph.packages.tests.examples.running import EXAMPLES, run_example
from sklearn.datasets import load_digits
from torch import nn


@pytest.mark.whole
def test_trained_features_need_few_labels(tmp_path: Path) -> None:
    printed = run_example("byol.py", tmp_path)
    accuracy = {name: float(value) for name, value in (line.split(": accuracy ") for line in printed.splitlines())}

    assert accuracy["trained"] > accuracy["before"] + 0.02
    assert accuracy["before"] > accuracy["pixels"] > 0.8
    assert run_example("byol.py", tmp_path) == printed


def test_features_are_compared_whatever_their_size() -> None:
    probe = runpy.run_path(str(EXAMPLES / "byol.py"))["probe"]
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels)

    assert probe(nn.Flatten(), images / 1000, labels) == pytest.approx(probe(nn.Flatten(), images, labels), abs=0.001)
