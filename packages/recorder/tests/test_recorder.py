"""The recorder records what happens, and changes nothing."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core.checkpoint.storage import read_manifest
from heliograph.packages.recorder.tests.recordings import fit
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph.tests.ranks_pool import Pool
from heliograph_recorder.explain.story import story
from heliograph_recorder.format import writer
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import (
    AttemptRecord,
    Batch,
    Batches,
    Entry,
    EventEntry,
    RepeatEntry,
    RequestEntry,
    TimesEntry,
    walk,
)
from heliograph_recorder.plugin import Recorder
from heliograph_testing import check_plugin
from torch import nn


class Moved(h.Event):
    """A custom event."""

    distance: float
    notes: Any = None


class Act(h.Plugin):
    """Does something after the batches with these numbers."""

    asks: tuple[str, ...] = ("stop", "save", "log", "validation")

    def __init__(self, action: Any, *batches: int) -> None:
        self.action, self.batches = action, batches

    @h.on(h.BatchEnd)
    def act(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.batches in self.batches:
            self.action(run)


class Seen(h.Plugin):
    """Notes the counters and the clock, as a handler sees them."""

    def __init__(self) -> None:
        self.batches: list[tuple[float, ...]] = []
        self.others: list[tuple[str, float]] = []

    @h.on(h.BatchEnd)
    def note(self, run: h.Run, event: h.BatchEnd) -> None:
        at = run.progress
        self.batches.append((at.epoch, at.batch, at.steps, at.samples, run.stepping.window, at.seconds))

    @h.on(h.EpochStart, h.Log, h.ValidationEnd)
    def note_clock(self, run: h.Run, event: h.EpochStart | h.Log | h.ValidationEnd) -> None:
        self.others.append((event.name, run.progress.seconds))


def usual(folder: Path, *more: Any) -> list[Any]:
    """Return a recorder and plugins that make requests."""
    schedules = [
        h.LogSchedule(h.Every(steps=3)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.SaveSchedule(h.Every(steps=5), at_end=False),
    ]
    return [Recorder(folder), *schedules, h.Checkpoint(folder / "checkpoints", resume="auto"), *more]


def only(path: Path | None) -> AttemptRecord:
    """Return the one attempt of a recording."""
    assert path is not None
    (attempt,) = read(path).attempts
    return attempt


def batches(attempt: AttemptRecord) -> list[Batch]:
    return [batch for entry in attempt.entries if isinstance(entry, Batches) for batch in entry]


def events(attempt: AttemptRecord, *names: str) -> list[EventEntry]:
    return [each for each in attempt.entries if isinstance(each, EventEntry) and (not names or each.event in names)]


def files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.is_file())


def test_it_conforms(tmp_path: Path) -> None:
    check_plugin(lambda: Recorder(tmp_path))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"folder": 3}, TypeError, "got 3"),
        ({"losses": 1}, TypeError, "losses.* got 1"),
        ({"sample": 0}, ValueError, "sample.* got 0"),
        ({"sample": 2.0}, ValueError, "sample.* got 2.0"),
        ({"sample": True}, ValueError, "sample.* got True"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Recorder(**{"folder": ".", **options})


def test_every_batch_is_recorded_as_handlers_saw_it(tmp_path: Path) -> None:
    seen = Seen()
    result, _ = fit(usual(tmp_path, h.GradientAccumulation(3), seen))
    recorded = [
        (
            each.counters.epoch,
            each.counters.batch,
            each.counters.steps,
            each.counters.samples,
            each.window,
            each.counters.seconds,
        )
        for each in batches(only(result.recording))
    ]
    assert recorded == seen.batches
    clocks = [(each.event, each.counters.seconds) for each in events(only(result.recording), "epoch_start", "log", "validation_end")]  # fmt: skip  # noqa: E501
    assert clocks == seen.others
    assert files(tmp_path) == [result.recording.name] if result.recording else False


def test_events_are_in_order_and_requests_follow_the_event_that_they_were_made_in(tmp_path: Path) -> None:
    attempt = only(fit(usual(tmp_path), batches=5, epochs=1)[0].recording)

    def name(entry: Entry) -> str:
        if isinstance(entry, EventEntry):
            return entry.event
        return f"{entry.number} {entry.request.verb}" if isinstance(entry, RequestEntry) else type(entry).__name__

    assert [name(each) for each in attempt.entries] == [
        "train_start", "epoch_start", "Batches", "0 log", "log", "Batches", "1 save", "save_point", "checkpoint_saved",
        "epoch_end", "2 validation", "validation_start", "validation_end", "last_boundary", "train_end", "TimesEntry",
        "run_closed",
    ]  # fmt: skip
    asked = {each.event: each.data["asked"] for each in events(attempt) if "asked" in each.data}
    assert asked == {"log": [0], "save_point": [1], "epoch_end": [], "validation_start": [2], "train_end": []}
    assert [each.request.event for each in attempt.entries if isinstance(each, RequestEntry)] == ["batch_end", "batch_end", "epoch_end"]  # fmt: skip  # noqa: E501


def test_the_data_of_events(tmp_path: Path) -> None:
    result, _ = fit(usual(tmp_path), batches=5, epochs=1, validation={"a": class_batches(2), "b": class_batches(3)})
    attempt = only(result.recording)
    of = {each.event: dict(each.data) for each in events(attempt)}
    assert of["epoch_start"] == {"epoch": 0, "resumed": False, "batches": 5}
    assert of["validation_start"] == {"batches": 5, "asked": [2]}
    assert of["validation_end"]["batches"] == {"a": 2, "b": 3}
    assert result.last_checkpoint is not None
    training = read_manifest(result.last_checkpoint).training
    assert of["checkpoint_saved"] == {"path": str(result.last_checkpoint), "is_best": False, "training": training}
    assert of["log"]["metrics"].keys() == {"train/loss"}
    assert of["run_closed"] == {
        "status": "completed", "reason": result.reason, "by": None, "rank": None, "metrics": result.metrics,
        "best": None, "last": str(result.last_checkpoint), "notes": list(result.notes),
        "warnings": [],
    }  # fmt: skip
    assert (attempt.run, attempt.phase, attempt.status, attempt.validation_sets) == ("run", "train", "completed", ("a", "b"))  # fmt: skip  # noqa: E501
    assert (attempt.max_epochs, attempt.max_steps, attempt.world_size, attempt.optimizers) == (1, None, 1, ("optimizer",))  # fmt: skip  # noqa: E501
    assert attempt.plan["batch_end"] == ("recorder", "log_schedule", "validation_schedule", "save_schedule")


def test_the_end_has_the_warnings_of_every_lane_before(tmp_path: Path) -> None:
    """Of very many the first ones."""
    trainer = h.Trainer([Recorder(tmp_path)], device="cpu")

    def warn(run: h.Run, event: h.RunClosed) -> None:
        for number in range(202):
            run.warn(f"Warning {number}.")

    trainer.bus.on(h.RunClosed, warn, lane=h.Lane.PERSIST)
    result = trainer.fit(linear_classifier(), class_batches(2), optimizer=sgd(), epochs=1)
    (closed,) = events(only(result.recording), "run_closed")
    assert closed.data["warnings"] == [*(f"Warning {number}." for number in range(200)), "(+2 warnings)"]
    assert len(result.warnings) == 202
    assert_facts(result.explain().split("\n\n")[1], "warnings\n", "Warning 0.\n", "Warning 1.\n")


def test_the_end_says_who_requested_the_stop(tmp_path: Path) -> None:
    result, _ = fit(usual(tmp_path, Act(lambda run: run.control.stop("enough " * 1_000), 4)))
    ending = events(only(result.recording), "run_closed", "train_end")
    assert ending[0].data["asked"] == [1]
    assert (ending[1].data["by"], ending[1].data["status"]) == ("act", "stopped")
    assert len(ending[1].data["reason"]) < 2_100


def test_a_failure_is_recorded_with_its_plugin_and_event(tmp_path: Path) -> None:
    def fail(run: h.Run) -> None:
        raise LookupError("lost")

    recorder = Recorder(tmp_path)
    with pytest.raises(LookupError):
        fit([recorder, h.ValidationSchedule(h.Every(epochs=1)), Act(fail, 4)])
    attempt = only(recorder.path)
    failed, closed = events(attempt, "run_failed", "run_closed")
    error = {name: failed.data[name] for name in ("error", "text", "phase", "plugin", "event")}
    assert error == {"error": "LookupError", "text": "LookupError: lost", "phase": "train", "plugin": "act", "event": "batch_end"}  # fmt: skip  # noqa: E501
    assert (closed.data["status"], closed.data["reason"]) == ("failed", "LookupError: lost")
    assert len(batches(attempt)) == 4


def test_a_repeated_request_is_counted(tmp_path: Path) -> None:
    attempt = only(fit(usual(tmp_path, h.GradientAccumulation(3)), batches=9, epochs=1)[0].recording)
    holds = {each.number: each.request.times for each in attempt.entries if isinstance(each, RequestEntry) and each.request.verb == "hold_step"}  # fmt: skip  # noqa: E501
    holds |= {
        each.number: each.times for each in attempt.entries if isinstance(each, RepeatEntry) and each.number in holds
    }
    assert list(holds.values()) == [6]


def test_the_times_of_handlers(tmp_path: Path) -> None:
    attempt = only(fit([Recorder(tmp_path, sample=1), *usual(tmp_path)[1:]], batches=10, epochs=2)[0].recording)
    (times,) = [each for each in attempt.entries if isinstance(each, TimesEntry)]
    rows = {(row.plugin, row.event): row for row in times.rows}
    assert rows["recorder", "batch_end"].emissions == 20
    assert rows["recorder", "batch_end"].timed == 19  # from the second on
    assert rows["log_schedule", "batch_end"].emissions < 20  # it is not called before one of the schedules is due
    assert rows["recorder", "log"].timed == rows["log_schedule", "log"].timed == 6
    assert rows["checkpoint", "save_point"].seconds > 0
    assert rows["recorder", "validation_batch_end"].emissions == 6


def test_the_training_does_not_change(tmp_path: Path) -> None:
    plugins = [h.RNGCapture(), h.ValidationSchedule(h.Every(epochs=1)), h.GradientAccumulation(3)]
    _, with_one = fit([Recorder(tmp_path, losses=True, sample=1), *plugins])
    _, without = fit(plugins)
    for ours, theirs in zip(with_one.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_it_handles_no_event_that_would_cost_time_without_other_handlers(tmp_path: Path) -> None:
    handlers: dict[str, int] = {}

    def look(run: h.Run) -> None:
        for event in (h.Log, h.Replay, h.BatchStart, h.GradientsReady, h.StepEnd, h.ShouldStop):
            handlers[event.name] = len(run.bus.signal(event).chain)

    fit([Recorder(tmp_path), h.ValidationSchedule(h.Every(epochs=1)), Silent(look, 3)])
    assert handlers == dict.fromkeys(handlers, 0)
    fit(
        [Recorder(tmp_path), h.ValidationSchedule(h.Every(epochs=1)), Act(look, 3)]
    )  # it declares that it requests logs
    assert handlers["log"] == 2


class Silent(Act):
    """Declares no requests."""

    asks = ()


def test_the_clock_runs_again_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = fit(usual(tmp_path))
    assert result.progress.seconds < math.inf
    monkeypatch.setattr("heliograph.events.progress.monotonic", lambda: math.inf)
    assert result.progress.seconds == math.inf


def test_custom_events_are_recorded_and_very_many_in_a_sample(tmp_path: Path) -> None:
    def move(run: h.Run) -> None:
        run.emit(Moved(1.5, notes={"text": "x" * 5_000}))

    def often(run: h.Run) -> None:
        for _ in range(1_100):
            run.emit(Moved(2.0))

    class Mover(Silent):
        @h.on(h.TrainStart)
        def declare(self, run: h.Run, event: h.TrainStart) -> None:
            run.bus.signal(Moved)

    recorder, validation = Recorder(tmp_path), h.ValidationSchedule(h.Every(epochs=1))
    moved = events(only(fit([recorder, validation, Mover(move, 3)])[0].recording), "moved")
    assert [each.data["distance"] for each in moved] == [1.5]
    assert len(moved[0].data["notes"]["text"]) < 2_100
    moved = events(only(fit([Recorder(tmp_path, sample=20), validation, Mover(often, 3)])[0].recording), "moved")
    assert (len(moved), moved[-1].data["emission"]) == (1_005, 1_100)


def test_losses_are_recorded_to_the_last_bit(tmp_path: Path) -> None:
    losses: list[float] = []

    class Losses(h.Plugin):
        asks = ("skip_batch",)

        @h.on(h.BatchStart)
        def skip(self, run: h.Run, event: h.BatchStart) -> None:
            if run.progress.batch == 2:
                run.control.skip_batch("the third")

        @h.on(h.BatchEnd)
        def note(self, run: h.Run, event: h.BatchEnd) -> None:
            losses.append(math.nan if run.progress.batch == 3 else run.loss.item())

    plugins = [Recorder(tmp_path, losses=True), h.ValidationSchedule(h.Every(epochs=1)), Losses()]
    attempt = only(fit(plugins)[0].recording)
    assert attempt.losses
    assert repr([each.loss for each in batches(attempt)]) == repr(losses)


def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file"):
        Recorder(tmp_path / "file")


def test_a_full_disk_ends_no_run_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = [False]
    whole = os.write

    def limited(file: int, text: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left")
        return whole(file, text)

    monkeypatch.setattr(writer.os, "write", limited)  # type: ignore[attr-defined]  # the module's own os
    fill, clear = (
        Act(lambda run: full.__setitem__(0, True), 4).named("fill"),
        Act(lambda run: full.__setitem__(0, False), 12),
    )
    plugins = [
        Recorder(tmp_path),
        h.LogSchedule(h.Every(steps=3)),
        h.ValidationSchedule(h.Every(epochs=1)),
        fill,
        clear,
    ]
    result, _ = fit(plugins)
    assert result.status == "completed"
    assert_each([error.partition(": ")[2] for error in result.plugin_errors["recorder"]], ("OSError", "[Errno 28]", "No space left"))  # fmt: skip  # noqa: E501
    attempt = only(result.recording)
    assert len(batches(attempt)) == 16
    assert len(events(attempt, "log")) == 5
    assert events(attempt, "plugin_failed")[0].data["plugin"] == "recorder"

    full[0] = False
    result, _ = fit([Recorder(tmp_path), *plugins[1:4]])  # the disk stays full
    assert result.status == "completed"
    assert len(result.plugin_errors["recorder"]) == 2
    assert [each.counters.batches for each in batches(only(result.recording))] == [1, 2, 3]
    assert [each.counters.steps for each in events(only(result.recording), "log")] == [3]


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result, _ = fit([Recorder(tmp_path / "file" / "x"), h.ValidationSchedule(h.Every(epochs=1))])
    assert (result.status, result.recording, len(result.plugin_errors["recorder"])) == ("completed", None, 3)


def test_a_second_fit_creates_a_file_and_a_test_appends_to_it(tmp_path: Path) -> None:
    trainer = h.Trainer([Recorder(tmp_path), h.ValidationSchedule(h.Every(epochs=1))], device="cpu")
    task = h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)
    options: dict[str, Any] = {"validation": class_batches(2), "optimizer": sgd()}
    first = trainer.fit(task, class_batches(8), epochs=1, **options)
    second = trainer.fit(task, class_batches(8), epochs=1, **options)
    tested = trainer.test(task, class_batches(3))
    assert first.recording != second.recording == tested.recording
    assert [each.phase for each in read(second.recording or "").attempts] == ["train", "test"]
    assert only(first.recording).status == "completed"
    attempt = read(tested.recording or "").attempts[-1]
    assert [each.event for each in events(attempt)] == ["test_start", "test_end", "run_closed"]
    assert events(attempt)[1].data["batches"] == {"": 3}


def test_a_resumed_run_continues_its_file(tmp_path: Path) -> None:
    whole, _ = fit(usual(tmp_path, Act(lambda run: run.control.stop("later"), 12)))
    resumed, _ = fit(usual(tmp_path))
    assert whole.recording == resumed.recording
    recording = read(tmp_path)
    assert [each.status for each in recording.attempts] == ["stopped", "completed"]
    (loaded,) = events(recording.attempts[1], "checkpoint_loaded")
    assert (loaded.data["origin"]["batch"], loaded.data["origin"]["epoch"], loaded.counters.steps) == (2, 1, 10)
    kept = [each.entry for each in walk(recording) if isinstance(each.entry, Batches) and not each.lost]
    assert [batch.counters.batches for entry in kept for batch in entry] == list(range(1, 17))


def test_a_resumed_run_whose_file_is_gone_creates_one(tmp_path: Path) -> None:
    whole, _ = fit(usual(tmp_path, Act(lambda run: run.control.stop("later"), 12)))
    assert whole.recording is not None
    whole.recording.unlink()
    resumed, _ = fit(usual(tmp_path))
    assert len(batches(only(resumed.recording))) == 6


def test_a_file_that_another_process_writes_is_not_continued(tmp_path: Path) -> None:
    whole, _ = fit(usual(tmp_path, Act(lambda run: run.control.stop("later"), 12)))
    assert whole.recording is not None
    other = writer.RecordingWriter.reopen(whole.recording)
    resumed, _ = fit(usual(tmp_path))
    other.close()
    assert resumed.recording != whole.recording
    assert any("in a new file" in note for note in resumed.notes)


def test_a_roll_back_is_recorded(tmp_path: Path) -> None:
    class RollsBack(h.Plugin):
        saved: Any = None

        @h.on(h.BatchEnd)
        def act(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.batches == 3 and self.saved is None:
                self.saved = run.state_dict()
            elif run.progress.batches == 6 and self.saved:
                run.roll_back(self.saved)
                self.saved = {}

    result, _ = fit([Recorder(tmp_path), h.ValidationSchedule(h.Every(epochs=1)), RollsBack()], epochs=1)
    attempt = only(result.recording)
    assert [each.counters.batch for each in batches(attempt)] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]
    walked = list(walk(read(tmp_path)))
    lost = [
        batch.counters.batch for each in walked if each.lost and isinstance(each.entry, Batches) for batch in each.entry
    ]
    assert lost == [4, 5, 6]


def toggling(folder: Path, off: Sequence[int], on: Sequence[int], **options: Any) -> AttemptRecord:
    """Return what is recorded if the recorder is disabled between two batches."""
    recorder = Recorder(folder, **options)
    trainer = h.Trainer([recorder, h.ValidationSchedule(h.Every(epochs=1))], device="cpu")
    trainer.plugins.register(Act(lambda run: trainer.plugins.disable("recorder"), *off).named("off"))
    trainer.plugins.register(Act(lambda run: trainer.plugins.enable("recorder"), *on).named("on"))
    task = h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)
    trainer.fit(task, class_batches(8), validation=class_batches(2), optimizer=sgd(), epochs=2)
    return only(recorder.path)


@pytest.mark.parametrize("losses", [False, True], ids=["plain", "losses"])
def test_disabling_it_leaves_a_gap(losses: bool, tmp_path: Path) -> None:
    attempt = toggling(tmp_path, (3,), (5,), losses=losses)
    assert not attempt.damage
    assert [each.counters.batch for each in batches(attempt)] == [1, 2, 3, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8]
    assert [each.data for each in events(attempt, "plugin_changed")] == [
        {"plugin": "recorder", "change": "disabled", "by": "off", "ends_recording": True},
        {"plugin": "recorder", "change": "enabled", "by": "on"},
    ]
    (before, after) = [each for each in attempt.entries if isinstance(each, Batches)][:2]
    assert (before.first.batch, after.first.batch, tuple(after.steps)) == (0, 5, (6, 7, 8))


def test_one_that_is_switched_off_says_so_in_its_last_line(tmp_path: Path) -> None:
    attempt = toggling(tmp_path, (3,), (), losses=True)
    assert [each.counters.batch for each in batches(attempt)] == [1, 2, 3]
    end = "not recorded to the end; the recorder was disabled by off at step 3"
    assert story(read(tmp_path)).startswith(f"run: {end}\n")


def test_one_that_is_registered_during_the_run_records_from_there(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    trainer = h.Trainer([h.ValidationSchedule(h.Every(epochs=1))], device="cpu")
    trainer.plugins.register(Act(lambda run: trainer.plugins.register(recorder), 3))
    task = h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)
    trainer.fit(task, class_batches(8), validation=class_batches(2), optimizer=sgd(), epochs=1)
    assert [each.counters.batch for each in batches(only(recorder.path))] == [4, 5, 6, 7, 8]


def test_disabled_by_the_environment_it_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOGRAPH_PLUGINS", "-recorder")
    with pytest.warns(RuntimeWarning, match="HELIOGRAPH_PLUGINS"):
        result, _ = fit([Recorder(tmp_path / "none"), h.ValidationSchedule(h.Every(epochs=1))])
    assert (result.recording, (tmp_path / "none").exists()) == (None, False)


def train_on_rank(folder: Path) -> tuple[str | None, list[float]]:
    """Train on two ranks; rank 1 requests a stop."""

    class Stopper(h.Plugin):
        asks = ("stop",)

        @h.on(h.StepEnd)
        def act(self, run: h.Run, event: h.StepEnd) -> None:
            if run.engine.rank == 1 and run.progress.steps == 3:
                run.control.stop("rank 1 has enough")

    class Clocks(h.Plugin):
        @h.on(h.BatchEnd)
        def act(self, run: h.Run, event: h.BatchEnd) -> None:
            clocks.append(run.progress.seconds)

    clocks: list[float] = []
    recorder = Recorder(folder)
    torch.manual_seed(0)
    trainer = h.Trainer([recorder, Stopper(), Clocks()], use_cpu=True)
    result = trainer.fit(
        h.Supervised(nn.Linear(4, 2), nn.functional.cross_entropy),
        torch.utils.data.TensorDataset(torch.zeros(40, 4), torch.zeros(40, dtype=torch.long)),
        loader_params={"global_batch_size": 4},
        optimizer=sgd(),
        epochs=1,
    )
    return None if result.recording is None else str(result.recording), clocks


def test_on_several_ranks_the_main_one_records_what_all_ask(ranks: Pool, tmp_path: Path) -> None:
    (path, clocks), (nothing, _) = ranks(2).run(train_on_rank, tmp_path)
    assert nothing is None
    attempt = only(Path(path))
    (stop,) = [each.request for each in attempt.entries if isinstance(each, RequestEntry)]
    assert (stop.verb, stop.rank, stop.reason) == ("stop", 1, "rank 1 has enough")
    assert (attempt.world_size, attempt.status, len(batches(attempt))) == (2, "stopped", 4)  # a step after it asked
    assert [each.counters.seconds for each in batches(attempt)] == [math.floor(each * 100) / 100 for each in clocks]
