"""The optimizer of a run, as `fit` gets it, and its accumulation window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...events import Control
from ..engines.options import modules_of

if TYPE_CHECKING:
    from ..engines.contract import LoopEngine


Optimizer = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Optimizers = Optimizer | Mapping[str, Optimizer]
SINGLE = "optimizer"  # the name of an optimizer without a name, and of its scheduler
WATCHED = 100  # steps: a check in each step of a thousand parameters without a gradient would cost 0.4 ms


def make_optimizer(optimizer: Optimizer | None, task: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a training with a single one.

    Raises:
        TypeError: it is not an optimizer.
        ValueError: it has no parameter of the task.
    """
    parameters = [parameter for module in modules_of(task).values() for parameter in module.parameters()]
    return check_optimizer(optimizer, parameters, task, "optimizer")


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


def check_optimizer(
    optimizer: Optimizer | None, parameters: list[nn.Parameter], task: Any, called: str
) -> torch.optim.Optimizer:
    made = optimizer
    if callable(made) and not isinstance(made, torch.optim.Optimizer):
        made = made(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        method = f"{type(task).__name__}.configure_optimizers"
        uncalled = f" {method} is not called: pass its results as optimizer=... and scheduler=..."
        raise TypeError(
            f"{'' if called == 'optimizer' else f'The {called}: '}optimizer= takes a torch optimizer, or a function "
            f"that makes one from parameters, got {optimizer!r}.{uncalled * hasattr(task, 'configure_optimizers')}"
        )
    closure = signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(f"{type(made).__name__} needs a closure for every step, but the loop passes none.")
    trained = {id(parameter) for module in modules_of(task).values() for parameter in module.parameters()}
    if trained and not trained & held_parameters(made):
        raise ValueError(f"The {called} has no parameter of the task: make it from the parameters of your model.")
    return made


def switched(optimizers: Iterable[Any]) -> list[Any]:
    # Schedule-free optimizers have `train()` and `eval()`.
    return [
        optimizer
        for optimizer in optimizers
        if callable(getattr(optimizer, "train", None)) and hasattr(optimizer, "eval")
    ]


def held_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    # Ids, because tensors compare by element.
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


class OptimizerWindow:
    """An optimizer, and the micro-batches since its last step.

    Attributes:
        label: the metric name of its loss.
        loss: its last loss in this epoch.
        size: the number of micro-batches with gradients.
        kept: the tracked losses of these micro-batches: (loss, weight, whether the loss is a sum).
        backward: runs the backward pass of a loss.
        backward_scaled: the same, with a factor on the loss.
        exchange: averages gradients over the ranks after a backward pass for one of several optimizers.
        step: steps the optimizer; returns False if the engine skipped the step.
        zero_grad: drops the gradients.
        without_gradient: the trained parameters without a gradient so far, None before the first step.
        counts: the counts of losses that are sums, None if the losses are means.
    """

    def __init__(self, name: str, label: str, optimizer: Any, scheduler: Any) -> None:
        self.name, self.label, self.optimizer, self.scheduler = name, label, optimizer, scheduler
        self.loss: Tensor | None = None
        self.size = 0
        self.kept: list[tuple[Tensor, Any, bool]] = []
        self.backward: Callable[[Tensor], object]
        self.backward_scaled: Callable[[Tensor, float], object]
        self.exchange: Callable[[], object]
        self.step: Callable[[], object]
        self.zero_grad: Callable[[], object]
        self.without_gradient: list[Any] | None = None
        self._watched_steps = 0
        self._hooks: dict[int, Any] = {}  # by the id of a parameter that is watched by a hook
        self.counts: Any = None  # a `WindowCounts`, which is loaded when it is used

    def bind(self, engine: LoopEngine) -> None:
        # In every epoch, because plugins may have patched the optimizer.
        self.step, self.zero_grad = engine.bind_step(self.optimizer), engine.bind_zero_grad(self.optimizer)
        self.backward, self.backward_scaled, self.counts = engine.backward, engine.backward_scaled, None
        if self.without_gradient != [] and not self._hooks:
            self.step = self._watch_gradients(self.step)

    def _watch_gradients(self, step: Callable[[], object]) -> Callable[[], object]:
        # Checks which parameters have no gradient, until each has had one; after the first steps, only by hooks.
        def watch_and_step() -> object:
            missing = trained_parameters(self.optimizer) if self.without_gradient is None else self.without_gradient
            self.without_gradient = [parameter for parameter in missing if parameter.grad is None]
            self._watched_steps += 1
            if self._watched_steps >= WATCHED and all(parameter.requires_grad for parameter in self.without_gradient):
                self._hooks = {
                    id(p): p.register_post_accumulate_grad_hook(self._unwatch) for p in self.without_gradient
                }
            if self._hooks or not self.without_gradient:
                self.step = step
            return step()

        return watch_and_step

    def _unwatch(self, parameter: Tensor) -> None:
        self.without_gradient = [watched for watched in self.without_gradient or () if watched is not parameter]
        self._hooks.pop(id(parameter)).remove()

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()


class Windows:
    """The window of the one optimizer of a run; of none in an evaluation.

    Attributes:
        by_name: every window by the name of its optimizer.
        first: the first window.
        in_hand: the window whose optimizer is stepping.
        forward: the training step, as the engine runs it.
        is_named: whether the optimizers have names, and a training step yields a loss for each.
        is_first_loss: whether the current loss is the first of its batch.
        has_stepped: whether a step of this round was counted.
        checked: the window, after the first loss of the epoch was checked and had no count.
        units: the unit of the counts by optimizer name, a power of two.
        counted: the last batch that had a count.
        weigh: sets the count of the current batch; set by the run.
    """

    weigh: Callable[[Any], None]

    def __init__(self, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any], *, is_named: bool = False) -> None:
        self.is_named, self.is_first_loss, self.has_stepped = is_named, True, False
        self.checked: OptimizerWindow | None = None
        self.units: dict[str, float] = {}
        self.counted: object = None
        self.by_name = {
            name: OptimizerWindow(name, self.label("loss", name), optimizer, schedulers.get(name))
            for name, optimizer in optimizers.items()
        }
        self.first = next(iter(self.by_name.values()), OptimizerWindow("", "loss", None, None))
        self.in_hand: OptimizerWindow | None = None
        self.forward: Callable[..., Any]

    @property
    def current(self) -> OptimizerWindow:
        return self.in_hand or self.first

    @property
    def optimizer_name(self) -> str:
        return self.current.name

    @property
    def window(self) -> int:
        return self.first.size

    @property
    def windows(self) -> Mapping[str, int]:
        return {name: window.size for name, window in self.by_name.items()}

    @property
    def window_count(self) -> float | None:
        counts = self.current.counts
        return None if counts is None else float(counts.count)

    @property
    def losses(self) -> Mapping[str, Tensor | None]:
        return {name: window.loss for name, window in self.by_name.items()}

    def for_each_loss(self, step: Callable[..., None]) -> Callable[[Any, Any], None]:
        return step

    def label(self, name: str, optimizer: str | None = None) -> str:
        return name

    def bind(self, engine: LoopEngine) -> None:
        self.first.bind(engine)

    def select(self, window: OptimizerWindow, control: Control) -> Tensor | None:
        return window.loss

    def deselect(self, control: Control, stepped: bool) -> None:
        if not stepped:
            control.count_skip("skipped_steps", by_engine=not control.drops_step)

    def take(self, run: Any, name: str | None, loss: Any) -> tuple[OptimizerWindow, Tensor]:
        """Return the window of a loss, and the loss; for a sum with a count, the mean.

        Raises:
            TypeError: the loss is neither a tensor nor a sum with a count.
            ValueError: it is not a scalar, or it has a name.
        """
        if name is not None:
            raise ValueError(f"run.step(loss, {name!r}) has a name, but the optimizer of trainer.run has none.")
        checked = check_taken(run, self.first, loss)
        self.checked = self.first if self.first.counts is None else None
        return self.first, checked

    @property
    def batch_losses(self) -> tuple[Tensor, ...]:
        return () if self.first.loss is None else (self.first.loss,)

    def end_batch(self) -> None:
        pass

    def end_round(self, control: Control) -> None:
        pass

    def unfinished(self) -> Iterator[OptimizerWindow]:
        return (window for window in self.by_name.values() if window.size)

    def close(self) -> None:
        for window in self.by_name.values():
            window.close()

    def clear(self) -> None:
        self.checked = self.counted = None
        for window in self.by_name.values():
            window.loss, window.size, window.kept = None, 0, []


def check_taken(run: Any, window: OptimizerWindow, loss: Any) -> Tensor:
    run.claim(window.label, "returned")
    if loss.__class__ is not tuple:
        check_loss(loss)
        if run.work.weight is None and window.counts is None:
            return loss  # type: ignore[no-any-return]  # checked
    from .counts import take_loss

    return take_loss(run, window, loss)


def check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.ndim:
        from ..system.errors import wrong_loss

        raise wrong_loss(loss)
