"""`VerifyResume`: compare the replayed steps of a resumed run with the steps of the killed run."""

from __future__ import annotations

import logging
import mmap
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, get_args

import torch
from torch import Tensor

from ...core.checkpoint.storage.manifest import run_part
from ...core.metrics.fetched import Fetched
from ...core.objects.equality import same, shortest
from ...core.system.errors import ResumeDiffers
from ...events import Handle, Lane
from ...events import catalogue as ev
from ...plugins import Plugin, on

if TYPE_CHECKING:
    from ...events import BatchEnd, Run

HEAD = struct.Struct("<8s 16s 16s 2q")  # magic, and the owner
ROW = struct.Struct("<4q d 2q")
MAGIC = b"HelioSt2"
BEGIN, ROWS = 128, 4096
SIZE = BEGIN + ROWS * ROW.size
OFFSETS = tuple(BEGIN + slot * ROW.size for slot in range(ROWS))  # by the number of the batch % ROWS
MASK = ROWS - 1
Counters = tuple[int, int, int, int]
Losses = tuple[Counters, list[Tensor]]  # of a batch
CHUNK = 32  # batches: a kill loses at most so many


class Owner(NamedTuple):
    """The owner of the rows.

    Attributes:
        training: 16 bytes that identify the training.
        layout: 16 bytes that identify the distribution of samples over batches: in another layout, numbers differ.
        rank: the process.
        world_size: the number of processes.
    """

    training: bytes
    layout: bytes
    rank: int = 0
    world_size: int = 1


class Row(NamedTuple):
    """One batch.

    Attributes:
        number: in the run, from 1.
        batch: in the epoch, from 1.
        steps: optimizer steps after it.
        samples: samples trained on, including it.
        loss: the first loss; 0 if the batch was skipped.
        other_digest: a digest of the other losses; 0 without.
        end: the number again, negative if the batch was skipped.
    """

    number: int
    batch: int
    steps: int
    samples: int
    loss: float
    other_digest: int
    end: int

    @property
    def is_skipped(self) -> bool:
        return self.end < 0

    @property
    def bits(self) -> bytes:
        # NaN equals NaN of the same bits
        return ROW.pack(*self)


class Ring:
    """The file, in memory. An existing file must be `SIZE` bytes long.

    Attributes:
        buffer: the file's content; a row is packed at `OFFSETS[number & MASK]`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self.buffer = mmap.mmap(file.fileno(), SIZE)

    @classmethod
    def new(cls, path: Path, owner: Owner) -> Self:
        """Replace the file by a new one.

        Raises:
            OSError: it cannot be replaced, there is no space, or the file system maps no files.
        """
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(SIZE))  # without space, this raises OSError; a write to the mapping would be a signal
        ring = cls(path)
        HEAD.pack_into(ring.buffer, 0, MAGIC, *owner)
        return ring

    @classmethod
    def open_existing(cls, path: Path) -> Self | None:
        """Open the file of an earlier run; None if there is no valid one.

        Raises:
            OSError: it cannot be read.
        """
        if path.is_symlink() or not path.is_file() or path.stat().st_size != SIZE or path.stat().st_nlink != 1:
            return None
        ring = cls(path)
        if ring.buffer[: len(MAGIC)] != MAGIC:
            ring.close()
            return None
        return ring

    @property
    def owner(self) -> Owner:
        _, *facts = HEAD.unpack_from(self.buffer)
        return Owner(*facts)

    def rows(self) -> list[Row]:
        rows = map(Row._make, ROW.iter_unpack(self.buffer[BEGIN:]))
        in_place = (row for slot, row in enumerate(rows) if row.number > 0 and row.number & MASK == slot)
        return sorted(row for row in in_place if abs(row.end) == row.number)  # others were cut off

    def write(self, row: Row) -> None:
        ROW.pack_into(self.buffer, OFFSETS[row.number & MASK], *row)

    def close(self) -> None:
        self.buffer.close()


class RowReader:
    """Create rows, in the order of the batches, once their losses have arrived from the device."""

    def __init__(self) -> None:
        self._open: list[Losses] = []  # still on the device
        self._sent: deque[tuple[list[Losses], Fetched]] = deque()

    def of(self, run: Run) -> Iterator[Row]:
        # also rows of earlier batches; none if the loop does not have the loss
        progress, is_skipped = run.progress, run.control.skips_batch
        losses = () if is_skipped else run.stepping.batch_losses
        if losses or is_skipped:
            counters = progress.batches, progress.batch, progress.steps, progress.samples
            self._open.append((counters, [copied(loss, losses[0].device) for loss in losses]))
            if len(self._open) == CHUNK or on_host(losses):
                self._send()
            yield from self._arrived(wait=False)

    def late(self, *, wait: bool = False) -> Iterator[Row]:
        self._send()
        yield from self._arrived(wait=wait)

    def _send(self) -> None:
        batches, self._open = self._open, []
        losses = [loss for _, of_batch in batches for loss in of_batch]
        self._sent.append((batches, Fetched(torch.stack(losses) if losses else torch.empty(0))))

    def _arrived(self, *, wait: bool) -> Iterator[Row]:
        while self._sent and (wait or self._sent[0][1].is_there):
            batches, fetched = self._sent.popleft()
            values = iter(fetched.read())
            for counters, losses in batches:
                yield _row(counters, [next(values) for _ in losses])


def on_host(losses: Sequence[Tensor]) -> bool:
    return all(loss.is_cpu for loss in losses)


# Not waited for. A graph on a GPU may reuse the loss's memory.
def copied(loss: Tensor, device: torch.device) -> Tensor:
    return loss.detach().clone().reshape(()).to(device, non_blocking=True)


def quick_writer(run: Run, ring: Ring) -> Callable[..., None]:
    # a handler for the common case: a single loss, on the CPU
    progress, control, buffer, pack = run.progress, run.control, ring.buffer, ROW.pack_into

    def write(run: Run, event: BatchEnd) -> None:  # noqa: ARG001  # the signature of a handler
        number = progress.earlier_batches + (batch := progress.batch)
        if control.skips_batch:
            ring.write(_row((number, batch, progress.steps, progress.samples), ()))
        elif (loss := run.loss) is not None:  # None if a train_function does not return it
            at = OFFSETS[number & MASK]
            pack(buffer, at, number, batch, progress.steps, progress.samples, loss.item(), 0, number)

    return write


def is_plain(run: Run) -> bool:
    return len(run.optimizers) == 1 and run.loss is not None and run.loss.is_cpu


def _row(counters: Counters, values: Sequence[float]) -> Row:
    number, *_ = counters
    if not values:
        return Row(*counters, loss=0.0, other_digest=0, end=-number)
    other_losses = blake2b(struct.pack(f"<{len(values)}d", *values), digest_size=8).digest() if values[1:] else bytes(8)
    return Row(*counters, loss=values[0], other_digest=int.from_bytes(other_losses, "little", signed=True), end=number)


OnDifference = Literal["note", "stop", "raise"]
logger = logging.getLogger("heliograph")


class SavingPlugin(Protocol):
    # a plugin that brings `VerifyResume`; `file_name` is empty until it is known

    folder: Path
    file_name: str


class RankFinding(NamedTuple):
    """The result of one rank.

    Attributes:
        batches: the number of compared batches.
        steps: the replayed optimizer steps that were equal.
        is_done: whether nothing is left to compare.
        difference: the number of the first batch that differs, a description, and its likely causes.
        obstacle: why the rank could compare nothing.
    """

    batches: int
    steps: int
    is_done: bool
    difference: tuple[int, str, str] | None
    obstacle: str | None


class VerifyResume(Plugin):
    """Compare replayed steps of a resumed run with the killed run, bit for bit.

    A run that was killed after its last checkpoint had done steps that the resumed run repeats. Their losses must be
    equal. `result.resume` reports how many were, and the first difference. `Checkpoint` brings this plugin; register
    one to choose the action at a difference.

    The losses of the last 4,096 batches are stored with the checkpoints, in a file `.<run>.steps` for each rank. On one
    process `ResumeVerified` is emitted when the last replayed batch is compared, or at the first difference; several
    ranks exchange their results at the next save, or at the end.

    Args:
        on_difference: `note` it (a warning, and `result.resume.divergence`), also request a `stop`, or `raise`
            `ResumeDiffers`.

    Raises:
        ValueError: `on_difference` is none of these.
        ResumeDiffers: a replayed step differs, with `"raise"`.
    """

    affects_training = False

    def __init__(self, on_difference: OnDifference = "note") -> None:
        if on_difference not in get_args(OnDifference):
            raise ValueError(f"on_difference is 'note', 'stop' or 'raise', got {on_difference!r}.")
        self.on_difference = on_difference
        self.asks = ("stop",) * (on_difference == "stop")
        self._ring: Ring | None = None
        self._handle: Handle | None = None
        self._forget()

    def describe(self, run: Run) -> str:
        """Return the action at a difference, unless it is only noted."""
        action = {"stop": "stops the run", "raise": "raises an error"}.get(self.on_difference)
        return f"{action} if a replayed step differs" if action else ""

    @on(ev.TrainStart, lane=Lane.PERSIST)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Forget the previous run, and prepare to record batches."""
        self.close()
        self._forget()
        self._find_saver(run)

    @on(ev.CheckpointLoaded, lane=Lane.REPORT)
    def continue_from(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Find the batches of the killed run; after a rollback, record again after the next checkpoint."""
        if self._saver is None:
            return
        self._steps, self._saved_at = run.progress.steps, run.progress.batches
        if run.checkpoints.resumed_at is run.origin:
            from ...core.checkpoint.verified import verified_before  # imported in a resumed run

            self._is_settled = False
            run.checkpoints.verified_before = verified_before(self._saver.folder, run.name)
            self._guarded(run, self._open_file)
        else:
            self._expected.clear()
            self._remove_file(run)

    @on(ev.SavePoint, lane=Lane.REPORT, optional=True)
    def exchange(self, run: Run, event: ev.SavePoint) -> None:
        """Compare batches that have arrived, and exchange results with the other ranks."""
        if self._handle is None and self._obstacle is None:  # after a difference, or a plugin was off for a while
            self._find_saver(run)
        self._saved_at = run.progress.batches
        self._take(run, self._rows.late())
        self._settle(run)

    @on(ev.TrainEnd, lane=Lane.PERSIST)
    def finish(self, run: Run, event: ev.TrainEnd) -> None:
        """Compare the remaining batches, and report the result."""
        self._take(run, self._rows.late(wait=True))
        self._settle(run, is_end=True)

    @on(ev.RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: ev.RunClosed) -> None:
        """Remove the file after a run that ended well and saved its last step."""
        is_over = event.status in ("completed", "stopped") and self._saved_at == run.progress.batches
        if is_over:
            self._remove_file(run)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._rows = RowReader()

    def _remove_file(self, run: Run) -> None:
        self.close()  # Windows cannot remove a mapped file
        if self._saver is not None and self._obstacle is None:
            self._path(run).unlink(missing_ok=True)

    def _forget(self) -> None:
        self._saver: SavingPlugin | None = None
        self._rows = RowReader()
        self._expected: dict[int, Row] = {}
        self._batches = self._equal = self._steps = 0
        self._saved_at = -1
        self._is_settled = True  # nothing to compare, or the result is reported
        self._difference: tuple[int, str, str] | None = None
        self._obstacle: str | None = None

    def _find_saver(self, run: Run) -> None:
        savers = [plugin for plugin in run.plugins if VerifyResume in getattr(plugin, "brings", ())]
        if not savers:
            run.warn("VerifyResume compares nothing: no plugin brings it. Register Checkpoint(folder).")
        self._saver = next((plugin for plugin in savers if run.plugins.is_enabled(plugin)), None)
        if self._saver is not None:
            self._listen(run, self._open_afresh)

    def _listen(self, run: Run, handler: Callable[..., None]) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = run.bus.on(ev.BatchEnd, handler, lane=Lane.PERSIST)

    def _open_afresh(self, run: Run, event: ev.BatchEnd) -> None:
        self._guarded(run, self._begin_file)
        if self._ring is not None:
            self._compare_batch(run, event)

    def _begin_file(self, run: Run) -> None:
        self._ring = Ring.new(self._path(run), self._owner(run))
        self._listen(run, self._compare_batch)

    def _open_file(self, run: Run) -> None:
        owner, ring = self._owner(run), Ring.open_existing(self._path(run))
        if ring is None:
            self._begin_file(run)
            return
        rows, previous_owner = ring.rows(), ring.owner
        if previous_owner == owner and run.checkpoints.batch_note is None:
            self._ring = ring
            self._expected = {row.number: row for row in rows if row.number > run.progress.batches}
            self._listen(run, self._compare_batch)
            return
        ring.close()
        if previous_owner.training == owner.training and any(row.steps > run.progress.steps for row in rows):
            change = run.checkpoints.batch_note or "the killed run had other batches"
            if previous_owner.world_size != owner.world_size:
                change = f"world size changed from {previous_owner.world_size} to {owner.world_size}"
            run.checkpoints.unverified = f"replayed steps not verified: {change}"
        self._begin_file(run)

    def _owner(self, run: Run) -> Owner:
        layout = blake2b(repr(run.data.layouts).encode(), digest_size=16).digest()
        return Owner(bytes.fromhex(run.checkpoints.training_id), layout, run.engine.rank, run.engine.world_size)

    def _path(self, run: Run) -> Path:
        assert self._saver is not None
        rank = f".{run.engine.rank}" * (not run.engine.is_main)
        return self._saver.folder / f".{run_part(self._saver.file_name or run.name)}.steps{rank}"

    def _guarded(self, run: Run, work: Callable[[Run], None]) -> None:
        # without the file the run continues, with a note
        try:
            work(run)
        except OSError as error:
            self.close()
            rank = f"rank {run.engine.rank}: " if run.engine.world_size > 1 else ""
            self._obstacle = f"{rank}replayed steps are neither compared nor recorded: {error}"
            run.note(self._obstacle)
            logger.warning("%s", self._obstacle)

    def _compare_batch(self, run: Run, event: ev.BatchEnd) -> None:
        self._take(run, self._rows.of(run))
        if run.engine.world_size == 1:
            self._settle(run)
        if self._ring is not None and not self._expected and is_plain(run):
            self._listen(run, quick_writer(run, self._ring))

    def _take(self, run: Run, rows: Iterable[Row]) -> None:
        for row in rows:
            if self._ring is None:
                return
            expected = self._expected.pop(row.number, None)
            if expected is not None:
                self._batches += 1
                if expected.bits != row.bits:
                    self._differ(run, expected, row)
                    return
                self._equal += row.steps - self._steps
            self._ring.write(row)
            self._steps = row.steps

    def _differ(self, run: Run, expected: Row, row: Row) -> None:
        # The file keeps the rows of the killed run until a checkpoint reports the difference.
        assert self._ring is not None
        text = difference(expected, row, run.engine.rank if run.engine.world_size > 1 else None)
        causes = "; ".join(run.data.resume_facts().sentences) or HIDDEN_STATE
        if self.on_difference == "raise":
            raise ResumeDiffers(text, row.steps, row.number, self._ring.path, causes)
        self._difference = row.number, text, causes
        self._expected.clear()
        self.close()
        run.data.report_difference(text)  # also in runs that resume this one
        logger.warning("the resumed run %s; likely cause: %s", text, causes)
        if self.on_difference == "stop":
            run.control.stop(f"the resumed run {text}")

    def _settle(self, run: Run, *, is_end: bool = False) -> None:
        # Reports the result once all ranks have compared, or a batch differs. A collective.
        if self._is_settled:
            return
        mine = RankFinding(self._batches, self._equal, not self._expected, self._difference, self._obstacle)
        findings: list[RankFinding] = run.engine.gather_objects(mine)
        differences = [finding.difference for finding in findings if finding.difference is not None]
        if not (is_end or differences or all(finding.is_done for finding in findings)):
            return
        self._is_settled = True
        steps = run.checkpoints.verified_steps = min(finding.steps for finding in findings)
        if differences:
            _, text, causes = min(differences)
            run.checkpoints.difference = text
            run.data.report_difference(text)
            run.warn(f"The resumed run {text}. Likely cause: {causes}.")
        for finding in findings:
            if finding.obstacle is not None and finding.obstacle != self._obstacle:
                run.note(finding.obstacle)
        if not any(finding.batches for finding in findings):
            return
        if steps and not differences and run.engine.is_main and self._saver is not None:
            from ...core.checkpoint.verified import record_verified

            record_verified(self._saver.folder, run.name, steps, "VerifyResume")
        run.emit(ev.ResumeVerified(steps, run.checkpoints.difference))


HIDDEN_STATE = (
    "the task or a plugin has state outside the checkpoint, fix it with state_dict and load_state_dict; or the data "
    "have changed"
)


def difference(expected: Row, got: Row, rank: int | None = None) -> str:
    # for example: DIVERGED at step 253: loss 0.4512, was 0.4513
    before, now = _values(expected), _values(got)
    name = next((name for name in now if not same(before[name], now[name])), "loss")
    texts = shortest(now[name], before[name]) if name == "loss" else [str(now[name]), str(before[name])]
    suffix = "" if rank is None else f" (rank {rank})"
    return f"DIVERGED at step {got.steps}: {name} {', was '.join(texts)}{suffix}"


def _values(row: Row) -> dict[str, Any]:
    return {
        "batch of the epoch": row.batch,
        "optimizer steps": row.steps,
        "samples": row.samples,
        "batch": "skipped" if row.is_skipped else "trained on",
        "loss": row.loss,
        "digest of the other losses": f"{row.other_digest % 2**64:x}",
    }
