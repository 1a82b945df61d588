"""Our plugins in Lightning's Trainer in two processes: what one of them asks, both do."""

from __future__ import annotations

import os
import warnings
from typing import Any

import heliograph as h
import torch
from heliograph.tests import kit
from heliograph.tests.ranks_pool import Pool


class Once(h.Plugin):
    """Asks to stop on one rank only."""

    asks = ("stop",)

    @h.on(h.StepEnd)
    def stop(self, run: h.Run, event: h.StepEnd) -> None:
        """Ask on rank 1 at step 3."""
        if run.engine.rank == 1 and run.progress.steps == 3:
            run.control.stop("enough")


def train() -> tuple[str, str | None, int | None, int, int, list[float]]:
    """Train with Lightning's DDP."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _train()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def _train() -> tuple[str, str | None, int | None, int, int, list[float]]:
    import lightning.pytorch as pl
    from heliograph.packages.bridges.tests.lightning.conftest import Classifier
    from heliograph_bridges.lightning import HeliographCallback
    from torch.utils.data import DataLoader

    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    callback = HeliographCallback([Once(), h.LogSchedule(h.Every(steps=1))])
    trainer = pl.Trainer(
        callbacks=[callback], accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, use_distributed_sampler=False,
        num_sanity_val_steps=0, **quiet,
    )  # fmt: skip
    module: Any = Classifier()
    assert os.environ["WORLD_SIZE"] == "2"
    trainer.fit(module, DataLoader(kit.class_batches(6), batch_size=None))  # type: ignore[arg-type]
    result = callback.result
    assert result is not None
    weights = [round(each, 6) for each in module.model.weight.flatten().tolist()]
    asked = (result.status, result.stopped_by, result.stopped_on_rank)
    return (*asked, result.progress.steps, trainer.global_step, weights)


def test_what_one_rank_asks_both_do(ranks: Pool) -> None:
    first, second = ranks(2).run(train)

    assert first == second
    assert first[:5] == ("stopped", "once", 1, 3, 3)
