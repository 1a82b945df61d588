"""What a callback of Lightning costs in each step, here and in Lightning's own loop.

Run it with `OMP_NUM_THREADS=1 python tests/benchmarks/bench_lightning.py`. Each figure is the least of several runs, in
microseconds per step, of a linear model with batches of 4 samples on the CPU.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from time import process_time
from typing import Any

import heliograph as h
import lightning.pytorch as pl
import torch
from heliograph.bridges.lightning import from_lightning
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, Timer
from torch import nn
from torch.utils.data import DataLoader

STEPS, ROUNDS = 1000, 15
BATCHES = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(50)]


class Nothing(pl.Callback):
    """Has the two hooks of a batch, which do nothing."""

    def on_train_batch_start(self, *given: Any) -> None:
        pass

    def on_train_batch_end(self, *given: Any) -> None:
        pass


class Module(pl.LightningModule):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def here(*callbacks: Any) -> None:
    schedules = [h.LogSchedule(steps=200)] if callbacks else []
    plugins = [h.RNGCapture(), *schedules, *map(from_lightning, callbacks)]
    task = h.Supervised(nn.Linear(8, 1), nn.functional.mse_loss)
    h.Trainer(plugins, device="cpu").fit(
        task, BATCHES, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), steps=STEPS
    )


def here_with_logs() -> None:
    task = h.Supervised(nn.Linear(8, 1), nn.functional.mse_loss)
    h.Trainer([h.RNGCapture(), h.LogSchedule(steps=200)], device="cpu").fit(
        task, BATCHES, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), steps=STEPS
    )


def there(*callbacks: Any) -> None:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(max_steps=STEPS, accelerator="cpu", callbacks=list(callbacks), **quiet)
    trainer.fit(Module(), DataLoader(BATCHES, batch_size=None))  # type: ignore[arg-type]


def seconds(train: Callable[[], None]) -> float:
    """Return the time of this process, in which others of the machine do not count."""
    start = process_time()
    train()
    return process_time() - start


def main() -> None:
    """Print a table."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    cases: dict[str, Callable[[], None]] = {
        "our loop": here,
        "our loop, with a log every 200 steps": here_with_logs,
        "  and a callback without hooks": lambda: here(pl.Callback()),
        "  and two hooks per batch that do nothing": lambda: here(Nothing()),
        "  and Timer('01:00:00:00')": lambda: here(Timer("01:00:00:00")),
        "  and EarlyStopping('train_loss')": lambda: here(EarlyStopping("train_loss", patience=10**6, strict=False)),
        "  and LearningRateMonitor()": lambda: here(LearningRateMonitor()),
        "Lightning's loop": there,
        "  and two hooks per batch that do nothing there": lambda: there(Nothing()),
        "  and Timer('01:00:00:00') there": lambda: there(Timer("01:00:00:00")),
    }
    least = {name: min(seconds(train) for _ in range(2)) for name, train in cases.items()}
    for _ in range(ROUNDS):  # in turn, as a machine is faster at one time than at another
        least = {name: min(least[name], seconds(train)) for name, train in cases.items()}
    for name, value in least.items():
        print(f"{name:50} {value / STEPS * 1e6:8.1f} us")


if __name__ == "__main__":
    main()
