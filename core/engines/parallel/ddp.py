"""The engine of several processes that hold the same model and average their gradients."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import isgeneratorfunction
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ....events.checks import check_number
from ...distributed.ranks.exchange import Collective, average_gradients
from ..options import PrecisionName
from .processes import Backend, ProcessEngine


class DDPEngine(ProcessEngine):
    """Several processes, each with the whole model; torch's `DistributedDataParallel` averages their gradients.

    The whole training step runs under it, and the task keeps its own modules: no name changes, in the task or in a
    checkpoint. A training step that yields several losses runs without it; the gradients are averaged just so.

    Args:
        backend: what carries gradients, `gloo` or `nccl`; by default nccl for GPUs.
        device: `cpu` or `cuda`; by default a GPU where there is one: the one whose number is the local rank. With a
            number, as in `cuda:0`, that very one.
        precision: as `DeviceEngine`.
        deterministic: as `DeviceEngine`.
        cudnn_benchmark: as `DeviceEngine`.
        sync_batch_norm: let batch norms share their statistics during training; on GPUs only.
        find_unused_parameters: look in every step for parameters that get no gradient; without it, they are an error.
        static_graph: the same parameters get gradients, in the same way, in every step; not with accumulation.
        bucket_cap_mb: how many MiB of gradients travel together; 25 by default.
        gradient_as_bucket_view: let gradients lie in what travels, which spares their copies.
        timeout: seconds after which a rank stops waiting for another, in any exchange.
        report_after: seconds in one exchange after which each rank logs where all of them are.
        grace: seconds that a run gets to end by itself once another rank has failed, before its process is ended.

    Raises:
        ValueError: as `ProcessEngine`; batch norm is to be shared on the CPU.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        device: str | torch.device | None = None,
        precision: PrecisionName = "fp32",
        deterministic: bool = False,
        cudnn_benchmark: bool = False,
        sync_batch_norm: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        timeout: float = 600.0,
        report_after: float = 60.0,
        grace: float = 30.0,
    ) -> None:
        super().__init__(
            backend,
            device=device,
            precision=precision,
            deterministic=deterministic,
            cudnn_benchmark=cudnn_benchmark,
            timeout=timeout,
            report_after=report_after,
            grace=grace,
        )
        if bucket_cap_mb is not None:
            check_number("bucket_cap_mb=", bucket_cap_mb, of="MiB", more_than=0, finite=False, or_else="None for 25")
        if sync_batch_norm and self.device.type == "cpu":
            raise ValueError("sync_batch_norm=True needs GPUs: torch's SyncBatchNorm does not compute on the CPU.")
        self.sync_batch_norm = sync_batch_norm
        self._options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._step: Callable[..., Any] | None = None
        self._wrapper: DistributedDataParallel | None = None
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        self._collective: Collective | None = None  # of backward passes
        self._buffers: list[dict[str, Tensor | None]] = []  # of each module
        self._names: dict[int, str] = {}
        self._converted: Converted = []
        self._by_name = False  # whether losses come one by one, each with the name of its optimizer
        self._holds = False  # whether gradients are not to be exchanged now
        self._owes = False  # whether there are gradients that were not exchanged
        self._is_armed = False  # whether the wrapper saw the forward pass of the next backward pass
        self._buffers_differ = False

    # Life.

    def set_up(
        self, task: Any, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        """Move modules to the device, and give all ranks the weights and buffers of rank 0."""
        super().set_up(task, modules, optimizers)
        self._parameters = list(self._modules.parameters())
        self._buffers = [each._buffers for each in self._modules.modules()]
        self._names = {
            id(value): f"{name}.{part}" for name, each in modules.items() for part, value in each.named_parameters()
        }
        self._by_name = bool(set(optimizers) - {"optimizer"})
        if self.group is None:
            return
        self._collective = self.group.collective("backward")
        if self.sync_batch_norm:
            self._converted = synchronize_batch_norm(modules.values(), self.group.tensors)

    def unwrap(self) -> None:
        """Drop torch's wrapper, and make batch norms what they were."""
        self._step = self._wrapper = self._collective = None
        self._parameters, self._trained, self._buffers, self._names = [], [], [], {}
        self._holds = self._owes = self._is_armed = self._buffers_differ = False
        separate_batch_norm(self._converted)
        self._converted = []

    # A step.

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a training step with its gradients averaged after it."""
        step = super().bind(forward)
        if self.group is None:
            return step
        if self._by_name or isgeneratorfunction(forward):
            return partial(self._run_with_buffers, step)
        self._step = step
        self._wrap()
        return self._run

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return the context of a micro-batch whose gradients are not yet exchanged.

        Raises:
            ValueError: the engine was made with `static_graph`.
        """
        if self._options["static_graph"] and self.group is not None:
            raise ValueError(
                "DDPEngine(static_graph=True) cannot accumulate: torch takes the micro-batches before the first step "
                "for a part of every step, and then averages no gradients any more. Leave static_graph out."
            )
        held, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = held

    @property
    def backward(self) -> Callable[[Tensor], None]:
        """What adds the gradients of a loss, averaged over all ranks."""
        return super().backward if self._is_alone else self._backward

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`, averaged over all ranks.

        Raises:
            RuntimeError: a parameter got no gradient, and that was not expected.
        """
        self._owes, armed, self._is_armed = self._holds, self._is_armed, False
        if self._collective is None or self._holds:
            self.precision.backward_scaled(loss, scale)
            return
        self._buffers_differ = True
        with self._collective:
            self.precision.backward_scaled(loss, scale)
            if armed:
                self._check_averaged()
        if not armed:  # of a forward pass in a loop of the user's own
            self._average()

    def exchange_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average over all ranks the gradients that `backward_for` left."""
        if self.group is not None:
            average_gradients(self.group, parameters, "the gradients")
            self._buffers_differ = True

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a step before which a window that ended before its last batch is averaged, if nobody looked at it."""
        step = super().bind_step(optimizer)
        if self.group is None:
            return step

        def averaged() -> object:
            if self._owes:
                self._average()
            return step()

        return averaged

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients true ones; a window that ended before its last batch is averaged only here."""
        if self._owes:
            self._average()
        super().unscale(optimizer)

    def _run(self, *args: Any) -> Any:
        """Run the training step, under torch's wrapper where its gradients are exchanged."""
        if [each.requires_grad for each in self._parameters] != self._trained:
            self._wrap()
        if self._wrapper is None or self._holds:
            assert self._step is not None
            return self._run_with_buffers(self._step, *args)
        self._is_armed = True
        return self._run_with_buffers(self._wrapper, *args)

    def _run_with_buffers(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run a training step; each window begins with the buffers of rank 0."""
        if self._buffers_differ:
            if any(self._buffers):  # a walk through all modules would cost every step of a model without buffers
                self.share_buffers()
            self._buffers_differ = False
        return step(*args)

    def _wrap(self) -> None:
        """Wrap the training step for the parameters that are trained now."""
        assert self.group is not None
        assert self._step is not None
        self._trained = [each.requires_grad for each in self._parameters]
        if self._wrapper is not None:
            self._wrapper = None
            gc.collect()  # it is in cycles
        if not any(self._trained):
            return
        whole = _WholeStep(self._modules, self._step)
        self._wrapper = DistributedDataParallel(
            whole, process_group=self.group.tensors, init_sync=False, **self._options
        )
        # torch rebuilds its buckets after the first step, in the order in which gradients came. Then a resumed
        # run would add up its first step in another order than an uninterrupted one. So it rebuilds before the first.
        self._wrapper.reducer._push_all_rebuilt_params()

    def _backward(self, loss: Tensor) -> None:
        self.backward_scaled(loss, 1.0)

    def _average(self) -> None:
        """Average all gradients, which the wrapper did not."""
        if self.group is not None:
            average_gradients(self.group, [each for each in self._parameters if each.requires_grad], "the gradients")
        self._owes = False

    def _check_averaged(self) -> None:
        """Raise where a parameter got no gradient: its bucket, and those after it, were never averaged."""
        assert self._wrapper is not None
        try:
            self._wrapper.reducer._check_reducer_finalized()
        except RuntimeError as error:
            trained = [each for each in self._wrapper.parameters() if each.requires_grad]
            found = re.search(r"did not receive grad for rank \d+:((?: \d+)+)", str(error))
            names = [self._names[id(trained[int(index)])] for index in found[1].split()] if found else []
            which = ", ".join(names) or "some parameters"
            error.add_note(
                f"heliograph: on rank {self.rank} no gradient came for {which}. If that is meant, pass "
                f"DDPEngine(find_unused_parameters=True), or freeze them with requires_grad_(False)."
            )
            raise


class _WholeStep(nn.Module):
    """A training step as a module, for torch's wrapper; it holds all modules, the last ones first.

    In that order gradients come, and torch fills its buckets.
    """

    def __init__(self, modules: nn.ModuleList, step: Callable[..., Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(reversed([part for each in modules for part in each.modules()]))
        self.step = step

    def forward(self, *args: Any) -> Any:
        return self.step(*args)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield none: torch would share them within a window, too."""
        return iter(())


GROUP = "process_group"  # where torch's SyncBatchNorm looks for it
Converted = list[tuple[nn.Module, type[nn.Module]]]


def synchronize_batch_norm(modules: Iterable[nn.Module], group: ProcessGroup) -> Converted:
    """Let the batch norms within modules share their statistics; return what `separate_batch_norm` needs.

    torch's own conversion puts new modules in the place of the old ones, and cannot do that for a module that is a
    batch norm itself. Here each stays the object that it was, with its parameters, buffers and hooks,
    and changes its class, as torch's lazy modules do.

    Args:
        modules: whatever may hold batch norms.
        group: with whom they share.
    """
    converted: Converted = []
    for root in modules:
        for module in root.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                converted.append((module, type(module)))
                module.__class__ = nn.SyncBatchNorm
                setattr(module, GROUP, group)
    return converted


def separate_batch_norm(converted: Converted) -> None:
    """Make batch norms what they were; what they have learned stays."""
    for module, kind in converted:
        module.__class__ = kind
        delattr(module, GROUP)
