"""How checkpoints are written: while the loop waits, or in the background; on several ranks by the main one."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn

from ...core.checkpoint.state.ranks import INDEX, cause_of
from ...core.checkpoint.storage.files import digest_of
from ...core.distributed.failure import WorkOutcome, on_main, outcome_of, value_of_main, values_of_ranks
from ...core.engines.sharded_states import ShardingEngine
from ...core.engines.weights import state_of
from ...events import BatchEnd, Engine, Handle, Lane, Run

T = TypeVar("T")
WORTH_REPORTING = 0.1  # seconds that the loop was held up
logger = logging.getLogger("heliograph")
LONGEST_WAIT = 0.1  # seconds: a signal that comes just before a wait is seen after it only
Shards = dict[str, tuple[int, str]]  # bytes and digest of files, by name
_Place = tuple[torch.device, int, int]


class Capture:
    """Takes the state of a run, without what plugins such as `TrainedOnly` leave out in `reduce_state(run, state)`.

    Args:
        weights_only: take only the weights.
    """

    def __init__(self, *, weights_only: bool) -> None:
        self.weights_only = weights_only

    def __call__(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the live state; on several ranks a collective."""
        return _reduced(run, run.state_dict(shards, weights_only=self.weights_only))

    def weights(self, run: Run) -> Mapping[str, Any]:
        """Return the weights alone, with those that a plugin leaves out."""
        return {name: state_of(module) for name, module in run.modules.items()}


def _reduced(run: Run, state: dict[str, Any]) -> dict[str, Any]:
    for plugin in run.plugins:
        if callable(reduce := getattr(plugin, "reduce_state", None)) and run.plugins.is_enabled(plugin):
            state = reduce(run, state)
    return state


class Writer:
    """Carries out the writing, which is the main rank's, while the loop waits; every rank receives the results.

    On several ranks all methods but `close` are collectives, and `end` unless the rank has left the others.

    Args:
        capture: returns the run's state, or what is saved of it.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return True

    def begin(self, run: Run) -> None:
        """Prepare for a run."""

    def hold(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the run's state, such that it can be written from now on; see `capture` for the shards."""
        return self._capture(run, shards)  # nothing changes it while it is written

    def do(self, run: Run, work: Callable[[], T], then: Callable[[T], object], *, is_save: bool = True) -> None:
        """Do some work on the main rank; call `then` with its result, in the thread of the loop, when it is done.

        `is_save`: whether the run gets a note if this rank has to abandon it.
        """
        then(on_main(run.engine, _watched(run, work)))

    def do_on_each(self, run: Run, work: Callable[[], T], then: Callable[[list[T]], object]) -> None:
        """Do some work on every rank; call `then` with the results, by rank, when it is done everywhere."""
        then(values_of_ranks(run.engine, outcome_of(_watched(run, work))))

    def drain(self) -> None:
        """Wait until all work is done."""

    def end(self, run: Run) -> None:
        """Wait until all work is done, and note how it went, or what had to be abandoned without the other ranks."""

    def close(self) -> None:
        """Wait, and stop listening."""


class BackgroundWriter(Writer):
    """Copies the state into kept buffers, and writes it in the background; one write at a time.

    It listens to `BatchEnd` only while something is under way. On several ranks the main rank writes; meanwhile all
    ask wherever they agree, in one small vote, whether it is done, so that all are informed at the same step. Whether
    they vote goes by `_awaited` only, which is set and cleared by all at the same places.

    Args:
        capture: returns the run's state, or what is saved of it.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__(capture)
        self._worker, self._buffers = BackgroundWorker(), Buffers()
        self._handle: Handle | None = None
        self._engine: Engine | None = None
        self._awaited: Callable[[Any], object] | None = None  # what all ranks do when the work is done
        self._of_each = False  # whether the work is every rank's, not the main rank's
        self._is_save = True
        self._waits_for_step = self._reserving = False
        self._saves = self._held_up = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._worker.is_idle

    def begin(self, run: Run) -> None:
        """Reserve buffers for the weights; for the optimizer's state, too, as soon as the first step has made it."""
        self._saves, self._held_up, self._worker.waited = 0, 0, 0.0
        self._meet(run)
        if run.engine.is_main:
            self._reserve(self._capture.weights(run))
            self._waits_for_step = not self._capture.weights_only
        self._listen(run)

    def hold(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a copy of the state, as soon as the former one is written."""
        self._meet(run)
        self._wait()
        self._saves += 1
        self._listen(run)
        state = self._capture(run, shards)
        return self._buffers.copy(state) if run.engine.is_main else state

    def do(self, run: Run, work: Callable[[], T], then: Callable[[T], object], *, is_save: bool = True) -> None:
        """Begin the work; `then` is called at the end of a later batch, at the next save, or at the end of the run."""
        self._of_each, self._is_save = False, is_save
        self._begin_work(run, work, then)

    def do_on_each(self, run: Run, work: Callable[[], T], then: Callable[[list[T]], object]) -> None:
        """Begin the work on every rank; `then` is called as after `do`."""
        self._of_each, self._is_save = True, True
        self._begin_work(run, work, then)

    def _begin_work(self, run: Run, work: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Begin the work; on several ranks, all are informed of its end together."""
        assert self._awaited is None
        self._meet(run)
        self._listen(run)
        work = _watched(run, work)
        if self._engine is None:
            self._worker.submit(work, (lambda result: then([result])) if self._of_each else then)
            return
        self._awaited = then
        if self._of_each or self._engine.is_main:
            self._worker.submit(partial(outcome_of, work), self._report)

    def drain(self) -> None:
        """Wait until everything is written."""
        while self._listens_only:
            self._report(None)
        self._worker.drain()
        while self._listens_only:  # what came up meanwhile
            self._report(None)

    def end(self, run: Run) -> None:
        """Wait until everything is written; note how long the loop was held up, and what is abandoned."""
        if run.report.has_left_group and (lost := self._part()):
            run.note(lost)
        self.drain()
        if self._held_up:
            run.note(
                f"background saves: {self._held_up} of {self._saves} waited for the former one, "
                f"{self._worker.waited:.2f} s in all"
            )

    def close(self) -> None:
        """Wait, and stop listening."""
        self._part()
        try:
            self._worker.drain()
        finally:
            self._stop_listening()

    @property
    def _listens_only(self) -> bool:
        """Whether this rank waits for the main rank's work."""
        return self._engine is not None and not (self._engine.is_main or self._awaited is None or self._of_each)

    def _meet(self, run: Run) -> None:
        """Continue with the other ranks, if there are any."""
        is_shared = run.engine.world_size > 1 and not run.report.has_left_group
        self._engine = run.engine if is_shared else None

    def _let_go(self) -> None:
        """Wait for the shards of this rank: their group must not end under the thread that writes them."""
        if self._of_each:
            self._worker.wait()

    def _part(self) -> str:
        """Continue without the other ranks; return what that makes of a running save, where it is not reported here.

        Only the main rank reports what it writes, and no rank reports shards.
        """
        engine, then, self._engine = self._engine, self._awaited, None
        if engine is None or then is None or (engine.is_main and not self._of_each):
            return ""
        self._awaited = None
        self._worker.forget()
        if not self._is_save:
            return ""
        what = "is finished by the main rank, and not reported on this one"
        if self._of_each:
            what = "is abandoned: its shards are not a checkpoint without the other ranks"
        lost = f"the save under way {what}, as the run did not end on all ranks together"
        logger.warning(lost)
        return lost

    def _report(self, outcome: WorkOutcome[Any] | None) -> None:
        """Report what was done, on all ranks."""
        then, self._awaited = self._awaited, None
        assert then is not None
        if self._engine is None:
            assert outcome is not None
            then(outcome.value_or_raise())
        elif self._of_each:
            assert outcome is not None
            then(values_of_ranks(self._engine, outcome))
        else:
            then(value_of_main(self._engine, outcome))

    def _wait(self) -> None:
        before, waits_for_save = self._worker.waited, not self._reserving
        self.drain()
        seconds = self._worker.waited - before
        if seconds > WORTH_REPORTING and waits_for_save:
            self._held_up += 1
            if self._held_up == 1:
                logger.warning("a save waited %.2f s for the former one, which was still being written", seconds)

    def _reserve(self, state: Any) -> None:
        self._reserving = True
        self._worker.submit(partial(self._buffers.reserve, sizes_of(state)), self._reserved)

    def _reserved(self, done: None) -> None:
        self._reserving = False

    def _listen(self, run: Run) -> None:
        run.hooks.when_settling(self.drain)
        run.hooks.when_leaving(self._let_go)
        if self._handle is None:
            self._handle = run.bus.on(BatchEnd, self._look, lane=Lane.PERSIST)

    def _stop_listening(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look(self, run: Run, event: BatchEnd) -> None:
        """Take note of what was done meanwhile; stop listening when there is nothing to wait for."""
        if self._engine is None or self._awaited is None:
            self._worker.poll()
        elif (
            run.report.ranks_meet
            and not self._engine.vote([float(not (self._listens_only or self._worker.is_done))])[0]
        ):
            self._report(None) if self._listens_only else self._worker.poll()
        if self._waits_for_step and self.is_idle and not run.stepping.window and run.progress.steps > run.origin.steps:
            self._waits_for_step = False
            self._reserve(self._own_state(run))
        if self.is_idle and self._awaited is None and not self._waits_for_step:
            self._stop_listening()

    def _own_state(self, run: Run) -> Any:
        """Return what takes the room of a state; on several ranks without asking the others for theirs."""
        if self._engine is None:
            return self._capture(run)
        return [self._capture.weights(run), *(each.state_dict() for each in run.optimizers.values())]


def _watched(run: Run, work: Callable[[], T]) -> Callable[[], T]:
    """Return work during which this process is not ended, whatever becomes of the other ranks."""
    engine = run.engine

    def watched() -> T:
        with engine.writing():
            return work()

    return watched


class _Job(NamedTuple):
    """One piece of work, in a daemon thread that ends with it."""

    future: Future[Any]
    then: Callable[[Any], object]
    thread: Thread


def _run(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  # raised where the job is asked after
        future.set_exception(error)


class BackgroundWorker:
    """Does one job at a time in a thread. `poll` and `drain` raise its errors in the thread that submitted it.

    Attributes:
        waited: seconds that `submit`, `drain` and `wait` have waited in all.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._job: _Job | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running, and nothing done is still to be reported."""
        return self._job is None

    @property
    def is_done(self) -> bool:
        """Whether a job is done and still to be reported."""
        return self._job is not None and self._job.future.done()

    def submit(self, work: Callable[[], T], then: Callable[[T], object] = lambda _: None) -> None:
        """Begin a job, as soon as the former one is done.

        Args:
            work: called in a thread of its own.
            then: called with the result, by `poll` or `drain`; it may submit another.

        Raises:
            BaseException: the former job failed; this one is not begun.
        """
        self.drain()
        future = Future[Any]()
        thread = Thread(target=_run, args=(work, future), name="heliograph-background", daemon=True)
        thread.start()
        self._job = _Job(future, then, thread)

    def forget(self) -> None:
        """Let the running job end; nothing is reported."""
        self._job = None

    def poll(self) -> None:
        """Report how the job ended, if it is done.

        Raises:
            BaseException: it failed. An error is raised once.
        """
        if self._job is not None and self.is_done:
            self._report_end(self._job)

    def drain(self) -> None:
        """Wait until nothing is under way. Ctrl-C interrupts the waiting, not the job.

        Raises:
            BaseException: the job failed. An error is raised once.
        """
        while (job := self._job) is not None:
            self.wait()
            self._report_end(job)

    def wait(self) -> None:
        """Wait until the job is done, without a report. Ctrl-C interrupts the waiting, not the job."""
        if self._job is None or self.is_done:
            return
        since = perf_counter()
        try:
            while not self.is_done:
                wait((self._job.future,), LONGEST_WAIT)
        finally:
            self.waited += perf_counter() - since

    def _report_end(self, job: _Job) -> None:
        job.thread.join()  # it has nothing left to do; no thread is to be seen after its job
        self._job = None
        job.then(job.future.result())


def save_shards(
    run: Run,
    engine: ShardingEngine,
    writer: Writer,
    begin: Callable[[int], Path],
    write: Callable[[dict[str, Any], Shards], T],
    then: Callable[[T], object],
    *,
    in_background: bool,
) -> None:
    """Let every rank write its shards, then the main rank the rest; it is a checkpoint only then. A collective.

    Args:
        run: the run.
        engine: holds the shards.
        writer: carries out the writing.
        begin: called on the main rank with the bytes that will be written; returns a folder that every rank sees.
        write: called on the main rank with the rest of the state and the shards.
        then: called with the result of `write`.
        in_background: copy the tensors now, and write them in the background.
    """
    tensors, rest = engine.shard_state(run.modules, run.optimizers)
    state = writer.hold(run, rest)
    needed = sum(run.engine.gather_objects(room_for(tensors, is_main=run.engine.is_main)))
    folder = on_main(run.engine, partial(begin, needed))

    def commit(of_ranks: list[Shards]) -> None:
        merged = {name: facts for shards in of_ranks for name, facts in shards.items()}
        writer.do(run, partial(write, state, merged), then)

    writer.do_on_each(run, begin_shards(engine, tensors, folder, run.engine.rank, in_background=in_background), commit)


def begin_shards(
    engine: ShardingEngine, tensors: Mapping[str, Tensor], folder: Path, rank: int, *, in_background: bool
) -> Callable[[], Shards]:
    """Return what writes this rank's shards, all ranks together, and returns what was written. A collective.

    Args:
        engine: holds the shards.
        tensors: of this rank, by name.
        folder: where they go; every rank must see it.
        rank: this one.
        in_background: copy the tensors now, and write them in the background.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    # What is on all ranks is the main rank's to write, as in a checkpoint without shards: buffers may differ.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    how: dict[str, Any] = {"checkpoint_id": folder, "planner": planner, "process_group": engine.saving_group()}
    write: Callable[[], object] = partial(save, dict(tensors), **how)
    if in_background:
        saving = async_save(dict(tensors), **how)
        assert isinstance(saving, Future)
        write = saving.result
    return partial(_written, write, folder, rank)


def room_for(tensors: Mapping[str, Tensor], *, is_main: bool) -> int:
    """Return how many bytes this rank will write: its shards, and of what all ranks have, the main rank's."""
    from torch.distributed.tensor import DTensor

    own = [each.to_local() if isinstance(each, DTensor) else each for each in tensors.values()]
    shards = [isinstance(each, DTensor) for each in tensors.values()]
    return sum(each.nbytes for each, shard in zip(own, shards, strict=True) if shard or is_main)


def _written(write: Callable[[], Any], folder: Path, rank: int) -> Shards:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        write()
    except CheckpointException as error:
        raise OSError(f"The shards of a checkpoint could not be written to {folder}: {cause_of(error)}") from error
    files = [*folder.glob(f"__{rank}_*"), *([folder / INDEX] if rank == 0 else [])]
    return {file.name: digest_of(file) for file in files}


class Size(NamedTuple):
    """What makes one buffer as good as another."""

    bytes: int
    pinned: bool


class Buffers:
    """Host memory that is kept from save to save: fresh memory costs a page fault per page, many times the copy.

    A copy is good until the next one, which overwrites it. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[Size, list[UntypedStorage]] = {}

    def reserve(self, needed: Mapping[Size, int]) -> None:
        """Have at least so many buffers of each size, touched, so that the next copy finds them ready.

        Args:
            needed: how many of which size, as `sizes_of` returns for a state.
        """
        for size, count in needed.items():
            kept = self._kept.setdefault(size, [])
            kept.extend(_new_buffer(size) for _ in range(count - len(kept)))

    @torch.no_grad()
    def copy(self, state: T) -> T:
        """Return the state as it is now: nested values rebuilt, tensors copied into the kept buffers.

        Tensors that share memory share it in the copy too, and are copied once. What is on a GPU comes to pinned host
        memory; it is waited for, once. Buffers that this state has no use for are let go of.

        Args:
            state: dicts, lists and tuples of plain values and tensors.
        """
        copied: dict[_Place, UntypedStorage] = {}
        taken: Counter[Size] = Counter()

        def copy_tensor(tensor: Tensor) -> Tensor:
            source = tensor.untyped_storage()
            place = _place(source)
            if place in copied:
                return _like(tensor, copied[place])
            copied[place] = buffer = self._take(_size(source), taken)
            view, on_gpu = _like(tensor, buffer), source.device.type == "cuda"
            if tensor.is_contiguous() and tensor.nbytes == source.nbytes():
                view.copy_(tensor, non_blocking=on_gpu)  # not by bytes: torch calls in threads by their number
            else:
                buffer.copy_(source, non_blocking=on_gpu)
            return view

        copy: T = _rebuilt(state, copy_tensor)
        for device in {device for device, *_ in copied if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        self._kept = {size: self._kept[size][:count] for size, count in taken.items()}
        return copy

    def _take(self, size: Size, taken: Counter[Size]) -> UntypedStorage:
        kept, used = self._kept.setdefault(size, []), taken[size]
        if used == len(kept):
            kept.append(_new_buffer(size))
        taken[size] = used + 1
        return kept[used]


def sizes_of(state: Any) -> Counter[Size]:
    """Return how many buffers of which size a copy of a state takes; holds on to nothing of the state."""
    storages = [tensor.untyped_storage() for tensor in _tensors_of(state)]
    return Counter(_size(storage) for storage in {_place(storage): storage for storage in storages}.values())


def _new_buffer(size: Size) -> UntypedStorage:
    # Filled, because memory that was never written to is only promised.
    return torch.empty(size.bytes, dtype=torch.uint8, pin_memory=size.pinned).fill_(0).untyped_storage()


def _size(storage: UntypedStorage) -> Size:
    return Size(storage.nbytes(), storage.device.type == "cuda")


def _place(storage: UntypedStorage) -> _Place:
    return storage.device, storage.data_ptr(), storage.nbytes()


def _like(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """Return a storage as this tensor views its own."""
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is nn.Parameter:
        return nn.Parameter(view, tensor.requires_grad)
    return view.requires_grad_(tensor.requires_grad)


def _has_storage(value: Any) -> bool:
    """Return whether a value is a tensor that is a plain view of its memory; sparse and such are none."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_conj() or value.is_neg() or value.is_quantized or value.is_meta or value.is_nested)
    )


def _rebuilt(value: Any, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: _rebuilt(item, copy_tensor) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)([_rebuilt(item, copy_tensor) for item in value])
    if _has_storage(value):
        return copy_tensor(value)
    if type(value) in (Tensor, nn.Parameter):  # sparse and such, of which deepcopy knows some only
        return value.detach().clone()
    return deepcopy(value.detach() if isinstance(value, Tensor) else value)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if type(value) in (dict, OrderedDict, Counter):
        value = list(value.values())
    if type(value) in (list, tuple):
        for item in value:
            yield from _tensors_of(item)
    elif _has_storage(value):
        yield value
