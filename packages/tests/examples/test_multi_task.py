"""Two heads that are trained from two streams."""

from __future__ import annotations

from pathlib import Path

from heliograph.packages.tests.examples.running import run_example


def test_both_heads_learn_and_a_second_start_has_nothing_left_to_do(tmp_path: Path) -> None:
    printed = run_example("multi_task.py", tmp_path)
    values = {name: float(value) for name, value in (line.split() for line in printed.splitlines())}

    assert values.keys() == {"test/digit_accuracy", "test/parity_accuracy"}
    assert min(values.values()) > 0.9
    saved = sorted((tmp_path / "runs" / "multi_task").glob("*.pth"))
    assert run_example("multi_task.py", tmp_path) == printed
    assert sorted((tmp_path / "runs" / "multi_task").glob("*.pth")) == saved
