"""Collects the digests of batches, and writes them in blocks."""

from __future__ import annotations

import ctypes
import math
import random
import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from operator import is_not
from struct import Struct
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import torch
from heliograph import BatchEnd, BatchStart, Bus, GradientsReady, Lane, Run
from heliograph.core.data.generators import states
from heliograph.core.metrics.window_losses import Fetched
from heliograph.events import OrderedSignal, PluginName, Receiver, Subscription
from numpy.random import mtrand
from numpy.typing import NDArray
from torch import Tensor

from ..format.records import DIGESTS, DigestBlock
from .checksums import LIMIT, Sum, checksum, combine, factor, read_batch, strided, text_checksum

if TYPE_CHECKING:
    from ..plugin import Digests

SECONDS = 1.0  # after which a block ends: a kill loses no more
PLAIN = (bool, int, float, str, type(None))  # types of optimizer options with a value, unlike functions
INTEGERS = {dtype.itemsize: dtype for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)}
BLOCK = 256  # batches, at most
PLACE, RATE, FIRST = 2, 2, 3  # columns: epoch and batch, the learning rate, the digests
WIDTH = FIRST + len(DIGESTS)
TABLE_ROW = Struct("=QQdQQQQQQ")
HALF = np.uint64(32)
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd: a bijection in which every bit changes the upper half
Table64: TypeAlias = NDArray[np.uint64]
PYTHON: Any = random._inst  # the generator of random.random and others
WORD = 4  # bytes
NUMPY_INDEX = 624 * WORD  # the offset of the index in the state of NumPy's generator
TORCH_INDEX, TORCH_WORD = (8, 12), (16, 24)  # in the state of torch's generator: the index, and the first words


class OptimizerOptions(NamedTuple):
    """The options of an optimizer, cached while they are the same objects.

    Attributes:
        values: of all groups, without parameters.
        can_change: an option may change in place.
        checksum: of the options.
        rate: the learning rate of the first group, NaN if it is not a number.
    """

    values: list[Any]
    can_change: bool
    checksum: Sum
    rate: float


class DigestCollector:
    """Collects the digests of the batches of a run. It runs once a batch with cold caches, so it does little.

    Args:
        run: the run.
        options: how often gradients and weights are read.
        write: receives the blocks.
    """

    def __init__(self, run: Run, options: Digests, write: Callable[[DigestBlock], None]) -> None:
        self._progress, self._control, self._is_single = run.progress, run.control, len(run.optimizers) == 1
        self._gradients, self._weights = options.gradients, options.weights
        self._write, self._draws = write, GlobalDraws()
        self._connected: list[tuple[OrderedSignal[Any], Receiver]] = []
        self._table = BatchTable()
        self._sent: deque[BatchTable] = deque()
        self._next = 0, 0  # epoch and number of the batch that continues the block
        self._due, self._rate, self._in_hand = monotonic() + SECONDS, math.nan, False
        self._loaded = list[Sum]()
        self._option_sum: Sum = 0  # of the optimizers that the current batch has stepped
        self._norms: Sum = 0  # of their gradients
        self._options: dict[Any, OptimizerOptions] = {}  # by optimizer
        self._has_note = False

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
        self._connected.clear()

    def begin_batch(self, run: Run, event: BatchStart) -> None:
        self._option_sum, self._norms, self._in_hand = 0, 0, True
        try:
            self._loaded = read_batch(run.batch)
        except (RuntimeError, TypeError, ValueError) as error:  # an unknown kind of tensor or array
            self._loaded = []
            if not self._has_note:
                self._has_note = True
                run.note(f"batches have no digests, because reading them failed: {type(error).__name__}: {error}")

    def take_step(self, run: Run, event: GradientsReady) -> None:
        optimizer = run.optimizer
        groups = optimizer.param_groups
        values = [value for group in groups for key, value in group.items() if key != "params"]
        options = self._options.get(optimizer)
        if (
            options is None
            or options.can_change
            or len(values) != len(options.values)
            or any(map(is_not, values, options.values))
        ):
            options = self._options[optimizer] = _read_options(values, groups[0].get("lr"))
        self._option_sum = options.checksum if self._is_single else combine([self._option_sum, options.checksum])
        if self._is_single or optimizer is next(iter(run.optimizers.values())):
            self._rate = options.rate
        if (every := self._gradients) and self._progress.steps % every == 0:
            parameters = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
            parts = [part for parameter in parameters for part in strided(parameter.grad)]
            if parts:
                norms = checksum([torch.stack([norm.to(parts[0].device) for norm in torch._foreach_norm(parts)])])
                self._norms = norms if self._is_single else combine([self._norms, norms])

    def end_batch(self, run: Run, event: BatchEnd) -> None:
        if not self._in_hand:  # the recorder was enabled during the batch
            return
        self._in_hand, progress, loss = False, self._progress, run.loss
        if loss is None or self._control.skips_batch:
            number: Sum = 0
        elif self._is_single:
            number = _bits(loss) or 1 if loss.is_cpu else _bits(loss)
        else:
            number = combine(map(_bits, run.stepping.batch_losses))
        every = self._weights
        weights = _weights(run) if every and progress.steps % every == 0 and not run.stepping.window else 0
        epoch, batch = progress.epoch, progress.batch
        if (epoch, batch) != self._next:
            self._send()
        self._next = epoch, batch + 1
        table, draws = self._table, self._draws.digest() << 32
        table.add(epoch, batch, self._rate, self._loaded, draws, self._option_sum, number, self._norms, weights)
        if table.rows >= BLOCK or monotonic() > self._due:
            self._send()
            self._write_blocks(wait=False)

    def finish(self) -> None:
        """Write all remaining blocks, and wait for the device."""
        self._send()
        self._write_blocks(wait=True)

    def _send(self) -> None:
        self._due = monotonic() + SECONDS
        if self._table.rows:
            table, self._table = self._table, BatchTable()
            table.send()
            self._sent.append(table)

    def _write_blocks(self, *, wait: bool) -> None:
        while self._sent and (wait or self._sent[0].has_arrived):
            numbers = self._sent.popleft().numbers()
            columns = zip(DIGESTS, words_of(numbers).astype("=u4").T, strict=True)
            rates, (epoch, batch) = array("d", numbers[:, RATE].tobytes()), numbers[0, :PLACE].tolist()
            digests = {name: array("I", column.tobytes()) for name, column in columns}
            self._write(DigestBlock(epoch, batch, digests, rates))


class BatchTable:
    """The batches of a block as a table of numbers, so that few calls compute the digests.

    Attributes:
        rows: the number of batches.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._numbers = bytearray(BLOCK * TABLE_ROW.size)
        self._later: list[tuple[int, int, int, Tensor]] = []  # on a device: row, column, weight, number
        self._fetched: Fetched | None = None

    def add(self, epoch: int, batch: int, rate: float, loaded: Sequence[Sum], *digests: Sum) -> None:
        content = sum(self._or_later(FIRST, part, factor(place)) for place, part in enumerate(loaded)) % LIMIT
        numbers = (self._or_later(*pair) for pair in enumerate(digests, FIRST + 1))
        TABLE_ROW.pack_into(self._numbers, self.rows * TABLE_ROW.size, epoch, batch, rate, content, *numbers)
        self.rows += 1

    def _or_later(self, column: int, number: Sum, weight: int = 1) -> int:
        """Return a number times its weight; 0 for a number on a device, which is added later."""
        if not isinstance(number, Tensor):
            return number * weight
        self._later.append((self.rows, column, weight, number))
        return 0

    def send(self) -> None:
        """Start the copy from the device."""
        parts = [number.reshape(-1) for *_, number in self._later]
        self._fetched = Fetched(torch.cat([part.to(parts[0].device) for part in parts])) if parts else None

    @property
    def has_arrived(self) -> bool:
        return self._fetched is None or self._fetched.is_there

    def numbers(self) -> Table64:
        """Return all numbers, of shape (batches, columns); waits for the device."""
        numbers = np.frombuffer(self._numbers, np.uint64, self.rows * WIDTH).reshape(self.rows, WIDTH)
        fetched = [] if self._fetched is None else self._fetched.read()
        for (row, column, weight, _), number in zip(self._later, fetched, strict=True):
            numbers[row, column] = (int(numbers[row, column]) + number * weight) % LIMIT or 1
        return numbers


def words_of(numbers: Table64) -> Table64:
    """Return 32 bits of each checksum, which depend on all its bits; 0 is for a digest that was not taken."""
    bits = numbers[:, FIRST:]
    words = (bits * SPREAD) >> HALF
    words[(words == 0) & (bits != 0)] = 1
    return words


class GlobalDraws:
    """Digests of the global generators of Python, NumPy (legacy), torch (CPU), and CUDA devices in use.

    A Mersenne Twister has 624 words and an index. A draw increments the index, and all words change at its end, so the
    index and the first word identify the state. They are read from memory, because the methods copy all words. The
    methods are the fallback if the address is unknown.
    """

    def __init__(self) -> None:
        self._parts: list[memoryview] = []
        self._methods: list[Callable[[], Any]] = []
        spans = [(0, 2 * WORD)], [TORCH_INDEX, TORCH_WORD], [(0, WORD)]
        methods: tuple[Callable[[], Any], ...] = random.getstate, torch.get_rng_state, np.random.get_state
        for state, places, method in zip(states(), spans, methods, strict=True):
            parts = [part for place in places if (part := state.part(*place)) is not None]
            self._parts += parts
            self._methods += [] if parts else [method]
        self._bits: Any = None
        self._all: list[memoryview] = []

    def digest(self) -> int:
        bits = mtrand.get_bit_generator()
        if bits is not self._bits:
            self._bits, self._of_numpy = bits, _parts_of_numpy(bits)
            self._all = [*self._parts, *self._of_numpy]
        value = 0 if (cached := PYTHON.gauss_next) is None else hash(cached) & 0xFFFFFFFF  # equal in all processes
        value = crc32(b"".join(self._all), value)
        if self._methods or not self._of_numpy or _cuda_is_used():
            value = self._add_slow_states(value)
        return value

    def _add_slow_states(self, value: int) -> int:
        state: Any
        for method in self._methods:
            state = method()
            value = crc32(bytes(state) if isinstance(state, torch.Tensor) else repr(state).encode(), value)
        if not self._of_numpy:
            value = crc32(repr(self._bits.state).encode(), value)
        for generator in torch.cuda.default_generators if _cuda_is_used() else ():
            state = generator.get_state().numpy()  # a few bytes on the host
            value = crc32(state, value)
        return value


_cuda_is_used: Callable[[], bool] = torch.cuda.is_initialized


def _parts_of_numpy(bits: Any) -> list[memoryview]:
    if type(bits) is not np.random.MT19937:
        return []
    state = memoryview((ctypes.c_char * (NUMPY_INDEX + WORD)).from_address(bits.ctypes.state_address)).cast("B")
    return [state[:WORD], state[NUMPY_INDEX:]]


def _read_options(values: list[Any], rate: Any) -> OptimizerOptions:
    tensors = [value for value in values if isinstance(value, Tensor)]
    total: Sum = text_checksum(repr(list(map(_plain, values)))) << 32
    total = combine([total, checksum(tensors)]) if tensors else total
    can_change = any(isinstance(value, Tensor | list) for value in values)
    return OptimizerOptions(values, can_change, total, rate if isinstance(rate, int | float) else math.nan)


def _plain(value: Any) -> Any:
    """Return an option as a value that is equal in all processes."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, PLAIN) for item in value):
        return tuple(value)
    return type(value).__qualname__


def _bits(number: Tensor) -> Sum:
    """Return the bits of a number; on a device as a copy, because a CUDA graph may reuse its memory."""
    if number.is_cpu:
        return int.from_bytes(struct.pack("<d", number.item()), "little")
    return number.detach().view(INTEGERS[number.element_size()]).to(torch.int64, copy=True)


def _weights(run: Run) -> Sum:
    return checksum(tensor for module in run.modules.values() for tensor in (*module.parameters(), *module.buffers()))
