"""Trackers where several processes train together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from heliograph.packages.trackers.tests import tracker_runs
from heliograph.packages.trackers.tests.tracker_runs import (
    places,
    trackio_losses,
    trackio_rows,
    wandb_files,
    wandb_losses,
)


def test_two_ranks_have_one_page(ranks: Any, tmp_path: Path, in_folder: Callable[[Path], None]) -> None:
    """The main rank writes it."""
    (warnings, pages), other = ranks(2).run(tracker_runs.on_two_ranks, tmp_path)

    assert (warnings, other) == ((), ((), [None, None]))
    (path,) = wandb_files(tmp_path)
    assert path.name == f"run-{pages[0]}.wandb"
    assert places(wandb_losses(tmp_path)) == [(1, 0), (2, 0)]
    in_folder(tmp_path)
    assert places(trackio_losses("ranks")) == [(1, 0), (2, 0)]
    assert trackio_rows("ranks")[-1]["status"]["_value"] == "completed"
