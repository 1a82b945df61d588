"""Comparison of replayed steps with the steps of the killed run."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from ...core.checkpoint.storage.manifest import run_part
from ...core.system.errors import ResumeDiffers
from ...events import Handle, Lane, Run
from ...events import catalogue as ev
from ...plugins import Plugin, on
from .ring_buffer import Owner, Ring, Row, Rows, is_plain, quick_writer

OnDifference = Literal["note", "stop", "raise"]
ACTIONS: tuple[str, ...] = get_args(OnDifference)
DIVERGES = "The resumed run"
logger = logging.getLogger("heliograph")


class Saver(Protocol):
    """A plugin that brings `VerifyResume`, as far as it matters here.

    Attributes:
        folder: where it writes.
        file_name: what the names of its files begin with; empty until that is known.
    """

    folder: Path
    file_name: str


class RankFinding(NamedTuple):
    """What a rank found.

    Attributes:
        batches: how many were compared.
        steps: the repeated optimizer steps that were found equal.
        is_done: whether nothing is left to compare.
        differs_at: the batch that was the first to differ, None without.
        difference: in words.
        obstacle: why the rank could compare nothing.
    """

    batches: int
    steps: int
    is_done: bool
    differs_at: int | None
    difference: str | None
    obstacle: str | None


class VerifyResume(Plugin):
    """Compare replayed steps of a resumed run with the killed run, bit for bit.

    A run that was killed after its last checkpoint had done steps that the resumed run does again. Their losses must be
    equal. `result.resume` says how many were, and what differs first. `Checkpoint` brings this plugin; register one to
    choose what happens at a difference.

    The losses of the last 4,096 batches are kept beside the checkpoints, in a file `.<run>.steps`; each rank has a file
    of its own. On one process `ResumeVerified` is emitted when the last repeated batch is compared, or at the first
    difference; several ranks exchange what they found at the next save, or at the end.

    Args:
        on_difference: `note` it (a warning, and `result.resume.divergence`), also ask for a `stop`, or `raise`
            `ResumeDiffers`.

    Raises:
        ValueError: `on_difference` is none of these.
        ResumeDiffers: a repeated step differs, with `"raise"`.
    """

    affects_training = False

    def __init__(self, on_difference: OnDifference = "note") -> None:
        if on_difference not in ACTIONS:
            raise ValueError(f"on_difference is one of {', '.join(ACTIONS)}; got {on_difference!r}.")
        self.on_difference = on_difference
        self.asks = ("stop",) * (on_difference == "stop")
        self._returns = 0  # how often the run went back to a saved state; part of the checkpoint
        self._keeps_former = False
        self._ring: Ring | None = None
        self._handle: Handle | None = None
        self._last_handle: Handle | None = None
        self._forget()

    def describe(self, run: Run) -> str:
        """Return what happens at a difference, unless it is only noted."""
        acts = {"stop": "stops the run", "raise": "raises an error"}.get(self.on_difference)
        return f"{acts} if a repeated step differs" if acts else ""

    @on(ev.TrainStart, lane=Lane.PERSIST)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Forget the previous run, and wait for the first batch or for the state to continue from."""
        self.close()
        self._forget()
        self._returns = 0
        self._find_saver(run)

    @on(ev.CheckpointLoaded, lane=Lane.REPORT)
    def continue_from(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Look for what was done after the state, or drop it if the run went back."""
        if self._saver is None:
            return
        self._steps, self._saved_at = run.progress.steps, run.progress.batches
        if run.checkpoints.resumed_at is run.origin:
            self._is_resumed = True
            self._guarded(run, lambda: self._look(run))
            return
        self._returns += 1
        self._rows.forget()
        self._expected.clear()
        if self._ring is not None:
            self._ring.drop(run.progress.batches)
            self._ring.sign(self._owner(run))
            if self._returns == self._other_path[0]:  # the killed run had gone back, too: from here on it did the same
                self._expect(run, self._other_path[1])
            self._listen(run, self._compare_batch)

    @on(ev.SavePoint, lane=Lane.REPORT, optional=True)
    def exchange(self, run: Run, event: ev.SavePoint) -> None:
        """Take in what a device has by now, and exchange with the other ranks."""
        if self._handle is None and self._obstacle is None:  # this or the saver was off for a while
            self._find_saver(run)
        self._saved_at = run.progress.batches
        self._take(run, self._rows.late())
        self._exchange(run, is_end=False)
        if self._keeps_former and self._ring is not None:  # from here on, the checkpoint says that it differs
            self._keeps_former = False
            self._ring.drop(run.progress.batches)

    @on(ev.TrainEnd, lane=Lane.PERSIST)
    def finish(self, run: Run, event: ev.TrainEnd) -> None:
        """Read the rest, and report what was found."""
        self._take(run, self._rows.late(wait=True))
        self._exchange(run, is_end=True)
        if run.engine.world_size == 1 and self._batches:
            self._emit_verified(run)

    @on(ev.RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: ev.RunClosed) -> None:
        """Remove the file after a run that ended well, if nothing was done after the last save."""
        is_over = event.status in ("completed", "stopped") and self._saved_at == run.progress.batches
        if is_over and self._ring is not None:
            path = self._ring.path
            self.close()  # Windows removes no file that is mapped
            path.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """Return how often the run went back."""
        return {"returns": self._returns} if self._returns else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; a run that goes back once more has another number than the path that it leaves."""
        self._returns = max(self._returns, state.get("returns", 0))

    def close(self) -> None:
        """Close the file, which stays for the next run."""
        self._remove_last_handle()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._rows.forget()

    def _forget(self) -> None:
        self._saver: Saver | None = None
        self._rows = Rows()
        self._expected: dict[int, Row] = {}
        self._other_path: tuple[int, list[Row]] = 0, []  # after how many returns the killed run did what, beside ours
        self._batches = self._equal = self._steps = 0
        self._saved_at = -1
        self._is_resumed = self._is_emitted = False
        self._keeps_former = False  # what the killed run had done, until a checkpoint knows that this one differs
        self._found: tuple[int, str] | None = None
        self._obstacle: str | None = None

    def _find_saver(self, run: Run) -> None:
        """Find the plugin that brought this one."""
        savers = [each for each in run.plugins if VerifyResume in getattr(each, "brings", ())]
        if not savers:
            run.warn("VerifyResume compares nothing: no plugin brings it, as Checkpoint(folder) does.")
        self._saver = next((each for each in savers if run.plugins.is_enabled(each)), None)
        if self._saver is not None:
            if not hasattr(self._saver, "folder") or not hasattr(self._saver, "file_name"):
                raise TypeError(
                    f"{type(self._saver).__name__} brings VerifyResume, which needs its attributes `folder` and "
                    f"`file_name`."
                )
            self._listen(run, self._open_afresh)

    def _listen(self, run: Run, handler: Callable[..., None]) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = run.bus.on(ev.BatchEnd, handler, lane=Lane.PERSIST)

    # The file.

    def _open_afresh(self, run: Run, event: ev.BatchEnd) -> None:
        """At the first batch of a run that starts fresh: begin an empty file."""
        self._guarded(run, lambda: self._begin_file(run))
        if self._ring is not None:
            self._compare_batch(run, event)

    def _begin_file(self, run: Run) -> None:
        self._ring = Ring.new(self._path(run), self._owner(run))
        self._listen(run, self._compare_batch)

    def _look(self, run: Run) -> None:
        """Find out what the killed run had done after the state, or begin an empty file."""
        owner = self._owner(run)
        if (found := Ring.found(self._path(run), owner.training)) is None:
            self._begin_file(run)
            return
        ring, former = found
        rows = ring.rows()
        if former == owner and run.checkpoints.batch_note is None:
            self._ring = ring
            self._expect(run, rows)
            self._listen(run, self._compare_batch)
            return
        ring.close()
        if former == replace(owner, returns=former.returns) and run.checkpoints.batch_note is None:
            self._other_path = former.returns, rows
        if former.returns == owner.returns and any(row.steps > run.progress.steps for row in rows):
            run.note(
                f"the steps that are done again were not compared: {_other(former, owner, run.checkpoints.batch_note)}"
            )
        self._begin_file(run)

    def _expect(self, run: Run, rows: Iterable[Row]) -> None:
        """Compare what is done from here on with rows of the killed run."""
        self._expected = {row.number: row for row in rows if row.number > run.progress.batches}
        if self._expected and run.engine.world_size == 1 and self._last_handle is None:
            self._last_handle = run.bus.on(ev.BatchEnd, self._emit_when_done, lane=Lane.REPORT)

    def _owner(self, run: Run) -> Owner:
        layout = blake2b(repr(run.data.layouts).encode(), digest_size=16).digest()
        return Owner(
            bytes.fromhex(run.checkpoints.training_id), layout, run.engine.rank, run.engine.world_size, self._returns
        )

    def _path(self, run: Run) -> Path:
        assert self._saver is not None
        rank = f".{run.engine.rank}" * (not run.engine.is_main)
        return self._saver.folder / f".{run_part(self._saver.file_name or run.name)}.steps{rank}"

    def _guarded(self, run: Run, work: Callable[[], None]) -> None:
        """Do some work on the file; where the system refuses, the run continues without the proof, and says so."""
        try:
            work()
        except OSError as error:
            self.close()
            who = f"rank {run.engine.rank}: " if run.engine.world_size > 1 else ""
            self._obstacle = f"{who}repeated steps are not compared, nor kept for it: {error}"
            run.note(self._obstacle)
            logger.warning("%s", self._obstacle)

    # The comparison.

    def _compare_batch(self, run: Run, event: ev.BatchEnd) -> None:
        self._take(run, self._rows.of(run))
        if self._ring is not None and not (self._expected or self._keeps_former) and is_plain(run):
            self._listen(run, quick_writer(run, self._ring))

    def _take(self, run: Run, rows: Iterable[Row]) -> None:
        """Compare rows with what is expected there, and write them."""
        if self._ring is None:
            return
        for row in rows:
            expected = self._expected.pop(row.number, None)
            if expected is not None:
                self._compare(run, expected, row)
            if not self._keeps_former:
                self._ring.write(row)
            self._steps = row.steps

    def _compare(self, run: Run, expected: Row, row: Row) -> None:
        assert self._ring is not None
        self._batches += 1
        if expected.bits != row.bits:
            self._differ(run, expected, row)
            self._keeps_former = True
            self._expected.clear()
            return
        self._equal += row.steps - self._steps
        if run.engine.world_size == 1:
            run.checkpoints.verified_steps = self._equal

    def _differ(self, run: Run, expected: Row, row: Row) -> None:
        """Report the difference with its likely causes, and do what was asked for."""
        assert self._ring is not None
        text = difference(expected, row, run.engine.rank if run.engine.world_size > 1 else None)
        causes = likely_causes(run)
        if self.on_difference == "raise":  # the file stays as it is, for the next try
            raise ResumeDiffers(text, row.steps, row.number, self._ring.path, "; ".join(causes))
        self._found = row.number, text
        _report(run, text)
        if causes == (HIDDEN_STATE,):  # the result lists all others anyway
            run.note(f"likely cause of the difference: {HIDDEN_STATE}")
        if run.engine.world_size == 1:  # several ranks agree on the first difference before
            run.warn(f"{DIVERGES} {text}. Likely cause: {'; '.join(causes)}.")
        logger.warning("the resumed run %s; likely cause: %s", text, "; ".join(causes))
        if self.on_difference == "stop":
            run.control.stop(f"the resumed run {text}")

    def _emit_when_done(self, run: Run, event: ev.BatchEnd) -> None:
        """Emit at the batch's end, after all handlers of the batch itself."""
        if not self._expected:
            if self._batches:
                self._emit_verified(run)
            self._remove_last_handle()

    def _remove_last_handle(self) -> None:
        if self._last_handle is not None:
            self._last_handle.remove()
            self._last_handle = None

    def _emit_verified(self, run: Run) -> None:
        if not self._is_emitted:
            self._is_emitted = True
            run.emit(ev.ResumeVerified(run.checkpoints.verified_steps, run.checkpoints.difference))

    def _exchange(self, run: Run, *, is_end: bool) -> None:
        """Let all ranks know what each found, as soon as nothing is left to compare. A collective."""
        if run.engine.world_size == 1 or not self._is_resumed or self._is_emitted:
            return
        at, text = self._found or (None, None)
        mine = RankFinding(self._batches, self._equal, not self._expected, at, text, self._obstacle)
        found: list[RankFinding] = run.engine.gather_objects(mine)
        differing = [each for each in found if each.differs_at is not None]
        if not (is_end or differing or all(each.is_done for each in found)):
            return
        run.checkpoints.verified_steps = min(each.steps for each in found)
        if differing:
            first = min(differing, key=lambda each: each.differs_at or 0)
            assert first.difference is not None
            _report(run, first.difference)
            run.warn(f"{DIVERGES} {first.difference}.")
        for each in found:
            if each.obstacle is not None and each.obstacle != self._obstacle:
                run.note(each.obstacle)
        if any(each.batches for each in found):
            self._emit_verified(run)
        self._is_emitted = True


def _report(run: Run, text: str) -> None:
    run.checkpoints.difference = text
    run.data.report_difference(text)  # which a run that resumes this one repeats


def _other(before: Owner, now: Owner, batches: str | None) -> str:
    """Return why the batches of a run are not those of the killed one."""
    if before.world_size != now.world_size:
        were = "1 process" if before.world_size == 1 else f"{before.world_size} processes"
        return (
            f"{were} had done them, now there are {now.world_size}" if now.world_size > 1 else f"{were} had done them"
        )
    return batches or "the batches are other ones than those of the killed run"


COUNTED = (("batch", "batch of the epoch"), ("steps", "optimizer steps"), ("samples", "samples"))
HIDDEN_STATE = (
    "the task or a plugin has state that no checkpoint holds: give it state_dict and load_state_dict; or the data have "
    "changed"
)


def difference(expected: Row, got: Row, rank: int | None = None) -> str:
    """Return where two rows of the same batch differ: `DIVERGED at step 253: loss 0.4512, was 0.4513`.

    Args:
        expected: what the killed run had.
        got: what the resumed one has.
        rank: where it was found, None where there is one process only.
    """
    where = "" if rank is None else f" (rank {rank})"
    return f"DIVERGED at step {got.steps}: {what_differs(expected, got)}{where}"


def distinguish(one: float, other: float) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to distinguish them."""
    pair = repr(one), repr(other)
    for digits in (4, 6, 9, 17):
        pair = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if pair[0] != pair[1]:
            break
    return pair


def what_differs(expected: Row, got: Row) -> str:
    """Return what two rows do not have in common: `loss 0.4512, was 0.4513`."""
    for field, name in COUNTED:
        before, now = getattr(expected, field), getattr(got, field)
        if before != now:
            return f"{name} {now:,}, was {before:,}"
    if expected.is_left_out != got.is_left_out:
        return "the batch was " + ("left out, not trained on" if got.is_left_out else "trained on, not left out")
    if struct.pack("d", expected.loss) == struct.pack("d", got.loss):
        return "the loss of another optimizer than the first"
    several = " of the first optimizer" if expected.others or got.others else ""
    return f"loss{several} {', was '.join(distinguish(got.loss, expected.loss))}"


def likely_causes(run: Run) -> tuple[str, ...]:
    """Return what makes a resumed run differ: what the run reports, else that something is hidden."""
    return run.data.resume_facts().sentences or (HIDDEN_STATE,)
