"""The early end of a run, which failed, is out of memory, exits or was left by the user's own loop."""

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

from ..events.checks import error_text, place_of
from . import loop
from .context import RunContext
from .epoch_end import finish_abandoned_batch
from .result import RunResult
from .system.errors import add_run_note

NO_GRADIENT = "element 0 of tensors does not require grad"  # begins torch's error for a loss without a graph


def end_early(run: RunContext, error: BaseException | None) -> BaseException | None:
    """Return the error that ends a run. Without one, finish the run and return the error of that, if any."""
    if error is None:
        return _finish_early(run)
    if isinstance(error, RuntimeError) and error_text(error).startswith(NO_GRADIENT):
        _explain_loss(run, error)
    if isinstance(error, MemoryError | RuntimeError):
        _explain_out_of_memory(run, error)
    return _unwrap_stop_iteration(error)


def _explain_loss(run: RunContext, error: RuntimeError) -> None:
    loss = run.loss
    if run.phase != "train" or loss is None or loss.requires_grad:
        return
    if any(parameter.requires_grad for module in run.modules.values() for parameter in module.parameters()):
        why = "depends on no parameter: return it as computed, without detach(), item(), no_grad() or a new tensor"
    else:
        why = "can train nothing because all parameters of the task are frozen: call requires_grad_(True) on some"
    error.add_note(f"heliograph: the loss that {type(run.task).__name__}.training_step returned {why}")


def leave_group(run: RunContext, error: BaseException, place: str, failures: list[Any]) -> BaseException:
    """Leave the group at once after an error that not all ranks share; inform the other ranks first.

    Args:
        run: the run.
        error: the error.
        place: where in the run it occurred.
        failures: gets the error of leaving, if any, as (owner, event, error).

    Returns:
        The cause, which is the error itself or a failure of another rank.
    """
    if run.report.has_left_group or error is run.control.agreed:
        return error
    run.report.has_left_group = True
    cause, watch = error, run.engine.watch
    try:
        if watch is not None:
            cause = watch.explain(error)
            if cause is error:
                watch.announce(error, place)
            from .distributed.collective_errors import release_groups

            release_groups(error)
        try:
            for act in run.hooks.leaving:
                act()
        finally:
            run.engine.abandon()
    except BaseException as failure:  # noqa: BLE001  # reported with the errors of closing
        failures.append(("the run", "leaving the group", failure))
    return cause


def note_newest_checkpoint(run: RunContext, error: BaseException) -> None:
    if run.settings.train and run.checkpoints.last is not None:
        add_run_note(error, f"the training was complete; its newest checkpoint is {run.checkpoints.last}")


def system_exit(status: int, result: RunResult) -> SystemExit:
    # The notes and warnings go with the exit because the caller gets no result.
    error = SystemExit(status)
    for text in (*result.notes, *result.warnings):
        add_run_note(error, text)
    return error


def _unwrap_stop_iteration(error: BaseException) -> BaseException:
    # PEP 479: a StopIteration of user code that crosses one of our generators arrives wrapped in a RuntimeError.
    cause = error.__cause__
    if isinstance(cause, StopIteration) and error_text(error) == "generator raised StopIteration":
        return cause
    return error


def _finish_early(run: RunContext) -> BaseException | None:
    try:
        finish_abandoned_batch(run)
        if run.control.is_rolling_back:
            run.control.discard_epoch()
        run.control.stop("the loop over the epochs was left", by="the caller")
        run.control.agree()
        run.control.decide()
        if run.report.started:
            loop.finish(run)
    except BaseException as error:  # noqa: BLE001  # raised by close_run
        return error
    return None


def _explain_out_of_memory(run: RunContext, error: BaseException) -> None:
    from .data.batch_size import is_out_of_memory  # imported after an error

    if is_out_of_memory(error):
        error.add_note("\n".join(["heliograph: out of memory", *(f"  {line}" for line in _memory_lines(run))]))


def _memory_lines(run: RunContext) -> Iterator[str]:
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
