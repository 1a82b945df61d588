"""Checkpoints of Helios, and their conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph_cli.checkpoint_command import files_in
from heliograph_cli.helios import migrate_file


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a folder with checkpoints of Helios: one from the border of an epoch, one from the middle of the next."""
    for epoch, steps in ((1, 4), (2, 6)):
        counters = {"current_iteration": steps, "global_iteration": steps, "global_epoch": epoch}
        saved = {
            "version": "1.1.0",
            "training_state": counters | {"validation_cycles": 1, "dataset_iter": steps - 4},
            "model": {"model": {"0.weight": torch.full((3, 2), float(steps))}},
            "rng": {},
        }
        torch.save(saved, tmp_path / f"golden_epoch_1_iter_{steps}.pth")
    return tmp_path


def migrate(path: Path, **options: Any) -> list[str]:
    """Convert a checkpoint of Helios, or all in a folder."""
    return [line for file in files_in(path) for line in migrate_file(file, **options)]
