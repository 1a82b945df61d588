"""FileLog: what it writes, that its handlers leave, that a resumed run appends."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

import heliograph.builtin_callbacks.file_log as module
import pytest
from heliograph import (
    At,
    BatchEnd,
    BatchStart,
    Checkpoint,
    EpochStart,
    Every,
    FileLog,
    Lane,
    LogSchedule,
    RunClosed,
    SavePoint,
    SaveSchedule,
    Trainer,
    TrainStart,
    ValidationSchedule,
)
from heliograph.tests.kit import class_batches, fit, linear_classifier
from heliograph.tests.messages import assert_each, assert_facts, has_facts

LOGGERS = ("heliograph", "py.warnings")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(list(each.handlers), each.level) for each in loggers]
    yield
    assert [(list(each.handlers), each.level) for each in loggers] == before


def only(folder: Path) -> Path:
    (path,) = folder.glob("*.log")
    return path


def lines(folder: Path) -> list[str]:
    return only(folder).read_text(encoding="utf-8").splitlines()


def test_the_name_and_what_is_written(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "deep" / "er")
    plugins = [
        log,
        LogSchedule(Every(steps=2)),
        ValidationSchedule(Every(epochs=1)),
        SaveSchedule(Every(epochs=1)),
        Checkpoint(tmp_path / "c", keep_best=1, monitor="validation/loss"),
    ]
    result = fit(*plugins, epochs=2, validation=class_batches(1), name="digits")
    path = only(tmp_path / "deep" / "er")
    text = path.read_text(encoding="utf-8")

    assert re.fullmatch(r"digits_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.log", path.name)
    assert log.path == path
    assert result.plugin_errors == {}
    assert re.search(r"INFO +\[train epoch 0 step 2\] train/loss \d", text)
    assert re.search(r"\[validation epoch 1 step 2\] validation/loss \d", text)
    assert "4] epochs done: 2" in text
    assert f"saved {tmp_path / 'c' / 'digits_epoch_1_iter_2.pth'} (the best" in text
    assert lines(tmp_path / "deep" / "er")[-1].endswith("[train epoch 2 step 4] closed: completed")
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line) for line in text.splitlines())


def test_a_removed_checkpoint_is_written_with_the_reason(tmp_path: Path) -> None:
    fit(FileLog(tmp_path), SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path / "c"), epochs=2)

    path = tmp_path / "c" / "run_epoch_1_iter_2.pth"
    assert [line for line in lines(tmp_path) if line.endswith(f"removed {path}: keep_last=1")]


def test_a_failure_is_written_with_its_traceback(tmp_path: Path) -> None:
    trainer = Trainer([FileLog(tmp_path)], device="cpu")

    def fail(run: Any, event: BatchEnd) -> None:
        raise ArithmeticError("too large")

    trainer.bus.on(BatchEnd, fail)
    with pytest.raises(ArithmeticError):
        fit(trainer)
    text = only(tmp_path).read_text(encoding="utf-8")

    assert_facts(text, "ERROR", "train epoch 0", "step 1", "failed\nTraceback")
    assert "ArithmeticError: too large" in text
    assert text.splitlines()[-1].endswith("closed: failed")


def test_handlers_leave_after_an_interrupt(tmp_path: Path) -> None:
    trainer = Trainer([FileLog(tmp_path)], device="cpu")

    def interrupt(run: Any, event: BatchEnd) -> None:
        raise KeyboardInterrupt

    trainer.bus.on(BatchEnd, interrupt)
    result = fit(trainer, on_interrupt="return")

    assert result.status == "interrupted"
    assert lines(tmp_path)[-1].endswith("closed: interrupted")


def test_requests_are_listed(tmp_path: Path) -> None:
    trainer = Trainer([FileLog(tmp_path), LogSchedule(Every(steps=1))], device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: run.control.stop("enough"))
    fit(trainer)
    text = "\n".join(lines(tmp_path))

    assert re.search(r"asked: .*stop - enough", text)
    assert "log_schedule: log" not in text
    assert lines(tmp_path)[-1].endswith("closed: stopped")


def test_warnings_of_the_run_are_written_at_its_end(tmp_path: Path) -> None:
    """Also what a plugin of a later lane has said."""
    trainer = Trainer([FileLog(tmp_path, level=logging.WARNING)], device="cpu")
    trainer.bus.on(RunClosed, lambda run, event: run.warn("Nothing was saved."), lane=Lane.PERSIST)
    fit(trainer)
    (path,) = tmp_path.iterdir()
    assert_each(path.read_text().splitlines(), ("WARNING", "train epoch 1", "step 2", "Nothing was saved."))


def test_a_second_fit_does_not_multiply_lines(tmp_path: Path) -> None:
    trainer = Trainer([FileLog(tmp_path)], device="cpu")
    for name in ("first", "second", "third"):
        fit(trainer, name=name)

    paths = sorted(tmp_path.glob("*.log"))
    assert [path.name.split("_")[0] for path in paths] == ["first", "second", "third"]
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert text.count("epochs done: 1") == 1
        assert text.count("closed: completed") == 1


def test_runs_that_begin_in_the_same_second_have_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Still(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Still:
            return cls(2026, 11, 25, 3, 4, 5)

    monkeypatch.setattr(module, "datetime", Still)
    for epochs in (1, 2, 3):
        fit(FileLog(tmp_path), epochs=epochs)

    names = [f"run_2026-11-25_03-04-05{number}.log" for number in ("", "-2", "-3")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert [(tmp_path / name).read_text().count("epochs done") for name in names] == [1, 2, 3]


def test_a_name_that_files_cannot_have_is_cleaned_in_a_test_too(tmp_path: Path) -> None:
    Trainer([FileLog(tmp_path)], device="cpu").test(linear_classifier(), class_batches(1), name="a:b")

    assert only(tmp_path).name.startswith("a-b_")


def test_fit_then_test_go_to_one_file(tmp_path: Path) -> None:
    trainer = Trainer([FileLog(tmp_path)], device="cpu")
    fit(trainer)
    trainer.test(linear_classifier(), class_batches(1))
    text = "\n".join(lines(tmp_path))

    assert "0 step 0] test/loss" in text
    assert text.count("closed: completed") == 2


def test_a_test_alone_has_a_file(tmp_path: Path) -> None:
    Trainer([FileLog(tmp_path)], device="cpu").test(linear_classifier(), class_batches(1), name="tested")

    assert only(tmp_path).name.startswith("tested_")


def test_the_name_in_a_test_is_cleaned_as_that_in_a_training(tmp_path: Path) -> None:
    trainer = Trainer([FileLog(tmp_path)], device="cpu")
    trainer.test(linear_classifier(), class_batches(1), name="a:b c")
    assert only(tmp_path).name.startswith("a-b-c_2")


def test_the_level(tmp_path: Path) -> None:
    trainer = Trainer([FileLog(tmp_path, level=logging.WARNING)], device="cpu")

    def warn(run: Any, event: BatchEnd) -> None:
        logging.getLogger("heliograph").warning("look here")
        logging.getLogger("heliograph").info("not here")

    handle = trainer.bus.on(BatchEnd, warn)
    fit(trainer, epochs=2)
    assert [line.split(" ", 2)[2] for line in lines(tmp_path)] == ["WARNING look here"] * 4
    handle.remove()


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG, logging.ERROR])
def test_the_logger_s_level_is_restored(tmp_path: Path, level: int) -> None:
    logger = logging.getLogger("heliograph")
    former = logger.level
    logger.setLevel(level)
    try:
        fit(FileLog(tmp_path), epochs=2)
        assert logger.level == level
        assert any("epochs done: 2" in line for line in lines(tmp_path))
    finally:
        logger.setLevel(former)


def test_what_others_log_goes_to_the_file(tmp_path: Path) -> None:
    trainer = Trainer([FileLog(tmp_path)], device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: logging.getLogger("heliograph.somewhere").warning("from elsewhere"))
    fit(trainer, train=class_batches(1), epochs=2)

    assert sum("from elsewhere" in line for line in lines(tmp_path)) == 2


def log_from_a_handler(log: FileLog, *names: str) -> None:
    trainer = Trainer([log], device="cpu")

    def say(run: Any, event: BatchEnd) -> None:
        for name in names:
            logging.getLogger(name).info("an info of %s", name)
            logging.getLogger(name).debug("a detail of %s", name)

    trainer.bus.on(BatchEnd, say)
    fit(trainer, train=class_batches(1))


def test_an_info_of_the_framework_is_written_where_the_root_lets_only_warnings_pass(tmp_path: Path) -> None:
    assert logging.getLogger().level == logging.WARNING
    log_from_a_handler(FileLog(tmp_path), "heliograph", "heliograph.part", "my_package")

    assert [line.split("INFO")[1].strip() for line in lines(tmp_path) if "an info" in line] == [
        "an info of heliograph",
        "an info of heliograph.part",
    ]
    assert not any("a detail" in line for line in lines(tmp_path))


@pytest.mark.parametrize("names", [["my_package"], ["root"], ["my_package", "root", "my_package.part"]])
def test_loggers_of_the_users_own_are_written_once_and_are_then_as_they_were(tmp_path: Path, names: list[str]) -> None:
    used = [logging.getLogger(name) for name in ("root", "my_package", "my_package.part", "heliograph")]
    before = [(each.level, list(each.handlers)) for each in used]
    log_from_a_handler(FileLog(tmp_path, loggers=names), "my_package.part", "heliograph", "my_package")

    for name in ("my_package.part", "heliograph", "my_package"):
        assert sum(line.endswith(f"an info of {name}") for line in lines(tmp_path)) == 1
    assert [(each.level, list(each.handlers)) for each in used] == before


def test_the_level_opens_loggers_further(tmp_path: Path) -> None:
    log_from_a_handler(FileLog(tmp_path, level=logging.NOTSET), "heliograph")

    assert any(line.endswith("a detail of heliograph") for line in lines(tmp_path))


def test_the_names_of_loggers_are_a_list(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"loggers=\['my_package'\]; got 'my_package'"):
        FileLog(tmp_path, loggers="my_package")


def test_captured_warnings_are_written(tmp_path: Path) -> None:
    trainer = Trainer([FileLog(tmp_path, loggers=["py.warnings"])], device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: warnings.warn("mind this", UserWarning, stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        try:
            fit(trainer, epochs=2)
        finally:
            logging.captureWarnings(False)
    assert any("UserWarning: mind this" in line for line in lines(tmp_path))


def resume_from(folder: Path, plugins: list[Any]) -> None:
    """Cut a run at its second step, and resume it from there."""
    saved: dict[str, Any] = {}
    for resumed in (False, True):
        trainer = Trainer([FileLog(folder), SaveSchedule(At(steps=2), at_end=False), *plugins], device="cpu")
        if resumed:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        else:
            trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
        fit(trainer, train=class_batches(4), name="run" if not resumed else "again")


def test_a_resumed_run_appends_to_its_file(tmp_path: Path) -> None:
    resume_from(tmp_path, [LogSchedule(Every(steps=1))])
    text = "\n".join(lines(tmp_path))

    assert only(tmp_path).name.startswith("run_")
    assert text.count("closed: completed") == 2
    assert sum(has_facts(line, "resumed", "epoch 0", "step 2", "None") for line in text.splitlines()) == 1


def test_also_where_the_cut_came_before_the_first_line(tmp_path: Path) -> None:
    resume_from(tmp_path, [])

    assert len(list(tmp_path.glob("*.log"))) == 1


def test_a_file_that_is_gone_is_begun_again(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.load_state_dict({"file": "gone.log"})
    log.load_state_dict({"file": None})
    fit(log, epochs=2)

    assert only(tmp_path).name.startswith("run_")


def test_state_round_trip(tmp_path: Path) -> None:
    (tmp_path / "a.log").touch()
    log = FileLog(tmp_path)
    log.load_state_dict({"file": "a.log"})

    assert log.path == tmp_path / "a.log"
    assert log.state_dict() == {"file": "a.log"}
    assert FileLog(tmp_path).state_dict() == {"file": None}


def test_a_state_that_comes_while_it_writes(tmp_path: Path) -> None:
    (tmp_path / "former.log").write_text("before\n")
    log = FileLog(tmp_path)
    trainer = Trainer([log, LogSchedule(Every(steps=1), at_start=True)], device="cpu")

    def load(run: Any, event: BatchEnd) -> None:
        if run.progress.batches == 2:
            log.load_state_dict({"file": "former.log"})

    trainer.bus.on(BatchEnd, load)
    fit(trainer)

    assert (tmp_path / "former.log").read_text().startswith("before\n")
    assert "closed: completed" in (tmp_path / "former.log").read_text()


def test_a_folder_that_cannot_be_written_kills_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = fit(FileLog(tmp_path / "file" / "logs"), epochs=2)

    assert result.status == "completed"
    assert result.plugin_errors["file_log"]


def test_disabled_in_the_midst_its_handlers_leave_at_once(tmp_path: Path) -> None:
    trainer = Trainer([FileLog(tmp_path), LogSchedule(Every(steps=1))], device="cpu")
    before = list(logging.getLogger("heliograph").handlers)

    def toggle(run: Any, event: BatchEnd) -> None:
        if run.progress.batch == 2:
            trainer.plugins.disable("file_log")
        if run.progress.batch == 3:
            trainer.plugins.enable("file_log")

    def look(run: Any, event: BatchStart) -> None:
        if run.progress.batch == 2:
            assert logging.getLogger("heliograph").handlers == before

    trainer.bus.on(BatchEnd, toggle)
    trainer.bus.on(BatchStart, look)
    fit(trainer, train=class_batches(4))
    text = "\n".join(lines(tmp_path))

    assert [step for step in range(1, 5) if f"0 step {step}] train/loss" in text] == [1, 3, 4]


def test_a_disk_that_fills_up_is_counted_and_forgotten(tmp_path: Path) -> None:
    class Full:
        """Has a full disk."""

        def write(self, text: str) -> None:
            raise OSError(28, "No space left")

        def flush(self) -> None: ...

        def close(self) -> None: ...

    log = FileLog(tmp_path)
    trainer = Trainer([log], device="cpu")
    real: list[Any] = []

    def fill(run: Any, event: EpochStart) -> None:
        assert log._handler is not None
        if event.epoch == 1:
            real.append(log._handler.stream)
            log._handler.stream = Full()  # type: ignore[assignment]
        elif event.epoch == 2:
            log._handler.stream = real[0]

    trainer.bus.on(EpochStart, fill, lane=Lane.REPORT)
    result = fit(trainer, train=class_batches(1), epochs=3)
    assert result.status == "completed"
    assert result.warnings == (f"Lines are missing (1) in {log.path}: OSError: [Errno 28] No space left.",)
    assert any("epochs done: 3" in line for line in lines(tmp_path))
