"""Write checkpoints in the background, and the shards of several ranks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from ...core.checkpoint.ranks import INDEX, cause_of
from ...core.checkpoint.schema import map_leaves
from ...core.checkpoint.storage.archive import has_memory, tensors_in
from ...core.checkpoint.storage.files import digest_of
from ...core.distributed.outcomes import WorkOutcome, on_main, outcome_of, value_of_main, values_of_ranks
from ...core.engines.contract import ShardingEngine
from ...core.engines.options import state_of
from ...events import BatchEnd, Engine, Handle, Lane, Run
from ...events.checks import PLAIN
from .folder import CheckpointWriter, Shards, T, watched

WORTH_REPORTING = 0.1  # seconds that the loop was held up
LONGEST_WAIT = 0.1  # seconds: a signal just before a wait is handled only after it
_Place = tuple[torch.device, int, int]
logger = logging.getLogger("heliograph")


class BackgroundWriter(CheckpointWriter):
    """Copy the state into reused buffers, and write it in the background; one write at a time.

    It listens to `BatchEnd` only while work is running. On several ranks the main rank writes. The ranks vote whether
    the work is done wherever they agree, so that all receive the result at the same step. They vote only while
    `_awaited` is set, which all ranks set and clear at the same places.
    """

    def __init__(self, *, weights_only: bool) -> None:
        super().__init__(weights_only=weights_only)
        self._worker, self._buffers = BackgroundWorker(), Buffers()
        self._handle: Handle | None = None
        self._engine: Engine | None = None
        self._awaited: Callable[[Any], object] | None = None  # called on all ranks when the work is done
        self._on_every_rank = False  # whether every rank works, or only the main rank
        self._is_save = True
        self._waits_for_step = self._reserving = False
        self._saves = self._held_up = 0

    @property
    def is_idle(self) -> bool:
        return self._worker.is_idle

    def begin(self, run: Run) -> None:
        # buffers for the optimizer's state are reserved after the first step, which creates it
        self._saves, self._held_up, self._worker.waited = 0, 0, 0.0
        self._join_group(run)
        if run.engine.is_main:
            self._reserve(_weights(run))
            self._waits_for_step = not self._weights_only
        self._listen(run)

    def hold(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self._join_group(run)
        self._wait()
        self._saves += 1
        self._listen(run)
        state = self._capture(run, shards)
        return self._buffers.copy(state) if run.engine.is_main else state

    def do(self, run: Run, work: Callable[[], T], then: Callable[[T], object], *, is_save: bool = True) -> None:
        self._on_every_rank, self._is_save = False, is_save
        self._begin_work(run, work, then)

    def do_on_every_rank(self, run: Run, work: Callable[[], T], then: Callable[[list[T]], object]) -> None:
        self._on_every_rank, self._is_save = True, True
        self._begin_work(run, work, then)

    def _begin_work(self, run: Run, work: Callable[[], Any], then: Callable[[Any], object]) -> None:
        assert self._awaited is None
        self._join_group(run)
        self._listen(run)
        work = watched(run, work)
        if self._engine is None:
            self._worker.submit(work, (lambda result: then([result])) if self._on_every_rank else then)
            return
        self._awaited = then
        if self._on_every_rank or self._engine.is_main:
            self._worker.submit(partial(outcome_of, work), self._report)

    def drain(self) -> None:
        while self._listens_only:
            self._report(None)
        self._worker.drain()
        while self._listens_only:  # work that was added meanwhile
            self._report(None)

    def end(self, run: Run) -> None:
        if run.report.has_left_group and (lost := self._leave_group()):
            run.note(lost)
        self.drain()
        if self._held_up:
            run.note(
                f"background saves: {self._held_up} of {self._saves} waited for the previous one, "
                f"{self._worker.waited:.2f} s in total"
            )

    def close(self) -> None:
        self._leave_group()
        try:
            self._worker.drain()
        finally:
            self._stop_listening()

    @property
    def _listens_only(self) -> bool:
        return self._engine is not None and not (self._engine.is_main or self._awaited is None or self._on_every_rank)

    def _join_group(self, run: Run) -> None:
        is_shared = run.engine.world_size > 1 and not run.report.has_left_group
        self._engine = run.engine if is_shared else None

    def _finish_shards(self) -> None:
        # the process group must not end while the thread writes shards
        if self._on_every_rank:
            self._worker.wait()

    def _leave_group(self) -> str:
        # only the main rank reports what it writes, and without the others no rank reports shards
        engine, then, self._engine = self._engine, self._awaited, None
        if engine is None or then is None or (engine.is_main and not self._on_every_rank):
            return ""
        self._awaited = None
        self._worker.forget()
        if not self._is_save:
            return ""
        outcome = "is finished by the main rank, without a report on this rank"
        if self._on_every_rank:
            outcome = "is abandoned: without the other ranks its shards are not a checkpoint"
        lost = f"the running save {outcome}, because the run did not end on all ranks together"
        logger.warning(lost)
        return lost

    def _report(self, outcome: WorkOutcome[Any] | None) -> None:
        then, self._awaited = self._awaited, None
        assert then is not None
        if self._engine is None:
            assert outcome is not None
            then(outcome.value_or_raise())
        elif self._on_every_rank:
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
                logger.warning("a save waited %.2f s for the previous one to be written", seconds)

    def _reserve(self, state: Any) -> None:
        self._reserving = True
        self._worker.submit(partial(self._buffers.reserve, sizes_of(state)), self._reserved)

    def _reserved(self, done: None) -> None:
        self._reserving = False

    def _listen(self, run: Run) -> None:
        run.hooks.when_settling(self.drain)
        run.hooks.when_leaving(self._finish_shards)
        if self._handle is None:
            self._handle = run.bus.on(BatchEnd, self._poll, lane=Lane.PERSIST)

    def _stop_listening(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _poll(self, run: Run, event: BatchEnd) -> None:
        if self._engine is None or self._awaited is None:
            self._worker.poll()
        elif (
            run.report.ranks_meet
            and not self._engine.vote([float(not (self._listens_only or self._worker.is_done))])[0]
        ):
            self._report(None) if self._listens_only else self._worker.poll()
        if self._waits_for_step and self.is_idle and not run.stepping.window and run.progress.steps > run.origin.steps:
            self._waits_for_step = False
            self._reserve(self._local_state(run))
        if self.is_idle and self._awaited is None and not self._waits_for_step:
            self._stop_listening()

    def _local_state(self, run: Run) -> Any:
        # of the size of a state; on several ranks without a collective
        if self._engine is None:
            return self._capture(run)
        return [_weights(run), *(optimizer.state_dict() for optimizer in run.optimizers.values())]


def _weights(run: Run) -> dict[str, Any]:
    return {name: state_of(module) for name, module in run.modules.items()}


class _Job(NamedTuple):
    future: Future[Any]
    then: Callable[[Any], object]
    thread: Thread


def _run(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  # raised by `poll` or `drain`
        future.set_exception(error)


class BackgroundWorker:
    """Run one job at a time in a thread. `poll` and `drain` raise its errors in the thread that submitted it.

    Attributes:
        waited: total seconds of waiting in `submit`, `drain` and `wait`.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._job: _Job | None = None

    @property
    def is_idle(self) -> bool:
        return self._job is None

    @property
    def is_done(self) -> bool:
        return self._job is not None and self._job.future.done()

    def submit(self, work: Callable[[], T], then: Callable[[T], object] = lambda _: None) -> None:
        """Start a job as soon as the previous one is done.

        Args:
            work: called in a new thread.
            then: called with the result, by `poll` or `drain`; it may submit another job.

        Raises:
            BaseException: the previous job failed; this one is not started.
        """
        self.drain()
        future = Future[Any]()
        thread = Thread(target=_run, args=(work, future), name="heliograph-background", daemon=True)
        thread.start()
        self._job = _Job(future, then, thread)

    def forget(self) -> None:
        self._job = None

    def poll(self) -> None:
        if self._job is not None and self.is_done:
            self._report_end(self._job)

    # An error is raised once. Ctrl-C interrupts the waiting, not the job.
    def drain(self) -> None:
        while (job := self._job) is not None:
            self.wait()
            self._report_end(job)

    def wait(self) -> None:
        if self._job is None or self.is_done:
            return
        since = perf_counter()
        try:
            while not self.is_done:
                wait((self._job.future,), LONGEST_WAIT)
        finally:
            self.waited += perf_counter() - since

    def _report_end(self, job: _Job) -> None:
        job.thread.join()  # a job's thread does not outlive it
        self._job = None
        job.then(job.future.result())


def save_shards(
    run: Run,
    engine: ShardingEngine,
    writer: CheckpointWriter,
    begin: Callable[[int], Path],
    write: Callable[[dict[str, Any], Shards], T],
    then: Callable[[T], object],
    *,
    in_background: bool,
) -> None:
    """Write the shards of every rank, then the remaining state on the main rank, which completes it. A collective.

    Args:
        run: the run.
        engine: holds the shards.
        writer: writes.
        begin: called on the main rank with the total size in bytes; returns a folder that every rank sees.
        write: called on the main rank with the remaining state and the shards.
        then: called with the result of `write`.
        in_background: copy the tensors now, and write them in the background.
    """
    tensors, description = engine.shard_state(run.modules, run.optimizers)
    state = writer.hold(run, description)
    needed = sum(run.engine.gather_objects(room_for(tensors, is_main=run.engine.is_main)))
    folder = on_main(run.engine, partial(begin, needed))

    def commit(of_ranks: list[Shards]) -> None:
        merged = {name: facts for shards in of_ranks for name, facts in shards.items()}
        writer.do(run, partial(write, state, merged), then)

    writer.do_on_every_rank(
        run, begin_shards(engine, tensors, folder, run.engine.rank, in_background=in_background), commit
    )


# Returns a function that writes this rank's shards and returns their sizes and digests. A collective.
def begin_shards(
    engine: ShardingEngine, tensors: Mapping[str, Tensor], folder: Path, rank: int, *, in_background: bool
) -> Callable[[], Shards]:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    # The main rank writes replicated tensors, as in a checkpoint without shards: buffers may differ.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    how: dict[str, Any] = {"checkpoint_id": folder, "planner": planner, "process_group": engine.saving_group()}
    write: Callable[[], object] = partial(save, dict(tensors), **how)
    if in_background:
        saving = async_save(dict(tensors), **how)
        assert isinstance(saving, Future)
        write = saving.result
    return partial(_written, write, folder, rank)


# The bytes that this rank writes: its shards, and replicated tensors on the main rank.
def room_for(tensors: Mapping[str, Tensor], *, is_main: bool) -> int:
    from torch.distributed.tensor import DTensor

    shards = [tensor.to_local() for tensor in tensors.values() if isinstance(tensor, DTensor)]
    replicated = [tensor for tensor in tensors.values() if not isinstance(tensor, DTensor)] if is_main else []
    return sum(tensor.nbytes for tensor in (*shards, *replicated))


def _written(write: Callable[[], Any], folder: Path, rank: int) -> Shards:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        write()
    except CheckpointException as error:
        raise OSError(f"The shards of a checkpoint could not be written to {folder}: {cause_of(error)}") from error
    files = [*folder.glob(f"__{rank}_*"), *([folder / INDEX] if rank == 0 else [])]
    return {file.name: digest_of(file) for file in files}


class Size(NamedTuple):
    # buffers of equal size and memory kind are interchangeable
    bytes: int
    pinned: bool


class Buffers:
    """Host memory that is reused from save to save: new memory costs a page fault per page, many times the copy.

    A copy is valid until the next one, which overwrites it. Not thread-safe.
    """

    def __init__(self) -> None:
        self._buffers_by_size: dict[Size, list[UntypedStorage]] = {}

    def reserve(self, needed: Mapping[Size, int]) -> None:
        for size, count in needed.items():
            buffers = self._buffers_by_size.setdefault(size, [])
            buffers.extend(_new_buffer(size) for _ in range(count - len(buffers)))

    @torch.no_grad()
    def copy(self, state: T) -> T:
        """Return a copy of the state: nested values rebuilt, tensors copied into the buffers.

        Tensors that share memory share it in the copy too, and are copied once. Tensors on a GPU are copied to pinned
        host memory, with one synchronization. Buffers that this state does not use are released.
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
                view.copy_(tensor, non_blocking=on_gpu)  # not as bytes: torch parallelizes by the number of elements
            else:
                buffer.copy_(source, non_blocking=on_gpu)
            return view

        copy: T = map_leaves(state, partial(_copy_leaf, copy_tensor=copy_tensor))
        for device in {device for device, *_ in copied if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        self._buffers_by_size = {size: self._buffers_by_size[size][:count] for size, count in taken.items()}
        return copy

    def _take(self, size: Size, taken: Counter[Size]) -> UntypedStorage:
        buffers, used = self._buffers_by_size.setdefault(size, []), taken[size]
        if used == len(buffers):
            buffers.append(_new_buffer(size))
        taken[size] = used + 1
        return buffers[used]


def sizes_of(state: Any) -> Counter[Size]:
    # holds no reference to the state
    storages = [tensor.untyped_storage() for tensor in tensors_in(state) if _has_storage(tensor)]
    return Counter(_size(storage) for storage in {_place(storage): storage for storage in storages}.values())


def _new_buffer(size: Size) -> UntypedStorage:
    # Filled, because the system commits memory at the first write.
    return torch.empty(size.bytes, dtype=torch.uint8, pin_memory=size.pinned).fill_(0).untyped_storage()


def _size(storage: UntypedStorage) -> Size:
    return Size(storage.nbytes(), storage.device.type == "cuda")


def _place(storage: UntypedStorage) -> _Place:
    return storage.device, storage.data_ptr(), storage.nbytes()


def _like(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    # a view of `storage` with the geometry of `tensor`
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is nn.Parameter:
        return nn.Parameter(view, tensor.requires_grad)
    return view.requires_grad_(tensor.requires_grad)


def _has_storage(value: Any) -> bool:
    return has_memory(value) and not (value.is_conj() or value.is_neg())


def _copy_leaf(value: Any, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
    if type(value) in PLAIN:  # nearly always
        return value
    if _has_storage(value):
        return copy_tensor(value)
    if type(value) in (Tensor, nn.Parameter):  # deepcopy supports only some layouts
        return value.detach().clone()
    return deepcopy(value.detach() if isinstance(value, Tensor) else value)
