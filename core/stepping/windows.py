"""The one optimizer of a run, with the window of micro-batches whose gradients its next step is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...events import Control
from .optimizers import trained_parameters

if TYPE_CHECKING:
    from ..engines.contract import LoopEngine


class OptimizerWindow:
    """An optimizer, and the micro-batches since its last step.

    Attributes:
        label: the name that its loss is tracked by.
        loss: its last loss in this epoch.
        size: how many micro-batches have left their gradients.
        kept: the losses of these that are tracked, each with its weight, and whether it is a sum over that.
        backward: takes a loss backward.
        backward_scaled: takes a loss and the factor on it backward.
        exchange: averages over the ranks what a backward pass for one of several optimizers did not.
        step: steps the optimizer; returns False where it had to skip that.
        zero_grad: drops the gradients.
        without_gradient: the trained parameters that have had no gradient yet, None before the first step.
        counts: what its losses are sums over, None where they are means.
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
        self.counts: Any = None  # a `WindowCounts`, which is loaded where it is used

    def bind(self, engine: LoopEngine) -> None:
        """Ask an engine how to step; again in every epoch, as plugins may have patched the optimizer."""
        self.step, self.zero_grad = engine.bind_step(self.optimizer), engine.bind_zero_grad(self.optimizer)
        self.backward, self.backward_scaled, self.counts = engine.backward, engine.backward_scaled, None
        if self.without_gradient != []:
            self.step = self._looking(self.step)

    def _looking(self, step: Callable[[], object]) -> Callable[[], object]:
        """Return a step that looks which parameters have no gradient, until each has had one."""

        def look_and_step() -> object:
            missing = trained_parameters(self.optimizer) if self.without_gradient is None else self.without_gradient
            self.without_gradient = [parameter for parameter in missing if parameter.grad is None]
            if not self.without_gradient:
                self.step = step
            return step()

        return look_and_step


class Windows:
    """The window of the one optimizer of a run; of none in an evaluation.

    Attributes:
        by_name: every window, by the name of its optimizer.
        first: the first of them.
        in_hand: the one that is stepped now.
        forward: the training step, as the engine runs it.
        is_named: whether the optimizers have names, and a training step yields a loss for each.
        is_first_loss: whether the loss in hand is the first of its batch.
        has_stepped: whether a step of this round was counted.
        checked: the one window, once its first loss of the epoch was checked, unless it has a count.
        units: the power of two that counts are in, by the names of the optimizers whose losses have some.
        counted: the last batch that had a count.
        weigh: says what the losses of the batch in hand are means over; set by the run.
    """

    weigh: Callable[[Any], None]

    def __init__(self, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any], *, is_named: bool = False) -> None:
        self.is_named, self.is_first_loss, self.has_stepped = is_named, True, False
        self.checked: OptimizerWindow | None = None
        self.units: dict[str, float] = {}
        self.counted: object = None
        self.by_name = {
            name: OptimizerWindow(name, self.label("loss", name), each, schedulers.get(name))
            for name, each in optimizers.items()
        }
        self.first = next(iter(self.by_name.values()), OptimizerWindow("", "loss", None, None))
        self.in_hand: OptimizerWindow | None = None
        self.forward: Callable[..., Any]

    @property
    def current(self) -> OptimizerWindow:
        """The window in hand, elsewhere the first."""
        return self.in_hand or self.first

    @property
    def optimizer_name(self) -> str:
        """The name of the optimizer in hand, elsewhere of the first."""
        return self.current.name

    @property
    def window(self) -> int:
        """The micro-batches in the window in hand, elsewhere in the longest."""
        return self.first.size

    @property
    def windows(self) -> Mapping[str, int]:
        """How many micro-batches have added gradients since the last step of each optimizer."""
        return {name: window.size for name, window in self.by_name.items()}

    @property
    def window_count(self) -> float | None:
        """What the gradients in hand were divided by, a sum over all ranks; None if losses have no counts."""
        counts = self.current.counts
        return None if counts is None else float(counts.count)

    @property
    def losses(self) -> Mapping[str, Tensor | None]:
        """The last training loss of each optimizer, by its name."""
        return {name: window.loss for name, window in self.by_name.items()}

    def for_each_loss(self, step: Callable[..., None]) -> Callable[[Any, Any], None]:
        """Return what calls `step(run, loss)` with the loss that a training step returned."""
        return step

    def label(self, name: str, optimizer: str | None = None) -> str:
        """Return the name to track a value of an optimizer by."""
        return name

    def bind(self, engine: LoopEngine) -> None:
        """Ask an engine how to step each optimizer."""
        self.first.bind(engine)

    def select(self, window: OptimizerWindow, control: Control) -> Tensor | None:
        """Begin the step of a window; return the loss that it is for."""
        return window.loss

    def deselect(self, control: Control, stepped: bool) -> None:
        """End the step of a window; count it where it was skipped."""
        if not stepped:
            control.count_skip("skipped_steps", by_engine=not control.drops_step)

    def take(self, run: Any, name: str | None, loss: Any) -> tuple[OptimizerWindow, Tensor]:
        """Return the window that a loss is for, and the loss; of a sum with its count, the mean.

        Raises:
            TypeError: the loss is not a tensor, nor a sum with its count.
            ValueError: it is not a scalar; it has a name.
        """
        if name is not None:
            raise ValueError(f"run.step(loss, {name!r}) is for optimizers that trainer.run was given by name.")
        checked = check_taken(run, self.first, loss)
        self.checked = self.first if self.first.counts is None else None
        return self.first, checked

    @property
    def batch_losses(self) -> tuple[Tensor, ...]:
        """The losses of the last batch that had some, in the order in which they were taken."""
        return () if self.first.loss is None else (self.first.loss,)

    def end_batch(self) -> None:
        """Do nothing: a batch has one loss."""

    def end_round(self, control: Control) -> None:
        """Do nothing: every step is counted by itself."""

    def unfinished(self) -> Iterator[OptimizerWindow]:
        """Yield the windows that hold gradients."""
        return (window for window in self.by_name.values() if window.size)

    def clear(self) -> None:
        """Drop the losses and windows."""
        self.checked = self.counted = None
        for window in self.by_name.values():
            window.loss, window.size, window.kept = None, 0, []


def check_taken(run: Any, window: OptimizerWindow, loss: Any) -> Tensor:
    """Return a loss that was checked; of a sum with its count, the mean, and the window takes the sum backward."""
    run.claim(window.label, "returned")
    if loss.__class__ is not tuple:
        check_loss(loss)
        if run.work.weight is None and window.counts is None:
            return loss  # type: ignore[no-any-return]  # checked
    from .counts import take_loss

    return take_loss(run, window, loss)


def check_loss(loss: Any) -> None:
    """Raise unless a loss is a scalar tensor."""
    if not isinstance(loss, Tensor) or loss.ndim:
        from ..system.errors import wrong_loss  # loaded where there is one

        raise wrong_loss(loss)
