"""Several losses of one batch, each with an optimizer of its own, as in adversarial training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..events.checks import known_names
from .optimizers import trained_parameters
from .task import check_loss

if TYPE_CHECKING:
    from .context import RunContext
    from .engines.contract import LoopEngine

END = object()


class Turn:
    """One of several optimizers, with the window of gradients that its next step is made of."""

    __slots__ = ("loss", "name", "optimizer", "scheduler", "take_step", "window", "zero_grad")

    def __init__(self, name: str, optimizer: Any, scheduler: Any) -> None:
        self.name, self.optimizer, self.scheduler = name, optimizer, scheduler
        self.loss: Tensor | None = None
        self.window = 0
        self.take_step: Callable[[], object]
        self.zero_grad: Callable[[], object]

    @property
    def parameters(self) -> list[Any]:
        """The parameters that its loss leaves gradients in."""
        return trained_parameters(self.optimizer)


class Round:
    """The turns of all optimizers that end with the same batch; they count as one step.

    Attributes:
        taken: the optimizers that the batch in hand had a loss for.
        latest: the losses of the last batch that had some, by the names of their optimizers, in their order.
        has_closed: whether a window was closed in this round.
        has_stepped: whether an optimizer was stepped in it.
    """

    def __init__(self, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]) -> None:
        self._turns = {name: Turn(name, each, schedulers.get(name)) for name, each in optimizers.items()}
        self._first = next(iter(self._turns.values()))
        self.taken: set[str] = set()
        self.latest: dict[str, Tensor] = {}
        self.has_closed = self.has_stepped = False

    @property
    def losses(self) -> dict[str, Tensor | None]:
        """The last loss of each optimizer."""
        return {name: turn.loss for name, turn in self._turns.items()}

    @property
    def windows(self) -> dict[str, int]:
        """The micro-batches in the window of each optimizer."""
        return {name: turn.window for name, turn in self._turns.items()}

    def bind(self, engine: LoopEngine) -> None:
        """Ask an engine how to step each optimizer."""
        for turn in self._turns.values():
            turn.take_step, turn.zero_grad = engine.bind_step(turn.optimizer), engine.bind_zero_grad(turn.optimizer)

    def turn(self, name: str) -> Turn:
        """Return the turn of an optimizer."""
        return self._turns[name]

    def begin(self, name: str | None, loss: Tensor) -> Turn:
        """Return the turn that a loss begins.

        Raises:
            TypeError: the loss is not a tensor.
            ValueError: there is no such optimizer, or it had its loss of this batch; the loss is not a scalar.
        """
        if (turn := self._turns.get(name or "")) is None:
            given = "A loss has no name" if name is None else f"There is no optimizer {name!r} for a loss"
            raise ValueError(f"{given}: fit was given optimizers by name.{known_names(name or '', self._turns)}")
        if name in self.taken:
            raise ValueError(
                f"A second loss of this batch for the optimizer {name!r}, which takes one step per batch: add the two "
                f"up, as in yield {name!r}, first + second."
            )
        check_loss(loss)
        if not self.taken:
            self.latest.clear()
        self.taken.add(turn.name)
        turn.loss = self.latest[turn.name] = loss
        return turn

    def unfinished(self) -> Iterator[Turn]:
        """Yield the turns that hold gradients."""
        return (turn for turn in self._turns.values() if turn.window)

    def close(self) -> bool:
        """Begin another round; return whether this one ended without a step, although there were gradients for one."""
        was_skipped = self.has_closed and not self.has_stepped
        self.has_closed = self.has_stepped = False
        return was_skipped

    def clear(self) -> None:
        """Drop the losses and windows."""
        for turn in self._turns.values():
            turn.loss, turn.window = None, 0
        self.taken.clear()
        self.latest.clear()
        self.has_closed = self.has_stepped = False

    def pick_up(self, run: RunContext, turn: Turn) -> None:
        """Let handlers see the optimizer whose turn it is."""
        run.optimizer_name, run.optimizer, run.scheduler = turn.name, turn.optimizer, turn.scheduler
        run.take_step, run.zero_grad = turn.take_step, turn.zero_grad
        run.loss, run.window = turn.loss, turn.window

    def put_down(self, run: RunContext) -> None:
        """Let handlers see the first optimizer again, and the longest window."""
        first = self._first
        run.optimizer_name, run.optimizer, run.scheduler = first.name, first.optimizer, first.scheduler
        run.window = max(turn.window for turn in self._turns.values())


def checked_losses(losses: Any) -> Generator[Any, None, None]:
    """Return what a training step yields its losses with.

    Raises:
        TypeError: it returned something instead.
    """
    if not isinstance(losses, Generator):
        raise TypeError(
            f"fit was given optimizers by name, so training_step yields (name, loss) for each, as in "
            f'`yield "generator", loss`; it returned {type(losses).__name__}.'
        )
    return losses


def next_loss(run: RunContext, losses: Generator[Any, None, None]) -> tuple[str, Tensor] | None:
    """Compute the next loss of a batch; return it with the name of its optimizer, or None behind the last.

    Raises:
        TypeError: what was yielded is no (name, loss).
        ValueError: there was none for this batch.
    """
    with run.engine.autocast():  # not around the backward passes and steps between two of them
        pair = next(losses, END)
    if pair is END:
        if run.round is not None and not run.round.taken:
            raise ValueError("training_step yielded no loss for a batch: yield (name, loss) at least once.")
        return None
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise TypeError(
            f'training_step yields (name of the optimizer, loss), as in `yield "generator", loss`; got {pair!r:.200}.'
        )
    return pair
