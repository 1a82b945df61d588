"""A small GPT over bytes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from heliograph.packages.tests.examples.running import EXAMPLES, run_example


@pytest.mark.whole
def test_it_predicts_better_than_counts_of_the_bytes_before(tmp_path: Path) -> None:
    summary, *written = run_example("gpt.py", tmp_path).splitlines()

    assert float(summary.split()[-1]) < 2.2  # counts after no, one, two and three bytes: 3.40, 2.75, 2.29, 2.25
    assert len(written) == 8
    assert all(line.isascii() for line in written)
    assert run_example("gpt.py", tmp_path).splitlines() == [summary, *written]


def test_it_makes_its_tensors_on_the_device_of_the_text() -> None:
    model = runpy.run_path(str(EXAMPLES / "gpt.py"))["GPT"]().to("meta")
    devices = []
    model.positions.register_forward_pre_hook(lambda _, inputs: devices.append(inputs[0].device.type))
    model.layers.register_forward_pre_hook(lambda _, inputs: devices.extend(each.device.type for each in inputs))
    model(torch.zeros((2, 5), dtype=torch.long, device="meta"))

    assert devices == ["meta"] * 3
