"""`LateResults`: what a training reads of the evaluations of its checkpoints, and when."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.recorder.tests.late import late_program
from heliograph.packages.recorder.tests.late.late_program import LateTrace, evaluate_all, score, train
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.kit import checkpoint_names, class_batches, damage, linear_classifier, sgd
from heliograph.tests.ranks_pool import Pool, warm_context
from heliograph.tuning import rehearse
from heliograph_recorder import LateResults
from heliograph_recorder.late.command import Evaluator
from heliograph_recorder.late.files import read_evaluation


def status_of(function: Callable[..., object], *args: object) -> int | None:
    """Call a function in a new process; return the exit status."""
    process = warm_context().Process(target=function, args=args)
    process.start()
    process.join()
    return process.exitcode


def weights_in(path: Path | None) -> torch.Tensor:
    assert path is not None
    weight: torch.Tensor = torch.load(path, weights_only=True)["modules"]["model"]["weight"]
    return weight


def test_results_are_read_before_the_next_save_and_rank_their_checkpoints(tmp_path: Path) -> None:
    log = h.LogSchedule(h.Every(steps=1))
    result, read = train(tmp_path, log, keep_last=3, keep_best=1, monitor="late/accuracy", mode="max", at=(3, 6, 7, 8))
    assert read == [
        [3, 1, 0.5], [3, 2, 0.8], [6, 3, 0.7], [6, 4, 0.6], [6, 5, 0.4], [7, 6, 0.3], [8, 7, 0.2],
    ]  # fmt: skip
    assert result.best_checkpoint == tmp_path / "run_epoch_0_iter_2.pth"
    assert result.metrics["late/accuracy"] == 0.2
    assert result.metrics["late/steps"] == 7
    kept = [f"run_epoch_{name}" for name in ("0_iter_2", "1_iter_6", "1_iter_7", "2_iter_8")]
    assert checkpoint_names(tmp_path) == [f"{name}.pth" for name in kept]
    assert sorted(path.name for path in tmp_path.glob("*.late.json")) == [f"{name}.late.json" for name in kept[:3]]
    assert result.notes[-1] == "late results: 7 read, none yet for 1 checkpoint: run_epoch_2_iter_8.pth"
    assert h.load_weights(linear_classifier(), tmp_path, which="best").step == 2


def test_a_result_of_a_removed_checkpoint_is_read_and_its_file_removed(tmp_path: Path) -> None:
    class Remove(h.Plugin):
        @h.on(h.StepEnd)
        def remove(self, run: h.Run, event: h.StepEnd) -> None:
            (tmp_path / "run_epoch_0_iter_1.pth").unlink(missing_ok=True)

    result, read = train(tmp_path, Remove(), steps=3, at=(2,), keep_best=1, monitor="late/accuracy", mode="max")
    assert read == [[2, 1, 0.5]]
    assert result.best_checkpoint is None
    assert not [*tmp_path.glob("*.late.json")]


def test_early_stopping_and_load_best_use_late_metrics(tmp_path: Path) -> None:
    stopping = h.EarlyStopping("late/accuracy", mode="max", patience=3)
    ranking: dict[str, Any] = {"keep_best": 1, "monitor": "late/accuracy", "mode": "max"}
    result, read = train(tmp_path, stopping, h.LoadBest(), **ranking)
    assert (result.status, result.stopped_by, result.progress.steps) == ("stopped", "early_stopping", 6)
    assert read[-1] == [6, 5, 0.4]
    assert_facts(result.notes, "weights of the best checkpoint", "run_epoch_0_iter_2.pth", "late/accuracy 0.8")


def test_the_bits_of_a_training_are_the_same_without_an_evaluation(tmp_path: Path) -> None:
    plain, read = train(tmp_path / "plain", at=())
    evaluated, _ = train(tmp_path / "evaluated")
    assert read == []
    assert torch.equal(weights_in(plain.last_checkpoint), weights_in(evaluated.last_checkpoint))
    assert_facts(plain.warnings[0], "LateResults read no result", "heliograph evaluate --follow")


def test_a_resume_from_an_older_checkpoint_reads_the_same_results_at_the_same_steps(tmp_path: Path) -> None:
    _, read = train(tmp_path, at=(2, 3, 6), steps=7)
    assert read == [[2, 1, 0.5], [3, 2, 0.8], [6, 3, 0.7], [6, 4, 0.6], [6, 5, 0.4]]
    evaluate_all(tmp_path)  # more results than the first attempt read
    for steps in range(3, 8):
        damage(tmp_path / f"run_epoch_{(steps - 1) // 4}_iter_{steps}.pth")
    second, again = train(tmp_path, at=(4, 5, 8), steps=8)
    assert second.resume is not None
    assert second.resume.step == 2
    assert again[:4] == read[1:]
    assert again[4:] == [[8, 6, 0.3], [8, 7, 0.2]]


def test_a_killed_training_repeats_its_decision(tmp_path: Path) -> None:
    whole, folder, path = tmp_path / "whole", tmp_path / "killed", tmp_path / "trace"
    done, read = train(whole, h.EarlyStopping("late/accuracy", mode="max", patience=3), at=(2, 3, 5, 6))
    assert (done.status, done.progress.steps, read[-1][0]) == ("stopped", 6, 6)
    assert status_of(late_program.train_until, 5, folder, path) == -signal.SIGKILL
    assert not (folder / "run_epoch_1_iter_5.pth").exists()
    evaluate_all(folder)  # another result is there when it resumes
    assert status_of(late_program.train_until, 0, folder, path) == 0
    assert path.read_text() == str([row for row in read if row[0] > 4])
    assert checkpoint_names(folder) == checkpoint_names(whole)
    newest = "run_epoch_1_iter_6.pth"
    assert torch.equal(weights_in(folder / newest), weights_in(whole / newest))


def test_results_after_a_roll_back_are_read_anew(tmp_path: Path) -> None:
    class Back(h.Plugin):
        asks = ("roll_back",)

        def __init__(self) -> None:
            self._is_done = False

        @h.on(h.StepEnd)
        def go(self, run: h.Run, event: h.StepEnd) -> None:
            if run.progress.steps == 5 and not self._is_done:
                self._is_done = True
                path = tmp_path / "run_epoch_0_iter_2.pth"
                run.roll_back(torch.load(path, weights_only=True), path)

    _, read = train(tmp_path, Back(), at=(2, 3, 4, 6), steps=6)
    assert read == [[2, 1, 0.5], [3, 2, 0.8], [4, 3, 0.7], [3, 2, 0.8], [4, 3, 0.7], [6, 4, 0.6], [6, 5, 0.4]]


def test_the_end_waits_for_the_results_of_all_checkpoints(tmp_path: Path) -> None:
    class AtEnd(h.Plugin):
        @h.on(h.TrainEnd, lane=h.Lane.TRANSFORM, before="late_results")
        def evaluate(self, run: h.Run, event: h.TrainEnd) -> None:
            evaluate_all(tmp_path)

    ranking: dict[str, Any] = {"keep_best": 1, "monitor": "late/accuracy", "mode": "max"}
    plugins = [LateResults(tmp_path, wait=60), AtEnd(), h.LoadBest()]
    result, read = train(tmp_path, *plugins, at=(), steps=3, background=True, **ranking)
    assert read == [[3, 1, 0.5], [3, 2, 0.8], [3, 3, 0.7]]
    assert_facts(result.notes, "weights of the best checkpoint", "run_epoch_0_iter_2.pth")
    other, ranking = tmp_path / "other", {**ranking, "steps": 2, "at": ()}
    result, read = train(other, LateResults(other, wait=0.01), **ranking)
    assert (read, result.best_checkpoint) == ([], None)
    evaluate_all(other)
    result, read = train(other, **ranking)  # the program again, after the evaluation
    assert (read, result.best_checkpoint) == ([[2, 1, 0.5], [2, 2, 0.8]], other / "run_epoch_0_iter_2.pth")


def stop_on_ranks(folder: Path) -> tuple[str, int, list[list[float]], Any]:
    ranking: dict[str, Any] = {"keep_best": 1, "monitor": "late/accuracy", "mode": "max"}
    trace = LateTrace()
    plugins = [h.EarlyStopping("late/accuracy", mode="max", patience=2), trace, LateResults(folder, wait=0.01)]
    saving = h.Checkpoint(folder, every=h.Every(steps=1), keep_last=2, **ranking)
    evaluating = late_program.EvaluateAt(folder, (3, 4, 5))
    trainer = h.Trainer([*plugins, evaluating, saving], engine=h.DDPEngine("gloo", device="cpu"))
    result = trainer.fit(linear_classifier(), class_batches(8), optimizer=sgd(), steps=8)
    return result.status, result.progress.steps, trace.read, result.best_checkpoint


def test_all_ranks_read_and_stop_at_the_same_step(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2).run(stop_on_ranks, tmp_path)
    assert first == second
    status, steps, read, best = first
    assert (status, best.name) == ("stopped", "run_epoch_0_iter_2.pth")
    assert read[-1][0] == steps


def test_only_current_results_of_this_training_are_read(tmp_path: Path) -> None:
    train(tmp_path, steps=2, at=(2,))
    path = tmp_path / "run_epoch_0_iter_1.late.json"
    before = path.read_text()
    _, read = train(tmp_path, steps=2, resume=None)  # another training, whose files are run-2_...
    assert read == [[2, 1, 0.5]]
    sha256 = read_evaluation(path).sha256  # type: ignore[union-attr]  # it is there
    assert path.read_text() == before
    path.write_text(before.replace(sha256, "0" * 64).replace('"steps": 1', '"steps": 2'))
    (tmp_path / "run_epoch_0_iter_2.late.json").write_text('{"schema": "heliograph.late/1"}')
    result, read = train(tmp_path, steps=3, at=(), resume=tmp_path / "run_epoch_0_iter_2.pth")
    assert read == []
    assert_facts(result.warnings[0], "run_epoch_0_iter_2.late.json", "is not a late result", "Remove it")


def test_a_failed_evaluation_and_a_missing_metric_stop_nothing(tmp_path: Path) -> None:
    class Fail(h.Plugin):
        def __init__(self) -> None:
            self._evaluator = Evaluator(tmp_path, "fail", lambda path: {} if "_1.pth" in path.name else score(path))

        @h.on(h.CheckpointSaved)
        def fail(self, run: h.Run, event: h.CheckpointSaved) -> None:
            list(self._evaluator.look())

    stopping = h.EarlyStopping("late/acuracy", mode="max")
    result, read = train(tmp_path, Fail(), stopping, steps=4, at=())
    assert read == [[3, 2, 0.8], [4, 3, 0.7], [4, 4, 0.6]]
    warnings = " ".join(result.warnings)
    assert_facts(warnings, "EarlyStopping never acted", "late/acuracy", "none of 3 measurements")
    assert_facts(warnings, "3 read, 1 evaluation failed", "run_epoch_0_iter_1.pth: TypeError", "it returned {}")
    assert "read no result" not in warnings
    assert "none yet" not in " ".join(result.notes)


def test_another_folder_than_that_of_the_checkpoints_is_reported(tmp_path: Path) -> None:
    result, _ = train(tmp_path / "run", LateResults(tmp_path / "other"), steps=1)
    assert_facts(result.warnings[0], str(tmp_path / "other"), str(tmp_path / "run"))
    result, _ = train(tmp_path / "same", LateResults(tmp_path / "run" / ".." / "same"), steps=2, at=(2,))
    assert not result.warnings
    saving = h.Checkpoint(tmp_path / "a", every=h.Every(steps=1))
    trainer = h.Trainer([h.RNGCapture(), saving, LateResults(tmp_path / "a")], device="cpu")
    rehearsal = rehearse(trainer, linear_classifier(), class_batches(4), optimizer=sgd(), steps=2)
    assert "LateResults" not in " ".join(rehearsal.warnings)


def test_a_damaged_journal_and_wrong_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.late.journal").write_text("{")
    with pytest.raises(ValueError, match=r"run\.late\.journal is damaged.*Remove it"):
        train(tmp_path)
    with pytest.raises(ValueError, match=r"wait.*-1"):
        LateResults(tmp_path, wait=-1)
    for url in ("s3://bucket/run", Path("s3://bucket/run")):
        with pytest.raises(ValueError, match=r"runs/s3/bucket/run"):
            LateResults(url)
    blocked = LateResults(tmp_path / "blocked")
    (tmp_path / "blocked" / "run.late.journal").mkdir(parents=True)
    with pytest.raises(OSError, match=r"run\.late\.journal"):
        train(tmp_path / "other", blocked)
    with pytest.raises(ValueError, match="late/accuracy"):
        h.LearningRate("plateau", monitor="late/accuracy")


def test_a_late_metric_without_late_results_is_reported(tmp_path: Path) -> None:
    plugins = [h.EarlyStopping("late/accuracy", mode="max"), h.Checkpoint(tmp_path, every=h.Every(steps=1))]
    result = h.Trainer(plugins, device="cpu").fit(linear_classifier(), class_batches(2), optimizer=sgd(), epochs=1)
    assert_facts(result.warnings[0], "EarlyStopping never acted", "late/accuracy", "add LateResults(folder)")
