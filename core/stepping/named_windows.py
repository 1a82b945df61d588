"""Several optimizers, each with a name, a loss and a window of its own, as in adversarial training."""

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
from .optimizers import Optimizer, check_optimizer, held_parameters, trained_parameters
from .windows import OptimizerWindow, Windows, check_taken

END = object()


class NamedWindows(Windows):
    """The windows of several optimizers; the steps that end with the same batch, a round, count as one.

    Attributes:
        taken: the optimizers that the batch in hand had a loss for.
        latest: the losses of the last batch that had some.
        has_closed: whether a window has ended in this round.
        skipped_by_engine: whether the engine skipped the step of the last one.
    """

    def __init__(self, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]) -> None:
        super().__init__(optimizers, schedulers, is_named=True)
        self.taken: set[str] = set()
        self.latest: list[Tensor] = []
        self.has_closed = self.skipped_by_engine = False

    @property
    def window(self) -> int:
        """See the base class."""
        sizes = (window.size for window in self.by_name.values())
        return max(sizes) if self.in_hand is None else self.in_hand.size

    def for_each_loss(self, step: Callable[..., None]) -> Callable[[Any, Any], None]:
        """Return what calls `step(run, loss, name)` with each loss that is yielded, computed after the step before."""

        def take_losses(run: Any, returned: Any) -> None:
            with closing(name_losses(returned, run.engine.autocast)) as losses:
                for name, loss in losses:
                    step(run, loss, name)

        return take_losses

    def label(self, name: str, optimizer: str | None = None) -> str:
        """See the base class."""
        return f"{optimizer or self.optimizer_name}_{name}"

    def bind(self, engine: LoopEngine) -> None:
        """Ask an engine how to step each optimizer, and how to leave gradients in its own parameters only."""
        for window in self.by_name.values():
            window.bind(engine)
            window.backward_scaled = partial(self._backward, engine, window)
            window.backward = partial(window.backward_scaled, scale=1.0)
            window.exchange = partial(self._exchange, engine, window)

    def take(self, run: Any, name: str | None, loss: Any) -> tuple[OptimizerWindow, Tensor]:
        """Return the window that a loss is for, and the loss; of a sum with its count, the mean.

        Raises:
            TypeError: the loss is not a tensor, nor a sum with its count.
            ValueError: there is no such optimizer, or its step with a loss of this batch is held; the loss is not a
                scalar.
        """
        if (window := self.by_name.get(name or "")) is None:
            given = "A loss has no name" if name is None else f"There is no optimizer {name!r} for a loss"
            raise ValueError(f"{given}: fit was given optimizers by name.{known_names(name or '', self.by_name)}")
        if name in self.taken and window.size:
            raise ValueError(
                f"A second loss of this batch for the optimizer {name!r}, whose step with the first one is held: "
                f"several steps per batch take no accumulation. Or add the two up: yield {name!r}, first + second."
            )
        checked = check_taken(run, window, loss)
        if not self.taken:
            self.latest.clear()
        self.is_first_loss = not self.taken
        self.taken.add(window.name)
        self.latest.append(checked)
        return window, checked

    def select(self, window: OptimizerWindow, control: Control) -> Tensor | None:
        """See the base class."""
        self.in_hand, self.has_closed = window, True
        control.note_optimizer(window.name)
        window.exchange()
        return window.loss

    def deselect(self, control: Control, stepped: bool) -> None:
        """See the base class; whether gradients are dropped is decided for each optimizer."""
        self.has_stepped |= stepped
        self.skipped_by_engine = not stepped and not control.drops_step
        self.in_hand, control.drops_step = None, False

    @property
    def batch_losses(self) -> tuple[Tensor, ...]:
        """See the base class."""
        return tuple(self.latest)

    def end_batch(self) -> None:
        """Let every optimizer have a loss again."""
        self.taken.clear()

    def end_round(self, control: Control) -> None:
        """Begin another round; one that ended without a step, although there were gradients for one, was skipped."""
        was_skipped = self.has_closed and not self.has_stepped
        self.has_closed = self.has_stepped = False
        if was_skipped:
            control.count_skip("skipped_steps", by_engine=self.skipped_by_engine)

    def clear(self) -> None:
        """Drop the losses and windows."""
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
    """Yield (name of the optimizer, loss) as a training step does; each is computed when the one before was taken.

    Args:
        losses: what the training step returned.
        autocast: makes the context that a loss is computed in; not entered around the backward passes between two.

    Raises:
        TypeError: it returned no generator, or yielded something else.
        ValueError: it yielded nothing for this batch.
    """
    if not isinstance(losses, Generator):
        raise TypeError(
            f"fit was given optimizers by name, so training_step yields (name, loss) for each, as in "
            f'`yield "generator", loss`; it returned {type(losses).__name__}.'
        )
    has_yielded = False
    with closing(losses):
        while (pair := _next(losses, autocast())) is not END:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
                raise TypeError(
                    f'training_step yields (name of the optimizer, loss), as in `yield "generator", loss`; got '
                    f"{pair!r:.200}."
                )
            has_yielded = True
            yield pair
    if not has_yielded:
        raise ValueError("training_step yielded no loss for a batch: yield (name, loss) at least once.")


def _next(losses: Generator[Any, None, None], context: AbstractContextManager[Any]) -> Any:
    with context:
        return next(losses, END)


def make_optimizers(optimizers: Mapping[Any, Optimizer], task: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name, made from the parameters of the modules of those names where functions were given.

    Raises:
        TypeError: one is not an optimizer, or its name is not a string.
        ValueError: there is none; one holds no parameter of the task, or one that another holds too; a name cannot be
            used.
    """
    if not optimizers:
        raise ValueError('optimizer={} holds no optimizer: give one by name for each loss, {"generator": ...}.')
    made = {}
    for name, each in optimizers.items():
        if not isinstance(name, str):
            raise TypeError(f"The names in optimizer={{...}} are strings, got {name!r}.")
        if not name or "/" in name:
            raise ValueError(f"The name of an optimizer becomes part of metric names: no '/' in {name!r}.")
        made[name] = check_optimizer(each, _own_parameters(name, each, task), task, f"optimizer {name!r}")
    _check_apart(made)
    return made


def _own_parameters(name: str, optimizer: Any, task: Any) -> list[nn.Parameter]:
    """Return the parameters that a function is to make the optimizer of a name from."""
    module = getattr(task, name, None)
    if isinstance(module, nn.Module):
        return list(module.parameters())
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer={{{name!r}: ...}} is a function that makes an optimizer, and {type(task).__name__} has no "
            f"module {name!r} to take the parameters from.{known_names(name, modules_of(task))} Or give an optimizer, "
            f"made from the parameters that you choose."
        )
    return []


def _check_apart(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise ValueError where two optimizers hold the same parameter."""
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for key in held_parameters(optimizer):
            if (other := owners.setdefault(key, name)) != name:
                raise ValueError(
                    f"The optimizers {other!r} and {name!r} hold the same parameter, in which the gradients of their "
                    f"losses would mix: give it to one of them."
                )
