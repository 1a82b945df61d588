"""`CreatorTrainer` on a cluster: two workers equal two local ranks, and a lost one is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.packages.ray.tests.creators import creators
from heliograph.packages.ray.tests.creators.creators import make, weights
from heliograph_ray.creators import LocalLauncher
from heliograph_ray.launcher.launcher import RayLauncher

pytestmark = pytest.mark.usefixtures("local_ray")
SHARES = (7 * 7 + 4 * 4) / creators.HELD_OUT  # the mean over all samples of the size of their rank's share
OPTIONS: dict[str, Any] = {
    "scheduler_creator": creators.scheduler,
    "scheduler_step_freq": "epoch",
    "train_function": creators.train_as_usual,
    "validation_function": creators.validate_as_usual,
}


@pytest.mark.whole
@pytest.mark.timeout(180)
def test_a_pass_with_a_lost_worker_is_repeated(tmp_path: Path) -> None:
    local = make(**OPTIONS, config={"dropout": 0.2}, launcher=LocalLauncher(2))
    expected = local.train(passes=3)

    trouble = tmp_path / "trouble"
    trouble.touch()
    config = {"dropout": 0.2, "file": trouble, "step": 6, "what": "die"}
    launcher = RayLauncher(2, storage_path=tmp_path / "ray")
    trainer = make(**OPTIONS, config=config, plugin_creator=creators.trouble, launcher=launcher)
    assert trainer.train(max_retries=1, passes=3) == expected
    assert not trouble.exists()
    assert trainer.messages == [(0, 1), (0, 2)]  # the passes of the second attempt
    assert torch.equal(weights(trainer), weights(local))

    alone = make(**OPTIONS)
    alone.restore(trainer.save(tmp_path / "of_two.pth"))
    assert trainer.validate() == pytest.approx({**alone.validate(), "validation/share": SHARES})
    for each in (trainer, local):
        each.shutdown()
