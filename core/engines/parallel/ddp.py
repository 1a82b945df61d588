"""The engine of several processes that hold the same model and average their gradients."""

from __future__ import annotations

import gc
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from inspect import isgeneratorfunction
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ....events.checks import check_number
from ....events.engine import Reduction
from ...distributed.ranks.exchange import Collective, Exchange, average_gradients, broadcast_tensors
from ...distributed.ranks.failure import release_groups
from ...distributed.ranks.group import Board, Group
from ...distributed.ranks.membership import Membership, membership
from ...distributed.ranks.shared_control import check_alike
from ...distributed.ranks.watch import Limits, Watch
from ..device import DeviceEngine, parse_device
from ..options import PrecisionName


class ProcessEngine(DeviceEngine, ABC):
    """One of several processes, each with a device of its own.

    Which of them this is, torchrun, `heliograph.launch` or the user says in the environment; alone, it is as
    `DeviceEngine`. The group is joined for each run, and left after it; code that holds `with engine.process():` around
    several runs stays in it. A process group that was initialised before is used, and left as it is.

    Args:
        backend: what carries gradients, `gloo` or `nccl`; by default nccl for GPUs.
        device: `cpu` or `cuda`; by default a GPU where there is one: the one whose number is the local rank. With a
            number, as in `cuda:0`, that very one.
        precision: as `DeviceEngine`.
        deterministic: as `DeviceEngine`.
        cudnn_benchmark: as `DeviceEngine`.
        timeout: seconds after which a rank stops waiting for another, in any exchange.
        report_after: seconds in one exchange after which each rank logs where all of them are.
        grace: seconds that a run gets to end by itself once another rank has failed, before its process is ended.

    Raises:
        ValueError: as `DeviceEngine`; the environment contradicts itself; the backend is not to be had.
    """

    joins_alone = False  # whether a single process needs a group of its own

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        device: str | torch.device | None = None,
        precision: PrecisionName = "fp32",
        deterministic: bool = False,
        cudnn_benchmark: bool = False,
        timeout: float = 600.0,
        report_after: float = 60.0,
        grace: float = 30.0,
    ) -> None:
        member = membership()
        super().__init__(
            own_device(device, member),
            precision=precision,
            deterministic=deterministic,
            cudnn_benchmark=cudnn_benchmark,
        )
        for name, value in (("timeout", timeout), ("report_after", report_after), ("grace", grace)):
            check_number(f"{name}=", value, of="seconds", more_than=0, finite=False)
        self.rank, self.local_rank, self.world_size = member.rank, member.local_rank, member.world_size
        self.is_main, self.is_local_main = member.rank == 0, member.local_rank == 0
        self.backend = check_backend(backend, self.device)
        self.timeout = float(timeout)
        self.limits = Limits(float(report_after), float(grace))
        self.group: Group | None = None
        self._contexts = 0
        self._modules: nn.ModuleList = nn.ModuleList()

    # Life.

    @contextmanager
    def process(self) -> Iterator[None]:
        """Return a context in which this process belongs to its group; entered again within itself, it does nothing.

        Raises:
            TimeoutError: not every rank came; says which.
            RuntimeError: the process group of torch that is there now is another than that of the engine.
        """
        if self._contexts:
            gc.collect()  # runs that were never entered: their contexts end as garbage, on all ranks here at the latest
        with self.settings():
            if self.group is None and (self.world_size > 1 or self.joins_alone):
                self._join()
            self._contexts += 1
            is_garbage = False
            try:
                yield
                if self._contexts == 1 and self.group is not None:
                    self.group.barrier()  # nobody takes the store or a connection away that another still reads
            except GeneratorExit:  # anywhere, in any thread: no place to leave a group
                is_garbage = True
                raise
            except BaseException as error:
                cause = self._fail(error)
                if cause is error:
                    raise
                raise cause  # noqa: B904  # its cause is the error already
            finally:
                self._contexts -= 1
                if not self._contexts and not is_garbage:
                    self._leave()

    def set_up(
        self, task: Any, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        """Move modules to the device, and give all ranks the weights and buffers of rank 0.

        Raises:
            ValueError: the modules of two ranks differ in more than the values.
        """
        super().set_up(task, modules, optimizers)
        self._modules = nn.ModuleList(modules.values())
        self._check_same(modules)
        if self.group is not None:
            state = [*self._modules.parameters(), *self._modules.buffers()]
            broadcast_tensors(self.group, (each.detach() for each in state), "the first weights")

    def tear_down(self) -> None:
        """Take the wrappers off; all ranks have the buffers of rank 0 then."""
        self.share_buffers()
        self._drop_wrappers()

    def abandon(self) -> None:
        """Take the wrappers off and leave the group at once."""
        self._drop_wrappers()
        self._leave(aborting=True)

    @abstractmethod
    def unwrap(self) -> None:
        """Take the wrappers off, and keep nothing that refers to the group."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context of a validation or test; the buffers are made those of rank 0 before."""
        self.share_buffers()
        return super().evaluating()

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, such as the statistics of batch norm."""
        if self.group is not None:
            broadcast_tensors(self.group, self._modules.buffers(), "the buffers")

    # Exchange.

    def reduce(self, value: Any, how: Reduction = "mean") -> Any:
        """Return a new tensor, or a number, reduced over all ranks."""
        return super().reduce(value, how) if self._is_alone else self._joined("reduce").reduce(value, how)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank."""
        return super().gather(tensor) if self._is_alone else self._joined("gather").gather(tensor)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, by rank."""
        return super().gather_objects(value) if self._is_alone else self._joined("gather_objects").gather_objects(value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the tensor or object of one rank on all ranks."""
        return (
            super().broadcast(value, source) if self._is_alone else self._joined("broadcast").broadcast(value, source)
        )

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if not self._is_alone:
            self._joined("barrier").barrier()

    @property
    def waited_seconds(self) -> float:
        """How long this process was in collectives so far; of those in torch's backward passes nothing is known."""
        return 0.0 if self.group is None else self.group.waited_seconds

    def vote(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        return super().vote(values) if self._is_alone else self._joined("vote").vote(values)

    @property
    def post_summary(self) -> Callable[[bytes], None]:
        """What posts a summary of this rank's, without a wait for those of the others; at most two may be unread."""
        return self._joined("post_summary").post_summary

    @property
    def read_summaries(self) -> Callable[[], list[list[bytes]]]:
        """What returns those of all ranks, by rank, for each that was posted and not read."""
        return self._joined("read_summaries").read_summaries

    def exchanging(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which torch exchanges something by itself: the watch reports it as a collective."""
        return nullcontext() if self.group is None else self.group.collective(name)

    def refusing(self, plugin: str, event: str) -> AbstractContextManager[None]:
        """Return a context that refuses collectives, where only some ranks are."""
        return nullcontext() if self.group is None else self.group.refusing(plugin, event)

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which the watchdog does not end this process."""
        return nullcontext() if self.watch is None else self.watch.writing()

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
        """Raise ValueError: several losses are for another engine."""
        raise ValueError(
            f"{type(self).__name__} takes one loss per step, the training step yields several: their gradients would "
            f"have to be exchanged one by one. DDPEngine does that, and DeviceEngine in one process."
        )

    # Joining and leaving.

    def _join(self) -> None:
        member = membership()
        if (member.rank, member.world_size) != (self.rank, self.world_size):
            raise RuntimeError(
                f"{type(self).__name__} was made as rank {self.rank} of {self.world_size}, but this process is rank "
                f"{member.rank} of {member.world_size} now: make the engine after the process group was initialised."
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
        """Report an error that no run has reported to the others, or find which of theirs caused it; leave."""
        watch = self.watch
        if watch is None:
            return error
        cause = watch.explain(error)
        if cause is error:
            watch.announce(error, "outside of a run")
        release_groups(error)
        self.abandon()
        return cause

    def _check_same(self, modules: Mapping[str, nn.Module]) -> None:
        if self.group is not None:
            check_same(self.group, modules)

    def _drop_wrappers(self) -> None:
        self.unwrap()
        self._modules = nn.ModuleList()
        gc.collect()  # a wrapper is in cycles; alive when its group is left, it may abort the process at its exit

    def _leave(self, *, aborting: bool = False) -> None:
        group, watch = self.group, self.watch
        self.group = self.watch = None
        if watch is not None:
            watch.close()
        if group is not None:
            group.leave(aborting=aborting)


Backend = Literal["gloo", "nccl"]


def own_device(device: str | torch.device | None, member: Membership) -> torch.device:
    """Return this process's device among those of its machine.

    Args:
        device: what was asked for; None for a GPU where there is one.
        member: this process's place.

    Raises:
        ValueError: several processes cannot compute there, or there are too few GPUs.
    """
    chosen = parse_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"Several processes compute on 'cpu' or 'cuda', got device={device!r}.")
    if chosen.type == "cpu" or chosen.index is not None:
        return chosen
    count = torch.cuda.device_count()
    if member.local_rank >= count:
        raise ValueError(
            f"Local rank {member.local_rank} has no GPU: torch sees {count} on this machine. Start no more processes "
            f"per machine than it has GPUs; or pass device='cuda:0' where each process sees its own only, or 'cpu'."
        )
    return torch.device("cuda", member.local_rank)


def check_backend(backend: Backend | None, device: torch.device) -> Backend:
    """Return what carries gradients between devices; raise ValueError where it cannot.

    Args:
        backend: what was asked for; None for what suits the device.
        device: where they are.
    """
    fitting: Backend = "nccl" if device.type == "cuda" else "gloo"
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"backend= is 'gloo' or 'nccl', got {backend!r}.")
    if backend == "nccl" and fitting != "nccl":
        raise ValueError("backend='nccl' is for device='cuda': on the CPU, take 'gloo'.")
    chosen = backend or fitting
    if chosen == "nccl" and not dist.is_nccl_available():
        raise ValueError("This build of torch has no nccl: pass backend='gloo'.")
    return chosen


def check_same(group: Exchange, modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError on every rank unless all ranks have equal modules, except for their values."""
    for name, module in modules.items():
        for part, value in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(value):
                raise ValueError(
                    f"{name}.{part} gets its shape in the first forward pass only. On several ranks it must have one "
                    f"before: call the model once on a batch, and make its optimizer after that."
                )
    own = [
        f"the {kind} {name}.{part} of {value.dtype} {list(value.shape)}"
        for name, module in modules.items()
        for kind, parts in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for part, value in parts
    ]
    digests = group.gather_objects(sha256("\n".join(own).encode()).digest())
    if len(set(digests)) > 1:
        check_alike("The task's modules are", group.gather_objects(own), "Build the same model everywhere.")


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
