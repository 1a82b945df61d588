"""Collects the digests of batches, and gives them out in blocks."""

from __future__ import annotations

import math
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_not
from time import monotonic
from typing import Any

import torch
from heliograph import BatchEnd, BatchStart, Bus, GradientsReady, Lane, Run
from heliograph.events import OrderedSignal, PluginName, Receiver, Subscription
from torch import Tensor

from ..format.digests import DigestBlock
from .batches import BatchSums, read_batch
from .chain import Chain
from .checksums import Sum, checksum, combine, strided, text_checksum
from .draws import GlobalDraws
from .options import Digests
from .table import BLOCK, PLACE, Table, columns_of, links_of, rates_of, words_of

SECONDS = 1.0  # after which a block ends all the same: a kill loses no more
PLAIN = (bool, int, float, str, type(None))  # options of an optimizer; others, such as functions, have no value
INTEGERS = {each.itemsize: each for each in (torch.uint8, torch.int16, torch.int32, torch.int64)}
MOST = 2**20  # numbers on a device that are waited for, 8 bytes each; a block with more ends


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of an optimizer.

    Attributes:
        held: all objects in its groups: while these are the same ones, so is the rest.
        options: their options.
        can_change: whether one of them can change in place.
        checksum: of the options.
        rate: the learning rate of the first group, NaN where it is no number.
    """

    held: list[Any]
    options: list[Any]
    can_change: bool
    checksum: Sum
    rate: float


class DigestCollector:
    """Collects what the batches of a run were and did. What it does in a batch is little: its code is never in a cache.

    Args:
        run: whose batches they are.
        options: how often what is collected.
        write: takes the blocks.

    Attributes:
        chain: over the batches that were given out.
    """

    def __init__(self, run: Run, options: Digests, write: Callable[[DigestBlock], None]) -> None:
        self.chain = Chain()
        self._progress, self._control, self._is_single = run.progress, run.control, len(run.optimizers) == 1
        self._gradients, self._weights = options.gradients, options.weights
        self._write, self._draws = write, GlobalDraws()
        self._connected: list[tuple[OrderedSignal[Any], Receiver]] = []
        self._table = Table()
        self._sent: deque[Table] = deque()
        self._next = 0, 0  # the epoch of the batch that continues the block, and its number there
        self._due, self._rate, self._in_hand = monotonic() + SECONDS, math.nan, False
        self._loaded: BatchSums = 0, 0, ()
        self._settings: Sum = 0  # the options of the optimizers that the batch in hand has stepped
        self._norms: Sum = 0  # the norms of their gradients, where they are due
        self._known: dict[Any, Settings] = {}  # by optimizer
        self._is_noted = False  # that a batch could not be read

    def attach(self, bus: Bus, owner: str) -> None:
        """Connect to a bus: to see batches before any other handler, and what they have left after all others."""
        for event, receiver, position in (
            (BatchStart, self.begin_batch, (Lane.TRANSFORM, -1)),
            (GradientsReady, self.take_step, (Lane.REPORT, sys.maxsize)),
            (BatchEnd, self.end_batch, (Lane.REPORT, sys.maxsize)),
        ):
            signal: OrderedSignal[Any] = bus.signal(event)
            signal.connect(receiver, weak=False, subscription=Subscription(position, PluginName(owner)))
            self._connected.append((signal, receiver))

    def detach(self) -> None:
        """Disconnect."""
        for signal, receiver in self._connected:
            signal.disconnect(receiver)
        self._connected.clear()

    def begin_batch(self, run: Run, event: BatchStart) -> None:
        """Take the batch as it was loaded."""
        self._settings, self._norms, self._in_hand = 0, 0, True
        try:
            self._loaded = read_batch(run.batch)
        except (RuntimeError, TypeError, ValueError) as error:  # a kind of tensor or array that nobody has thought of
            self._loaded = 0, 0, ()
            if not self._is_noted:
                self._is_noted = True
                run.note(f"batches have no digests, since they cannot be read: {type(error).__name__}: {error}")

    def take_step(self, run: Run, event: GradientsReady) -> None:
        """Take the options that the optimizer steps with, and the norms of its gradients where they are due."""
        optimizer = run.optimizer
        groups = optimizer.param_groups
        held = [each for group in groups for each in group.values()]
        known = self._known.get(optimizer)
        if known is None or known.can_change or len(held) != len(known.held) or any(map(is_not, held, known.held)):
            known = self._known[optimizer] = _read_settings(groups, held, known)
        self._settings = known.checksum if self._is_single else combine([self._settings, known.checksum])
        if self._is_single or optimizer is next(iter(run.optimizers.values())):
            self._rate = known.rate
        if (every := self._gradients) and self._progress.steps % every == 0:
            held = [each.grad for group in groups for each in group["params"] if each.grad is not None]
            parts = [part for each in held for part in strided(each)]
            if parts:
                alike = torch.stack([each.to(parts[0].device) for each in torch._foreach_norm(parts)])
                self._norms = checksum([alike]) if self._is_single else combine([self._norms, checksum([alike])])

    def end_batch(self, run: Run, event: BatchEnd) -> None:
        """Take the rest, and give out the blocks that are ready."""
        if not self._in_hand:  # the recorder was switched on within the batch
            return
        self._in_hand, progress, loss = False, self._progress, run.loss
        if loss is None or self._control.skips_batch:
            number: Sum | float = 0
        elif self._is_single:
            number = (loss.item() or _bits(loss) or 1) if loss.is_cpu else _bits(loss)
        else:
            number = combine(map(_bits, run.stepping.batch_losses))
        every = self._weights
        weights = _weights(run) if every and progress.steps % every == 0 and not run.stepping.window else 0
        epoch, batch = progress.epoch, progress.batch
        if (epoch, batch) != self._next:
            self._send()
        self._next = epoch, batch + 1
        table, draws = self._table, self._draws.digest()
        table.add(epoch, batch, self._rate, self._loaded, draws, self._settings, number, self._norms, weights)
        if table.rows >= BLOCK or table.waiting > MOST or monotonic() > self._due:
            self._send()
            self._give_out(wait=False)

    def finish(self) -> None:
        """Give out all that is left, and wait for it."""
        self._send()
        self._give_out(wait=True)

    def _send(self) -> None:
        """End the block."""
        self._due = monotonic() + SECONDS
        if self._table.rows:
            table, self._table = self._table, Table()
            table.send()
            self._sent.append(table)

    def _give_out(self, *, wait: bool) -> None:
        """Give out the blocks that have arrived."""
        while self._sent and (wait or self._sent[0].is_there):
            numbers = self._sent.popleft().numbers()
            words = words_of(numbers)
            self.chain.add(links_of(numbers, words))
            state, (epoch, batch) = self.chain.state_dict(), numbers[0, :PLACE].tolist()
            block = epoch, batch, columns_of(words), rates_of(numbers), state["value"], state["length"]
            self._write(DigestBlock(*block))


def _read_settings(groups: Sequence[Mapping[str, Any]], held: list[Any], known: Settings | None) -> Settings:
    """Return the options of an optimizer; their checksum only where they differ from those that are known."""
    options = [value for group in groups for key, value in group.items() if key != "params"]
    if known is not None and not known.can_change and options == known.options:
        return replace(known, held=held)
    can_change = any(isinstance(each, Tensor | list) for each in options)  # in place, so that it equals itself
    rate = groups[0].get("lr")
    return Settings(
        held, options, can_change, _checksum_of_options(options), rate if isinstance(rate, int | float) else math.nan
    )


def _checksum_of_options(options: Sequence[Any]) -> Sum:
    """Return the checksum of an optimizer's options; of those that are tensors, where they lie."""
    plain = text_checksum(repr([each if isinstance(each, PLAIN) else _plain(each) for each in options])) << 32
    tensors = [each for each in options if isinstance(each, Tensor)]
    return combine([plain, checksum(tensors)]) if tensors else plain


def _plain(value: Any) -> Any:
    """Return an option of an optimizer as a value that is the same in every process."""
    if isinstance(value, list | tuple) and all(isinstance(each, PLAIN) for each in value):
        return tuple(value)
    return type(value).__qualname__


def _bits(number: Tensor) -> Sum:
    """Return the bits of a number: at once on the CPU, elsewhere as a copy, since a graph may use its memory again."""
    if number.is_cpu:
        return _bits_of_float(number.item())
    return number.detach().view(INTEGERS[number.element_size()]).to(torch.int64, copy=True)


def _bits_of_float(number: float) -> int:
    return int.from_bytes(struct.pack("<d", number), "little")


def _weights(run: Run) -> Sum:
    return checksum(held for each in run.modules.values() for held in (*each.parameters(), *each.buffers()))
