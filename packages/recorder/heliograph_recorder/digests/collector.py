"""Collects the digests of batches, and writes them in blocks."""

from __future__ import annotations

import ctypes
import math
import random
import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from time import monotonic
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from heliograph import BatchEnd, BatchStart, Bus, GradientsReady, Lane, Run
from heliograph.core.data.generators import states
from heliograph.core.metrics.fetched import Fetched
from heliograph.events import OrderedSignal, PluginName, Receiver, Subscription
from heliograph.spi import capture
from numpy.random import mtrand
from torch import Tensor

from ..format.records import DIGESTS, DigestBlock
from .checksums import Part, checksum, dense, words_of

if TYPE_CHECKING:
    from ..plugin import Digests

SECONDS = 1.0  # after which a block ends: a kill loses no more
BLOCK = 256  # batches, at most
PYTHON: Any = random._inst  # the generator of random.random and others
WORD = 4  # bytes
NUMPY_INDEX = 624 * WORD  # the offset of the index in the state of NumPy's generator
TORCH_INDEX, TORCH_WORD = (8, 12), (16, 24)  # in the state of torch's generator: the index, and the first words


class DigestCollector:
    """Collects the digests of the batches of a run. It runs once a batch with cold caches, so it does little.

    Args:
        options: how often gradients and weights are read.
        write: receives the blocks.
    """

    def __init__(self, options: Digests, write: Callable[[DigestBlock], None]) -> None:
        self._gradients, self._weights = options.gradients, options.weights
        self._write, self._draws = write, GlobalDraws()
        self._connected: list[tuple[OrderedSignal[Any], Receiver]] = []
        self._block: OpenBlock | None = None
        self._sent: deque[OpenBlock] = deque()
        self._ends_at = monotonic() + SECONDS
        self._rate = math.nan
        self._batch: list[Part] | None = None  # None if the recorder was enabled during the batch
        self._options: list[Part] = []  # of the optimizers that the current batch has stepped
        self._norms: list[Part] = []  # of their gradients
        self._cached: dict[Any, tuple[list[Any], list[Part]]] = {}  # options by optimizer, and their checksum

    def attach(self, bus: Bus, owner: str) -> None:
        """Connect to a bus: to the start of a batch before all other handlers, and to its end after them."""
        for event, receiver, position in (
            (BatchStart, self.begin_batch, (Lane.TRANSFORM, -1)),
            (GradientsReady, self.take_step, (Lane.REPORT, sys.maxsize)),
            (BatchEnd, self.end_batch, (Lane.REPORT, sys.maxsize)),
        ):
            signal: OrderedSignal[Any] = bus.signal(event)
            signal.connect(receiver, weak=False, subscription=Subscription(position, PluginName(owner)))
            self._connected.append((signal, receiver))

    def detach(self) -> None:
        for signal, receiver in self._connected:
            signal.disconnect(receiver)

    def begin_batch(self, run: Run, event: BatchStart) -> None:
        self._batch, self._options, self._norms = [], [], []
        try:
            self._batch = checksum(run.batch)
        except (RuntimeError, TypeError, ValueError) as error:  # an unknown kind of tensor or array
            run.warn(f"batches have no digests, because reading them failed: {type(error).__name__}: {error}")

    def take_step(self, run: Run, event: GradientsReady) -> None:
        optimizer = run.optimizer
        groups = optimizer.param_groups
        values = [value for group in groups for key, value in group.items() if key != "params"]
        cached, options = self._cached.get(optimizer, ((), []))
        if len(values) != len(cached) or not all(map(is_, values, cached)):
            options = checksum(values)
            if not any(isinstance(value, Tensor | list) for value in values):  # which may change in place
                self._cached[optimizer] = values, options
        self._options = self._options + options
        if optimizer is next(iter(run.optimizers.values())):
            rate = groups[0].get("lr")
            self._rate = rate if isinstance(rate, int | float) else math.nan
        if (every := self._gradients) and run.progress.steps % every == 0:
            parameters = [parameter for group in groups for parameter in group["params"]]
            gradients = [dense(parameter.grad) for parameter in parameters if parameter.grad is not None]
            if gradients:
                norms = [norm.to(gradients[0].device) for norm in torch._foreach_norm(gradients)]
                self._norms = self._norms + checksum(torch.stack(norms))

    def end_batch(self, run: Run, event: BatchEnd) -> None:
        if self._batch is None:
            return
        losses = () if run.control.skips_batch else run.stepping.batch_losses
        weights: list[Part] = []
        if (every := self._weights) and run.progress.steps % every == 0 and not run.stepping.window:
            weights = checksum([[*module.parameters(), *module.buffers()] for module in run.modules.values()])
        epoch, batch = run.progress.epoch, run.progress.batch
        if self._block is None or (epoch, batch) != self._block.next_place:
            self._send()
            self._block = OpenBlock(epoch, batch)
        row = self._batch, [self._draws.digest()], self._options, [*map(_bits, losses)], self._norms, weights
        self._batch = None
        self._block.rows.append((self._rate, row))
        if len(self._block.rows) >= BLOCK or monotonic() > self._ends_at:
            self._send()
            self._write_blocks(wait=False)

    def finish(self) -> None:
        """Write all remaining blocks, and wait for the device."""
        self._send()
        self._write_blocks(wait=True)

    def _send(self) -> None:
        self._ends_at = monotonic() + SECONDS
        if self._block is not None:
            self._block.fetch()
            self._sent.append(self._block)
            self._block = None

    def _write_blocks(self, *, wait: bool) -> None:
        while self._sent and (wait or self._sent[0].fetched.is_there):
            self._write(self._sent.popleft().finish())


class OpenBlock:
    """The checksums of consecutive batches of an epoch, until their parts have arrived from the device."""

    def __init__(self, epoch: int, first: int) -> None:
        self._epoch, self._first = epoch, first
        self.rows: list[
            tuple[float, Sequence[Sequence[Part]]]
        ] = []  # learning rate, and checksums in the order of DIGESTS
        self.fetched: Fetched

    @property
    def next_place(self) -> tuple[int, int]:
        return self._epoch, self._first + len(self.rows)

    def fetch(self) -> None:
        """Start the copy from the device."""
        tensors = [part for _, row in self.rows for parts in row for part in parts if isinstance(part, Tensor)]
        on_device = [tensor.reshape(-1).to(tensors[0].device) for tensor in tensors]
        self.fetched = Fetched(torch.cat(on_device) if on_device else torch.empty(0))

    def finish(self) -> DigestBlock:
        """Return the digests; waits for the device."""
        numbers = iter(self.fetched.read())
        rates = array("d", [rate for rate, _ in self.rows])
        digests = [[_digest(parts, numbers) for parts in row] for _, row in self.rows]
        columns = {name: array("I", column) for name, column in zip(DIGESTS, zip(*digests, strict=True), strict=True)}
        return DigestBlock(self._epoch, self._first, columns, rates)


def _digest(parts: Sequence[Part], fetched: Iterator[int]) -> int:
    """Return a digest of 32 bits; 0 is for a checksum that was not taken."""
    numbers = [next(fetched) if isinstance(part, Tensor) else part for part in parts]
    return (crc32(array("q", numbers)) or 1) if parts else 0


class GlobalDraws:
    """Digests of the global generators of Python, NumPy (legacy), torch (CPU), and CUDA devices in use.

    A Mersenne Twister has 624 words and an index. A draw increments the index, and all words change at its end, so the
    index and the first word identify the state. They are read from memory, because the methods copy all words. The
    methods are the fallback if the address is unknown.
    """

    def __init__(self) -> None:
        self._bits: Any = None  # NumPy's bit generator
        self._marks: list[memoryview] = []

    def digest(self) -> Part:
        bits = mtrand.get_bit_generator()
        if bits is not self._bits:
            self._bits, self._marks = bits, _marks(bits)
        if not self._marks:
            return checksum(capture())[0]
        cached = PYTHON.gauss_next
        crc = crc32(b"".join(self._marks), 0 if cached is None else hash(cached) & 0xFFFFFFFF)  # equal in all processes
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for generator in torch.cuda.default_generators:
                crc = crc32(generator.get_state().numpy().data, crc)  # a few bytes on the host
        return crc


def _marks(bits: Any) -> list[memoryview]:
    """Return views of what identifies the states in memory; nothing if an address is unknown."""
    spans = [(0, 2 * WORD)], [TORCH_INDEX, TORCH_WORD], [(0, WORD)]
    marks = [state.part(*span) for state, places in zip(states(), spans, strict=True) for span in places]
    if type(bits) is not np.random.MT19937 or None in marks:
        return []
    numpy = memoryview((ctypes.c_char * (NUMPY_INDEX + WORD)).from_address(bits.ctypes.state_address)).cast("B")
    return [*filter(None, marks), numpy[:WORD], numpy[NUMPY_INDEX:]]


def _bits(loss: Tensor) -> Part:
    """Return the bits of a loss; on a device as a copy, because a CUDA graph may reuse its memory."""
    return crc32(struct.pack("<d", loss.item())) if loss.is_cpu else words_of(loss).to(torch.int64, copy=True)
