"""What all trackers have in common, with one that writes to a list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    At,
    BatchStart,
    EpochEnd,
    Every,
    Lane,
    Log,
    LogSchedule,
    Plugin,
    Run,
    RunClosed,
    SavePoint,
    SaveSchedule,
    StepEnd,
    Trainer,
    TrainStart,
    ValidationSchedule,
    on,
)
from heliograph.spi import Page, Place, Tracker
from heliograph.tests.messages import assert_each, assert_facts

Make = Callable[..., Any]


class Pages(Tracker):
    """Writes to a store that outlives it, as a server would."""

    name = "pages"
    patience = 0.2

    def __init__(self, store: dict[str, Any], fails: Callable[[str], Exception | None] = lambda kind: None) -> None:
        super().__init__()
        self.store, self.fails = store, fails
        self.threads: set[str] = set()
        self.opened: list[Page] = []

    def _note(self, kind: str, *row: Any) -> None:
        if (error := self.fails(kind)) is not None:
            raise error
        self.threads.add(threading.current_thread().name)
        self.page["rows"].append((kind, *row))

    @property
    def page(self) -> dict[str, Any]:
        page: dict[str, Any] = self.store[self.made]
        return page

    def open(self, page: Page) -> str:
        if (error := self.fails("open")) is not None:
            raise error
        self.opened.append(page)
        known = [name for name, each in self.store.items() if each["training"] == page.training_id]
        self.made = page.id or (known[0] if known else f"page-{len(self.store)}")
        self.store.setdefault(self.made, {"rows": [], "status": "running", "training": page.training_id})
        return self.made

    def last_steps(self) -> Mapping[str, int]:
        return {name: row[1] for row in self.page["rows"] if row[0] == "scalars" for name in row[2]}

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        self._note("scalars", place.step, dict(values), place.rollbacks)

    def write_hyper_parameters(self, values: Mapping[str, Any]) -> None:
        self._note("hyper_parameters", dict(values))

    def write_image(self, place: Place, name: str, image: Any) -> None:
        self._note("image", place.step, name, image)

    def write_text(self, place: Place, name: str, text: str) -> None:
        self._note("text", place.step, name, text)

    def finish(self, status: str) -> None:
        self._note("finish")
        self.page["status"] = status


def steps(page: Mapping[str, Any], name: str = "train/loss") -> list[int]:
    return [row[1] for row in page["rows"] if row[0] == "scalars" and name in row[2]]


def fit(
    plugins: list[Any],
    task: Any,
    batches: Any,
    sgd: Any,
    then: Callable[[Trainer], None] = lambda trainer: None,
    **more: Any,
) -> Any:
    trainer = Trainer([LogSchedule(Every(steps=1)), *plugins], device="cpu")
    then(trainer)
    return trainer.fit(task, batches, optimizer=sgd, **{"epochs": 1, **more})


def test_a_run_on_its_page(task: Make, batches: Make, sgd: Any) -> None:
    tracker = Pages({})
    parameters = {"rate": 0.1, "layers": [3, 4], "deep": True}
    result = fit(
        [tracker, ValidationSchedule(Every(epochs=1))],
        task(),
        batches(3),
        sgd,
        validation=batches(1),
        hyper_parameters=parameters,
        name="first",
    )

    page = tracker.store["page-0"]
    assert tracker.opened == [Page("first", tracker.opened[0].training_id, None, 1, None)]
    assert page["rows"][0] == ("hyper_parameters", {"rate": 0.1, "layers": "[3, 4]", "deep": True})
    assert steps(page) == [1, 2, 3]
    assert steps(page, "validation/loss") == [3]
    assert (page["status"], result.warnings, result.notes) == ("completed", (), ())
    assert tracker.threads == {"heliograph-pages"}
    assert "heliograph-pages" not in {each.name for each in threading.enumerate()}


@pytest.mark.parametrize("status", ["stopped", "preempted", "failed", "interrupted"])
def test_the_status_is_the_true_one(task: Make, batches: Make, sgd: Any, status: str) -> None:
    errors = {"failed": RuntimeError("a fault"), "interrupted": KeyboardInterrupt()}
    tracker = Pages({})

    def end(run: Run, event: StepEnd) -> None:
        if status in errors:
            raise errors[status]
        run.control.stop("enough", required=status == "preempted")

    def listen(trainer: Trainer) -> None:
        trainer.bus.on(StepEnd, end)

    if status in errors:
        with pytest.raises(type(errors[status])):
            fit([tracker], task(), batches(3), sgd, listen)
    else:
        fit([tracker], task(), batches(3), sgd, listen)

    assert tracker.store["page-0"]["status"] == status


def resumable(store: dict[str, Any], task: Make, batches: Make, sgd: Any) -> Callable[..., Any]:
    saved: dict[str, Any] = {}

    def run(*, at: int, resumed: bool, kill: int | None = None, **options: Any) -> Any:
        def listen(trainer: Trainer) -> None:
            if resumed:
                trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
            else:
                trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
            if kill is not None:
                trainer.bus.on(BatchStart, stop)

        def stop(run: Run, event: BatchStart) -> None:
            if run.progress.steps == kill:
                raise RuntimeError("killed")

        tracker = options.pop("kind", Pages)(store, **options)
        try:
            result = fit([SaveSchedule(At(steps=at), at_end=False), tracker], task(), batches(4), sgd, listen, epochs=2)
        except RuntimeError:
            result = None
        return tracker, result

    return run


def test_a_resumed_run_continues_its_page_with_every_step_once(task: Make, batches: Make, sgd: Any) -> None:
    store: dict[str, Any] = {}
    run = resumable(store, task, batches, sgd)
    run(at=3, resumed=False, kill=6)
    killed = list(store["page-0"]["rows"])
    tracker, _ = run(at=99, resumed=True)

    assert list(store) == ["page-0"]
    assert (tracker.opened[0].attempt, tracker.opened[0].resumed_at) == (2, 3)
    assert [row[1] for row in killed if row[0] == "scalars"] == [1, 2, 3, 4, 5, 6]
    assert steps(store["page-0"]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert store["page-0"]["status"] == "completed"


def test_what_waits_in_a_checkpoint_is_written_by_the_resumed_run(task: Make, batches: Make, sgd: Any) -> None:
    """The server cannot be reached from the second step on, and the run is killed."""
    store: dict[str, Any] = {}
    run = resumable(store, task, batches, sgd)

    first: list[str] = []

    def fails(kind: str) -> Exception | None:
        first.append(kind)
        return ConnectionError("no route") if len(first) > 3 else None

    run(at=3, resumed=False, kill=6, fails=fails)
    assert steps(store["page-0"]) == [1, 2]
    _, result = run(at=99, resumed=True)

    assert steps(store["page-0"]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not [each for each in result.warnings if "pages" in each]


def test_a_save_does_not_wait_for_an_outage_to_end(task: Make, batches: Make, sgd: Any) -> None:
    """The outage ends after the save, or at the fifth attempt; a save that waited until then would have nothing."""
    saved, attempts = list[int](), list[str]()

    def fails(kind: str) -> Exception | None:
        if kind == "scalars" and not saved and len(attempts) < 5:
            attempts.append(kind)
            return OSError("the disk is full")
        return None

    tracker = type("local", (Pages,), {"is_local": True, "patience": 60.0})({}, fails)

    def save(run: Run, event: SavePoint) -> None:
        saved.append(len(tracker.state_dict()["waiting"]))

    def listen(trainer: Trainer) -> None:
        trainer.bus.on(SavePoint, save)

    result = fit([tracker, SaveSchedule(At(steps=3), at_end=False)], task(), batches(3), sgd, listen)

    assert (saved, result.warnings) == ([3], ())
    assert steps(tracker.store["page-0"]) == [1, 2, 3]


def test_images_that_waited_at_the_checkpoint_are_noted_as_missing(task: Make, batches: Make, sgd: Any) -> None:
    store: dict[str, Any] = {}
    run = resumable(store, task, batches, sgd)

    class Showing(Pages):
        @on(StepEnd)
        def show(self, run: Run, event: StepEnd) -> None:
            run.log_image("pixels", torch.zeros(3, 2, 4))
            run.log_text("words", "as they are")

    run(at=3, resumed=False, kill=6, kind=Showing, fails=lambda kind: ConnectionError() if kind != "open" else None)
    _, result = run(at=99, resumed=True, kind=Showing)

    rows = store["page-0"]["rows"]
    assert [row[1] for row in rows if row[0] == "text"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row[1] for row in rows if row[0] == "image"] == [4, 5, 6, 7, 8]
    (note,) = [each for each in result.notes if "may lack" in each]
    assert_facts(note, "showing", "checkpoint", "image (3)")


def test_what_a_killed_service_may_lose_is_in_the_checkpoint(task: Make, batches: Make, sgd: Any) -> None:
    """The service had rows in memory when it died with the training: those of the last steps."""
    store: dict[str, Any] = {}
    run = resumable(store, task, batches, sgd)
    patient = type("patient", (Pages,), {"settles": 60.0})
    run(at=3, resumed=False, kill=6, kind=patient)
    del store["page-0"]["rows"][2:]
    run(at=99, resumed=True, kind=patient)

    assert steps(store["page-0"]) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_run_that_goes_back_says_so(task: Make, batches: Make, sgd: Any) -> None:
    saved: list[dict[str, Any]] = []
    tracker = Pages({})

    def listen(trainer: Trainer) -> None:
        trainer.bus.on(SavePoint, lambda run, event: saved.append(deepcopy(run.state_dict())))
        trainer.bus.on(StepEnd, go_back)

    def go_back(run: Run, event: StepEnd) -> None:
        if run.progress.steps == 3 and saved:
            run.roll_back(saved.pop())

    fit([SaveSchedule(At(steps=2), at_end=False), tracker], task(), batches(4), sgd, listen)

    rows = [(row[1], row[3]) for row in tracker.store["page-0"]["rows"] if row[0] == "scalars"]
    assert rows == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_an_outage_that_ends_loses_nothing(task: Make, batches: Make, sgd: Any) -> None:
    fails = iter([None, None, ConnectionError("gone"), ConnectionError("gone")])
    tracker = Pages({}, lambda kind: next(fails, None))
    tracker.patience = 10.0  # the two pauses are as long as that of this file
    result = fit([tracker], task(), batches(4), sgd)

    assert steps(tracker.store["page-0"]) == [1, 2, 3, 4]
    assert (tracker.store["page-0"]["status"], result.warnings) == ("completed", ())


def test_an_outage_that_does_not_end_costs_the_training_nothing_and_is_said(
    task: Make, batches: Make, sgd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    out = [False]

    def fails(kind: str) -> Exception | None:
        if kind == "scalars" and not out[0]:
            out[0] = True
            return None
        return ConnectionError("no route") if out[0] else None

    tracker = Pages({}, fails)
    result = fit([tracker], task(), batches(4), sgd)

    assert (result.status, result.progress.steps, result.plugin_errors) == ("completed", 4, {})
    assert_each(result.warnings, ("pages", "rows of metrics (3)", "the ending (1)", "ConnectionError: no route"))
    assert_each(
        [each.getMessage() for each in caplog.records], ("pages", "cannot be written", "ConnectionError: no route")
    )


def test_an_error_that_is_not_an_outage_loses_its_record_only(
    task: Make, batches: Make, sgd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fails = iter([None, None, ValueError("a bad name")])
    tracker = Pages({}, lambda kind: next(fails, None))
    result = fit([tracker], task(), batches(4), sgd)

    assert steps(tracker.store["page-0"]) == [1, 3, 4]
    assert_each(result.warnings, ("pages", "rows of metrics (1)", "ValueError: a bad name"))


def test_without_a_page_nothing_is_written_and_that_is_said(
    task: Make, batches: Make, sgd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Pages({}, lambda kind: ValueError("a wrong key") if kind == "open" else None)
    result = fit([tracker], task(), batches(2), sgd)

    assert tracker.store == {}
    assert_each(result.warnings, ("pages", "nothing", "ValueError: a wrong key"))


def test_a_request_that_never_ends_is_said(task: Make, batches: Make, sgd: Any) -> None:
    until = threading.Event()

    def fails(kind: str) -> Exception | None:
        if kind == "finish":
            until.wait(60)
        return None

    result = fit([Pages({}, fails)], task(), batches(2), sgd)
    until.set()

    assert_each(result.warnings, ("pages", "the ending (1)", "0.2 seconds"))


def test_no_more_waits_than_there_is_room_for(task: Make, batches: Make, sgd: Any) -> None:
    until = threading.Event()

    def fails(kind: str) -> Exception | None:
        if kind == "open":
            until.wait(60)
        return None

    tracker = Pages({}, fails)
    tracker.capacity = 4  # with the page itself

    def listen(trainer: Trainer) -> None:
        trainer.bus.on(EpochEnd, lambda run, event: until.set())

    result = fit([tracker], task(), batches(6), sgd, listen)

    assert steps(tracker.store["page-0"]) == [1, 2, 3]
    assert_each(result.warnings, ("pages", "rows of metrics (3)", "4 records", "256 MB"))
    assert tracker.store["page-0"]["status"] == "completed"


def test_images_texts_and_what_a_tracker_cannot_show(task: Make, batches: Make, sgd: Any) -> None:
    tracker = Pages({})

    def show(run: Run, event: StepEnd) -> None:
        run.log_image("pixels", torch.zeros(3, 2, 4))
        run.log_text("words", "as they are")
        run.log_histogram("weights", torch.ones(2, 2))

    def listen(trainer: Trainer) -> None:
        trainer.bus.on(StepEnd, show)

    result = fit([tracker], task(), batches(2), sgd, listen)

    rows = tracker.store["page-0"]["rows"]
    images = [row[1:] for row in rows if row[0] == "image"]
    assert [(step, name, image.shape, image.dtype) for step, name, image in images] == [
        (step, "pixels", (2, 4, 3), np.uint8) for step in (1, 2)
    ]
    assert [row for row in rows if row[0] == "text"] == [("text", step, "words", "as they are") for step in (1, 2)]
    assert_each(result.notes, ("pages", "histogram", "2 times"))
    assert result.warnings == ()


def test_a_metric_that_is_named_as_an_axis_gets_another_name(task: Make, batches: Make, sgd: Any) -> None:
    """A page shows the step and the others beside each metric, under these names."""
    names = ("step", "epoch", "samples", "seconds", "attempt", "rollbacks", "training")
    tracker = Pages({})

    class Mine(Plugin):
        @on(Log, lane=Lane.MEASURE)
        def add(self, run: Run, event: Log) -> None:
            event.metrics.update(dict.fromkeys(names, 99.0))
            run.log_text("epoch", "seven")

    fit([tracker, Mine()], task(), batches(1), sgd)

    (text, (_, step, values, _), _) = tracker.store["page-0"]["rows"]
    assert text == ("text", 1, "epoch", "seven")
    assert (step, [name for name in names if name in values]) == (1, [])
    assert [values[f"metric/{name}"] for name in names] == [99.0] * 7


def test_a_test_after_a_training_is_on_the_same_page(task: Make, batches: Make, sgd: Any) -> None:
    tracker = Pages({})
    trainer = Trainer([LogSchedule(Every(steps=1)), tracker], device="cpu")
    mine = task()
    trainer.fit(mine, batches(2), optimizer=sgd, epochs=1)
    tested = trainer.test(mine, batches(1))
    trainer.fit(mine, batches(2), optimizer=sgd, epochs=1)

    assert list(tracker.store) == ["page-0", "page-1"]
    assert ("scalars", 0, {"test/loss": tested.metrics["test/loss"]}, 0) in tracker.store["page-0"]["rows"]


def test_an_evaluation_on_the_page_of_a_training_keeps_its_status(task: Make, batches: Make, sgd: Any) -> None:
    tracker, faults = Pages({}), [RuntimeError("a fault")]
    trainer = Trainer([LogSchedule(Every(steps=1)), tracker], device="cpu")

    def fail(run: Run, event: StepEnd) -> None:
        if faults:
            raise faults.pop()

    trainer.bus.on(StepEnd, fail)
    mine = task()
    with pytest.raises(RuntimeError, match="a fault"):
        trainer.fit(mine, batches(2), optimizer=sgd, epochs=1)
    trainer.test(mine, batches(1))
    assert steps(tracker.store["page-0"], "test/loss") == [0]
    assert tracker.store["page-0"]["status"] == "failed"

    trainer.fit(mine, batches(2), optimizer=sgd, epochs=1)
    assert tracker.store["page-1"]["status"] == "completed"


def test_what_is_logged_after_the_ending_is_lost_and_said_once(task: Make, batches: Make, sgd: Any) -> None:
    class Late(Plugin):
        @on(RunClosed, lane=Lane.REPORT)
        def log(self, run: Run, event: RunClosed) -> None:
            run.log_text("summary", event.status)
            run.log_text("summary", "again")

    tracker = Pages({})
    result = fit([tracker, Late()], task(), batches(2), sgd)

    rows = tracker.store["page-0"]["rows"]
    assert ([row[0] for row in rows], len(tracker.opened)) == (["scalars", "scalars", "finish"], 1)
    assert tracker.store["page-0"]["status"] == "completed"
    assert_each(result.warnings, ("pages", "texts", "closed"))


def test_a_tracker_that_is_switched_off_and_on_continues_its_page(task: Make, batches: Make, sgd: Any) -> None:
    tracker = Pages({})

    def listen(trainer: Trainer) -> None:
        def switch(run: Run, event: BatchStart) -> None:
            if run.progress.steps == 1:
                trainer.plugins.disable("pages")
            if run.progress.steps == 2:
                trainer.plugins.enable("pages")

        trainer.bus.on(BatchStart, switch)

    fit([tracker], task(), batches(4), sgd, listen)

    assert list(tracker.store) == ["page-0"]
    assert steps(tracker.store["page-0"]) == [1, 3, 4]


def test_nothing_left_to_do_still_ends_the_page(task: Make, batches: Make, sgd: Any) -> None:
    store: dict[str, Any] = {}
    run = resumable(store, task, batches, sgd)
    run(at=8, resumed=False, kill=99)
    store["page-0"]["status"] = "running"
    _, result = run(at=99, resumed=True)

    assert result.progress.steps == 8
    assert store["page-0"]["status"] == "completed"
    assert steps(store["page-0"]) == [1, 2, 3, 4, 5, 6, 7, 8]


class Unflushed(Pages):
    collects = ("scalars",)


class Misspelt(Pages):
    collects = ("scalar",)

    def flush(self) -> None: ...


@pytest.mark.parametrize("kind", [Unflushed, Misspelt])
def test_what_is_collected_is_flushed_and_has_a_kind(kind: type[Pages]) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has collects ="):
        kind({})


def test_texts_count_as_memory(task: Make, batches: Make, sgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heliograph.builtin_callbacks.trackers.MEMORY", 2**20)

    class Talk(Plugin):
        @on(StepEnd)
        def talk(self, run: Run, event: StepEnd) -> None:
            run.log_text("long", "x" * 400_000)

    away = threading.Event()

    class Late(Pages):
        def open(self, page: Page) -> str:
            away.wait()
            return super().open(page)

    class Release(Plugin):
        @on(RunClosed, lane=Lane.MEASURE)
        def release(self, run: Run, event: RunClosed) -> None:
            away.set()

    result = fit([Late({}), Talk(), Release()], task(), batches(4), sgd)
    assert_each(result.warnings, ("late", "texts (2)", "10000 records", "1 MB"))
