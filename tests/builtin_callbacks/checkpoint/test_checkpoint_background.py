"""Checkpoint(background=True): a file holds the cut, nothing is lost, nothing stays unsaid, an idle one is free."""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Bus,
    Checkpoint,
    CheckpointSaved,
    Event,
    Every,
    Lane,
    LastBoundary,
    Plugin,
    Resume,
    Run,
    RunClosed,
    RunFailed,
    RunResult,
    SavePoint,
    SaveSchedule,
    Supervised,
    TrainEnd,
    Trainer,
    on,
)
from heliograph.builtin_callbacks.checkpoint import background_writer
from heliograph.builtin_callbacks.checkpoint.background_writer import BackgroundWriter
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import Entry, Store, reader
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn

Make = Callable[..., Any]


class CrashError(Exception):
    """What the tests interrupt a run with."""


class Disk:
    """Stands before `Store.save`: holds it up until the gate is opened, and lets it fail where a test wants it to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.places: list[dict[str, int]] = []
        self.running = self.most = 0
        real = Store.save

        def save(store: Store, name: str, state: Any, **options: Any) -> Entry:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                self.gate.wait()
                self.places.append(places_of(state))
                if self.error is not None:
                    error, self.error = self.error, None
                    raise error
                return real(store, name, state, **options)
            finally:
                self.running -= 1

        monkeypatch.setattr(Store, "save", save)


def places_of(state: Any, place: str = "") -> dict[str, int]:
    """Return where in memory each tensor of a state lies."""
    if isinstance(state, Tensor):
        return {place: state.untyped_storage().data_ptr()}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {where: at for key, item in items for where, at in places_of(item, f"{place}/{key}").items()}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    before = threading.active_count()
    disk = Disk(monkeypatch)
    yield disk
    disk.gate.set()
    assert threading.active_count() == before, "a thread is left"


@pytest.fixture
def on_waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Return a function that says what happens whenever the loop is about to wait for the worker; it waits 2 s each."""

    def arrange(action: Callable[[], object]) -> None:
        ticks = iter(range(0, 10_000, 2))

        def clock() -> float:
            tick = next(ticks)
            if tick % 4 == 0:
                action()
            return float(tick)

        monkeypatch.setattr(background_writer, "perf_counter", clock)

    return arrange


def finish_writing(checkpoint: Checkpoint) -> None:
    """Let the worker come to the end of its job; nobody has asked after it yet."""
    writer = checkpoint._writer
    assert isinstance(writer, BackgroundWriter)
    if writer._worker._job is not None:
        writer._worker._job.thread.join()


def finish_reserving(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Have all buffers reserved when the second batch ends."""
    for batches in (1, 2):
        at(trainer.bus, BatchEnd, lambda run: finish_writing(checkpoint), batches=batches)


def at(bus: Bus, event: type[Event], act: Callable[[Run], object], *, batches: int | None = None) -> None:
    """Do something at an event, before any plugin learns of it."""

    def handle(run: Run, event: Event) -> None:
        if batches in (None, run.progress.batches):
            act(run)

    bus.on(event, handle, lane=Lane.TRANSFORM)


@pytest.fixture
def make(task: Make, batches: Make, sgd: Any, disk: Disk) -> Callable[..., tuple[Trainer, Callable[..., RunResult]]]:
    """Return a function that makes a trainer which saves every `every` batches of 8, and a function that runs it."""

    def build(checkpoint: Checkpoint, *plugins: Any, every: Any = None) -> tuple[Trainer, Callable[..., RunResult]]:
        trainer = Trainer([SaveSchedule(every or Every(steps=2), at_end=False), *plugins, checkpoint], device="cpu")

        def fit(**options: Any) -> RunResult:
            options = {"task": task(), "optimizer": sgd, "epochs": 1, **options}
            return trainer.fit(options.pop("task"), batches(8), **options)

        return trainer, fit

    return build


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix not in (".last", ".best", ".steps", ".jsonl"))


# The cut.


class Growing(Plugin):
    """Has a state that it changes in place."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @on(BatchEnd)
    def grow(self, run: Run, event: BatchEnd) -> None:
        self.seen.append(run.progress.batches)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = list(state["seen"])


def test_the_file_holds_the_cut_whatever_happens_meanwhile(make: Make, disk: Disk, task: Make, tmp_path: Path) -> None:
    checkpoint, mine, cut = Checkpoint(tmp_path, background=True), task(), dict[str, Any]()
    trainer, fit = make(checkpoint, Growing(), every=Every(steps=4))

    def keep(run: Run, event: SavePoint) -> None:
        if not cut:
            cut["weight"] = mine.model.weight.detach().clone()
            cut["moment"] = next(iter(run.optimizer.state.values()))["momentum_buffer"].clone()

    def spoil(run: Run) -> None:
        for moments in run.optimizer.state.values():
            moments["momentum_buffer"].fill_(7.0)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        with torch.no_grad():
            mine.model.weight.fill_(9.0)
        disk.gate.set()

    trainer.bus.on(SavePoint, keep)
    disk.gate.clear()
    at(trainer.bus, BatchEnd, spoil, batches=6)
    at(trainer.bus, BatchEnd, lambda run: run.control.stop("enough"), batches=7)
    result = fit(task=mine)
    saved = reader.load(tmp_path / "run_epoch_0_iter_4.pth")

    assert torch.equal(saved["modules"]["model"]["weight"], cut["weight"])
    assert torch.equal(saved["optimizers"]["optimizer"]["state"][0]["momentum_buffer"], cut["moment"])
    assert saved["optimizers"]["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert saved["plugins"]["growing"] == {"seen": [1, 2, 3, 4]}
    assert saved["progress"]["steps"] == 4
    assert bool((mine.model.weight == 9.0).all())
    assert result.progress.steps == 7


def test_tied_weights_are_saved_once_and_stay_tied(make: Make, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)
            self.out.weight = self.into.weight

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.into(inputs) + self.out(inputs)
            return result

    for background_ in (False, True):
        _, fit = make(Checkpoint(tmp_path / str(background_), background=background_), every=Every(epochs=1))
        fit(task=Supervised(Tied(), nn.functional.mse_loss))
    plain, after = (reader.load(tmp_path / str(each) / "run_epoch_1_iter_8.pth") for each in (False, True))

    weights = after["modules"]["model"]
    assert weights["into.weight"].untyped_storage().data_ptr() == weights["out.weight"].untyped_storage().data_ptr()
    assert places_of(plain["modules"]).keys() == places_of(after["modules"]).keys()


def test_what_is_written_is_what_the_loop_would_have_written(make: Make, task: Make, tmp_path: Path) -> None:
    for background_ in (False, True):
        torch.manual_seed(1)
        _, fit = make(Checkpoint(tmp_path / str(background_), keep_last=None, background=background_))
        fit(task=task(dropout=0.5))

    plain, after = (
        [storage.read_manifest(each).size for each in sorted((tmp_path / str(b)).glob("*.pth"))] for b in (False, True)
    )
    assert plain == after
    for name in names(tmp_path / "True"):
        one, other = (reader.load(tmp_path / str(each) / name) for each in (False, True))
        assert torch.equal(one["modules"]["model"]["1.weight"], other["modules"]["model"]["1.weight"])
        assert one["optimizers"]["optimizer"]["param_groups"] == other["optimizers"]["optimizer"]["param_groups"]


def test_buffers_are_reserved_at_the_start_and_used_by_every_save(make: Make, disk: Disk, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, background=True)
    trainer, fit = make(checkpoint)
    reserved: list[set[int]] = []

    def look(run: Run) -> None:
        finish_writing(checkpoint)
        buffers = checkpoint._writer._buffers  # type: ignore[attr-defined]  # it is the one in the background
        reserved.append({kept.data_ptr() for each in buffers._buffers_by_size.values() for kept in each})

    at(trainer.bus, BatchEnd, look, batches=1)  # before the first step's state is reserved, after the weights are
    at(trainer.bus, BatchEnd, look, batches=2)
    fit()
    first, *others = disk.places

    assert len(others) == 3
    assert {first["/modules/model/weight"], first["/modules/model/bias"]} <= reserved[1]
    assert first["/optimizers/optimizer/state/0/momentum_buffer"] in reserved[1]
    assert len(reserved[0]) == 2
    assert all(each == first for each in others)


# When it is reported.


def test_nothing_is_reported_before_it_is_durable(make: Make, disk: Disk, tmp_path: Path) -> None:
    checkpoint, reported = Checkpoint(tmp_path, background=True), list[tuple[int, str, bool]]()
    trainer, fit = make(checkpoint, every=Every(steps=3))
    last: list[Path | None] = []

    def report(run: Run, event: CheckpointSaved) -> None:
        reported.append((run.progress.batches, event.path.name, event.path.exists()))

    def open_gate(run: Run) -> None:
        disk.gate.set()
        finish_writing(checkpoint)

    trainer.bus.on(CheckpointSaved, report)
    trainer.bus.on(BatchEnd, lambda run, event: last.append(run.checkpoints.last), lane=Lane.REPORT)
    disk.gate.clear()
    at(trainer.bus, BatchEnd, open_gate, batches=5)
    at(trainer.bus, BatchEnd, lambda run: finish_writing(checkpoint), batches=7)
    result = fit()

    first, second = tmp_path / "run_epoch_0_iter_3.pth", tmp_path / "run_epoch_0_iter_6.pth"
    assert reported == [(5, first.name, True), (7, second.name, True)]
    assert last == [None, None, None, None, first, first, second, second]
    assert result.last_checkpoint == second
    assert names(tmp_path) == [second.name]


def test_the_former_one_stays_until_the_new_one_is_reported(make: Make, disk: Disk, tmp_path: Path) -> None:
    checkpoint, seen = Checkpoint(tmp_path, background=True), list[list[str]]()
    trainer, fit = make(checkpoint, every=Every(steps=4))

    def look(run: Run, event: CheckpointSaved) -> None:
        seen.append(sorted(path.name for path in tmp_path.glob("*.pth")))

    trainer.bus.on(CheckpointSaved, look)
    fit()

    first, second = "run_epoch_0_iter_4.pth", "run_epoch_0_iter_8.pth"
    assert seen == [[first], [first, second]]
    assert names(tmp_path) == [second]


def test_an_idle_one_listens_to_nothing(make: Make, disk: Disk, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, background=True)
    trainer, fit = make(checkpoint, every=Every(steps=5))
    chains: dict[int, int] = {}
    at(trainer.bus, BatchEnd, lambda run: finish_writing(checkpoint))
    trainer.bus.on(
        BatchEnd, lambda run, event: chains.update({run.progress.batches: len(trainer.bus.signal(BatchEnd).chain)})
    )
    fit()
    idle = chains[4]

    assert chains == {1: idle + 1, 2: idle + 1, 3: idle, 4: idle, 5: idle, 6: idle + 1, 7: idle + 1, 8: idle}
    assert len(trainer.bus.signal(BatchEnd).chain) == idle - 1  # the losses of the last batches are no longer kept


class Shut(Plugin):
    """Shuts the gate whenever a cut is made: after the former save was waited for, before the next one begins."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    @on(TrainEnd)
    def nothing(self, run: Run, event: TrainEnd) -> None:
        """A plugin receives something."""

    def state_dict(self) -> dict[str, Any]:
        self.disk.gate.clear()
        return {}

    def load_state_dict(self, state: Any) -> None:
        """There is none."""


def test_at_most_one_is_in_flight_and_the_waiting_is_reported(
    make: Make, disk: Disk, on_waiting: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(tmp_path, background=True, keep_last=None)
    trainer, fit = make(checkpoint, Shut(disk))
    finish_reserving(trainer, checkpoint)
    on_waiting(disk.gate.set)  # the gate opens when the loop waits, and no sooner
    with caplog.at_level(logging.WARNING, "heliograph"):
        result = fit()

    assert disk.most == 1
    assert len(list(tmp_path.glob("*.pth"))) == 4
    (note,) = result.notes
    assert_facts(note, "background saves", "3 of 4 waited")
    (message,) = caplog.messages
    assert re.search(r"save waited [24].00 s", message)  # its pruning may be waited for, too


# Errors surface.


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_an_error_is_raised_at_the_next_batch(make: Make, disk: Disk, tmp_path: Path) -> None:
    checkpoint, seen = Checkpoint(tmp_path, background=True), list[int]()
    trainer, fit = make(checkpoint, every=Every(steps=3))
    disk.error = FULL
    at(trainer.bus, BatchEnd, lambda run: finish_writing(checkpoint))
    at(trainer.bus, BatchEnd, lambda run: seen.append(run.progress.batches))
    with pytest.raises(OSError, match="No space left") as info:
        fit()

    assert info.value is FULL
    assert seen == [1, 2, 3, 4]
    assert "epoch 0, batch 4," in info.value.__notes__[-1]
    assert names(tmp_path) == []


def test_an_error_is_raised_at_the_next_save(make: Make, disk: Disk, on_waiting: Make, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, background=True)
    trainer, fit = make(checkpoint, every=Every(steps=3))
    finish_reserving(trainer, checkpoint)

    def fail_now() -> None:
        disk.error = OSError("at the next save")
        disk.gate.set()

    disk.gate.clear()
    on_waiting(fail_now)
    with pytest.raises(OSError, match="at the next save") as info:
        fit()

    assert "step 6; in checkpoint" in info.value.__notes__[-1]
    assert disk.most == 1
    assert len(disk.places) == 1  # the second one was not begun


def test_an_error_of_the_last_save_fails_the_run(make: Make, disk: Disk, tmp_path: Path) -> None:
    _, fit = make(Checkpoint(tmp_path, background=True), every=Every(steps=8))
    disk.error = OSError("the last one")
    with pytest.raises(OSError, match="the last one") as info:
        fit()

    assert "in checkpoint on last_boundary" in info.value.__notes__[-1]


def test_an_error_of_a_save_that_was_asked_for_at_the_end_fails_the_run(make: Make, disk: Disk, tmp_path: Path) -> None:
    trainer, fit = make(Checkpoint(tmp_path, background=True), every=Every(steps=100))
    at(trainer.bus, TrainEnd, lambda run: run.control.request_save("at the end"))
    disk.error = OSError("later than the end")
    statuses: list[str] = []
    trainer.bus.on(RunClosed, lambda run, event: statuses.append(event.status))
    with pytest.raises(OSError, match="later than the end") as info:
        fit()

    assert "in checkpoint on run_closed" in info.value.__notes__[-1]
    assert statuses == ["completed"]


def test_an_error_of_a_save_does_not_hide_what_failed_the_run(make: Make, disk: Disk, tmp_path: Path) -> None:
    trainer, fit = make(Checkpoint(tmp_path, background=True), every=Every(steps=3))

    def crash(run: Run) -> None:
        disk.error = FULL
        disk.gate.set()
        raise CrashError

    disk.gate.clear()
    at(trainer.bus, BatchEnd, crash, batches=4)
    with pytest.raises(CrashError) as info:
        fit()

    assert any("failed on run_closed: OSError" in note for note in info.value.__notes__)
    assert names(tmp_path) == []


def test_an_error_in_a_handler_of_a_save_is_no_error_of_the_save(make: Make, disk: Disk, tmp_path: Path) -> None:
    trainer, fit = make(Checkpoint(tmp_path, background=True), every=Every(steps=8))

    def crash(run: Run) -> None:
        raise CrashError

    at(trainer.bus, CheckpointSaved, crash)
    with pytest.raises(CrashError):
        fit()

    assert names(tmp_path) == ["run_epoch_0_iter_8.pth"]


# Drained on every ending.


@pytest.mark.parametrize("error", [CrashError, KeyboardInterrupt])
def test_what_is_in_flight_is_finished_when_the_run_fails(
    make: Make, disk: Disk, tmp_path: Path, error: type[BaseException]
) -> None:
    trainer, fit = make(Checkpoint(tmp_path, background=True), every=Every(steps=3))
    reported: list[str] = []

    def fail(run: Run) -> None:
        raise error

    disk.gate.clear()
    at(trainer.bus, BatchEnd, fail, batches=4)
    at(trainer.bus, RunFailed, lambda run: disk.gate.set())
    trainer.bus.on(CheckpointSaved, lambda run, event: reported.append(event.path.name))
    with pytest.raises(error):
        fit()

    assert reported == ["run_epoch_0_iter_3.pth"]
    assert names(tmp_path) == ["run_epoch_0_iter_3.pth"]
    assert reader.load(tmp_path / "run_epoch_0_iter_3.pth")["progress"]["steps"] == 3


def test_what_is_in_flight_is_finished_when_the_run_is_stopped(make: Make, disk: Disk, tmp_path: Path) -> None:
    trainer, fit = make(Checkpoint(tmp_path, background=True), every=Every(steps=3))
    disk.gate.clear()
    at(trainer.bus, BatchEnd, lambda run: run.control.stop("enough"), batches=3)
    at(trainer.bus, LastBoundary, lambda run: disk.gate.set())
    result = fit()

    assert (result.status, result.last_checkpoint) == ("stopped", tmp_path / "run_epoch_0_iter_3.pth")


def test_switching_it_off_finishes_what_is_in_flight(make: Make, disk: Disk, tmp_path: Path) -> None:
    trainer, fit = make(Checkpoint(tmp_path, background=True), every=Every(steps=3))

    def switch_off(run: Run) -> None:
        disk.gate.set()
        trainer.plugins.disable("checkpoint")

    disk.gate.clear()
    at(trainer.bus, BatchEnd, switch_off, batches=4)
    seen: list[list[str]] = []
    at(trainer.bus, BatchEnd, lambda run: seen.append(names(tmp_path)), batches=5)
    fit()

    assert seen == [["run_epoch_0_iter_3.pth"]]


def test_a_second_interrupt_leaves_at_once_and_the_next_run_finds_all_in_order(
    make: Make, disk: Disk, on_waiting: Make, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(tmp_path, background=True)
    trainer, fit = make(checkpoint, every=Every(steps=3))
    handlers = []

    def interrupt(*run: Run) -> None:
        raise KeyboardInterrupt

    def crash(run: Run) -> None:
        on_waiting(interrupt)  # the second one comes while the closing waits
        raise KeyboardInterrupt

    disk.gate.clear()
    handlers.append(trainer.bus.on(BatchEnd, lambda run, event: crash(run), when=Every(steps=4)))
    with pytest.raises(KeyboardInterrupt) as info:
        fit()
    assert isinstance(info.value.__context__, KeyboardInterrupt)  # the first one
    assert ".run.lock" in names(tmp_path)  # it may still be written to
    with pytest.raises(ValueError, match="this process"):
        make(Checkpoint(tmp_path))[1]()

    handlers[0].remove()
    on_waiting(lambda: None)
    disk.gate.set()
    checkpoint.resume = Resume("auto")
    result = fit(epochs=2)
    assert any("epoch 0, batch 3," in note for note in result.notes)
    assert names(tmp_path) == ["run_epoch_1_iter_15.pth"]
