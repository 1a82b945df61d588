"""CSVLog: a row for each step, whatever happens to the process, the columns or the disk."""

from __future__ import annotations

import csv
import errno
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.tests.facts import assert_each, assert_facts, has_facts
from heliograph.tests import kit
from heliograph.tests.builtin_callbacks.tracker_attempts import Die, Noisy, killed, spoiled, train
from heliograph.tests.kit import class_batches
from heliograph_trackers.csv_log import CSVLog, Sheet


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows as a spreadsheet reads them."""
    content = path.read_bytes()
    assert content.endswith(b"\n")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def places(path: Path) -> list[tuple[int, int]]:
    return [(int(row["rollbacks"]), int(row["step"])) for row in read(path)]


def columns(path: Path, *names: str) -> list[tuple[str, ...]]:
    return [tuple(row[name] for name in names) for row in read(path)]


def log(path: Path, *plugins: Any, steps: int = 4, **options: Any) -> h.RunResult:
    """Train from the beginning."""
    return kit.fit(
        h.LogSchedule(h.Every(steps=1)),
        CSVLog(path),
        *plugins,
        train=class_batches(steps),
        **{"epochs": 1, **options},
    )


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    with kit.kept_generators():
        yield


def test_a_row_for_each_step_and_a_column_for_each_metric(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "log.csv"
    result = log(path, h.ValidationSchedule(h.Every(steps=2)), Noisy(), validation=class_batches(1))

    rows = read(path)
    head = ["step", "epoch", "samples", "seconds", "attempt", "rollbacks", "training"]
    assert list(rows[0])[:8] == [*head, "train/loss"]
    assert [[row[name] for name in ("step", "epoch", "samples", "attempt", "rollbacks")] for row in rows] == [
        [str(step), str(step / 4), str(3 * step), "1", "0"] for step in (1, 2, 3, 4)
    ]
    assert float(rows[3]["train/loss"]) == result.metrics["train/loss"]
    assert float(rows[3]["validation/loss"]) == result.metrics["validation/loss"]
    assert [bool(row["validation/loss"]) for row in rows] == [False, True, False, True]
    assert (rows[0]["a"], rows[0]["b"], rows[0]["c, quoted"], rows[0]["metric/epoch"]) == ("nan", "inf", "-inf", "7.0")
    assert math.isnan(float(rows[0]["a"]))
    assert (result.warnings, result.notes, result.plugin_errors) == ((), (), {})
    assert [each.name for each in path.parent.iterdir()] == ["log.csv"]


def test_a_log_and_a_validation_at_the_end_of_an_epoch_are_of_the_same_epoch(tmp_path: Path) -> None:
    plugins = [h.ValidationSchedule(h.Every(epochs=1))]
    log(tmp_path / "log.csv", *plugins, validation=class_batches(1), epochs=2)

    rows = [row for row in read(tmp_path / "log.csv") if row["validation/loss"]]
    assert [(row["step"], row["epoch"], bool(row["train/loss"])) for row in rows] == [
        ("4", "1.0", True),
        ("8", "2.0", True),
    ]


@pytest.mark.parametrize(("kind", "name"), [(CSVLog, "log.csv"), (h.JsonlLog, "log.jsonl")])
def test_a_folder_is_not_a_file(tmp_path: Path, kind: type[Any], name: str) -> None:
    facts = (kind.__name__, f"{tmp_path} is a folder", f"{tmp_path}/{name}.")
    with pytest.raises(ValueError, match="is a folder") as caught:
        kind(tmp_path)
    assert_facts(caught.value, *facts)


def test_a_test_after_a_training_is_in_its_table(tmp_path: Path) -> None:
    trainer = h.Trainer([h.LogSchedule(h.Every(steps=1)), CSVLog(tmp_path / "log.csv")], device="cpu")
    task = kit.linear_classifier()
    trainer.fit(task, class_batches(2), optimizer=kit.sgd(), epochs=1)
    first, second = (trainer.test(task, class_batches(1, size=size)).metrics["test/loss"] for size in (2, 5))

    assert [float(row["test/loss"]) for row in read(tmp_path / "log.csv") if row["test/loss"]] == [first, second]
    assert [row["train/loss"] != "" for row in read(tmp_path / "log.csv")][:2] == [True, True]


def test_a_column_that_comes_late_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the disk is full while the file is written anew."""
    failures = iter([OSError(errno.ENOSPC, "No space left")] * 2)
    real = Path.replace

    def replace(self: Path, target: Any) -> Path:
        if (error := next(failures, None)) is not None:
            raise error
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    result = log(tmp_path / "log.csv", Noisy(since=3))

    rows = read(tmp_path / "log.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["a"] for row in rows] == ["", "", "nan", "nan"]
    assert all(row["train/loss"] for row in rows)
    assert result.warnings == ()
    assert [each.name for each in tmp_path.iterdir()] == ["log.csv"]


def full_disk(monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool]) -> None:
    """Let some writes, counted from 1, write half of what they are given and fail."""
    real, count = Sheet._put, iter(range(1, 10_000))

    def put(self: Sheet, at: int, line: bytes) -> None:
        if line[:1].isdigit() and when(next(count)):
            real(self, at, line[: len(line) // 2])
            raise OSError(errno.ENOSPC, "No space left")
        real(self, at, line)

    monkeypatch.setattr(Sheet, "_put", put)


def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, lambda count: count in (2, 3, 5))
    result = log(tmp_path / "log.csv", h.ValidationSchedule(h.Every(steps=2)), validation=class_batches(1))

    rows = read(tmp_path / "log.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [bool(row["validation/loss"]) for row in rows] == [False, True, False, True]
    assert result.warnings == ()


def test_a_full_disk_costs_rows_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CSVLog, "patience", 0.05)
    full_disk(monkeypatch, lambda count: count > 2)
    result = log(tmp_path / "log.csv")

    assert (result.status, result.progress.steps) == ("completed", 4)
    assert [row["step"] for row in read(tmp_path / "log.csv")] == ["1", "2"]
    (warning,) = result.warnings
    assert_facts(warning, "csv_log lost rows", "(2)")
    assert "No space left" in warning


def test_the_file_of_another_run_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log(path)
    first = path.read_bytes() + b"5,0,1"  # still being written
    path.write_bytes(first)
    result = log(path)
    (tmp_path / "log-3.csv").write_text("date,price\n2026-01-01,3\n")
    log(path)

    assert path.read_bytes() == first
    assert [places(tmp_path / f"log-{number}.csv") for number in (2, 4)] == [[(0, step) for step in (1, 2, 3, 4)]] * 2
    assert (tmp_path / "log-3.csv").read_text() == "date,price\n2026-01-01,3\n"
    assert_each(result.notes, (str(path), "another run", str(tmp_path / "log-2.csv")))


def test_a_killed_run_is_resumed_with_every_step_once(tmp_path: Path) -> None:
    def attempt(folder: Path, die: int | None = None) -> h.RunResult:
        tracker = CSVLog(folder / "log.csv")
        plugins = [
            h.ValidationSchedule(h.Every(steps=2)),
            *([] if die is None else [Die(tracker, die, loads=int(die > 3))]),
        ]
        return train(folder, tracker, *plugins, steps=7, validation=class_batches(1))

    path = tmp_path / "killed" / "log.csv"
    attempt(tmp_path / "whole")
    for step in (3, 5, 6):
        killed(partial(attempt, path.parent, step))
        with path.open("ab") as file:
            file.write(b"6,0,1")  # as a kill in the middle of a line leaves it
    result = attempt(path.parent)

    names = ("step", "epoch", "samples", "train/loss", "validation/loss")
    assert columns(path, *names) == columns(tmp_path / "whole" / "log.csv", *names)
    assert places(path) == [(0, step) for step in range(1, 8)]
    assert len({row["training"] for row in read(path)}) == 1
    assert [row["attempt"] for row in read(path)] == ["1", "1", "2", "2", "3", "3", "3"]
    assert sorted(each.name for each in path.parent.glob("log*")) == ["log.csv"]
    assert not [each for each in result.warnings if "csv_log" in each]


def resumed(folder: Path, content: Callable[[bytes], bytes]) -> tuple[bytes, h.RunResult]:
    """Resume a finished training whose table was changed; return what it became, and the result."""
    path = folder / "log.csv"
    train(folder, CSVLog(path))
    changed = content(path.read_bytes())
    path.write_bytes(changed)
    return changed, train(folder, CSVLog(path), epochs=2)


@pytest.mark.parametrize(
    ("junk", "what"),
    [
        (lambda content: b"\xff\xfe\x00junk", "that are not text"),
        (lambda content: content[:90] + b"\xff\xfe" + content[92:], "that are not text"),
        (lambda content: b"junk", "another run"),
    ],
)
def test_junk_is_left_as_it_is(tmp_path: Path, junk: Callable[[bytes], bytes], what: str) -> None:
    changed, result = resumed(tmp_path, junk)

    path, other = tmp_path / "log.csv", tmp_path / "log-2.csv"
    assert path.read_bytes() == changed
    assert places(other)[-4:] == [(0, step) for step in range(5, 9)]
    assert any(has_facts(line, f"{path} has", what) for line in result.notes)


def test_what_a_resumed_run_does_otherwise_is_in_its_rows(tmp_path: Path) -> None:
    """What the killed run has written after the checkpoint is removed."""
    path = tmp_path / "log.csv"
    tracker = CSVLog(path)
    killed(lambda: train(tmp_path, tracker, Noisy({"rate/of": 1.0}), Die(tracker, 8), steps=9, every=4))
    assert places(path)[-1] == (0, 7)
    train(tmp_path, CSVLog(path), Noisy({"rate/of": 2.0}), steps=9, every=4)

    assert columns(path, "step", "rate/of") == [(str(step), "1.0" if step < 5 else "2.0") for step in range(1, 10)]


def test_a_resumed_run_may_have_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    tracker = CSVLog(path)
    killed(lambda: train(tmp_path, tracker, Noisy({"a": math.nan}), Die(tracker, 3)))
    train(tmp_path, CSVLog(path), h.ValidationSchedule(h.Every(steps=1)), validation=class_batches(1))

    assert [(row["step"], row["a"], bool(row["validation/loss"])) for row in read(path)] == [
        ("1", "nan", False),
        ("2", "nan", False),
        ("3", "", True),
        ("4", "", True),
    ]


def test_a_run_that_goes_back_shows_both_ways(tmp_path: Path) -> None:
    """Also one that is killed after it went back, and goes back again when it is resumed."""

    def attempt(folder: Path, *plugins: Any, tracker: CSVLog | None = None) -> None:
        tracker = tracker or CSVLog(folder / "log.csv")
        train(folder, tracker, h.RollBack(), *plugins, train=spoiled(9, at=6), every=4)

    path, tracker = tmp_path / "killed" / "log.csv", CSVLog(tmp_path / "killed" / "log.csv")
    attempt(tmp_path / "whole")
    killed(lambda: attempt(path.parent, Die(tracker, 7, loads=1), tracker=tracker))
    before = places(path)
    attempt(path.parent)

    whole = tmp_path / "whole" / "log.csv"
    assert places(whole) == [*((0, step) for step in range(1, 7)), *((1, step) for step in range(5, 9))]
    assert before == places(whole)[:-2]
    names = ("step", "rollbacks", "train/loss")
    assert columns(path, *names) == columns(whole, *names)


def test_of_two_ranks_the_main_one_writes(tmp_path: Path, ranks: Callable[[int], Any]) -> None:
    ranks(2).run(log, tmp_path / "log.csv")
    assert places(tmp_path / "log.csv") == [(0, 1), (0, 2)]  # of four batches each rank has two
    assert [each.name for each in tmp_path.iterdir()] == ["log.csv"]
