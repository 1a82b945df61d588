"""Collects the digests of batches, and gives them out in blocks."""

from __future__ import annotations

import math
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....core.metrics.window_losses import Fetched
from ....events import BatchEnd, BatchStart, Bus, GradientsReady, Lane, OrderedSignal, Run
from ....events.bus import PluginName, Receiver, Subscription
from ..format.digests import COLUMNS, DigestBlock
from .batches import BatchSums, checksums_of, read_batch
from .chain import FACTOR, LIMIT, Chain
from .checksums import Numbers, Rows, Sum, checksum, combine, strided, text_checksum
from .draws import GlobalDraws
from .options import Digests

BLOCK = 64  # batches, at most
SECONDS = 1.0  # after which a block ends all the same: a kill loses no more
NOTHING: Numbers = np.zeros(0, np.int64)
SPREAD = np.uint64(FACTOR)  # odd: no two numbers become one, and each bit acts on the upper half
PLAIN = (bool, int, float, str, type(None))  # options of an optimizer; others, such as functions, have no value
WHOLE = tuple(COLUMNS.index(name) for name in ("samples", "draws"))  # of 32 bits from the start
CHAINED = tuple(COLUMNS.index(name) for name in ("batch", "draws", "options", "loss"))
INTEGERS = {each.itemsize: each for each in (torch.uint8, torch.int16, torch.int32, torch.int64)}
MOST = 2**20  # numbers on a device that are waited for, 8 bytes each; a block with more ends
# A batch: its epoch, its number there, the learning rate, what was read of it, and the checksums of the other columns;
# that of the loss as a number, if it is on the CPU.
Row = tuple[int, int, float, BatchSums, int, Sum, Sum | float, Sum, Sum]


class Arrived:
    """Numbers that have arrived from a device, given out in their order, each in the place of its tensor."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers, self._at = numbers, 0

    def numbers(self, given: Rows) -> Numbers:
        """Return those of a tensor; what is an array is there already."""
        if not isinstance(given, Tensor):
            return given
        begin = self._at
        self._at += given.numel()
        return self._numbers[begin : self._at]

    def number(self, given: Sum | float) -> int | float:
        """Return that of a tensor, never 0; what is a number is there already."""
        return int(self.numbers(given)[0]) % LIMIT or 1 if isinstance(given, Tensor) else given


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
        self._loaded: BatchSums = 0, 0, ()
        self._waiting = 0  # numbers on a device
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
            self._loaded = read_batch(run.batch)
        except (RuntimeError, TypeError, ValueError) as error:  # a kind of tensor or array that nobody has thought of
            self._loaded = 0, 0, ()
            if not self._is_noted:
                self._is_noted = True
                run.note(f"batches have no digests, since they cannot be read: {type(error).__name__}: {error}")

    def take_step(self, run: Run, event: GradientsReady) -> None:
        """Take the options that the optimizer steps with, and the norms of its gradients where they are due."""
        groups = run.optimizer.param_groups
        values = [value for group in groups for key, value in group.items() if key != "params"]
        known = self._known.get(run.optimizer_name)
        if known is None or known[2] or known[0] != values:
            can_change = any(isinstance(each, Tensor | list) for each in values)  # in place, so that it equals itself
            known = self._known[run.optimizer_name] = values, _checksum_of_options(values), can_change
        self._settings = known[1] if self._is_single else combine([self._settings, known[1]])
        if self._is_single or run.optimizer is next(iter(run.optimizers.values())):
            self._rate = groups[0].get("lr", math.nan)
        if (every := self._options.gradients) and run.progress.steps % every == 0:
            held = [each.grad for group in groups for each in group["params"] if each.grad is not None]
            parts = [part for each in held for part in strided(each)]
            if parts:
                alike = torch.stack([each.to(parts[0].device) for each in torch._foreach_norm(parts)])
                self._norms = checksum([alike]) if self._is_single else combine([self._norms, checksum([alike])])

    def end_batch(self, run: Run, event: BatchEnd) -> None:
        """Take the rest, and give out the blocks that are ready."""
        if not self._in_hand:  # the recorder was switched on within the batch
            return
        self._in_hand, progress, rows, loss = False, self._progress, self._rows, run.loss
        if loss is None or self._control.skips_batch:
            number: Sum | float = 0
        elif self._is_single:
            number = loss.item() if loss.is_cpu else _bits(loss)
        else:
            number = combine(map(_bits, run.batch_losses))
        every = self._options.weights
        weights = _weights(run) if every and progress.steps % every == 0 and not run.window else 0
        epoch, batch, loaded = progress.epoch, progress.batch, self._loaded
        if rows and (rows[-1][0] != epoch or rows[-1][1] + 1 != batch):
            self._send()
        digest = self._draws.digest()
        self._rows.append((epoch, batch, self._rate, loaded, digest, self._settings, number, self._norms, weights))
        if loaded[2]:
            self._waiting += sum(map(len, loaded[2]))
        if len(rows) >= BLOCK or self._waiting > MOST or monotonic() > self._due:
            self._send()
            self._give_out(wait=False)

    def finish(self) -> None:
        """Give out all that is left, and wait for it."""
        self._send()
        self._give_out(wait=True)

    def _send(self) -> None:
        """Begin to copy what lies on a device."""
        self._due, self._waiting = monotonic() + SECONDS, 0
        rows, self._rows = self._rows, []
        held = [each.reshape(-1) for row in rows for each in (*row[3][2], *row[4:]) if isinstance(each, Tensor)]
        if rows:
            fetched = Fetched(torch.cat([each.to(held[0].device) for each in held])) if held else None
            self._sent.append((rows, fetched))

    def _give_out(self, *, wait: bool) -> None:
        """Give out the blocks that have arrived."""
        while self._sent and (wait or self._sent[0][1] is None or self._sent[0][1].is_there):
            rows, fetched = self._sent.popleft()
            arrived = Arrived(NOTHING if fetched is None else fetched.wait().cpu().numpy())
            table = []
            for *_, (crc, small, sums), draws, settings, loss, norms, weights in rows:
                batch = checksums_of(crc, small, map(arrived.numbers, sums))
                table.append((*batch, draws, *map(arrived.number, (settings, loss, norms, weights))))
            self._write(self._block(rows, [_words(*each) for each in enumerate(zip(*table, strict=True))]))

    def _block(self, rows: list[Row], words: list[NDArray[np.uint64]]) -> DigestBlock:
        places = np.array([row[:2] for row in rows], np.uint64).T
        self.chain.add(np.stack([*places, *(words[column] for column in CHAINED)], axis=1))
        columns = {name: column.tolist() for name, column in zip(COLUMNS, words, strict=True)}
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
        return _bits_of_float(number.item())
    return number.detach().view(INTEGERS[number.element_size()]).to(torch.int64, copy=True)


def _bits_of_float(number: float) -> int:
    return int.from_bytes(struct.pack("<d", number), "little")


def _words(column: int, numbers: Sequence[int | float]) -> NDArray[np.uint64]:
    """Return 32 bits of each checksum of a column, on which every bit acts; never 0, which is for one not taken."""
    wide = [number if isinstance(number, int) else _bits_of_float(number) or 1 for number in numbers]
    bits: NDArray[np.uint64] = np.array(wide, np.uint64)
    is_whole = column in WHOLE
    words = bits % np.uint64(2**32) if is_whole else (bits * SPREAD) >> np.uint64(32)
    words[(words == 0) & (is_whole | (bits != 0))] = 1
    return words


def _weights(run: Run) -> Sum:
    return checksum(held for each in run.modules.values() for held in (*each.parameters(), *each.buffers()))
