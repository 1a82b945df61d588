"""Engines of several processes, and the one whose processes have the same model and average gradients."""

from __future__ import annotations

import gc
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import isgeneratorfunction
from typing import Any, Literal, NoReturn, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...events.checks import check_number
from ...events.run import Reduction
from ..distributed.collective_errors import release_groups
from ..distributed.exchange import Collective, average_gradients, broadcast_tensors
from ..distributed.group import Board, Group
from ..distributed.membership import Membership, membership
from ..distributed.shared_control import check_equal_on_ranks
from ..distributed.watch import Limits, Watch
from .contract import Modules, Optimizers
from .device import DeviceEngine, parse_device
from .options import ComputeOptions


class ProcessEngine(DeviceEngine, ABC):
    """One of several processes, each with its own device.

    torchrun, `heliograph.launch` or the user sets the place of this process in the environment. Alone, it behaves like
    `DeviceEngine`. The group is joined for each run and left after it; within `with engine.process():`, several runs
    stay in one group. A process group that was initialized before is used and kept.

    Args:
        backend: the backend for gradients, `gloo` or `nccl`; by default nccl for GPUs.
        device: `cpu` or `cuda`; by default a GPU if there is one, namely the one whose number is the local rank. With a
            number, as in `cuda:0`, exactly that one.
        timeout: seconds after which a rank stops waiting for another, in any exchange.
        report_after: seconds in one exchange after which each rank logs where all of them are.
        grace: seconds that a run has to end after another rank has failed, before its process is ended.
        options: `precision`, `deterministic` and `cudnn_benchmark`, as `DeviceEngine`.

    Raises:
        ValueError: as `DeviceEngine`; the environment is contradictory; the backend is not available.
    """

    joins_alone = False  # whether a single process needs a group of its own

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        device: str | torch.device | None = None,
        timeout: float = 600.0,
        report_after: float = 60.0,
        grace: float = 30.0,
        **options: Unpack[ComputeOptions],
    ) -> None:
        member = membership()
        super().__init__(local_device(device, member), **options)
        for name, value in (("timeout", timeout), ("report_after", report_after), ("grace", grace)):
            check_number(f"{name}=", value, of="seconds", more_than=0, finite=False)
        self.rank, self.local_rank, self.world_size = member.rank, member.local_rank, member.world_size
        self.is_main, self.is_local_main = member.rank == 0, member.local_rank == 0
        if backend not in (None, "gloo", "nccl") or (backend == "nccl" and self.device.type != "cuda"):
            raise ValueError(f"backend= is 'gloo', or 'nccl' on GPUs; got {backend!r} on device='{self.device.type}'.")
        self.backend: Backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        self.timeout = float(timeout)
        self.limits = Limits(float(report_after), float(grace))
        self.group: Group | None = None
        self._contexts = 0
        self._modules: nn.ModuleList = nn.ModuleList()

    # Life.

    @contextmanager
    def process(self) -> Iterator[None]:
        """Return a context in which this process belongs to its group; entering it again within itself does nothing.

        Raises:
            TimeoutError: some ranks did not arrive; the error names them.
            RuntimeError: the current process group of torch is not that of the engine.
        """
        if self._contexts:
            gc.collect()  # ends the contexts of runs that were never entered, on all ranks at the same place
        with self.settings():
            if self.group is None and (self.world_size > 1 or self.joins_alone):
                self._join()
            self._contexts += 1
            is_garbage = False
            try:
                yield
                if self._contexts == 1 and self.group is not None:
                    self.group.barrier()  # else the store or a connection could close while another rank reads it
            except GeneratorExit:  # garbage collection, in any thread: the group cannot be left here
                is_garbage = True
                raise
            except BaseException as error:
                cause = self._fail(error)
                if cause is error:
                    raise
                raise cause  # noqa: B904  # the error is its cause already
            finally:
                self._contexts -= 1
                if not self._contexts and not is_garbage:
                    self._leave()

    def set_up(self, task: Any, modules: Modules, optimizers: Optimizers) -> None:
        """Move modules to the device, and give all ranks the weights and buffers of rank 0.

        Raises:
            ValueError: the modules of two ranks differ in more than their values.
        """
        super().set_up(task, modules, optimizers)
        self._modules = nn.ModuleList(modules.values())
        self._check_same(modules)
        if self.group is not None:
            state = [*self._modules.parameters(), *self._modules.buffers()]
            broadcast_tensors(self.group, (tensor.detach() for tensor in state), "the first weights")

    def tear_down(self) -> None:
        """Remove the wrappers; all ranks then have the buffers of rank 0."""
        self.share_buffers()
        self._drop_wrappers()

    def abandon(self) -> None:
        """Remove the wrappers and leave the group at once."""
        self._drop_wrappers()
        self._leave(aborting=True)

    @abstractmethod
    def unwrap(self) -> None:
        """Remove the wrappers, and keep no reference to the group."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context of a validation or test, after giving all ranks the buffers of rank 0."""
        self.share_buffers()
        return super().evaluating()

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, such as the statistics of batch norm."""
        if self.group is not None:
            broadcast_tensors(self.group, self._modules.buffers(), "the buffers")

    # Exchange.

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        return super().reduce(value, how) if self._is_alone else self._joined("reduce").reduce(value, how)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return super().gather(tensor) if self._is_alone else self._joined("gather").gather(tensor)

    def gather_objects(self, value: Any) -> list[Any]:
        return super().gather_objects(value) if self._is_alone else self._joined("gather_objects").gather_objects(value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return (
            super().broadcast(value, source) if self._is_alone else self._joined("broadcast").broadcast(value, source)
        )

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if not self._is_alone:
            self._joined("barrier").barrier()

    @property
    def waited_seconds(self) -> float:
        """The time of this process in collectives so far, except those in torch's backward passes."""
        return 0.0 if self.group is None else self.group.waited_seconds

    def vote(self, values: Sequence[float]) -> list[float]:
        return super().vote(values) if self._is_alone else self._joined("vote").vote(values)

    @property
    def post_summary(self) -> Callable[[bytes], None]:
        """Posts a summary of this rank without waiting for the other ranks; at most two may be unread."""
        return self._joined("post_summary").post_summary

    @property
    def read_summaries(self) -> Callable[[], list[list[bytes]]]:
        """Returns the summaries of all ranks, by rank, for each one that was posted and not read."""
        return self._joined("read_summaries").read_summaries

    def exchanging(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which torch exchanges something on its own: the watch reports it as a collective."""
        return nullcontext() if self.group is None else self.group.collective(name)

    def refusing(self, plugin: str, event: str) -> AbstractContextManager[None]:
        """Return a context that refuses collectives while a handler runs on some ranks only."""
        return nullcontext() if self.group is None else self.group.refusing(plugin, event)

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which the watchdog does not end this process."""
        return nullcontext() if self.watch is None else self.watch.writing()

    @property
    def backward(self) -> Callable[[Tensor], None]:
        """Adds the gradients of a loss and, outside of `no_sync`, averages them over all ranks."""
        return super().backward if self.group is None else lambda loss: self.backward_scaled(loss, 1.0)

    @property
    def _is_alone(self) -> bool:
        return self.world_size == 1

    def _joined(self, name: str) -> Group:
        if self.group is None:
            raise RuntimeError(
                f"{type(self).__name__}.{name} was called outside of its group of {self.world_size} processes: call it "
                f"within a run, or within `with engine.process():`."
            )
        return self.group

    def refuse_several_losses(self, task: Any, optimizers: Collection[str]) -> None:
        """Raise ValueError if a training step yields several losses, each with the name of its optimizer."""
        if set(optimizers) - {"optimizer"} or isgeneratorfunction(getattr(task, "training_step", None)):
            self.refuse_several()

    def refuse_several(self) -> NoReturn:
        """Raise ValueError: this engine does not support several losses."""
        raise ValueError(
            f"{type(self).__name__} takes one loss per step, but the training step yields several, whose gradients are "
            f"exchanged one by one. Use DDPEngine, or DeviceEngine in one process."
        )

    # Joining and leaving.

    def _join(self) -> None:
        member = membership()
        if (member.rank, member.world_size) != (self.rank, self.world_size):
            raise RuntimeError(
                f"{type(self).__name__} was created as rank {self.rank} of {self.world_size}, but this process is now "
                f"rank {member.rank} of {member.world_size}: create the engine after the process group is initialized."
            )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        group = self.group = Group(member, self.backend, self.device, self.timeout)
        if self.world_size > 1:
            watch = self.watch = Watch(
                group.store,
                self.rank,
                self.world_size,
                waiting=lambda: group.waiting_in,
                host=None if member.agent_store else 0,
                limits=self.limits,
                abort=group.tensors.abort if self.backend == "nccl" else None,
            )
            if isinstance(group.rounds, Board):
                group.rounds.has_failed = lambda: watch.failure() is not None

    def _fail(self, error: BaseException) -> BaseException:
        # Reports an error that no run has reported, unless another rank caused it.
        watch = self.watch
        if watch is None:
            return error
        cause = watch.explain(error)
        if cause is error:
            watch.announce(error, "outside of a run")
        release_groups(error)
        self.abandon()
        return cause

    def _check_same(self, modules: Modules) -> None:
        # All ranks must have equal modules, except for their values.
        if self.group is None:
            return
        local_parts = [
            f"the {kind} {name}.{part} of {value.dtype} {list(value.shape)}"
            for name, module in modules.items()
            for kind, parts in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
            for part, value in parts
        ]
        of_ranks = self.group.gather_objects(local_parts)
        check_equal_on_ranks("The task's modules are", of_ranks, "Build the same model everywhere.")

    def _drop_wrappers(self) -> None:
        self.unwrap()
        self._modules = nn.ModuleList()
        gc.collect()  # the wrapper is in reference cycles; if it outlives its group, the process may abort at exit

    def _leave(self, *, aborting: bool = False) -> None:
        group, watch = self.group, self.watch
        self.group = self.watch = None
        if watch is not None:
            watch.close()
        if group is not None:
            group.leave(aborting=aborting)


Backend = Literal["gloo", "nccl"]


def local_device(device: str | torch.device | None, member: Membership) -> torch.device:
    """Return the device of this process among those of its machine.

    Args:
        device: the requested device; None for a GPU if there is one.
        member: this process's place.

    Raises:
        ValueError: several processes cannot compute there, or there are too few GPUs.
    """
    chosen = parse_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"Several processes need device='cpu' or 'cuda', got device={device!r}.")
    if chosen.type == "cpu" or chosen.index is not None:
        return chosen
    count = torch.cuda.device_count()
    if member.local_rank >= count:
        raise ValueError(
            f"Local rank {member.local_rank} has no GPU: torch sees {count} on this machine. Start at most one process "
            f"per GPU; or pass device='cuda:0' if each process sees only its own GPU, or 'cpu'."
        )
    return torch.device("cuda", member.local_rank)


class ProcessOptions(ComputeOptions, total=False):
    """Options of engines with several processes: `ComputeOptions`, and the options of `ProcessEngine`."""

    device: str | torch.device | None
    timeout: float
    report_after: float
    grace: float


class DDPEngine(ProcessEngine):
    """Several processes, each with the complete model; torch's `DistributedDataParallel` averages their gradients.

    The complete training step runs under it, and the task keeps its own modules: no name changes, in the task or in a
    checkpoint. A training step that yields several losses runs without it; its gradients are averaged in the same way.
    To share the statistics of batch norms, convert the model with `torch.nn.SyncBatchNorm.convert_sync_batchnorm`.

    Args:
        backend: as `ProcessEngine`.
        find_unused_parameters: look in every step for parameters without a gradient; otherwise they are an error.
        static_graph: the same parameters get gradients, in the same way, in every step; not with accumulation.
        bucket_cap_mb: MiB of gradients in one exchange; 25 by default.
        gradient_as_bucket_view: use the exchange buffers as gradients, which avoids copies.
        options: `device`, `precision`, `deterministic`, `cudnn_benchmark`, `timeout`, `report_after` and `grace`, as
            `ProcessEngine`.

    Raises:
        ValueError: as `ProcessEngine`.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        **options: Unpack[ProcessOptions],
    ) -> None:
        super().__init__(backend, **options)
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
        self._by_name = False  # whether the step yields losses with the names of optimizers
        self._holds = False  # whether the exchange of gradients is suspended
        self._owes = False  # whether some gradients were not exchanged yet
        self._is_armed = False  # whether the wrapper saw the forward pass of the next backward pass
        self._buffers_differ = False

    # Life.

    def set_up(self, task: Any, modules: Modules, optimizers: Optimizers) -> None:
        super().set_up(task, modules, optimizers)
        self._parameters = list(self._modules.parameters())
        self._buffers = [module._buffers for module in self._modules.modules()]
        self._names = {
            id(value): f"{name}.{part}" for name, module in modules.items() for part, value in module.named_parameters()
        }
        self._by_name = bool(set(optimizers) - {"optimizer"})
        if self.group is not None:
            self._collective = self.group.collective("backward")

    def unwrap(self) -> None:
        """Remove torch's wrapper."""
        self._step = self._wrapper = self._collective = None
        self._parameters, self._trained, self._buffers, self._names = [], [], [], {}
        self._holds = self._owes = self._is_armed = self._buffers_differ = False

    # A step.

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a training step whose gradients are averaged after it."""
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
        """Return the context of a micro-batch whose gradients are not exchanged yet.

        Raises:
            ValueError: the engine has `static_graph`.
        """
        if self._options["static_graph"] and self.group is not None:
            raise ValueError(
                "DDPEngine(static_graph=True) does not support accumulation: torch would stop averaging gradients "
                "after the first step. Leave static_graph out."
            )
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`, averaged over all ranks.

        Raises:
            RuntimeError: a parameter got no gradient unexpectedly.
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
        if not armed:  # the forward pass ran in the user's own loop
            self._average()

    def exchange_gradients(self, parameters: Sequence[Tensor]) -> None:
        if self.group is not None:
            average_gradients(self.group, parameters, "the gradients")
            self._buffers_differ = True

    def bind_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Return a step that first averages the gradients of a window that ended early, unless that is done."""
        step = super().bind_step(optimizer)
        if self.group is None:
            return step

        def averaged() -> object:
            if self._owes:
                self._average()
            return step()

        return averaged

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the loss scale from the gradients; average those of a window that ended early."""
        if self._owes:
            self._average()
        super().unscale(optimizer)

    def _run(self, *args: Any) -> Any:
        # torch's wrapper is needed only if the gradients are exchanged.
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            self._wrap()
        if self._wrapper is None or self._holds:
            assert self._step is not None
            return self._run_with_buffers(self._step, *args)
        self._is_armed = True
        return self._run_with_buffers(self._wrapper, *args)

    def _run_with_buffers(self, step: Callable[..., Any], *args: Any) -> Any:
        # Each window begins with the buffers of rank 0.
        if self._buffers_differ:
            if any(self._buffers):  # saves a walk through all modules for a model without buffers
                self.share_buffers()
            self._buffers_differ = False
        return step(*args)

    def _wrap(self) -> None:
        assert self.group is not None
        assert self._step is not None
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        if self._wrapper is not None:
            self._wrapper = None
            gc.collect()  # it is in reference cycles
        if not any(self._trained):
            return
        module = _StepModule(self._modules, self._step)
        self._wrapper = DistributedDataParallel(
            module, process_group=self.group.tensors, init_sync=False, **self._options
        )
        # torch rebuilds its buckets after the first step, in the order of the gradients. The first step of a resumed
        # run would then sum in another order than in an uninterrupted run, so the buckets are rebuilt before it.
        self._wrapper.reducer._push_all_rebuilt_params()

    def _average(self) -> None:
        # For gradients that torch's wrapper did not exchange.
        if self.group is not None:
            average_gradients(
                self.group, [parameter for parameter in self._parameters if parameter.requires_grad], "the gradients"
            )
        self._owes = False

    def _check_averaged(self) -> None:
        # If a parameter got no gradient, its bucket and those after it were not averaged.
        assert self._wrapper is not None
        try:
            self._wrapper.reducer._check_reducer_finalized()
        except RuntimeError as error:
            trained = [parameter for parameter in self._wrapper.parameters() if parameter.requires_grad]
            match = re.search(r"did not receive grad for rank \d+:((?: \d+)+)", str(error))
            names = [self._names[id(trained[int(index)])] for index in match[1].split()] if match else []
            which = ", ".join(names) or "some parameters"
            error.add_note(
                f"heliograph: rank {self.rank} has no gradient for {which}. If this is intended, pass "
                f"DDPEngine(find_unused_parameters=True), or freeze them with requires_grad_(False)."
            )
            raise


class _StepModule(nn.Module):
    """A training step as a module for torch's wrapper, with all modules in reverse order.

    Gradients arrive in that order, in which torch fills its buckets.
    """

    def __init__(self, modules: nn.ModuleList, step: Callable[..., Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(reversed([part for module in modules for part in module.modules()]))
        self.step = step

    def forward(self, *args: Any) -> Any:
        return self.step(*args)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        # None, because torch would share them within a window, too.
        return iter(())
