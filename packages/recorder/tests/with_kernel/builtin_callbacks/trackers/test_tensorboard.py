"""TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heliograph import Every, LogSchedule, TensorBoard, Trainer
from heliograph_recorder import Recorder, replay
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

Make = Callable[..., Any]


def scalars(folder: Path) -> dict[str, Any]:
    """Return the points of every curve, as TensorBoard shows them."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("measured", [True, False])
def test_a_replay_draws_what_was_logged(task: Make, batches: Make, sgd: Any, tmp_path: Path, measured: bool) -> None:
    live = [TensorBoard(tmp_path / "live")] if measured else []
    plugins: list[Any] = [LogSchedule(Every(steps=2)), *live, Recorder(tmp_path)]
    Trainer(plugins, device="cpu").fit(task(), batches(4), optimizer=sgd, epochs=1)
    replayed = replay(tmp_path, [TensorBoard(tmp_path / "again")])

    assert (replayed.unheld, replayed.failed) == ({}, {})
    curves = scalars(tmp_path / "again")
    assert [step for step, _ in curves["train/loss"]] == [2, 4]
    assert curves == (scalars(tmp_path / "live") if measured else {"train/loss": curves["train/loss"]})
