"""The plugins that most runs want: which they are, what they do in a run, replaced, added to and left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    EMA,
    BatchEnd,
    Checkpoint,
    DDPEngine,
    EarlyStopping,
    Every,
    LogSchedule,
    Plugin,
    ProgressBar,
    RNGCapture,
    Run,
    RunResult,
    Trainer,
    on,
    standard,
    tuning,
)
from heliograph.core.checkpoint.storage import read_manifest
from heliograph.tests import kit
from heliograph.tests.ranks_pool import Pool
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

NAMES = ["rng_capture", "log_schedule", "validation_schedule", "checkpoint", "tensorboard", "progress"]
BATCHES = kit.class_batches(6)


class Looks(Plugin):
    """Look at every batch, and
    do nothing.

    Not shown.
    """

    @on(BatchEnd)
    def look(self, run: Run, event: BatchEnd) -> None: ...


class StopsAt(Plugin):
    """Stop at a step."""

    asks = ("stop",)
    affects_training = False

    def __init__(self, step: int) -> None:
        self.step = step

    @on(BatchEnd)
    def stop(self, run: Run, event: BatchEnd) -> None:
        if run.progress.steps == self.step:
            run.control.stop("a test")


def names(plugins: list[Any]) -> list[str]:
    return [each.name for each in plugins]


def fit(folder: Path, *plugins: Any, task: Any = None, **options: Any) -> RunResult:
    """Train on six batches with the standard plugins, two epochs unless steps are given."""
    of_fit = {key: options.pop(key) for key in ("validation", "epochs", "steps") if key in options}
    length = {} if "steps" in of_fit else {"epochs": 2}
    return kit.fit(
        Trainer(standard(folder, *plugins, **options), device="cpu"), train=BATCHES, task=task, **length | of_fit
    )


# Which they are.


def test_the_list_has_the_plugins_and_early_stopping_where_a_patience_is_given(tmp_path: Path) -> None:
    assert names(standard(tmp_path)) == NAMES
    assert names(standard(tmp_path, patience=3)) == [*NAMES[:3], "early_stopping", *NAMES[3:]]
    assert isinstance(standard(tmp_path), list)
    assert names(list(Trainer().plugins)) == []  # bare


def test_what_it_is_is_printed() -> None:
    plugins = standard("runs/first", Looks(), patience=3, keep_last=None, seed=7, every=Every(steps=500))
    assert str(plugins).splitlines() == [
        "rng_capture          RNGCapture(seed=7)",
        "log_schedule         LogSchedule(steps=50, at_end=True)",
        "validation_schedule  ValidationSchedule(when=Every(steps=500), required=False)",
        "early_stopping       EarlyStopping(monitor='validation/loss', patience=3, mode=None)",
        "checkpoint           Checkpoint(folder='runs/first', every=Every(steps=500), keep_last=None, keep_best=1, "
        "monitor='validation/loss', mode=None, resume=None)",
        "tensorboard          TensorBoard(folder='runs/first')",
        "progress             ProgressBar()",
        "looks                Looks()",
    ]


def test_a_list_that_was_changed_prints_what_it_holds(tmp_path: Path) -> None:
    plugins = standard(tmp_path, without=NAMES[:-1])
    plugins += [Looks(), EMA()]
    plugins[0] = ProgressBar(interval=3)
    lines = [line.split(maxsplit=1) for line in str(plugins).splitlines()]
    assert lines == [["progress", "ProgressBar(interval=3)"], ["looks", "Looks()"], ["ema", "EMA(decay=0.999)"]]
    assert Trainer(plugins, device="cpu").plugins.names() == ["progress", "looks", "ema"]


def test_the_arguments_reach_the_plugins(tmp_path: Path) -> None:
    plugins = {
        each.name: each
        for each in standard(
            tmp_path,
            every=Every(steps=4),
            log_every=7,
            patience=5,
            monitor="validation/accuracy",
            mode="max",
            keep_last=2,
            keep_best=3,
            seed=11,
            resume="auto",
        )
    }
    checkpoint = plugins["checkpoint"]
    assert str(plugins["log_schedule"].filter) == "every 7 steps"
    assert str(plugins["validation_schedule"].filter) == str(checkpoint.every) == "every 4 steps"
    assert (plugins["early_stopping"].patience, plugins["early_stopping"].monitor.mode) == (5, "max")
    assert (checkpoint.folder, checkpoint.resume.path, checkpoint.monitor.name) == (
        tmp_path,
        "auto",
        "validation/accuracy",
    )
    assert checkpoint.forecast({})["kept"] == 5
    assert plugins["rng_capture"].seed == 11
    assert plugins["tensorboard"].folder == tmp_path


# Replaced, added, left out.


def test_one_of_the_same_name_replaces_the_standard_one_in_its_place(tmp_path: Path) -> None:
    own, bar = LogSchedule(steps=3), ProgressBar(plain=True)
    plugins = standard(tmp_path, bar, own, Looks())
    assert names(plugins) == [*NAMES, "looks"]
    assert plugins[1] is own
    assert plugins[5] is bar


def test_an_early_stopping_of_ones_own_needs_no_patience(tmp_path: Path) -> None:
    own = EarlyStopping(patience=4, min_delta=0.1)
    assert standard(tmp_path, own)[-1] is own


def test_left_out_by_name(tmp_path: Path) -> None:
    assert names(standard(tmp_path, without=("tensorboard", "progress"))) == NAMES[:4]
    result = fit(tmp_path / "x", without=("tensorboard", "checkpoint", "early_stopping"))
    assert result.warnings == ()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("plugins", "options", "error", "words"),
    [
        (
            [],
            {"without": ("tensorbord",)},
            ValueError,
            r"'tensorbord'.*mean 'tensorboard'\? Known",
        ),
        ([], {"without": "tensorboard"}, TypeError, r"names, \('tensorboard',\), got 'tensorboard'"),
        ([RNGCapture()], {"without": ("rng_capture",)}, ValueError, "'rng_capture' is both.*without="),
        ([Looks(), Looks()], {}, ValueError, r"named 'looks'.*Looks\(\.\.\.\)\.named\('looks_2'\)"),
        ([[Looks()]], {}, TypeError, "^list is not.*without brackets"),
        ([standard(".")], {}, TypeError, "^PluginList is not.*collection"),
        ([Looks], {}, TypeError, r"Looks is a class.*Looks\(\.\.\.\)"),
        ([RNGCapture()], {"seed": 3}, ValueError, "seed=3.*no effect.*rng_capture"),
        ([Checkpoint(".")], {"resume": "auto"}, ValueError, "resume='auto'.*no effect"),
        ([], {"patience": 3, "without": ("early_stopping",)}, ValueError, "patience=3.*no effect"),
        (
            [],
            {"monitor": "validation/error", "keep_best": 0},
            ValueError,
            "replace early_stopping and checkpoint",
        ),
        ([], {"keep_best": None}, ValueError, "keep_best.*least 0; got None"),
        ([], {"log_every": 0}, ValueError, "^log_every.*least 1; got 0"),
        ([], {"every": 500}, TypeError, r"^every takes.*every=Every\(steps=500\); got 500"),
        ([], {"resume": True}, TypeError, "^resume is.*a Resume; got True"),
        ([], {"monitor": "validation/accuracy"}, ValueError, "'validation/accuracy'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    plugins: list[Any], options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        standard(tmp_path, *plugins, **options)


def test_a_folder_that_is_not_a_path_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^standard\(folder\) takes the path"):
        standard(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"path of a folder"):
        standard("")


# In a run.


def test_a_run_validates_saves_logs_and_draws(tmp_path: Path) -> None:
    result = fit(tmp_path, validation=BATCHES[:2], epochs=3, log_every=4)
    assert result.warnings == ()
    assert result.status == "completed"
    assert result.progress.validations == 3
    assert [row["step"] for row in result.log_history if "train/loss" in row] == [4, 8, 12, 16, 18]
    assert [row["step"] for row in result.log_history if "validation/loss" in row] == [6, 12, 18]
    assert result.last_checkpoint == result.best_checkpoint == tmp_path / "run_epoch_3_iter_18.pth"
    drawn = EventAccumulator(str(tmp_path)).Reload()
    assert [each.step for each in drawn.Scalars("validation/loss")] == [6, 12, 18]


def test_a_run_by_steps(tmp_path: Path) -> None:
    result = fit(tmp_path, validation=BATCHES[:2], steps=10, every=Every(steps=4), keep_last=None)
    assert result.warnings == ()
    assert [row["step"] for row in result.log_history if "validation/loss" in row] == [4, 8, 10]
    assert kit.checkpoint_names(tmp_path) == [
        f"run_epoch_{epoch}_iter_{step}.pth" for epoch, step in ((0, 4), (1, 10), (1, 8))
    ]


def test_a_run_without_validation_data_keeps_the_last_and_says_so(tmp_path: Path) -> None:
    result = fit(tmp_path)
    assert result.warnings == ()
    assert any("best by 'validation/loss':" in line for line in result.notes)
    assert any("validation: fit" in line for line in result.notes)
    assert fit(tmp_path / "last", keep_best=0).warnings == ()
    assert result.progress.validations == 0
    assert result.best_checkpoint is None
    assert kit.checkpoint_names(tmp_path) == ["run_epoch_2_iter_12.pth"]


def test_its_plan_names_no_best_and_no_validation(tmp_path: Path) -> None:
    trainer = Trainer(standard(tmp_path), device="cpu")
    plan = trainer.plan(kit.linear_classifier(), BATCHES, optimizer=kit.sgd(), epochs=1)
    assert "keeps the last 1\n" in plan
    assert "validation_schedule:" not in plan


def test_patience_without_validation_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="act without validation data:"):
        fit(tmp_path, patience=2)


def test_a_metric_that_no_task_measures_is_still_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="metric 'validation/acuracy'"):
        fit(tmp_path, validation=BATCHES, monitor="validation/acuracy", mode="max")


def test_of_several_validation_sets_one_is_named_as_the_monitored_one(tmp_path: Path) -> None:
    sets = {"day": BATCHES, "night": BATCHES}
    words = "mean 'validation/day/loss'.*validation/day/loss, validation/night/loss"
    for options in ({}, {"patience": 2}):
        with pytest.raises(ValueError, match=words):
            fit(tmp_path, validation=sets, **options)
    assert kit.checkpoint_names(tmp_path) == []
    result = fit(tmp_path, validation=sets, monitor="validation/night/loss", patience=2)
    assert result.best_checkpoint is not None
    judged_by = read_manifest(result.best_checkpoint).judged_by
    assert judged_by is not None
    assert judged_by[:2] == ("validation/night/loss", "min")


def test_patience_stops_a_run_that_no_longer_improves(tmp_path: Path) -> None:
    result = kit.fit(
        Trainer(standard(tmp_path, patience=2), device="cpu"),
        train=BATCHES,
        validation=BATCHES,
        optimizer=kit.sgd(0.0),
        epochs=9,
    )
    assert (result.status, result.progress.epoch) == ("stopped", 3)
    assert result.best_checkpoint == tmp_path / "run_epoch_1_iter_6.pth"


def weights(task: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in task.model.parameters()]


@pytest.mark.parametrize("validation", [None, BATCHES[:2]], ids=["without validation", "with validation"])
def test_a_run_that_was_stopped_continues_with_the_same_bits(tmp_path: Path, validation: Any) -> None:
    whole, rest = kit.linear_classifier(), kit.linear_classifier()
    options: dict[str, Any] = {"validation": validation, "epochs": 3, "every": Every(steps=5), "seed": 1}
    fit(tmp_path / "whole", task=whole, **options)
    fit(tmp_path / "cut", StopsAt(8), task=kit.linear_classifier(), **options)
    result = fit(tmp_path / "cut", StopsAt(99), task=rest, resume="auto", **options)
    assert result.warnings == ()
    assert result.resume is not None
    assert (result.resume.reasons, result.resume.step) == ((), 8)
    assert all(map(torch.equal, weights(whole), weights(rest)))


def on_a_rank(folder: Path) -> tuple[tuple[str, ...], int, str]:
    result = kit.fit(
        Trainer(standard(folder, patience=3), engine=DDPEngine()), train=BATCHES, validation=BATCHES[:3], epochs=2
    )
    assert result.best_checkpoint is not None
    return result.warnings, result.progress.steps, result.best_checkpoint.name


def test_on_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2).run(on_a_rank, tmp_path)
    assert first == second == ((), 6, "run_epoch_2_iter_6.pth")
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


def test_a_rehearsal_leaves_nothing(tmp_path: Path) -> None:
    trainer = Trainer(standard(tmp_path / "x"), device="cpu")
    for validation in (None, BATCHES[:2]):
        report = tuning.rehearse(
            trainer, kit.linear_classifier(), BATCHES, optimizer=kit.sgd(), epochs=50, validation=validation
        )
        assert report.problems == ()
        assert [path.name for path in (tmp_path / "x").iterdir()] == [".verified.jsonl"]
