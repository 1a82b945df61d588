"""Several named optimizers, each with its own loss and window, as in adversarial training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...events import Control
from ...events.checks import known_names
from ..engines.contract import LoopEngine
from ..engines.options import modules_of
from .windows import (
    Optimizer,
    OptimizerWindow,
    Windows,
    check_optimizer,
    check_taken,
    held_parameters,
    trained_parameters,
)

END = object()


class NamedWindows(Windows):
    """The windows of several optimizers. All steps that end with the same batch form a round and count as one step.

    Attributes:
        taken: the optimizers that have a loss in the current batch.
        latest: the losses of the last batch that had any.
        has_closed: whether a window has ended in this round.
        skipped_by_engine: whether the engine skipped the step of the last window.
    """

    def __init__(self, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]) -> None:
        super().__init__(optimizers, schedulers, is_named=True)
        self.taken: set[str] = set()
        self.latest: list[Tensor] = []
        self.has_closed = self.skipped_by_engine = False

    @property
    def window(self) -> int:
        sizes = (window.size for window in self.by_name.values())
        return max(sizes) if self.in_hand is None else self.in_hand.size

    def for_each_loss(self, step: Callable[..., None]) -> Callable[[Any, Any], None]:
        # The training step is a generator: each loss is computed after the step with the one before.
        def take_losses(run: Any, returned: Any) -> None:
            with closing(name_losses(returned, run.engine.autocast)) as losses:
                for name, loss in losses:
                    step(run, loss, name)

        return take_losses

    def label(self, name: str, optimizer: str | None = None) -> str:
        return f"{optimizer or self.optimizer_name}_{name}"

    def bind(self, engine: LoopEngine) -> None:
        for window in self.by_name.values():
            window.bind(engine)
            window.backward_scaled = partial(self._backward, engine, window)
            window.backward = partial(window.backward_scaled, scale=1.0)
            window.exchange = partial(self._exchange, engine, window)

    def take(self, run: Any, name: str | None, loss: Any) -> tuple[OptimizerWindow, Tensor]:
        if (window := self.by_name.get(name or "")) is None:
            problem = "A loss has no name" if name is None else f"There is no optimizer {name!r} for a loss"
            raise ValueError(f"{problem}: the optimizers of fit have names.{known_names(name or '', self.by_name)}")
        if name in self.taken and window.size:
            raise ValueError(f"The optimizer {name!r} got a second loss while its step is held: yield the sum of both.")
        checked = check_taken(run, window, loss)
        if not self.taken:
            self.latest.clear()
        self.is_first_loss = not self.taken
        self.taken.add(window.name)
        self.latest.append(checked)
        return window, checked

    def select(self, window: OptimizerWindow, control: Control) -> Tensor | None:
        self.in_hand, self.has_closed = window, True
        control.note_optimizer(window.name)
        window.exchange()
        return window.loss

    def deselect(self, control: Control, stepped: bool) -> None:
        # `drops_step` applies to one optimizer only.
        self.has_stepped |= stepped
        self.skipped_by_engine = not stepped and not control.drops_step
        self.in_hand, control.drops_step = None, False

    @property
    def batch_losses(self) -> tuple[Tensor, ...]:
        return tuple(self.latest)

    def end_batch(self) -> None:
        self.taken.clear()

    def end_round(self, control: Control) -> None:
        # A round that had gradients but no step was skipped.
        was_skipped = self.has_closed and not self.has_stepped
        self.has_closed = self.has_stepped = False
        if was_skipped:
            control.count_skip("skipped_steps", by_engine=self.skipped_by_engine)

    def clear(self) -> None:
        super().clear()
        self.taken.clear()
        self.latest.clear()
        self.has_closed = self.has_stepped = False

    @staticmethod
    def _backward(engine: LoopEngine, window: OptimizerWindow, loss: Tensor, scale: float) -> None:
        engine.backward_for(loss, scale, trained_parameters(window.optimizer))

    @staticmethod
    def _exchange(engine: LoopEngine, window: OptimizerWindow) -> None:
        engine.exchange_gradients(trained_parameters(window.optimizer))


def name_losses(
    losses: Any, autocast: Callable[[], AbstractContextManager[Any]]
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield (optimizer name, loss) from a training step that is a generator.

    Args:
        losses: the generator that the training step returned.
        autocast: makes the context in which a loss is computed; it is left between two losses, for the backward pass.

    Raises:
        TypeError: `losses` is not a generator, or it yielded something other than a pair.
        ValueError: it yielded nothing for this batch.
    """
    if not isinstance(losses, Generator):
        kind = type(losses).__name__
        raise TypeError(f"training_step must yield (optimizer name, loss) for each optimizer; it returned {kind}.")
    has_yielded = False
    with closing(losses):
        while (pair := _next(losses, autocast())) is not END:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
                raise TypeError(f"training_step must yield (optimizer name, loss); got {pair!r:.200}.")
            has_yielded = True
            yield pair
    if not has_yielded:
        raise ValueError("training_step yielded no loss for a batch: yield (name, loss) at least once.")


def _next(losses: Generator[Any, None, None], context: AbstractContextManager[Any]) -> Any:
    with context:
        return next(losses, END)


def make_optimizers(optimizers: Mapping[Any, Optimizer], task: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name. A function makes an optimizer from the module of the same name.

    Raises:
        TypeError: a value is not an optimizer, or a name is not a string.
        ValueError: there is no optimizer, an optimizer has no parameter of the task, two share a parameter, or a name
            cannot be used.
    """
    if not optimizers:
        raise ValueError('optimizer={} is empty: give an optimizer for each loss, {"generator": ...}.')
    made = {}
    for name, optimizer in optimizers.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"The name of an optimizer is a string without '/', got {name!r}.")
        made[name] = check_optimizer(optimizer, _module_parameters(name, optimizer, task), task, f"optimizer {name!r}")
    _check_disjoint(made)
    return made


def _module_parameters(name: str, optimizer: Any, task: Any) -> list[nn.Parameter]:
    module = getattr(task, name, None)
    if isinstance(module, nn.Module):
        return list(module.parameters())
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(task).__name__} has no module {name!r} for the function in optimizer=."
            f"{known_names(name, modules_of(task))} Or give an optimizer that you made from parameters of your choice."
        )
    return []


def _check_disjoint(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for key in held_parameters(optimizer):
            if (owner := owners.setdefault(key, name)) != name:
                raise ValueError(f"The optimizers {owner!r} and {name!r} share a parameter: give it to one of them.")
