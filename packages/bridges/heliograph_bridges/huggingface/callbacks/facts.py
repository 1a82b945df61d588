"""What callbacks are given of a run: the model, the optimizer, the loaders, the length."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from heliograph import Run
from torch import nn

from ...absent import Absent


def keywords(run: Run, processing_class: Any) -> dict[str, Any]:
    """Return the keywords that every method of a callback is called with."""
    if run.report.is_replay:
        absent = {name: Absent(what) for name, what in (("model", "the model"), ("train_dataloader", "the loader"))}
        given: dict[str, Any] = {**absent, "lr_scheduler": None, "eval_dataloader": None}
    else:
        loaders = list(run.data.validation_loaders.values())
        given = {
            "model": model_of(run.modules),
            "lr_scheduler": run.scheduler,
            "train_dataloader": run.data.train_loader,
            "eval_dataloader": loaders[0] if loaders else None,
        }
    return {**given, "processing_class": processing_class, "optimizer": run.optimizer}


def model_of(modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return the one module of a task; several as one `nn.ModuleDict`, which shares their weights."""
    if len(modules) == 1:
        return next(iter(modules.values()))
    return nn.ModuleDict(dict(modules)) if modules else None


def accumulation(run: Run) -> int:
    """Return how many micro-batches make a step in the first epoch, as far as a plugin says so."""
    name = None if run.report.is_replay else run.plugins.declared("exclusive").get("accumulation")
    number = None if name is None else getattr(run.plugins[name], "number", None)
    return 1 if number is None else int(number(0))


def epochs(run: Run) -> int:
    """Return the length in whole epochs; 0 where it is not known."""
    if run.length.max_epochs is not None:
        return ceil(run.length.max_epochs)
    if run.length.planned_steps is None or run.length.batches_per_epoch is None:
        return 0
    return ceil(run.length.planned_steps / ceil(run.length.batches_per_epoch / accumulation(run)))


def rate_of(run: Run) -> Any:
    """Return the learning rate, which may be a tensor on a device; None outside of a training, and in a replay."""
    return None if run.optimizer is None or run.report.is_replay else run.optimizer.param_groups[0]["lr"]
