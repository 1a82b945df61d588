"""Collects the digests of batches, and gives them out in blocks."""

from __future__ import annotations

import math
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....core.metrics.window_losses import Fetched
from ....events import BatchEnd, BatchStart, Bus, GradientsReady, Lane, OrderedSignal, Run
from ....events.bus import PluginName, Receiver, Subscription
from ..format.digests import COLUMNS, DigestBlock
from .chain import LIMIT, Chain
from .checksums import Sum, checksum, checksums_of_batch, combine, strided, text_checksum
from .draws import GlobalDraws
from .options import Digests

BLOCK = 64  # batches, at most
SECONDS = 1.0  # after which a block ends all the same: a kill loses no more
PLAIN = (bool, int, float, str, type(None))  # options of an optimizer; others, such as functions, have no value
WHOLE = tuple(COLUMNS.index(name) for name in ("samples", "draws"))  # of 32 bits from the start
CHAINED = tuple(COLUMNS.index(name) for name in ("batch", "draws", "options", "loss"))
Number = Sum | float  # a float: a loss that is not a checksum yet
# A batch: its epoch, its number there, the learning rate, and the checksums in the order of the columns.
Row = tuple[int, int, float, Number, Number, Number, Number, Number, Number, Number]


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
        self._options, self._write, self._draws = options, write, GlobalDraws()
        self._connected: list[tuple[OrderedSignal[Any], Receiver]] = []
        self._rows: list[Row] = []
        self._sent: deque[tuple[list[Row], Fetched | None]] = deque()
        self._due, self._rate, self._in_hand = monotonic() + SECONDS, math.nan, False
        self._loaded: tuple[Sum, Sum] = 0, 0
        self._settings: Sum = 0  # the options of the optimizers that the batch in hand has stepped
        self._norms: Sum = 0  # the norms of their gradients, where they are due
        self._known: dict[str, tuple[list[Any], Sum, bool]] = {}  # of each optimizer: its options, their checksum
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
            self._loaded = checksums_of_batch(run.batch)
        except (RuntimeError, TypeError, ValueError) as error:  # a kind of tensor or array that nobody has thought of
            self._loaded = 0, 0
            if not self._is_noted:
                self._is_noted = True
                run.note(f"batches have no digests, since they cannot be read: {type(error).__name__}: {error}")

    def take_step(self, run: Run, event: GradientsReady) -> None:
        """Take the options that the optimizer steps with, and the norms of its gradients where they are due."""
        groups = run.optimizer.param_groups
        values = [value for group in groups for key, value in group.items() if key != "params"]
        known = self._known.get(run.optimizer_name)
        if known is None or known[2] or known[0] != values:  # a tensor may have changed in place
            has_tensors = any(isinstance(each, Tensor) for each in values)
            known = self._known[run.optimizer_name] = values, _checksum_of_options(values), has_tensors
        several = len(run.optimizers) > 1
        self._settings = combine([self._settings, known[1]]) if several else known[1]
        if not several or run.optimizer is next(iter(run.optimizers.values())):
            self._rate = groups[0].get("lr", math.nan)
        if (every := self._options.gradients) and run.progress.steps % every == 0:
            held = [each.grad for group in groups for each in group["params"] if each.grad is not None]
            parts = [part for each in held for part in strided(each)]
            if parts:
                alike = [each.to(parts[0].device, torch.float64) for each in torch._foreach_norm(parts)]
                self._norms = combine([self._norms, checksum([torch.stack(alike)])])

    def end_batch(self, run: Run, event: BatchEnd) -> None:
        """Take the rest, and give out the blocks that are ready."""
        if not self._in_hand:  # the recorder was switched on within the batch
            return
        self._in_hand, progress, rows, loss = False, self._progress, self._rows, run.loss
        if loss is None or self._control.skips_batch:
            number: Number = 0
        elif self._is_single and loss.is_cpu:
            number = loss.item()
        else:
            number = combine(map(_bits, run.batch_losses))
        every = self._options.weights
        weights = _weights(run) if every and progress.steps % every == 0 and not run.window else 0
        epoch, batch, (content, samples) = progress.epoch, progress.batch, self._loaded
        if rows and (rows[-1][0] != epoch or rows[-1][1] + 1 != batch):
            self._send()
        self._rows.append(
            (
                epoch,
                batch,
                self._rate,
                content,
                samples,
                self._draws.digest(),
                self._settings,
                number,
                self._norms,
                weights,
            )
        )
        if len(rows) >= BLOCK or monotonic() > self._due:
            self._send()
            self._give_out(wait=False)

    def finish(self) -> None:
        """Give out all that is left, and wait for it."""
        self._send()
        self._give_out(wait=True)

    def _send(self) -> None:
        """Begin to copy what lies on a device."""
        self._due = monotonic() + SECONDS
        rows, self._rows = self._rows, []
        held = [each for row in rows for each in row[3:] if isinstance(each, Tensor)]
        if rows:
            self._sent.append(
                (rows, Fetched(torch.stack([each.to(held[0].device) for each in held])) if held else None)
            )

    def _give_out(self, *, wait: bool) -> None:
        """Give out the blocks that have arrived."""
        while self._sent and (wait or self._sent[0][1] is None or self._sent[0][1].is_there):
            rows, fetched = self._sent.popleft()
            read = iter([] if fetched is None else fetched.read())
            table = [[next(read) if isinstance(each, Tensor) else each for each in row[3:]] for row in rows]
            words = [[_word(each, column) for column, each in enumerate(row)] for row in table]
            self._write(self._block(rows, np.array(words, np.uint64)))

    def _block(self, rows: list[Row], words: NDArray[np.uint64]) -> DigestBlock:
        places = np.array([row[:2] for row in rows], np.uint64)
        self.chain.add(np.concatenate([places, words[:, CHAINED]], axis=1))
        columns = dict(zip(COLUMNS, words.T.tolist(), strict=True))
        rates = [float(row[2]) if isinstance(row[2], int | float) else math.nan for row in rows]
        state = self.chain.state_dict()
        return DigestBlock(rows[0][0], rows[0][1], columns, rates, state["value"], state["length"])


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
        return crc32(struct.pack("<d", number.item())) << 32
    return number.detach().double().clone().view(torch.int64).reshape(())


def _word(number: Number, column: int) -> int:
    """Return 32 bits of a checksum, on which every bit acts; never 0, which is for one that was not taken."""
    if isinstance(number, float):
        return crc32(struct.pack("<d", number)) or 1
    if column in WHOLE:
        return int(number) % 2**32 or 1
    return (int(number) % LIMIT) >> 32 or int(number != 0)


def _weights(run: Run) -> Sum:
    return checksum(held for each in run.modules.values() for held in (*each.parameters(), *each.buffers()))
