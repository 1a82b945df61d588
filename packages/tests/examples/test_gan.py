"""A GAN with an optimizer for each network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from heliograph.packages.tests.examples.running import run_example


@pytest.mark.whole
def test_what_it_draws_is_nearer_to_digits_than_noise_and_of_several_classes(tmp_path: Path) -> None:
    printed = run_example("gan.py", tmp_path)
    drawn, noise = ([float(number) for number in re.findall(r"[\d.]+", line)] for line in printed.splitlines())

    assert drawn[0] < noise[0] / 2
    assert drawn[1] >= 8
    picture = tmp_path / "runs" / "gan" / "digits.png"
    first = picture.read_bytes()
    assert run_example("gan.py", tmp_path) == printed
    assert picture.read_bytes() == first
