"""Runs in Trackio's database, with the real library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from sqlite3 import OperationalError
from threading import Event
from typing import Any

import heliograph as h
import numpy as np
import pytest
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.packages.trackers.tests.tracker_runs import end_as, in_the_middle, places, trackio_losses, trackio_rows
from heliograph.tests.kit import class_batches, fit
from heliograph_testing import check_tracker
from heliograph_trackers import Trackio
from trackio.sqlite_storage import SQLiteStorage

LOG = h.LogSchedule(h.Every(steps=1))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, in_folder: Callable[[Path], None]) -> None:
    in_folder(tmp_path)


def config() -> dict[str, Any]:
    (known,) = SQLiteStorage.get_run_records("tests")
    found = SQLiteStorage.get_run_config("tests", run_id=known["id"])
    assert found is not None
    return found


def test_it_keeps_what_trackers_promise(in_folder: Callable[[Path], None]) -> None:
    def make(folder: Path) -> Trackio:
        in_folder(folder)
        return Trackio("tests")

    def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
        points: dict[str, list[tuple[int, float]]] = {}
        for row in trackio_rows("tests"):
            for name in row.keys() - {"step"}:
                points.setdefault(name, []).append((row["step"], row[name]))
        return points

    check_tracker(make, read, read_status=lambda folder: str(config()["status"]))


def test_it_says_where_the_database_is(tmp_path: Path) -> None:
    said = Trackio("tests").describe(None)  # type: ignore[arg-type]  # it does not look
    assert_facts(said, "Trackio's project tests", str(tmp_path))


def test_a_run_in_the_database() -> None:
    result = fit(
        LOG,
        Trackio("tests", group="first"),
        train=class_batches(3),
        hyper_parameters={"rate": 0.1, "layers": [3, 4]},
        name="mine",
    )

    (known,) = SQLiteStorage.get_run_records("tests")
    assert known["name"] == "mine"
    expected = {"rate": 0.1, "layers": "[3, 4]", "status": "completed", "_Group": "first"}
    assert config().items() >= expected.items()
    *found, ending = trackio_rows("tests")
    axes = ("step", "epoch", "samples", "attempt", "rollbacks")
    assert [[row[name] for name in axes] for row in found] == [
        [1, 0.333333, 3, 1, 0],
        [2, 0.666667, 6, 1, 0],
        [3, 1.0, 9, 1, 0],
    ]
    assert found[-1]["train/loss"] == pytest.approx(result.metrics["train/loss"])
    assert (ending["step"], ending["status"]["_value"]) == (3, "completed")
    assert (result.warnings, result.notes) == ((), ())


def test_a_run_that_goes_back_shows_both_passes(tmp_path: Path) -> None:
    batches = class_batches(8)
    batches[6][0].fill_(float("nan"))
    fit(
        h.RNGCapture(),
        LOG,
        h.SaveSchedule(h.Every(steps=5), at_end=False),
        h.Checkpoint(tmp_path / "saved"),
        h.RollBack(max_times=1),
        Trackio("tests"),
        train=batches,
    )

    assert places(trackio_losses("tests")) == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (6, 1), (7, 1)]


@pytest.mark.parametrize("status", ["stopped", "preempted", "failed", "interrupted"])
def test_the_status_is_the_true_one(status: str) -> None:
    if status in ("failed", "interrupted"):
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            fit(LOG, Trackio("tests"), end_as(status))
    else:
        fit(LOG, Trackio("tests"), end_as(status))

    assert config()["status"] == status


def test_images_texts_histograms_and_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")

    def show(run: h.Run) -> None:
        run.log_image("drawing", np.full((2, 3, 3), 7, np.uint8))
        run.log_text("step", "*one*")  # a name that is taken
        run.log_histogram("weights", np.array([0.0, 1.0, 1.0, np.inf]))
        run.log_curve("hits", np.array([0, 1, 1]), np.array([0.1, 0.9, 0.5]))
        run.log_file("the notes", tmp_path / "notes.txt")

    result = fit(LOG, Trackio("tests"), in_the_middle(show))

    shown = {name: value for row in trackio_rows("tests") for name, value in row.items() if isinstance(value, dict)}
    assert (tmp_path / "media" / shown["drawing"]["file_path"]).read_bytes().startswith(b"\x89PNG")
    assert shown["text/step"] == {"_type": "trackio.markdown", "_value": "*one*"}
    assert sum(shown["weights"]["values"]) == 3
    (known,) = SQLiteStorage.get_run_records("tests")
    assert [each["name"] for each in SQLiteStorage.get_artifacts("tests")] == [f"run-{known['id']}-the-notes"]
    assert result.warnings == ()
    assert_each(result.notes, ("trackio", "curve (1 times)"))


def test_rows_that_wait_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction takes many milliseconds on a slow disk."""
    real, trained, sizes = SQLiteStorage.bulk_log, Event(), list[int]()

    def insert(project: str, run: str, found: list[Any], **options: Any) -> None:
        trained.wait()
        sizes.append(len(found))
        real(project, run, found, **options)

    monkeypatch.setattr(SQLiteStorage, "bulk_log", insert)
    trainer = h.Trainer([LOG, Trackio("tests")], device="cpu")
    trainer.bus.on(h.TrainEnd, lambda run, event: trained.set())
    fit(trainer, train=class_batches(50))

    assert [row["step"] for row in trackio_rows("tests")] == [*range(1, 51), 50]
    assert len(sizes) <= 4


def test_what_is_logged_at_one_place_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row is being written until the training ends, so all others are written together."""
    real, writes, trained = SQLiteStorage.bulk_log, Event(), Event()

    def insert(*arguments: Any, **options: Any) -> None:
        writes.set()
        trained.wait()
        real(*arguments, **options)

    class Shows(h.Plugin):
        @h.on(h.StepEnd)
        def show(self, run: h.Run, event: h.StepEnd) -> None:
            if run.progress.steps > 1:
                writes.wait()
                run.log_text("says", f"step {run.progress.steps}")
                run.log_histogram("weights", np.array([0.0, 1.0]))
            if run.progress.steps == 3:
                run.log_text("says", "another of this name")

    monkeypatch.setattr(SQLiteStorage, "bulk_log", insert)
    trainer = h.Trainer([LOG, h.ValidationSchedule(h.Every(steps=2)), Shows(), Trackio("tests")], device="cpu")
    trainer.bus.on(h.TrainEnd, lambda run, event: trained.set())
    fit(trainer, train=class_batches(3), validation=class_batches(1), epochs=1)

    found = [
        [row["step"], row.get("epoch"), {"says", "train/loss", "validation/loss", "weights"} & row.keys()]
        for row in trackio_rows("tests")
    ]
    assert found == [
        [1, 0.333333, {"train/loss"}],
        [2, 0.666667, {"says", "weights", "train/loss", "validation/loss"}],
        [3, 1.0, {"says", "weights", "train/loss", "validation/loss"}],
        [3, 0.666667, {"says"}],  # before the batch was counted
        [3, None, set()],  # the ending
    ]


def test_a_database_that_is_locked_is_waited_for() -> None:
    with pytest.MonkeyPatch.context() as patch:
        real, failures = SQLiteStorage.bulk_log, [OSError("Could not acquire database lock"), None, None, None]

        def locked(*arguments: Any, **options: Any) -> None:
            if failures and (error := failures.pop(0)):
                raise error
            real(*arguments, **options)

        patch.setattr(SQLiteStorage, "bulk_log", locked)
        result = fit(LOG, Trackio("tests"), train=class_batches(3))

    assert [row["step"] for row in trackio_rows("tests")] == [1, 2, 3, 3]
    assert result.warnings == ()


def refusing(refuses: Callable[[list[Any]], Exception | None]) -> pytest.MonkeyPatch:
    """Let the database refuse rows."""
    patch, real = pytest.MonkeyPatch(), SQLiteStorage.bulk_log

    def insert(project: str, run: str, found: list[Any], **options: Any) -> None:
        if (error := refuses(found)) is not None:
            raise error
        real(project, run, found, **options)

    patch.setattr(SQLiteStorage, "bulk_log", insert)
    return patch


def test_a_database_that_stays_locked_keeps_all_rows_waiting() -> None:
    """They are in the checkpoints of a run that may be killed, and they are counted where it is not."""
    tracker, saved = Trackio("tests"), list[int]()
    tracker.patience = 0.2
    trainer = h.Trainer([LOG, tracker, h.SaveSchedule(h.At(steps=6), at_end=False)], device="cpu")
    trainer.bus.on(h.SavePoint, lambda run, event: saved.append(len(tracker.state_dict()["waiting"])))
    patch = refusing(lambda rows: OperationalError("database is locked"))
    try:
        result = fit(trainer, train=class_batches(8))
    finally:
        patch.undo()

    assert saved == [6]
    (warning,) = result.warnings
    assert_facts(warning, "trackio lost rows", "(8)", "the ending (1)", "OperationalError: database is locked")


@pytest.mark.parametrize("lasts", [False, True])
def test_a_row_that_is_refused_loses_no_other(lasts: bool) -> None:
    """All wait until the training has ended, so the row is refused with others, and then alone where that lasts."""
    trained, refused = Event(), list[int]()

    def refuse(rows: list[Any]) -> Exception | None:
        trained.wait()
        if any(row.get("samples") == 9 for row in rows) and (lasts or not refused):
            refused.append(len(rows))
            return ValueError("a bad row")
        return None

    trainer = h.Trainer([LOG, Trackio("tests")], device="cpu")
    trainer.bus.on(h.TrainEnd, lambda run, event: trained.set())
    patch = refusing(refuse)
    try:
        result = fit(trainer, train=class_batches(6))
    finally:
        patch.undo()

    assert refused[0] > 1
    steps = [1, 2, 4, 5, 6, 6] if lasts else [1, 2, 3, 4, 5, 6, 6]
    assert [row["step"] for row in trackio_rows("tests")] == steps
    lost = [("trackio lost rows", "(1)", "ValueError: a bad row")]
    assert_each(result.warnings, *(lost if lasts else []))


@pytest.mark.parametrize("variable", ["TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"])
def test_another_place_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "somewhere")
    with pytest.raises(ValueError, match=f"{variable} is set: unset"):
        Trackio("tests")


def test_a_network_file_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")
    with pytest.raises(ValueError, match="set TRACKIO_DIR"):
        Trackio("tests")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio.sqlite_storage", None)
    with pytest.raises(ImportError, match=r"Trackio needs trackio.* 'heliograph\[trackio\]'"):
        Trackio("tests")
