"""The same small training in `transformers.Trainer` and here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph.tests.kit import sgd
from heliograph_bridges.huggingface import from_huggingface
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

Call = tuple[Any, ...]
INTEGRATIONS: Any = import_module("transformers.integrations")  # whose trackers have no types


class Model(nn.Module):
    """A linear model that returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.linear(x)
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


class Task(h.Task):
    """The same model here."""

    def __init__(self) -> None:
        self.model = Model()

    def training_step(self, run: h.Run, batch: Any) -> Any:
        return self.model(*batch)["loss"]

    def validation_step(self, run: h.Run, batch: Any) -> Any:
        return self.model(*batch)["loss"]


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Return samples whose labels are noise, so that a training overfits."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.randn(1, generator=generator)} for _ in range(count)
    ]


def batches(count: int, seed: int = 0, size: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Return the same samples in batches."""
    rows = samples(count * size, seed)
    return [
        (torch.stack([row["x"] for row in part]), torch.stack([row["labels"] for row in part]))
        for part in (rows[start : start + size] for start in range(0, len(rows), size))
    ]


class Tracer(TrainerCallback):
    """Notes every call: the method, the step, the epoch, the names of what is logged or measured."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def note(self, method: str, state: TrainerState, values: dict[str, Any] | None = None) -> None:
        names = () if values is None else tuple(sorted(values))
        self.calls.append((method, state.global_step, round(float(state.epoch), 3), *names))


def _method(name: str) -> Any:
    def method(
        self: Tracer, args: Any, state: TrainerState, control: TrainerControl, **given: Any
    ) -> TrainerControl | None:
        self.note(name, state, given.get("logs") or given.get("metrics"))
        return None

    return method


METHODS = sorted(name for name in vars(TrainerCallback) if name.startswith("on_"))
for _name in METHODS:
    setattr(Tracer, _name, _method(_name))


def train_there(folder: Path, callbacks: Sequence[TrainerCallback], train: int = 5, **options: Any) -> Trainer:
    """Train in `transformers.Trainer` on so many batches of 2, in their order; return the trainer."""
    options = {"save_strategy": "no", "logging_strategy": "no", **options}
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        **options,
    )
    trainer = Trainer(Model(), args, train_dataset=samples(2 * train, 0), eval_dataset=samples(4, 1))
    for kind in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(kind)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    return trainer


def train_here(*plugins: Any, train: int = 5, rate: float = 0.1, **options: Any) -> h.RunResult:
    """Train the same here; callbacks among the plugins are bridged."""
    made = [from_huggingface(each) if isinstance(each, TrainerCallback) else each for each in plugins]
    trainer = h.Trainer(made, device="cpu")
    if "validation" in trainer.plugins.declared("asks"):
        options = {"validation": batches(2, 1), **options}
    return trainer.fit(Task(), batches(train), optimizer=sgd(rate), **options)
