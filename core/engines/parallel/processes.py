"""What engines of several processes have in common."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import sha256
from inspect import isgeneratorfunction
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ....events.checks import check_number
from ....events.engine import Reduction
from ...distributed.ranks.ballots import check_alike
from ...distributed.ranks.board import Board
from ...distributed.ranks.exchange import Exchange, broadcast_tensors
from ...distributed.ranks.failure import release_groups
from ...distributed.ranks.group import Group
from ...distributed.ranks.membership import Membership, membership
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
