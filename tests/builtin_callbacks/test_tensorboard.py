"""TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import heliograph.builtin_callbacks.trackers as module
import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    BatchStart,
    Every,
    GradientClipping,
    LearningRate,
    Log,
    LogSchedule,
    Run,
    SavePoint,
    SaveSchedule,
    StepEnd,
    TensorBoard,
    Trainer,
    TrainStart,
    ValidationSchedule,
)
from heliograph.builtin_callbacks.trackers import SAVED, EventFile, Place, TrackerRecord
from heliograph.tests import kit
from heliograph.tests.messages import assert_each, assert_facts
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from torch.optim.lr_scheduler import StepLR

Make = Callable[..., Any]


def scalars(folder: Path) -> dict[str, Any]:
    """Return the points of every curve, as TensorBoard shows them."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags}


def steps(folder: Path, tag: str) -> list[int]:
    return [step for step, _ in scalars(folder)[tag]]


def test_tags_steps_and_values(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    plugins = [
        LogSchedule(Every(steps=2)),
        ValidationSchedule(Every(epochs=1)),
        TensorBoard(tmp_path / "deep" / "er"),
        GradientClipping(1.0),
    ]
    trainer = Trainer(plugins, device="cpu")
    logged: list[dict[str, float]] = []
    trainer.bus.on(Log, lambda run, event: logged.append(event.metrics))
    result = trainer.fit(task(), batches(4), validation=batches(2), optimizer=sgd, epochs=2)
    curves = scalars(tmp_path / "deep" / "er")

    assert result.plugin_errors == {}
    assert set(curves) == {
        "train/loss",
        "train/learning_rate",
        "train/gradient_norm",
        "train/samples_per_second",
        "validation/loss",
    }
    assert curves["train/loss"] == [
        (step, pytest.approx(each["train/loss"])) for step, each in zip([2, 4, 6, 8], logged, strict=True)
    ]
    assert curves["train/learning_rate"] == [(step, pytest.approx(0.1)) for step in (2, 4, 6, 8)]
    assert [step for step, _ in curves["train/samples_per_second"]] == [4, 6, 8]
    assert [step for step, _ in curves["validation/loss"]] == [4, 8]
    assert curves["validation/loss"][-1][1] == pytest.approx(result.metrics["validation/loss"])


def test_the_throughput(task: Make, batches: Make, sgd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 2.0
        return now[0]

    monkeypatch.setattr(module, "perf_counter", clock)
    plugins = [LogSchedule(Every(steps=2)), TensorBoard(tmp_path)]
    trainer = Trainer(plugins, device="cpu")
    for name in ("first", "second"):
        trainer.fit(task(), batches(4), optimizer=sgd, epochs=1, name=name)

    (second,) = tmp_path.glob("second_*")
    assert scalars(second)["train/samples_per_second"] == [(4, 4.0)]


def fit_once(folder: Path, task: Any, batches: Any, sgd: Any, name: str, count: int = 1) -> Any:
    trainer = Trainer([LogSchedule(Every(steps=1)), TensorBoard(folder)], device="cpu")
    return trainer.fit(task, batches(count), optimizer=sgd, epochs=1, name=name, hyper_parameters={"name": name})


def test_nothing_of_another_run_is_purged(
    task: Make, batches: Make, sgd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them begin in the same second."""

    class Still(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Still:
            return cls(2026, 11, 25, 3, 4, 5)

    monkeypatch.setattr(module, "datetime", Still)
    results = [fit_once(tmp_path, task(), batches, sgd, name, count) for name, count in [("a", 3), ("b", 1), ("b", 2)]]

    folders = ["b_2026-11-25_03-04-05", "b_2026-11-25_03-04-05-2"]
    assert [steps(tmp_path / each, "train/loss") for each in ("", *folders)] == [[1, 2, 3], [1], [1, 2]]
    assert results[0].notes == ()
    (note,) = results[2].notes
    assert_facts(note, tmp_path, "another run", tmp_path / folders[1])


def test_a_resumed_run_continues_in_its_own_folder(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    fit_once(tmp_path, task(), batches, sgd, "former", 2)
    fit = resumable(task, batches, sgd, tmp_path)
    fit(at=3, resumed=False)
    fit_once(tmp_path, task(), batches, sgd, "later", 1)
    resumed = fit(at=99, resumed=True)

    assert not [each for each in resumed.notes if "curves" in each]
    (own,) = tmp_path.glob("run_*")
    (later,) = tmp_path.glob("later_*")
    assert steps(tmp_path, "train/loss") == [1, 2]
    assert steps(own, "train/loss") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps(later, "train/loss") == [1]


def test_an_evaluation_outside_a_training_leaves_the_curves_of_another_run_alone(
    task: Make, batches: Make, sgd: Any, tmp_path: Path
) -> None:
    fit_once(tmp_path, task(), batches, sgd, "former", 2)
    before = set(tmp_path.iterdir())
    result = Trainer([TensorBoard(tmp_path)], device="cpu").validate(task(), batches(1))

    (own,) = set(tmp_path.iterdir()) - before
    assert [value for _, value in scalars(own)["validation/loss"]] == [pytest.approx(result.metrics["validation/loss"])]
    assert_each(result.notes, (tmp_path, "another run", own))


def test_a_resumed_run_in_the_folder_itself_notes_no_other(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    fit = resumable(task, batches, sgd, tmp_path)
    fit(at=3, resumed=False)
    resumed = fit(at=99, resumed=True)

    assert not [each for each in resumed.notes if "curves" in each]


def test_a_clock_that_stands_still_gives_no_throughput(
    task: Make, batches: Make, sgd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "perf_counter", lambda: 1.0)
    Trainer([LogSchedule(Every(steps=2)), TensorBoard(tmp_path)], device="cpu").fit(
        task(), batches(4), optimizer=sgd, epochs=1
    )

    assert "train/samples_per_second" not in scalars(tmp_path)


@pytest.mark.parametrize("first", [True, False])
def test_the_learning_rate_is_the_plugin_s_where_there_is_one(
    task: Make, batches: Make, sgd: Any, tmp_path: Path, first: bool
) -> None:
    mine = task()
    optimizer = sgd(list(mine.model.parameters()))
    board = TensorBoard(tmp_path)
    plugins: list[Any] = [board, LearningRate("step")] if first else [LearningRate("step"), board]
    trainer = Trainer([LogSchedule(Every(steps=1)), *plugins], device="cpu")
    trainer.fit(mine, batches(2), optimizer=optimizer, scheduler=StepLR(optimizer, 1, gamma=0.5), epochs=1)

    assert scalars(tmp_path)["train/learning_rate"] == [(1, pytest.approx(0.05)), (2, pytest.approx(0.025))]


def resumable(task: Make, batches: Make, sgd: Any, folder: Path) -> Callable[..., Any]:
    saved: dict[str, Any] = {}

    def fit(*, at: int, resumed: bool, then: Callable[[Trainer], None] = lambda trainer: None) -> Any:
        plugins = [
            LogSchedule(Every(steps=1)),
            ValidationSchedule(Every(epochs=1)),
            SaveSchedule(At(steps=at), at_end=False),
            TensorBoard(folder),
        ]
        trainer = Trainer(plugins, device="cpu")
        if resumed:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        else:
            trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
        then(trainer)
        return trainer.fit(task(), batches(4), validation=batches(1), optimizer=sgd, epochs=2)

    return fit


def test_a_resumed_run_has_no_step_twice(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    fit = resumable(task, batches, sgd, tmp_path)
    fit(at=3, resumed=False)
    fit(at=99, resumed=True)

    assert steps(tmp_path, "train/loss") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps(tmp_path, "validation/loss") == [4, 8]


def test_toggling_in_a_resumed_run_purges_nothing_of_its_own(
    task: Make, batches: Make, sgd: Any, tmp_path: Path
) -> None:
    def toggle(trainer: Trainer) -> None:
        def switch(run: Any, event: BatchStart) -> None:
            if run.progress.steps == 5:
                trainer.plugins.disable("tensorboard")
            if run.progress.steps == 6:
                trainer.plugins.enable("tensorboard")

        trainer.bus.on(BatchStart, switch)

    fit = resumable(task, batches, sgd, tmp_path)
    fit(at=3, resumed=False)
    fit(at=99, resumed=True, then=toggle)

    assert steps(tmp_path, "train/loss") == [1, 2, 3, 4, 5, 7, 8]


def test_a_run_that_goes_back_has_no_step_twice(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    saved: list[dict[str, Any]] = []

    def go_back(run: Run, event: BatchEnd) -> None:
        if run.progress.steps == 6 and saved:
            run.roll_back(saved.pop())

    plugins = [LogSchedule(Every(steps=1)), ValidationSchedule(Every(epochs=1)), TensorBoard(tmp_path)]
    trainer = Trainer([*plugins, SaveSchedule(At(steps=3), at_end=False)], device="cpu")
    trainer.bus.on(SavePoint, lambda run, event: saved.append(deepcopy(run.state_dict())))
    trainer.bus.on(BatchEnd, go_back)
    result = trainer.fit(task(), batches(4), validation=batches(1), optimizer=sgd, epochs=2)

    assert [each.verb for each in result.history].count("roll_back") == 1
    assert steps(tmp_path, "train/loss") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps(tmp_path, "validation/loss") == [4, 8]


def test_hyper_parameters(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    given = {"rate": 0.1, "layers": 3, "deep": True, "kind": "linear", "sizes": [4, 2], "none": None}
    trainer = Trainer([LogSchedule(Every(steps=1)), TensorBoard(tmp_path)], device="cpu")
    result = trainer.fit(task(), batches(2), optimizer=sgd, epochs=1, hyper_parameters=given)
    reader = EventAccumulator(str(tmp_path / "hyper_parameters"))
    reader.Reload()
    tags = reader.Tags()
    start = reader.SummaryMetadata("_hparams_/session_start_info")

    assert result.plugin_errors == {}
    assert set(tags["scalars"]) == set(result.metrics)
    assert reader.Scalars("train/loss")[0].value == pytest.approx(result.metrics["train/loss"])
    for name in given:
        assert name.encode() in start.plugin_data.content
    assert b"[4, 2]" in start.plugin_data.content


def test_without_hyper_parameters_there_are_none(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    Trainer([LogSchedule(Every(steps=1)), TensorBoard(tmp_path)], device="cpu").fit(
        task(), batches(2), optimizer=sgd, epochs=1
    )

    assert not (tmp_path / "hyper_parameters").exists()


def test_nothing_logged_makes_no_file(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    result = Trainer([TensorBoard(tmp_path / "runs")], device="cpu").fit(
        task(), batches(2), optimizer=sgd, epochs=1, hyper_parameters={"a": 1}
    )

    assert result.plugin_errors == {}
    assert not (tmp_path / "runs").exists()


def test_fit_then_test(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    trainer = Trainer([LogSchedule(Every(steps=1)), board], device="cpu")
    trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)
    tested = trainer.test(task(), batches(2))

    assert steps(tmp_path, "train/loss") == [1, 2]
    assert [value for _, value in scalars(tmp_path)["test/loss"]] == [pytest.approx(tested.metrics["test/loss"])]
    assert board._file is None


def test_the_writer_is_closed_after_a_failure(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    trainer = Trainer([LogSchedule(Every(steps=1)), board], device="cpu")

    def fail(run: Any, event: BatchStart) -> None:
        if run.progress.steps == 2:
            raise KeyboardInterrupt

    trainer.bus.on(BatchStart, fail)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)

    assert board._file is None
    assert steps(tmp_path, "train/loss") == [1, 2]


def test_a_folder_that_cannot_be_written_kills_no_run(
    task: Make, batches: Make, sgd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorBoard, "patience", 0.05)
    (tmp_path / "file").touch()
    trainer = Trainer([LogSchedule(Every(steps=1)), TensorBoard(tmp_path / "file" / "runs")], device="cpu")
    result = trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)

    assert result.status == "completed"
    (warning,) = result.warnings
    assert_facts(warning, "tensorboard", "rows of metrics (4)", "the ending (1)", "NotADirectoryError", "file/runs'")


def test_a_missing_tensorboard_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ImportError, match=r"TensorBoard needs .*: pip"):
        TensorBoard(tmp_path)


def test_images_texts_histograms_curves_and_files(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    def show(run: Run, event: StepEnd) -> None:
        run.log_image("pixels", torch.zeros(3, 2, 4))
        run.log_text("words", "some *words*")
        run.log_histogram("weights", torch.arange(9.0))
        run.log_curve("curve", [0, 1], [0.2, 0.7])
        run.log_file("notes", tmp_path / "notes.txt")

    (tmp_path / "notes.txt").touch()
    trainer = Trainer([LogSchedule(Every(steps=1)), TensorBoard(tmp_path / "board")], device="cpu")
    trainer.bus.on(StepEnd, show)
    result = trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)
    reader = EventAccumulator(str(tmp_path / "board"))
    reader.Reload()

    assert (result.warnings, result.notes) == ((), ())
    images = [(each.step, each.width, each.height) for each in reader.Images("pixels")]
    assert images == [(1, 4, 2), (2, 4, 2)]
    histogram = reader.Histograms("weights")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (0.0, 8.0, 9.0)
    texts = {name: reader.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0] for name in ("words", "notes")}
    assert texts == {"words": b"some *words*", "notes": f"`{tmp_path / 'notes.txt'}`".encode()}
    assert [each.step for each in reader.Tensors("curve")] == [1, 2]


@pytest.mark.parametrize("name", ["samples", "epoch", "training"])
def test_what_is_logged_besides_numbers_has_the_name_that_was_given(tmp_path: Path, name: str) -> None:
    def show(run: Run, event: StepEnd) -> None:
        run.log_image(name, torch.zeros(3, 2, 4))
        run.log_text(name, "some *words*")
        run.log_histogram(name, torch.arange(9.0))

    trainer = Trainer([LogSchedule(Every(steps=1)), TensorBoard(tmp_path)], device="cpu")
    trainer.bus.on(StepEnd, show)
    kit.fit(trainer)
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert (reader.Tags()["images"], reader.Tags()["histograms"]) == ([name], [name])
    assert f"{name}/text_summary" in reader.Tags()["tensors"]


def full_disk(monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool]) -> None:
    """Let some writes, counted from 1, write half of what they are given and fail."""
    put, number = EventFile._put, count(1)

    def put_half(self: EventFile, content: bytes) -> None:
        if when(next(number)):
            put(self, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, content)

    monkeypatch.setattr(EventFile, "_put", put_half)


def test_a_disk_that_is_full_for_a_while_loses_nothing(
    task: Make, batches: Make, sgd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, lambda number: number in (1, 4, 5))
    trainer = Trainer([LogSchedule(Every(steps=1)), TensorBoard(tmp_path)], device="cpu")
    result = trainer.fit(task(), batches(4), optimizer=sgd, epochs=1, hyper_parameters={"rate": 0.1})

    assert result.warnings == ()
    assert steps(tmp_path, "train/loss") == [1, 2, 3, 4]
    assert len(list(tmp_path.rglob("events.*"))) == 2  # the curves, and the hyper-parameters


def test_a_full_disk_loses_curves_and_nothing_else(
    task: Make,
    batches: Make,
    sgd: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(TensorBoard, "patience", 0.05)
    full_disk(monkeypatch, lambda number: number > 3)
    trainer = Trainer([LogSchedule(Every(steps=1)), TensorBoard(tmp_path)], device="cpu")
    result = trainer.fit(task(), batches(8), optimizer=sgd, epochs=1)

    assert (result.status, result.plugin_errors) == ("completed", {})
    assert_each(result.warnings, ("tensorboard", "rows of metrics (6)", "the ending (1)", "[Errno 28]"))
    assert steps(tmp_path, "train/loss") == [1, 2]
    assert "Traceback" not in capfd.readouterr().err


TRAINING = """
import os, signal, sys
import torch
from heliograph import *

torch.manual_seed(0)
batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]

def kill(run, event):
    if len(sys.argv) > 2 and run.progress.steps == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

folder = sys.argv[1]
plugins = [RNGCapture(), LogSchedule(steps=1), TensorBoard(folder + "/board")]
plugins.append(Checkpoint(folder + "/saves", every=Every(steps=3), resume="auto"))
trainer = Trainer(plugins, device="cpu")
trainer.bus.on(BatchEnd, kill)
task = Supervised(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss)
print(trainer.fit(task, batches, optimizer=torch.optim.SGD, epochs=2).warnings)
"""


@pytest.mark.whole
def test_after_a_sigkill_every_step_is_there_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path)]
    killed = subprocess.run([*command, "5"], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert (resumed.returncode, resumed.stdout) == (0, "()\n"), resumed.stderr
    assert steps(tmp_path / "board", "train/loss") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_file_that_could_not_be_begun_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, lambda number: True)
    with pytest.raises(OSError, match="No space left"):
        EventFile(tmp_path)
    assert list(tmp_path.iterdir()) == []


CURVES = """
import sys
import torch
from heliograph import Every, LogSchedule, Supervised, TensorBoard, Trainer

plugins = [LogSchedule(Every(steps=1)), TensorBoard(sys.argv[1])]
task = Supervised(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss)
batches = [(torch.randn(4, 3), torch.randn(4, 1))]
before = set(sys.modules)
result = Trainer(plugins, device="cpu").fit(task, batches, optimizer=torch.optim.SGD, epochs=1)
print(result.warnings, sorted({"torch.utils.tensorboard", "fsspec", "absl"} & sys.modules.keys()))
"""


def test_curves_need_neither_torchs_summaries_nor_the_stubs_of_tensorflow(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CURVES, str(tmp_path)], capture_output=True, text=True, timeout=120)

    assert (done.returncode, done.stdout) == (0, "() []\n"), done.stderr
    assert steps(tmp_path, "train/loss") == [1]


def test_what_draws_is_imported_in_the_thread_of_the_loop(
    task: Make, batches: Make, sgd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    load = module._summaries

    def loaded() -> Any:
        threads.append(threading.current_thread().name)
        return load()

    monkeypatch.setattr(module, "_summaries", loaded)
    trainer = Trainer([LogSchedule(Every(steps=1)), TensorBoard(tmp_path)], device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: run.log_text("words", "some"))
    trainer.fit(task(), batches(1), optimizer=sgd, epochs=1)
    assert threads[:2] == ["MainThread", "heliograph-tensorboard"]

    threads.clear()
    trainer = Trainer([LogSchedule(Every(steps=1)), TensorBoard(tmp_path / "with")], device="cpu")
    trainer.fit(task(), batches(1), optimizer=sgd, epochs=1, hyper_parameters={"rate": 0.1})
    assert threads == ["MainThread", "heliograph-tensorboard"]


@pytest.mark.parametrize("waits", SAVED)
def test_for_what_a_checkpoint_had_waiting_it_is_imported_there_too(
    waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    monkeypatch.setattr(module, "_summaries", lambda: threads.append(threading.current_thread().name))
    place = Place(1, 1.0, 2, 0.1, 1, 0)
    arguments: dict[str, tuple[Any, ...]] = {
        "scalars": (place, {"a": 1.0}),
        "text": (place, "words", "some"),
        "hyper_parameters": ({"rate": 1.0},),
    }
    tracker = TensorBoard(tmp_path)
    tracker.load_state_dict({**tracker.state_dict(), "waiting": [TrackerRecord(waits, arguments[waits]).as_plain()]})
    assert threads == ["MainThread"] * (waits != "scalars")
    assert [each.kind for each in tracker._waiting] == [waits]
