"""The script of the documentation, and precision, in processes that were started together."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import GradientAccumulation, Supervised, Trainer
from heliograph.core.engines.options import PrecisionName
from heliograph.tests.kit import random_batches, sgd
from heliograph.tests.ranks_pool import Pool
from torch import nn

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "several_gpus.md"


def run_script(path: str) -> tuple[float, str]:
    script = runpy.run_path(path)
    engine = script["h"].Trainer().engine
    return script["main"](), f"{type(engine).__name__} {engine.rank} of {engine.world_size}"


def test_the_script_of_the_documentation_runs_on_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```\n")[0]
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    (first, one), (second, two) = ranks(2).run(run_script, str(path))
    assert [one, two] == ["DDPEngine 0 of 2", "DDPEngine 1 of 2"]
    assert first == second > 0


def train(precision: PrecisionName, window: int, bad_rank: int | None) -> tuple[list[list[float]], int, int, Any]:
    """Train on four batches on each rank, of which one rank's second overflows; return what all must agree on."""
    torch.manual_seed(0)
    trainer = Trainer([GradientAccumulation(window)] if window > 1 else [], device="cpu", precision=precision)
    batches = random_batches(8, inputs=3, outputs=1)
    if bad_rank is not None:
        batches[2 + bad_rank][0].mul_(1e38)
    task = Supervised(nn.Linear(3, 1), lambda outputs, targets: nn.functional.mse_loss(outputs, targets) / 64)
    result = trainer.fit(task, batches, optimizer=sgd(), epochs=1)
    weights = [each.detach().flatten().tolist() for each in task.model.parameters()]
    return weights, result.progress.steps, result.progress.skipped_steps, trainer.engine.state_dict()


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_ranks_skip_the_same_steps_in_fp16(ranks: Pool, window: int, bad_rank: int | None) -> None:
    first, second = ranks(2).run(train, "fp16", window, bad_rank)
    assert first == second
    _, steps, skipped, state = first
    assert (steps, skipped) == (4 // window - (bad_rank is not None), int(bad_rank is not None))
    assert state["scaler"]["scale"] == (2.0**16 if bad_rank is None else 2.0**15)


def test_ranks_compute_alike_in_bf16(ranks: Pool) -> None:
    first, second = ranks(2).run(train, "bf16", 2, None)
    assert first == second
    assert first[0] != ranks(2).run(train, "fp32", 2, None)[0][0]
