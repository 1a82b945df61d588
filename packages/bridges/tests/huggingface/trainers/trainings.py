"""A training by the Trainer of Hugging Face that takes no time: a linear model on a few rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from heliograph import Event, Lane, Plugin, Run, on
from heliograph.events import CATALOGUE
from heliograph_bridges.huggingface import HeliographCallback
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

Row = dict[str, Tensor]


class Linear(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layer(x)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


class Rows(Dataset[Row]):
    """So many rows, the same every time; `poison` puts a NaN into one of them."""

    def __init__(self, count: int, *, poison: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(count, 3, generator=generator), torch.randn(count, 1, generator=generator)
        if poison is not None:
            self.x[poison] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Row:
        return {"x": self.x[index], "labels": self.y[index]}


class Script(Trainer):
    """Measures what it is given instead of the loss of an evaluation.

    Args:
        losses: the losses of the evaluations, one after the other.
    """

    def __init__(self, *args: Any, losses: Iterable[float] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses = list(losses)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        output: Any = super().evaluation_loop(*args, **options)
        if self.losses:
            output.metrics["eval_loss"] = self.losses.pop(0)
        return output


class Both:
    """One trace of what comes, theirs and ours: `step_end` is theirs, `StepEnd` ours."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def of_theirs(self) -> TrainerCallback:
        """Return a callback that keeps the names of its calls."""
        names = self.names

        class Theirs(TrainerCallback):
            pass

        for name in [each for each in vars(TrainerCallback) if each.startswith("on_") and each != "on_init_end"]:

            def keep(self: Any, *args: Any, _name: str = name[3:], **kwargs: Any) -> None:
                names.append(_name)

            setattr(Theirs, name, keep)
        return Theirs()

    def of_ours(self) -> Plugin:
        """Return a plugin that keeps the names of its events."""
        names = self.names

        class Ours(Plugin):
            policy = "observer"

            @on(*CATALOGUE, lane=Lane.TRANSFORM, optional=True)
            def keep(self, run: Run, event: Event) -> None:
                names.append(type(event).__name__)

        return Ours()


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Return arguments for the CPU, without progress, reports and saves, unless they are asked for."""
    defaults: Mapping[str, Any] = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "save_strategy": "no",
        "logging_strategy": "no",
        "learning_rate": 0.05,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def make(
    folder: Path,
    *plugins: Any,
    rows: int = 8,
    callbacks: Iterable[Any] = (),
    losses: Iterable[float] = (),
    evaluation: Any = None,
    kind: type[Script] = Script,
    train: Dataset[Row] | None = None,
    **options: Any,
) -> tuple[Script, HeliographCallback]:
    """Return a Trainer with plugins, and their callback; `options` are those of `TrainingArguments`."""
    set_seed(0)
    callback = HeliographCallback(plugins)
    trainer = kind(
        model=Linear(),
        args=arguments(folder, **options),
        train_dataset=Rows(rows) if train is None else train,
        eval_dataset=Rows(4) if evaluation is None else evaluation,
        callbacks=[callback, *callbacks],
        losses=losses,
    )
    return trainer, callback
