"""JsonlLog: every line parses, no step twice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import deepcopy
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from heliograph import (
    At,
    BatchEnd,
    BatchStart,
    Checkpoint,
    Every,
    JsonlLog,
    Lane,
    Log,
    LogSchedule,
    RunClosed,
    RunResult,
    SavePoint,
    SaveSchedule,
    Trainer,
    TrainStart,
    ValidationSchedule,
)
from heliograph.tests.messages import assert_each

Make = Callable[..., Any]


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def places(path: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in read(path)]


def test_every_line_parses_and_has_its_head(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "log.jsonl"
    plugins = [
        JsonlLog(path),
        LogSchedule(Every(steps=2)),
        ValidationSchedule(Every(epochs=1)),
        SaveSchedule(Every(epochs=1)),
        Checkpoint(tmp_path / "c", keep_best=1, monitor="validation/loss"),
    ]
    trainer = Trainer(plugins, device="cpu")
    result = trainer.fit(task(), batches(4), validation=batches(1), optimizer=sgd, epochs=1, name="digits")
    lines = read(path)

    assert result.plugin_errors == {}
    assert places(path) == [
        ("log", 2),
        ("log", 4),
        ("validation_end", 4),
        ("checkpoint_saved", 4),
        ("run_closed", 4),
    ]
    for line in lines:
        assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
        assert len(line["attempt"]) == 8
        assert line["run"] == "digits"
    assert [line["epoch"] for line in lines] == [0, 0, 1, 1, 1]
    assert lines[1]["metrics"] == {"train/loss": result.metrics["train/loss"]}
    assert lines[2]["metrics"] == {"validation/loss": result.metrics["validation/loss"]}
    assert lines[3]["path"] == str(tmp_path / "c" / "digits_epoch_1_iter_4.pth")
    assert lines[3]["is_best"] is True
    assert lines[4]["status"] == "completed"


def test_what_is_no_number_in_json_is_a_string(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    trainer = Trainer([JsonlLog(tmp_path / "log"), LogSchedule(Every(steps=1))], device="cpu")

    def add(run: Any, event: Log) -> None:
        event.metrics.update({"a": math.nan, "b": math.inf, "c": -math.inf})

    trainer.bus.on(Log, add, lane=Lane.MEASURE)
    trainer.fit(task(), batches(1), optimizer=sgd, epochs=1)
    metrics = read(tmp_path / "log")[0]["metrics"]

    assert (metrics["a"], metrics["b"], metrics["c"]) == ("nan", "inf", "-inf")


def test_a_failure(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    trainer = Trainer([JsonlLog(tmp_path / "log"), LogSchedule(Every(steps=1))], device="cpu")

    def fail(run: Any, event: BatchEnd) -> None:
        if run.progress.batches == 2:
            raise ArithmeticError("too\nlarge")

    trainer.bus.on(BatchEnd, fail)
    with pytest.raises(ArithmeticError):
        trainer.fit(task(), batches(3), optimizer=sgd, epochs=1)
    lines = read(tmp_path / "log")

    assert places(tmp_path / "log") == [("log", 1), ("run_failed", 2), ("run_closed", 2)]
    assert lines[1]["error"] == "ArithmeticError: too\nlarge"
    assert lines[2]["status"] == "failed"


def test_the_last_line_has_the_warnings(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    """Also what a plugin of a later lane has said."""
    trainer = Trainer([JsonlLog(tmp_path / "log.jsonl"), LogSchedule(Every(steps=1))], device="cpu")
    handle = trainer.bus.on(RunClosed, lambda run, event: run.warn("Nothing was saved."), lane=Lane.PERSIST)
    trainer.fit(task(), batches(1), optimizer=sgd, epochs=1)
    handle.remove()
    trainer.test(task(), batches(1))

    ends = [line["warnings"] for line in read(tmp_path / "log.jsonl") if line["event"] == "run_closed"]
    assert ends == [["Nothing was saved."], []]


def fit_once(path: Path, task: Any, batches: Any, sgd: Any, name: str = "run", count: int = 1) -> Any:
    """Log a training of as many steps, by plugins of its own; return the result."""
    trainer = Trainer([JsonlLog(path), LogSchedule(Every(steps=1))], device="cpu")
    return trainer.fit(task, batches(count), optimizer=sgd, epochs=1, name=name)


def test_nothing_of_another_run_is_removed(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    results = [fit_once(path, task(), batches, sgd, name) for name in ("night1", "night2", "night2")]

    names = [{line["run"] for line in read(tmp_path / each)} for each in ("log.jsonl", "log-2.jsonl", "log-3.jsonl")]
    assert names == [{"night1"}, {"night2"}, {"night2"}]
    first, *others = [each.notes for each in results]
    assert first == ()
    for number, notes in enumerate(others, 2):
        assert_each(notes, (path, "another run", tmp_path / f"log-{number}.jsonl"))


def test_one_object_in_two_fits_writes_two_files(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    trainer = Trainer([JsonlLog(tmp_path / "log"), LogSchedule(Every(steps=1))], device="cpu")
    trainer.fit(task(), batches(3), optimizer=sgd, epochs=1)
    trainer.fit(task(), batches(1), optimizer=sgd, epochs=1, name="second")
    trainer.test(task(), batches(1), name="tested")

    assert places(tmp_path / "log") == [("log", 1), ("log", 2), ("log", 3), ("run_closed", 3)]
    assert places(tmp_path / "log-2") == [("log", 1), ("run_closed", 1), ("test_end", 0), ("run_closed", 0)]


def test_a_file_of_evaluations_only_is_used(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    Trainer([JsonlLog(path)], device="cpu").validate(task(), batches(1))
    fit_once(path, task(), batches, sgd)

    assert [event for event, _ in places(path)] == ["validation_end", "run_closed", "log", "run_closed"]
    assert [line["training"] is None for line in read(path)] == [True, True, False, False]


def test_a_resumed_run_finds_its_own_file(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    """Others began before and after, and tests were written into it; its checkpoint is of before its first line."""
    path, saved = tmp_path / "log.jsonl", dict[str, Any]()
    Trainer([JsonlLog(path)], device="cpu").test(task(), batches(1))
    fit_once(path, task(), batches, sgd, "former")
    first = Trainer(
        [JsonlLog(path), LogSchedule(Every(steps=2)), SaveSchedule(At(steps=1), at_end=False)], device="cpu"
    )
    first.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
    first.fit(task(), batches(4), optimizer=sgd, epochs=1, name="mine")
    first.test(task(), batches(1))
    fit_once(path, task(), batches, sgd, "later")
    others = [(tmp_path / name).read_bytes() for name in ("log.jsonl", "log-3.jsonl")]

    second = Trainer([JsonlLog(path), LogSchedule(Every(steps=2))], device="cpu")
    second.bus.on(TrainStart, lambda run, event: run.resume(saved))
    second.fit(task(), batches(4), optimizer=sgd, epochs=1, name="mine")

    assert [(tmp_path / name).read_bytes() for name in ("log.jsonl", "log-3.jsonl")] == others
    events = [("test_end", 0), ("run_closed", 0), ("log", 2), ("log", 4), ("run_closed", 4)]
    assert places(tmp_path / "log-2.jsonl") == events
    assert len(list(tmp_path.iterdir())) == 3


def test_lines_that_are_lost_are_a_warning(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = JsonlLog(path)
    trainer = Trainer([log, LogSchedule(Every(steps=1))], device="cpu")

    def put_aside(run: Any, event: Log) -> None:
        if run.progress.steps in (2, 3):
            log.close()
            path.rename(tmp_path / "aside")
            path.mkdir()

    def put_back(run: Any, event: BatchStart) -> None:
        if path.is_dir():
            path.rmdir()
            (tmp_path / "aside").rename(path)

    trainer.bus.on(Log, put_aside, lane=Lane.DECIDE)
    trainer.bus.on(BatchStart, put_back)
    result = trainer.fit(task(), batches(5), optimizer=sgd, epochs=1)

    assert_each(result.warnings[1:], ("Lines are missing", "(2)", path, "[Errno 21]"))
    assert [step for event, step in places(path) if event == "log"] == [1, 4, 5]


def test_fit_then_test_append(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = JsonlLog(path)
    trainer = Trainer([log, LogSchedule(Every(steps=1))], device="cpu")
    trainer.fit(task(), batches(1), optimizer=sgd, epochs=1)
    tested = trainer.test(task(), batches(1))
    trainer.validate(task(), batches(1))

    assert [event for event, _ in places(path)] == [
        "log",
        "run_closed",
        "test_end",
        "run_closed",
        "validation_end",
        "run_closed",
    ]
    assert read(path)[2]["metrics"] == tested.metrics
    assert log._file is None


def test_a_test_of_another_process_appends(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    Trainer([JsonlLog(path), LogSchedule(Every(steps=1))], device="cpu").fit(
        task(), batches(1), optimizer=sgd, epochs=1
    )
    Trainer([JsonlLog(path)], device="cpu").test(task(), batches(1))

    assert [event for event, _ in places(path)] == ["log", "run_closed", "test_end", "run_closed"]


def resumable(
    task: Make, batches: Make, sgd: Any, path: Path, at: int, *, between: Callable[[], None] = lambda: None
) -> RunResult:
    """Cut a run of two epochs of four steps after a step; then resume it from there, and return the result."""
    saved: dict[str, Any] = {}
    for resumed in (False, True):
        plugins = [
            JsonlLog(path),
            LogSchedule(Every(steps=1)),
            ValidationSchedule(Every(epochs=1)),
            SaveSchedule(At(steps=at), at_end=False),
        ]
        trainer = Trainer(plugins, device="cpu")
        if resumed:
            between()
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        else:
            trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
        result = trainer.fit(task(), batches(4), validation=batches(1), optimizer=sgd, epochs=2)
    return result


@pytest.mark.parametrize("at", [1, 3, 4, 5, 7])
def test_a_resumed_run_has_no_step_twice(task: Make, batches: Make, sgd: Any, tmp_path: Path, at: int) -> None:
    path = tmp_path / "log"
    resumable(task, batches, sgd, path, at)
    seen = [place for place in places(path) if place[0] in ("log", "validation_end")]

    assert seen == [
        *(("log", step) for step in range(1, 5)),
        ("validation_end", 4),
        *(("log", step) for step in range(5, 9)),
        ("validation_end", 8),
    ]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("tail", ['{"event": "log", "ti', "{}", "nothing", "12", "[1]", '"step"'])
def test_a_last_line_that_a_kill_cut_short(task: Make, batches: Make, sgd: Any, tmp_path: Path, tail: str) -> None:
    path = tmp_path / "log"

    def cut() -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(tail)

    resumable(task, batches, sgd, path, 3, between=cut)

    assert [step for event, step in places(path) if event == "log"] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("at", [0, -1])
def test_junk_bytes_are_left_as_they_are(task: Make, batches: Make, sgd: Any, tmp_path: Path, at: int) -> None:
    path, junk = tmp_path / "log.jsonl", list[bytes]()

    def spoil() -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        lines[at] = b"\xff\xfe\x00junk\n"
        junk.append(b"".join(lines))
        path.write_bytes(junk[0])

    result = resumable(task, batches, sgd, path, 3, between=spoil)

    other = tmp_path / "log-2.jsonl"
    assert path.read_bytes() == junk[0]
    assert [step for event, step in places(other) if event == "log"] == [4, 5, 6, 7, 8]
    assert any(f"{path} has bytes" in line for line in result.notes)
    assert result.plugin_errors == {}


def test_a_last_line_that_was_cut_short_does_not_swallow_a_test(task: Make, batches: Make, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"event": "log", "ti', encoding="utf-8")
    Trainer([JsonlLog(path)], device="cpu").test(task(), batches(1))
    parsed = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            parsed.append(json.loads(line)["event"])
        except ValueError:
            continue

    assert parsed == ["test_end", "run_closed"]


def test_a_resumed_run_whose_log_is_gone(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    resumable(task, batches, sgd, path, 3, between=path.unlink)

    assert [step for event, step in places(path) if event == "log"] == [4, 5, 6, 7, 8]


def test_a_start_that_fails_leaves_the_former_log(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    """A typo in the path to resume from must not cost the log of the run that was to be resumed."""
    path = tmp_path / "log"
    Trainer([JsonlLog(path), LogSchedule(Every(steps=1))], device="cpu").fit(
        task(), batches(3), optimizer=sgd, epochs=1
    )
    plugins = [JsonlLog(path), SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path, resume=tmp_path / "typo.pth")]
    with pytest.raises(FileNotFoundError):
        Trainer(plugins, device="cpu").fit(task(), batches(3), optimizer=sgd, epochs=1)

    assert [step for event, step in places(path) if event == "log"] == [1, 2, 3]


def test_toggled_in_the_midst_it_continues_after(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    trainer = Trainer([JsonlLog(path), LogSchedule(Every(steps=1))], device="cpu")

    def toggle(run: Any, event: BatchEnd) -> None:
        if run.progress.batch == 2:
            trainer.plugins.disable("jsonl_log")
        if run.progress.batch == 3:
            trainer.plugins.enable("jsonl_log")

    trainer.bus.on(BatchEnd, toggle)
    trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)

    assert [step for event, step in places(path) if event == "log"] == [1, 3, 4]


def test_a_folder_that_cannot_be_written_kills_no_run(task: Make, batches: Make, sgd: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer = Trainer([JsonlLog(tmp_path / "file" / "log"), LogSchedule(Every(steps=1))], device="cpu")
    result = trainer.fit(task(), batches(4), optimizer=sgd, epochs=1)

    assert result.status == "completed"
    assert len(result.plugin_errors["jsonl_log"]) == 3


def test_two_logs_of_one_path_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(ValueError, match=f"{path}, which is exclusive"):
        Trainer([JsonlLog(path), JsonlLog(str(path)).named("again")], device="cpu")
    Trainer([JsonlLog(path), JsonlLog(tmp_path / "other").named("again")], device="cpu")
