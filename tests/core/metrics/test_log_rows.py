"""What a run has logged, as rows of its result: without a plugin, continued by a resume, bounded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    DDPEngine,
    EpochStart,
    Every,
    LogSchedule,
    RNGCapture,
    RollBack,
    Run,
    RunResult,
    SaveSchedule,
    Supervised,
    Task,
    Trainer,
    ValidationSchedule,
)
from heliograph.core.metrics import log_rows
from heliograph.core.metrics.log_rows import LogRows
from heliograph.tests import kit
from heliograph.tests.kit import adam, class_batches, linear_classifier
from heliograph.tests.ranks_pool import Pool
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

BY_THE_CLOCK = {"validation/seconds", "validation/samples_per_second"}


def train(*plugins: Any, epochs: int = 2, task: Any = None, **options: Any) -> RunResult:
    schedules = [LogSchedule(Every(steps=2)), ValidationSchedule(Every(epochs=1))]
    options = {"train": class_batches(5), "validation": {"a": class_batches(1), "b": class_batches(2)}, **options}
    return kit.fit(*schedules, *plugins, task=task, epochs=epochs, optimizer=adam(), **options)


def without_clock(result: RunResult) -> list[dict[str, float]]:
    return [{name: each for name, each in row.items() if name not in BY_THE_CLOCK} for row in result.log_history]


def test_a_row_for_each_step_at_which_something_was_known() -> None:
    result = train()
    rows = result.log_history

    assert [(row["step"], row["epoch"]) for row in rows] == [
        (2, 0.4), (4, 0.8), (5, 1.0), (6, 1.2), (8, 1.6), (10, 2.0)
    ]  # fmt: skip
    measured = {"validation/a/loss", "validation/b/loss", *BY_THE_CLOCK}
    logged = {"step", "epoch", "train/loss"}
    validated = {"step", "epoch", *measured}
    assert [set(row) for row in rows] == [logged, logged, validated, logged, logged, logged | measured]
    assert {name: rows[-1][name] for name in result.metrics} == result.metrics
    assert type(rows[0]["step"]) is int
    assert rows[-1]["validation/samples_per_second"] == pytest.approx(9 / rows[-1]["validation/seconds"])
    assert BY_THE_CLOCK.isdisjoint(result.metrics)


def test_an_evaluation_has_a_row_with_its_pace() -> None:
    result = Trainer(device="cpu").test(linear_classifier(), class_batches(3))
    (row,) = result.log_history

    assert row.keys() == {"step", "epoch", "test/loss", "test/seconds", "test/samples_per_second"}
    assert row["test/samples_per_second"] == pytest.approx(9 / row["test/seconds"])
    assert result.means == {}


def test_nothing_is_kept_where_nothing_is_logged(tmp_path: Path) -> None:
    result = kit.fit(SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path))
    assert result.last_checkpoint is not None

    assert (result.log_history, result.means) == ([], {})
    assert "log_history" not in torch.load(result.last_checkpoint)


def test_a_users_own_metric_goes_before_the_pace() -> None:
    class Own(Supervised):
        def validation_step(self, run: Run, batch: Any) -> dict[str, float]:
            return {"seconds": 5.0}

    task = Own(nn.Linear(4, 2), nn.functional.cross_entropy)
    assert Trainer(device="cpu").validate(task, class_batches(1)).log_history[0]["validation/seconds"] == 5.0


def test_the_mean_is_over_every_sample_also_those_after_the_last_log() -> None:
    class Scripted(Task):
        def __init__(self) -> None:
            self.model = nn.Linear(4, 2)
            self.losses = iter(range(100))

        def training_step(self, run: Run, batch: Any) -> torch.Tensor:
            run.track("twice", 2.0, weight=len(batch[0]))
            nothing: torch.Tensor = 0 * self.model(batch[0]).sum()
            return nothing + next(self.losses)

    train = [*class_batches(4), class_batches(1, size=1)[0]]
    result = kit.fit(LogSchedule(Every(steps=3)), task=Scripted(), train=train)

    assert [row["train/loss"] for row in result.log_history] == [1.0]
    assert result.means == {"train/loss": (3 * (0 + 1 + 2 + 3) + 4) / 13, "train/twice": 2.0}


def saving(folder: Path, **options: Any) -> list[Any]:
    return [RNGCapture(), SaveSchedule(Every(steps=3)), Checkpoint(folder, keep_last=None, **options)]


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_continues_rows_and_means(tmp_path: Path, background: bool) -> None:
    whole = train(*saving(tmp_path / "whole", background=background), epochs=3)
    path = tmp_path / "whole" / "run_epoch_1_iter_6.pth"
    resumed = train(*saving(tmp_path / "other", resume=path), epochs=3)

    assert without_clock(resumed) == without_clock(whole)
    assert resumed.means == whole.means
    assert [row.keys() >= BY_THE_CLOCK for row in whole.log_history if "validation/a/loss" in row] == [True] * 3
    assert [row.keys() >= BY_THE_CLOCK for row in resumed.log_history if "validation/a/loss" in row] == [
        False, True, True
    ]  # fmt: skip


def test_rows_of_what_was_discarded_are_gone(tmp_path: Path) -> None:
    """A run that goes back has the rows of the checkpoint, and those after it once."""
    spoilt: list[int] = []

    def spoil(run: Run, event: BatchEnd) -> None:
        if run.progress.steps == 7 and not spoilt:
            spoilt.append(7)
            run.task.model.weight.data.fill_(float("nan"))

    trainer = Trainer([LogSchedule(Every(steps=1)), RollBack(), *saving(tmp_path)], device="cpu")
    trainer.bus.on(BatchEnd, spoil)
    result = kit.fit(trainer, train=class_batches(5), epochs=2, optimizer=adam())

    assert [row["step"] for row in result.log_history] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert "rolled back" in "".join(result.notes)
    assert math.isfinite(result.means["train/loss"])


def test_a_checkpoint_without_rows_is_resumed_without(tmp_path: Path) -> None:
    first = kit.fit(*saving(tmp_path), train=class_batches(3), optimizer=adam())
    resumed = train(*saving(tmp_path, resume=first.last_checkpoint), train=class_batches(3), epochs=2)

    assert [row["step"] for row in resumed.log_history] == [4, 6]


def test_the_rows_are_bounded_and_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(log_rows, "LONGEST", 3)
    result = kit.fit(LogSchedule(Every(steps=1)), *saving(tmp_path), train=class_batches(5), epochs=1)
    resumed = kit.fit(LogSchedule(Every(steps=1)), *saving(tmp_path, resume="auto"), train=class_batches(5), epochs=2)

    assert [row["step"] for row in result.log_history] == [3, 4, 5]
    assert "3 rows; 2 older" in result.notes[-1]
    assert [row["step"] for row in resumed.log_history] == [8, 9, 10]
    assert "7 older rows" in resumed.notes[-1]


def test_a_full_table_takes_little_room_in_a_checkpoint() -> None:
    rows = LogRows()
    for step in range(log_rows.LONGEST):
        rows.add(step, step / 100, {"train/loss": 1 / (step + 1), "train/learning_rate": 0.1})
    state = rows.state_dict()

    assert len(state["values"]) < 10_000 * (4 * 9 + 6)
    assert LogRows.of_state(state).rows == rows.rows


def test_what_is_missing_is_not_what_is_no_number() -> None:
    rows = LogRows()
    rows.add(1, 0.5, {"a": math.nan})
    rows.add(2, 1.0, {"b": math.inf})
    first, second = LogRows.of_state(rows.state_dict()).rows

    assert (set(first), math.isnan(first["a"])) == ({"step", "epoch", "a"}, True)
    assert second == {"step": 2, "epoch": 1.0, "b": math.inf}


def test_a_loop_of_ones_own_has_rows_too() -> None:
    run = kit.make_run(Trainer([LogSchedule(Every(steps=1))], device="cpu"))
    kit.go_through(run)

    assert [row["step"] for row in run.result.log_history] == [1, 2, 3]
    assert run.result.means["train/loss"] == pytest.approx(
        sum(row["train/loss"] for row in run.result.log_history) / 3, rel=1e-12
    )


def test_a_failed_or_interrupted_run_has_what_it_logged() -> None:
    def interrupt(run: Run, event: BatchEnd) -> None:
        if run.progress.steps == 3:
            raise KeyboardInterrupt

    trainer = Trainer([LogSchedule(Every(steps=2))], device="cpu")
    trainer.bus.on(BatchEnd, interrupt)
    result = kit.fit(trainer, train=class_batches(5), on_interrupt="return")

    assert result.status == "interrupted"
    assert [row["step"] for row in result.log_history] == [2]
    assert result.means == {"train/loss": result.log_history[0]["train/loss"]}


def log_on_ranks(folder: Path, resume: str | None) -> tuple[list[dict[str, float]], dict[str, float]]:
    schedules = [LogSchedule(Every(steps=2)), ValidationSchedule(Every(epochs=1))]
    trainer = Trainer([*schedules, *saving(folder, resume=resume)], engine=DDPEngine(device="cpu"))
    options = {"optimizer": adam(), "epochs": 1 if resume is None else 2}
    result = trainer.fit(linear_classifier(), class_batches(6), validation=class_batches(4), **options)  # type: ignore[arg-type]
    return result.log_history, result.means


def test_every_rank_has_the_same_rows(tmp_path: Path, ranks: Pool) -> None:
    for resume, steps in ((None, [2, 3]), ("auto", [2, 3, 4, 6])):
        (rows, means), (of_other, means_of_other) = ranks(2).run(log_on_ranks, tmp_path, resume)
        ours, theirs = (
            [{**row, **dict.fromkeys(BY_THE_CLOCK & row.keys(), 0.0)} for row in each] for each in (rows, of_other)
        )

        assert [row["step"] for row in rows] == steps
        assert ours == theirs
        assert means == means_of_other
        assert rows[-1]["validation/samples_per_second"] == pytest.approx(12 / rows[-1]["validation/seconds"])


def test_a_handler_of_an_epoch_sees_its_rows_in_the_state() -> None:
    seen: list[Any] = []
    trainer = Trainer([LogSchedule(Every(steps=2))], device="cpu")
    trainer.bus.on(EpochStart, lambda run, event: seen.append(run.state_dict().get("log_history")))
    kit.fit(trainer, epochs=2)

    assert seen[0] is None
    assert [row["step"] for row in LogRows.of_state(seen[1]).rows] == [2]


def test_the_result_as_json(tmp_path: Path) -> None:
    task = linear_classifier(metrics={"nothing": lambda outputs, targets: math.nan})
    result = train(*saving(tmp_path), task=task)
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))

    assert content["status"] == "completed"
    assert content["metrics"]["validation/a/nothing"] == "nan"
    loss = result.log_history[1]["train/loss"]
    assert content["log_history"][1] == {"step": 4, "epoch": 0.8, "train/loss": loss, "train/nothing": "nan"}
    assert content["last_checkpoint"] == str(result.last_checkpoint)
    assert content["progress"]["steps"] == 10
    assert content["means"]["train/loss"] == result.means["train/loss"]
    assert content["resume"]["position"] == "seeked"
    assert content["resume"]["untracked"] == {}
    assert content["history"][0]["by"] == "log_schedule"


class TestPlot:
    """`result.plot`."""

    def test_a_panel_for_each_name(self, tmp_path: Path) -> None:
        result = train(task=linear_classifier(metrics={"accuracy": lambda outputs, targets: 0.5}))
        figure = result.plot(tmp_path / "curves.png")
        loss, accuracy = figure.axes

        assert figure._repr_png_()[:4] == b"\x89PNG"  # a notebook draws it
        assert (loss.get_title(), accuracy.get_title()) == ("loss", "accuracy")
        assert (loss.get_xlabel(), loss.get_ylabel()) == ("optimizer steps", "loss")
        lines = {line.get_label(): line for line in loss.lines}
        assert lines.keys() == {"train/loss", "validation/a/loss", "validation/b/loss"}
        assert lines["train/loss"].get_xdata().tolist() == [2, 4, 6, 8, 10]
        assert lines["train/loss"].get_ydata().tolist() == [
            row["train/loss"] for row in result.log_history if "train/loss" in row
        ]
        assert lines["validation/a/loss"].get_xdata().tolist() == [5, 10]
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    def test_names_and_values_that_are_no_numbers(self) -> None:
        result = train(task=linear_classifier(metrics={"nothing": lambda outputs, targets: math.nan}))
        seconds, nothing = result.plot(names=["seconds", "nothing"]).axes

        assert [line.get_label() for line in seconds.lines] == ["validation/seconds"]
        assert len(nothing.lines[0].get_xdata()) == 0
        with pytest.raises(ValueError, match=r"'los' was logged. Did"):
            result.plot(names=["los"])
        with pytest.raises(TypeError, match=r"^plot\(path\) takes the path"):
            result.plot(5)  # type: ignore[arg-type]

    def test_nothing_to_draw_and_nothing_to_draw_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match=r"LogSchedule\(steps=50\)"):
            kit.fit().plot()
        monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
        monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"result.plot needs matplotlib.*pip install"):
            train().plot()


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b"]), st.floats(-9, 9), st.booleans())))
def test_the_rows_are_those_of_a_plain_list_whenever_they_are_read(
    moments: list[tuple[bool, str, float, bool]],
) -> None:
    expected: list[dict[str, float]] = []
    rows, step = LogRows(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_rows, "LONGEST", 7)
        for is_next, name, value, is_read in moments:
            step += is_next
            rows.add(step, step / 2, {name: value})
            if not expected or expected[-1]["step"] != step:
                expected.append({"step": step, "epoch": step / 2})
            expected[-1][name] = value
            if is_read:
                rows = LogRows.of_state(rows.state_dict())

        assert list(rows.rows) == expected[-7:]
        assert rows.dropped == len(expected[:-7])
