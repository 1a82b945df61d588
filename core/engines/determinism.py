"""Which of torch's algorithms a run uses: the same in every run, or the fastest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPRODUCIBLE = (":4096:8", ":16:8")


class Determinism:
    """Settings of torch that hold during a run.

    Args:
        deterministic: use deterministic algorithms only; an operation that has none raises.
        cudnn_benchmark: let cuDNN time its algorithms and take the fastest for each shape; not in a validation or test,
            whose shapes differ.

    Raises:
        ValueError: both are asked for, which contradict each other.
    """

    def __init__(self, *, deterministic: bool = False, cudnn_benchmark: bool = False) -> None:
        if deterministic and cudnn_benchmark:
            raise ValueError(
                "deterministic=True and cudnn_benchmark=True contradict each other: which algorithm is the fastest "
                "differs from run to run. Give one of them."
            )
        self.deterministic, self.cudnn_benchmark = deterministic, cudnn_benchmark

    def prepare(self, device: torch.device) -> None:
        """Set what cuBLAS needs in order to be deterministic; it reads that once per process, so this stays set.

        Raises:
            ValueError: it is set to something else, or it is too late.
        """
        if not self.deterministic or device.type != "cuda":
            return
        value, how = os.environ.get(WORKSPACE), f"Set {WORKSPACE}={REPRODUCIBLE[0]} in the environment"
        if value is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no annotation here
            raise ValueError(
                f"deterministic=True comes too late for cuBLAS: the GPU is in use already. {how}, or make the Trainer "
                f"before anything uses the GPU."
            )
        if value not in (None, *REPRODUCIBLE):
            raise ValueError(
                f"deterministic=True does not work with {WORKSPACE}={value!r}, which is set: cuBLAS is deterministic "
                f"with {' or '.join(REPRODUCIBLE)}. {how}, or leave it unset."
            )
        os.environ[WORKSPACE] = value or REPRODUCIBLE[0]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Set them within this context, and restore the former ones; may be entered within itself."""
        if not self.deterministic and not self.cudnn_benchmark:
            yield
            return
        cudnn = torch.backends.cudnn
        before = (cudnn.deterministic, cudnn.benchmark)
        strict = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        try:
            cudnn.benchmark = self.cudnn_benchmark
            if self.deterministic:
                cudnn.deterministic = True
                torch.use_deterministic_algorithms(True)
            yield
        finally:
            cudnn.deterministic, cudnn.benchmark = before
            if self.deterministic:
                torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Spare an evaluation the timing of algorithms."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before and not self.cudnn_benchmark
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before
