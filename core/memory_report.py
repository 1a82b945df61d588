"""The report of a run that is out of memory: its batch, the sizes of model and optimizer, and what to try."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..events.checks import place_of
from .context import RunContext


def explain_out_of_memory(run: RunContext, error: BaseException) -> None:
    """Add a note with the report to an error that means that there is no more memory."""
    from .data.batch_size import is_out_of_memory  # imported after an error

    if is_out_of_memory(error):
        error.add_note("\n".join(["heliograph: out of memory", *(f"  {line}" for line in _lines(run))]))


def _lines(run: RunContext) -> Iterator[str]:
    yield f"place: {place_of(run)}"
    if run.batch is not None:
        yield f"batch: {', '.join(_shapes(run.batch)) or type(run.batch).__name__}"
    parameters = {id(value): value for module in run.modules.values() for value in module.parameters()}.values()
    gradients = [value.grad for value in parameters if value.grad is not None]
    states = [value for optimizer in run.optimizers.values() for value in tree_leaves(dict(optimizer.state))]
    sizes = {"parameters": parameters, "gradients": gradients, "optimizer": states}
    yield ", ".join(f"{name}: {_megabytes(values):,.1f} MB" for name, values in sizes.items())
    device = torch.device(str(run.engine.device))
    if device.type == "cuda":
        yield from _cuda_lines(device)
    size = run.data.batch_size
    if run.phase == "train" and size is not None and size > 1:
        yield (
            f"to try: batches of {size // 2} with GradientAccumulation(2), which heliograph.tuning.find_batch_size or "
            f"find_executable_batch_size would try next; now {size}"
        )


def _cuda_lines(device: torch.device) -> Iterator[str]:
    free, total = torch.cuda.mem_get_info(device)
    used = {"allocated": torch.cuda.max_memory_allocated(device), "free": free, "total": total}
    yield ", ".join(f"{name}: {value / 1e6:,.1f} MB" for name, value in used.items())
    path = Path(gettempdir(), f"out-of-memory-{os.getpid()}.pickle")
    with path.open("wb") as file:
        pickle.dump(torch.cuda.memory_snapshot(), file)  # type: ignore[no-untyped-call]  # torch has no annotation here
    yield f"snapshot of the memory: {path}"


def _shapes(batch: Any) -> list[str]:
    if isinstance(batch, Mapping):
        return [f"{name} {shape}" for name, part in batch.items() for shape in _shapes(part)]
    return [
        f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for value in tree_leaves(batch)
        if isinstance(value, Tensor)
    ]


def _megabytes(values: Iterable[Any]) -> float:
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) / 1e6
