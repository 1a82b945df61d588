"""The engine of processes that shard the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.hooks import RemovableHandle

from ..distributed.exchange import broadcast_tensors
from . import sharded_states
from .contract import Modules, Optimizers, Read, SavedStates
from .ddp import Backend, ProcessEngine, ProcessOptions
from .options import state_of
from .precision import DTYPES
from .sharded_states import Sharding, States
from .weights import load_module

Kinds = type[nn.Module] | Sequence[type[nn.Module]]


class FSDPEngine(ProcessEngine):
    """Several processes that each have a shard of every weight, its gradient and its optimizer state.

    This is torch's `fully_shard` (FSDP2): the weights of a module are gathered for its forward and backward only. All
    ranks begin with the weights of rank 0. During a run, the task's parameters are shards (`DTensor`), and the
    optimizers train these. After a successful run, the task and the optimizers have the original parameter objects
    again, complete and on their original devices. A failed run leaves the shards, which can no longer be gathered:
    build a new task and resume. (A process that trains alone gets its parameters back in any case.)

    Weights are gathered around `forward`, and around the steps of a task that is a module itself. So a task must call
    its modules, not other methods of theirs; and in training, all ranks must call the same modules equally often.

    In bf16 and fp16, weights are gathered in 16 bits and gradients are summed in 32, in addition to the autocast of
    every engine. Normalizations with running statistics stay in 32 bits.

    Optimizers see shards: torch itself refuses some that need complete matrices, such as `Muon` and `LBFGS`. Use
    `DDPEngine` for a training step that yields several losses.

    Args:
        backend: as `ProcessEngine`.
        shard: the submodules that are gathered separately: module classes, as in `shard=nn.TransformerEncoderLayer` or
            a list of them, or a function that returns True for such a module. By default the elements of the outermost
            `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`. A submodule that shares a parameter with another part
            of its model is gathered with its parent.
        reshard_after_forward: whether gathered weights are dropped after the forward and gathered again for the
            backward, which takes less memory and more time. None: for all submodules, but not for the root modules.
        whole_evaluations: whether all weights are gathered once for a validation or test. Its batches then need no
            exchange, so ranks may have different numbers of them. False takes less memory and needs equal numbers: with
            unequal numbers, or if an evaluation is cut short, ranks wait until the timeout.
        state: the contents of checkpoints: `full`, gathered on the main rank and loaded by any engine; or `sharded`,
            written by all ranks.
        options: `device`, `precision`, `deterministic`, `cudnn_benchmark`, `timeout`, `report_after` and `grace`, as
            `ProcessEngine`.

    Raises:
        ValueError: as `ProcessEngine`; an option is unknown.
    """

    joins_alone = True
    state: Literal["full", "sharded"]

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        shard: Kinds | Callable[[nn.Module], bool] | None = None,
        reshard_after_forward: bool | None = None,
        whole_evaluations: bool = True,
        state: Literal["full", "sharded"] = "full",
        **options: Unpack[ProcessOptions],
    ) -> None:
        super().__init__(backend, **options)
        if state not in ("full", "sharded"):
            raise ValueError(f"state= must be 'full' or 'sharded', got {state!r}.")
        self.state = state
        self.reshard_after_forward, self.whole_evaluations = reshard_after_forward, whole_evaluations
        self._wrap = sharded_states.check_wrap(shard)
        self._sharding: Sharding | None = None
        self._roots: frozenset[nn.Module] = frozenset()
        self._mesh: DeviceMesh | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._saving: ProcessGroup | None = None
        self._holds = self._pending = False  # whether the exchange is suspended; whether gradients wait for it
        self._is_gathered = False  # whether all weights are gathered
        self._hooks: list[RemovableHandle] = []

    # Life.

    def set_up(self, task: Any, modules: Modules, optimizers: Optimizers) -> None:
        """Shard the modules in place, and make the optimizers train the shards.

        Raises:
            ValueError: as `ProcessEngine`; a parameter could not be gathered when it is used, or an optimizer has one
                that is not in the modules.
        """
        self.refuse_several_losses(task, optimizers)
        self.refuse_shared(modules)
        self._check_same(modules)
        for optimizer in optimizers.values():
            sharded_states.check_trained(optimizer, modules)
        self._modules = nn.ModuleList(modules.values())
        for buffer in self._modules.buffers():
            buffer.data = buffer.data.to(self.device)
        self._roots = frozenset(sharded_states.root_modules(modules))
        assert self.group is not None
        self._mesh = DeviceMesh.from_group(self.group.tensors, self.device.type)
        self._sharding = Sharding(modules, self._shard, self._wrap, (_NormBase,) if self._is_mixed else ())
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward, prepend=True) for module in self._sharding.wrapped()
        ]
        self.share_buffers()
        self._optimizers = list(optimizers.values())
        for optimizer in self._optimizers:
            sharded_states.replace_parameters(optimizer, self._sharding.shards)
        self.precision.begin(self.device, optimizers)

    def tear_down(self) -> None:
        """Restore plain, complete modules, optimizers and their states on every rank."""
        self.share_buffers()
        self._restore()
        self._drop_wrappers()

    def unwrap(self) -> None:
        """Remove everything but the shards; in a process that trains alone, also the shards."""
        if self._is_alone:
            self._restore()
        if self._sharding is not None:
            self._sharding.release()
        if self._mesh is not None:
            getattr(self._mesh, "_pg_registry", {}).clear()  # torch caches it for ever
            self._mesh = None
        while self._hooks:
            self._hooks.pop().remove()
        self._sharding, self._roots, self._optimizers = None, frozenset(), []
        self._holds = self._pending = False
        if self._saving is not None:
            dist.destroy_process_group(self._saving)
            self._saving = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return the context of a validation or test, with all weights gathered and the buffers of rank 0."""
        assert self._sharding is not None
        wrapped = list(self._sharding.wrapped()) if self.whole_evaluations else []
        with super().evaluating():
            for module in wrapped:
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
            self._is_gathered = self.whole_evaluations
            try:
                yield
            finally:
                self._is_gathered = False
                for module in wrapped:
                    module.reshard()
                    sharded_states.forget_forwards(module)
                    module.set_reshard_after_forward(self._reshards(module), recurse=False)

    def _restore(self) -> None:
        if self._sharding is None:
            return
        self._sharding.undo()
        plain = {shard: parameter for parameter, shard in self._sharding.shards.items()}
        for optimizer in self._optimizers:
            sharded_states.replace_parameters(optimizer, plain)
        self._sharding = None

    # A step.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return the context of a micro-batch whose gradients are not exchanged yet.

        Until then the gradients are not sharded: each rank needs memory for the gradients of all parameters.
        """
        self._set_holding(True)
        try:
            yield
        finally:
            self._set_holding(False)

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the training step; weights are gathered within it."""
        bound = super().bind(forward)

        def step(run: Any, batch: Any) -> Any:
            with self.exchanging("forward"):
                return bound(run, batch)

        return step

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        # Refuses to gather weights while a handler runs on some ranks only; compiled code is not checked.
        if not self._is_gathered and not torch.compiler.is_compiling():
            with self.exchanging("the forward of a sharded module"):
                pass

    def backward_scaled(self, loss: Tensor, scale: float) -> None:
        """Add the gradients of `scale * loss`; average them as `backward` does."""
        with self.exchanging("backward"):
            super().backward_scaled(loss, scale)
        self._pending = self._holds

    def backward_for(self, loss: Tensor, scale: float, parameters: Sequence[Tensor]) -> None:
        """Refuse: a backward pass cannot reach the shards of some parameters only."""
        self.refuse_several()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange gradients that are still local, and remove the loss scale."""
        self._exchange_pending()
        super().unscale(optimizer)

    def bind_zero_grad(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        zero_grad = super().bind_zero_grad(optimizer)

        def drop() -> None:
            self._exchange_pending()
            zero_grad()

        return drop

    def clip_gradients(self, parameters: Iterable[Tensor], norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Clip gradients by their total norm over all shards; return the norm before clipping."""
        chosen = list(parameters)
        with self.exchanging("clip_gradients"):
            total = sharded_states.gather_tensor(
                get_total_norm([value.grad for value in chosen if value.grad is not None], norm_type)
            )
        if norm is not None:
            clip_grads_with_norm_(chosen, norm, total)
        return total

    def _set_holding(self, holds: bool) -> None:
        assert self._sharding is not None
        self._holds = holds
        for module in self._sharding.wrapped():
            module.set_requires_gradient_sync(not holds, recurse=False)

    def _exchange_pending(self) -> None:
        # A window may end with a micro-batch that was not expected to be its last.
        if self._pending:
            self._pending = False
            for root in self._roots:
                root._get_fsdp_state()._root_post_backward_final_callback()  # type: ignore[operator]  # it is sharded

    # State.

    def pack(self, modules: Modules, optimizers: Optimizers) -> States:
        """Return the complete states by name on the main rank; gathered tensors are on the CPU."""
        states = {name: state_of(module) for name, module in modules.items()}
        trained = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
        with self.exchanging("pack"):
            packed = sharded_states.gather_state([states, trained], keep=self.is_main)
        return (packed[0], packed[1]) if self.is_main else ({}, {})

    def unpack(self, modules: Modules, optimizers: Optimizers, states: SavedStates) -> None:
        """Load the states by name; each rank keeps its shards."""
        with self.exchanging("unpack"):
            sharded_states.load_modules(modules, states[0])
            sharded_states.load_optimizers(optimizers, states[1])

    def shard_state(self, modules: Modules, optimizers: Optimizers) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's tensors by name, and the rest of the state; see `ShardingEngine`."""
        with self.exchanging("shard_state"):  # all ranks save together, but this exchanges nothing
            states = {name: state_of(module) for name, module in modules.items()}
            return sharded_states.split_states(
                (states, {name: optimizer.state_dict() for name, optimizer in optimizers.items()})
            )

    def saving_group(self) -> ProcessGroup:
        """Return a gloo group for saving in a thread; see `ShardingEngine`."""
        if self._saving is None:
            self._saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        return self._saving

    def load_shard_state(self, modules: Modules, optimizers: Optimizers, rest: Mapping[str, Any], read: Read) -> None:
        """Load the result of `shard_state`, saved by any number of ranks; see `ShardingEngine`."""
        tensors = sharded_states.allocate(modules, optimizers, rest)
        read(tensors)
        weights, trained = sharded_states.join_states(tensors, rest)
        for name, module in modules.items():
            load_module(name, module, weights[name])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(trained[name])

    # Sharding.

    @property
    def _is_mixed(self) -> bool:
        return self.precision.name in DTYPES

    def _shard(self, module: nn.Module) -> None:
        # Never more than one module is complete on the device.
        assert self.group is not None
        plain = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
        for parameter in plain:
            parameter.data = parameter.data.to(self.device).contiguous()
        broadcast_tensors(self.group, (parameter.detach() for parameter in plain), "the first weights")
        is_mixed = self._is_mixed and not isinstance(module, _NormBase)
        full = MixedPrecisionPolicy()
        mixed = MixedPrecisionPolicy(DTYPES.get(self.precision.name), torch.float32, cast_forward_inputs=False)
        wrapper: Any = fully_shard(
            module, mesh=self._mesh, reshard_after_forward=self._reshards(module), mp_policy=mixed if is_mixed else full
        )
        if self.backend == "gloo":  # torch 2.8 does not divide its average
            wrapper.set_force_sum_reduction_for_comms(True)

    def _reshards(self, module: nn.Module) -> bool:
        return module not in self._roots if self.reshard_after_forward is None else self.reshard_after_forward
