"""A small GPT over bytes."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path

import pytest
from heliograph.tests.examples.running import run_example


@pytest.mark.whole
def test_the_bytes_before_it_help_to_predict_a_byte(tmp_path: Path) -> None:
    summary, *written = run_example("gpt.py", tmp_path).splitlines()
    counts = Counter(Path(argparse.__file__).read_text())
    entropy = -sum(each / counts.total() * math.log(each / counts.total()) for each in counts.values())

    assert float(summary.split()[-1]) < min(entropy, 2.8)
    assert len(written) == 8
    assert all(line.isascii() for line in written)
