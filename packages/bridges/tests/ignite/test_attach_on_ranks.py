"""Our plugins in engines of Ignite in two processes: what one of them asks, both do."""

from __future__ import annotations

import math
import os

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import class_batches
from heliograph.tests.ranks_pool import Pool
from torch import nn


def train(skips: bool) -> tuple[str, str | None, int | None, int, list[float]]:
    """Train; on rank 1 the third loss is not a number."""
    from heliograph.packages.bridges.tests.ignite import quietly  # noqa: F401

    from heliograph_bridges.ignite import attach  # isort: skip
    from ignite.engine import create_supervised_trainer  # isort: skip

    torch.distributed.init_process_group("gloo")
    try:
        torch.manual_seed(0)
        model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = class_batches(6)
        if os.environ["RANK"] == "1":
            batches[2] = (batches[2][0] * math.nan, batches[2][1])
        engine = create_supervised_trainer(model, optimizer, loss)
        guard = h.NaNGuard("skip" if skips else "stop")
        attached = attach(engine, [guard], model=model, optimizer=optimizer, loss=loss)
        engine.run(batches, max_epochs=2)
    finally:
        torch.distributed.destroy_process_group()
    result = attached.result
    assert result is not None
    weights = [round(each, 6) for each in model.weight.flatten().tolist()]
    return result.status, result.stopped_by, result.stopped_on_rank, result.progress.steps, weights


@pytest.mark.parametrize("skips", [False, True])
def test_what_one_rank_asks_both_do(skips: bool, ranks: Pool) -> None:
    first, second = ranks(2).run(train, skips)

    assert first == second
    assert first[:4] == (("completed", None, None, 10) if skips else ("stopped", "nan_guard", 1, 2))
    assert all(math.isfinite(each) for each in first[4])
