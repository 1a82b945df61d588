"""Callbacks of Lightning on two ranks: what one asks all do, and what is for the main rank is done there."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import heliograph as h
import lightning.pytorch as pl
import torch
from heliograph import DDPEngine, Every, Trainer, ValidationSchedule
from heliograph.tests import kit
from heliograph.tests.ranks_pool import Pool
from heliograph_bridges.lightning import from_lightning
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.utilities import rank_zero_only

MAIN_ONLY: Any = rank_zero_only


class StopOnRank(pl.Callback):
    """Stops on one rank only, at its third step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.main: list[int] = []

    @rank_zero_only
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.main.append(trainer.global_rank)

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 3:
            trainer.should_stop = True


class Collectives(pl.Callback):
    """Calls what the strategy has."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        strategy, rank = trainer.strategy, trainer.global_rank
        strategy.barrier("here")
        self.found = [
            (trainer.world_size, trainer.is_global_zero),
            strategy.broadcast({"rank": rank}, src=1),
            float(strategy.reduce(torch.tensor(float(rank)))),
            float(strategy.reduce(torch.tensor(float(rank)), reduce_op="sum")),
            strategy.reduce_boolean_decision(rank == 1, all=False),
            strategy.reduce_boolean_decision(rank == 1),
        ]


def fit(*callbacks: Any, folder: Path | None = None, **options: Any) -> Any:
    saving = [] if folder is None else kit.saving(folder, Every(steps=1), resume="auto")
    plugins = [*saving, ValidationSchedule(epochs=1), *map(from_lightning, callbacks)]
    trainer = Trainer(plugins, engine=DDPEngine())
    options = {"train": kit.class_batches(8), "validation": kit.class_batches(2), "epochs": 3} | options
    return kit.fit(trainer, **options)


def stopped_by_rank(rank: int) -> tuple[Any, ...]:
    before = MAIN_ONLY.rank
    result = fit(callback := StopOnRank(rank))
    assert MAIN_ONLY.rank == before
    return result.progress.steps, result.status, result.stopped_by, callback.main


def test_a_stop_on_one_rank_stops_all_and_main_hooks_run_on_the_main_rank(ranks: Pool) -> None:
    stopped = (4, "stopped", "lightning_stop_on_rank")  # a step after it asked
    assert ranks(2).run(stopped_by_rank, 1) == [(*stopped, [0]), (*stopped, [])]
    assert ranks(2).run(stopped_by_rank, 0) == [(*stopped, [0]), (*stopped, [])]


def collectives() -> list[Any]:
    fit(callback := Collectives(), epochs=1)
    return callback.found


def test_the_collectives_of_the_strategy_are_those_of_the_engine(ranks: Pool) -> None:
    main, other = ranks(2).run(collectives)
    assert main == [(2, True), {"rank": 1}, 0.5, 1.0, True, False]
    assert other == [(2, False), *main[1:]]


def early(folder: Path, epochs: int) -> tuple[Any, ...]:
    stopper = EarlyStopping("val_loss", patience=2, mode="max")
    result = fit(stopper, LearningRateMonitor(), folder=folder, epochs=epochs)
    best = float(stopper.best_score)
    return result.progress.epoch, result.stopped_by, stopper.wait_count, best, result.metrics["validation/loss"]


def test_early_stopping_is_the_same_on_all_ranks_and_resumes(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks(2).run(early, tmp_path / "whole", 9)
    assert whole[0] == whole[1]
    assert whole[0][:3] == (3, "lightning_early_stopping", 2)
    first = ranks(2).run(early, tmp_path / "parts", 2)
    assert first[0][:3] == (2, None, 1)
    assert ranks(2).run(early, tmp_path / "parts", 9) == whole


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
