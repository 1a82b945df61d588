"""Checkpoints that hold only weights: small, kept and loaded as others, and never resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    EMA,
    BatchEnd,
    Checkpoint,
    CheckpointLabel,
    CheckpointSaved,
    DDPEngine,
    Every,
    FSDPEngine,
    LoadBest,
    RNGCapture,
    RollBack,
    Run,
    RunResult,
    SaveSchedule,
    Trainer,
    ValidationSchedule,
    WeightsCheckpoint,
    load_weights,
)
from heliograph.__main__ import main
from heliograph.builtin_callbacks.checkpoint.background_writer import BackgroundWriter
from heliograph.core.checkpoint.storage import reader
from heliograph.tests import kit
from heliograph.tests.kit import adam, checkpoint_names, class_batches, linear_classifier
from heliograph.tests.messages import assert_facts, has_facts
from heliograph.tests.ranks_pool import Pool

Make = Callable[..., Any]
LOSS = "validation/loss"
BEST: dict[str, Any] = {"keep_best": 1, "monitor": LOSS}


def train(*plugins: Any, epochs: int = 3, task: Any = None, **options: Any) -> RunResult:
    schedules = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
    options = {"optimizer": adam(), "validation": class_batches(1), "epochs": epochs, **options}
    return kit.fit(*schedules, *plugins, task=task or linear_classifier(), **options)


@pytest.mark.parametrize("background", [False, True])
def test_the_file_holds_the_weights_and_what_they_are_worth(tmp_path: Path, background: bool) -> None:
    task: Any = linear_classifier()
    result = train(WeightsCheckpoint(tmp_path / "weights", background=background), task=task)
    full = train(Checkpoint(tmp_path / "full", background=background))
    assert result.last_checkpoint is not None
    assert full.last_checkpoint is not None
    state = torch.load(result.last_checkpoint, weights_only=True)

    assert result.last_checkpoint.name == "run_epoch_3_iter_6.pth"
    assert torch.equal(state["modules"]["model"]["weight"], task.model.weight)
    assert (state["optimizers"], state["plugins"], state["data"], state["schedulers"]) == ({}, {}, {}, {})
    assert state["metrics"] == result.metrics
    assert result.last_checkpoint.stat().st_size < full.last_checkpoint.stat().st_size
    fresh: Any = linear_classifier()
    assert load_weights(fresh, tmp_path / "weights").metrics == result.metrics
    assert torch.equal(fresh.model.weight, task.model.weight)
    reader.verify(result.last_checkpoint)


def test_the_best_are_kept_and_loaded_back(tmp_path: Path) -> None:
    task: Any = linear_classifier()
    others = [(inputs, 1 - targets) for inputs, targets in class_batches(2)]
    plugins = [WeightsCheckpoint(tmp_path, **BEST), LoadBest(), CheckpointLabel("loss_{validation/loss:.2f}")]
    result = train(*plugins, task=task, validation=others)
    best = result.best_checkpoint

    assert best is not None
    assert best.name.startswith("run_epoch_1_iter_2_loss_0.")
    assert [name[:17] for name in checkpoint_names(tmp_path)] == ["run_epoch_1_iter_", "run_epoch_3_iter_"]
    assert torch.equal(task.model.weight, torch.load(best)["modules"]["model"]["weight"])
    assert (tmp_path / "run.best").read_text() == f"{best.name}\n"


def test_an_average_is_in_it(tmp_path: Path) -> None:
    task: Any = linear_classifier()
    result = train(EMA(0.5), RNGCapture(), WeightsCheckpoint(tmp_path), task=task)
    loaded = load_weights(task, tmp_path)

    assert (loaded.average, loaded.metrics) == ("ema", result.metrics)
    assert reader.load(loaded.path)["plugins"].keys() == {"ema"}


@pytest.mark.parametrize("how", ["auto", "path"])
def test_a_resume_from_it_is_refused(tmp_path: Path, how: str) -> None:
    path = train(WeightsCheckpoint(tmp_path)).last_checkpoint
    assert path is not None
    with pytest.raises(ValueError, match=r"iter_6\.pth holds only weights,"):
        train(Checkpoint(tmp_path, resume="auto" if how == "auto" else path), epochs=4)
    assert checkpoint_names(tmp_path) == [path.name]


def test_what_it_has_not_saved_is_said_in_its_name(tmp_path: Path) -> None:
    trainer = Trainer([SaveSchedule(Every(steps=3), at_end=False), WeightsCheckpoint(tmp_path)], device="cpu")
    result = kit.fit(trainer, train=class_batches(2), epochs=2)

    assert_facts(result.warnings[-1], "step 3", "step 4")
    assert "use WeightsCheckpoint(..., every=...)" in result.warnings[-1]


def test_a_run_that_goes_back_does_not_use_it(tmp_path: Path) -> None:
    spoilt: list[int] = []

    def spoil(run: Run, event: BatchEnd) -> None:
        if run.progress.steps == 3 and not spoilt:
            spoilt.append(run.progress.steps)
            run.task.model.weight.data.fill_(float("nan"))

    def trainer(*plugins: Any) -> Trainer:
        made = Trainer([SaveSchedule(Every(epochs=1)), RollBack(), *plugins], device="cpu")
        made.bus.on(BatchEnd, spoil)
        return made

    with pytest.raises(FloatingPointError, match=r"run_epoch_1_iter_2\.pth holds only weights"):
        kit.fit(trainer(WeightsCheckpoint(tmp_path / "alone", keep_last=None)), train=class_batches(2), epochs=4)
    spoilt.clear()
    both = trainer(Checkpoint(tmp_path / "full"), WeightsCheckpoint(tmp_path / "weights"))
    result = kit.fit(both, train=class_batches(2), epochs=4)
    assert "to " + str(tmp_path / "full") in "".join(result.notes)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_beside_a_full_one_the_resume_is_exact_and_the_weights_go_on(tmp_path: Path, order: list[int]) -> None:
    def run(folder: str, epochs: int) -> tuple[RunResult, Any]:
        task: Any = linear_classifier()
        full = Checkpoint(tmp_path / folder / "full", resume="auto")
        weights = WeightsCheckpoint(tmp_path / folder / "weights", keep_last=None, **BEST)
        plugins = [(full, weights)[number] for number in order]
        return train(RNGCapture(), *plugins, task=task, epochs=epochs), task

    whole, expected = run("whole", 4)
    first, _ = run("halves", 2)
    result, task = run("halves", 4)

    assert first.last_checkpoint == tmp_path / "halves" / "full" / "run_epoch_2_iter_4.pth"
    assert (result.resume.reasons, result.resume.epoch) == ((), 2)  # type: ignore[union-attr]
    assert torch.equal(task.model.weight, expected.model.weight)
    for each in (result, whole):
        assert each.last_checkpoint.parent.name == "full"  # type: ignore[union-attr]
        assert each.best_checkpoint.parent.name == "weights"  # type: ignore[union-attr]
        assert each.warnings == ()
    assert checkpoint_names(tmp_path / "halves" / "weights") == checkpoint_names(tmp_path / "whole" / "weights")
    assert not list((tmp_path / "halves").glob("*/*-2*"))
    assert not list((tmp_path / "halves" / "weights").glob(".*.steps*"))


def test_alone_the_result_says_that_it_cannot_be_resumed(tmp_path: Path) -> None:
    result = train(WeightsCheckpoint(tmp_path))

    assert "WeightsCheckpoint saves no state" in str(result)
    assert result.warnings == ()


def test_a_run_that_fails_says_what_is_left(tmp_path: Path) -> None:
    trainer = Trainer([SaveSchedule(Every(steps=1)), WeightsCheckpoint(tmp_path)], device="cpu")

    def fail(run: Run, event: BatchEnd) -> None:
        if run.progress.steps == 2:
            raise ArithmeticError

    trainer.bus.on(BatchEnd, fail)
    with pytest.raises(ArithmeticError) as caught:
        kit.fit(trainer)
    path = tmp_path / "run_epoch_0_iter_1.pth"
    assert any(has_facts(note, path, "step 1", "only weights", "cannot be resumed") for note in caught.value.__notes__)


def test_it_has_no_options_of_a_resume(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="has no argument 'resume'"):
        WeightsCheckpoint(tmp_path, resume="auto")  # type: ignore[call-arg]
    assert WeightsCheckpoint(tmp_path).brings == ()


def test_inspect_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = train(WeightsCheckpoint(tmp_path)).last_checkpoint
    assert main(["checkpoint", "inspect", str(path), str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert_facts(said, "holds", "only weights", "load_weights", "checkpoint export")
    assert "weights only,last" in said
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert main(["checkpoint", "migrate", str(path)]) == 0


def test_the_plan_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = kit.make_run(
        Trainer([SaveSchedule(Every(epochs=1)), WeightsCheckpoint(Path("w"))], device="cpu")
    ).report.plan()
    assert_facts(plan, "weights_checkpoint", "weights to w", "last 1")


def test_no_buffers_are_kept_for_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[Any] = []
    monkeypatch.setattr(BackgroundWriter, "_reserve", lambda self, state: reserved.append(list(state)))
    train(WeightsCheckpoint(tmp_path, background=True))
    assert reserved == [["model"]]


def train_on_ranks(folder: Path, kind: str) -> tuple[list[str], RunResult, dict[str, Any]]:
    engine = DDPEngine(device="cpu") if kind == "ddp" else FSDPEngine(device="cpu", state="sharded")
    saved: list[str] = []
    plugins = [SaveSchedule(Every(epochs=1)), WeightsCheckpoint(folder)]
    trainer = Trainer(plugins, engine=engine)
    trainer.bus.on(CheckpointSaved, lambda run, event: saved.append(event.path.name))
    task: Any = linear_classifier()
    result = trainer.fit(task, class_batches(4), optimizer=adam(), epochs=2)
    return saved, result, {name: value.detach().clone() for name, value in task.model.state_dict().items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_file_of_several_ranks(tmp_path: Path, ranks: Pool, kind: str) -> None:
    (saved, result, weights), (of_other, _, _) = ranks(2).run(train_on_ranks, tmp_path, kind)
    task: Any = linear_classifier()
    load_weights(task, tmp_path)

    assert saved == of_other == ["run_epoch_1_iter_2.pth", "run_epoch_2_iter_4.pth"]
    assert result.last_checkpoint == tmp_path / "run_epoch_2_iter_4.pth"
    assert torch.equal(task.model.weight, weights["weight"])
    assert not list(tmp_path.glob("*.shards"))
