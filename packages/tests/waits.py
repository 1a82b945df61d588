"""Refuses what waits for a device: on a GPU by torch's debug mode, on the CPU whatever would wait on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph_trackers import CSVLog
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READING = {
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__int__,
    Tensor.__array__,
    Tensor.cpu,
    Tensor.item,
    Tensor.nonzero,
    Tensor.numpy,
    Tensor.tolist,
    torch.equal,
    torch.nonzero,
}
IS_CPU = Tensor.is_cpu.__get__  # type: ignore[attr-defined]  # a descriptor


class WaitedError(AssertionError):
    """Something waits for the device."""


class NoReads(TorchFunctionMode):
    """Refuses functions of tensors that read values, which wait for the device where that is a GPU.

    No tensor is on the CPU for who asks, as sums of losses do, which are read there.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == IS_CPU:
            return False
        if function in READING:
            raise WaitedError(f"{function.__name__} reads a value")
        return function(*args, **(kwargs or {}))


class NoScalars(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotation there
    """Refuses operators that read a value, whoever calls them."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise WaitedError("a value is read")
        return operator(*args, **(kwargs or {}))


@contextmanager
def no_waits_on_a_gpu() -> Iterator[None]:
    """Let torch refuse within what waits for a GPU."""
    debug_mode("error")
    try:
        yield
    finally:
        debug_mode("default")


def waits_for_a_gpu(work: Callable[[], object]) -> int:
    """Return how often some work waits for a GPU."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        debug_mode("warn")
        try:
            work()
        finally:
            debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(each.message) for each in seen)


def keep_a_gpu_busy(seconds: float) -> None:
    """Give a GPU of 2 GHz a kernel that takes so long."""
    torch.cuda._sleep(int(seconds * 2e9))  # type: ignore[no-untyped-call]  # torch has no annotation here


def debug_mode(mode: str) -> None:
    """Set torch's debug mode; the first time it warns that it does not see every wait, which is an error in tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_reads() -> Iterator[None]:
    """Refuse within what would wait, were the tensors of the CPU on a GPU."""
    with NoReads(), NoScalars():  # type: ignore[no-untyped-call]  # nor here
        yield


def usual_plugins(folder: Path) -> list[Any]:
    """Return plugins of a usual training, none of which waits, on the CPU either."""
    return [
        h.EMA(0.99, validate=False),
        h.GradientClipping(1.0),
        h.GradientAccumulation(2),
        h.JsonlLog(folder / "log.jsonl"),
        CSVLog(folder / "log.csv"),
        h.FileLog(folder),
        h.TensorBoard(folder / "tensorboard"),
        h.ProgressBar(),
        h.EpochMeans(),
        h.EarlyStopping("train/loss", patience=9),
    ]


class NoWaits(h.Plugin):
    """Lets nothing wait in some of the steps.

    Args:
        refusing: makes the context that refuses.
        steps: from which one on, and until which.
    """

    def __init__(self, refusing: Callable[[], AbstractContextManager[None]], steps: range) -> None:
        self.refusing, self.steps = refusing, steps
        self.batches = 0
        self._entered = ExitStack()

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def watch(self, run: h.Run, event: h.BatchEnd) -> None:
        """Begin to refuse, or end it."""
        self._entered.close()
        if run.progress.steps in self.steps:
            self._entered.enter_context(self.refusing())
            self.batches += 1

    def close(self) -> None:
        """Allow it again."""
        self._entered.close()
