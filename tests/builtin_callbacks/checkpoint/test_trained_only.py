"""TrainedOnly: frozen weights are left out of checkpoints, and verified by their digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    CheckpointSaved,
    DDPEngine,
    Every,
    FSDPEngine,
    LoadBest,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    StepEnd,
    Supervised,
    TrainedOnly,
    Trainer,
    ValidationSchedule,
    load_weights,
    on,
)
from heliograph.tests import kit
from heliograph.tests.messages import assert_each, assert_facts
from heliograph.tests.ranks_pool import Pool
from torch import nn

BATCHES = kit.class_batches(4)
HEAD = {"2.weight", "2.bias"}


def adapted(base: int = 0) -> Supervised:
    """Return a task whose base is frozen; another base, the same head."""
    torch.manual_seed(base)
    frozen = nn.Linear(4, 64).requires_grad_(False)
    torch.manual_seed(7)
    return Supervised(nn.Sequential(frozen, nn.Dropout(0.5), nn.Linear(64, 2)), nn.functional.cross_entropy)


def trained(folder: Path, task: Supervised, *plugins: Any, steps: int = 6, **options: Any) -> RunResult:
    """Train, and save what is trained every second step."""
    saving = [SaveSchedule(Every(steps=2)), Checkpoint(folder, keep_last=None, **options), TrainedOnly()]
    return kit.fit(RNGCapture(), *saving, *plugins, task=task, train=BATCHES, steps=steps)


def saved_modules(path: Path) -> dict[str, Any]:
    """Return what a file holds of the one module."""
    return dict(torch.load(path, weights_only=True)["modules"]["model"])


@pytest.mark.parametrize("background", [False, True])
def test_frozen_weights_are_left_out_and_a_resume_is_exact(background: bool, tmp_path: Path) -> None:
    whole = adapted()
    trained(tmp_path, whole, background=background)
    middle = tmp_path / "run_epoch_0_iter_2.pth"
    assert saved_modules(middle).keys() == HEAD

    again = adapted()
    result = trained(tmp_path / "again", again, resume=middle)
    assert result.resume is not None
    assert (result.resume.reasons, result.warnings) == ((), ())
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_base_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    path = trained(tmp_path, adapted()).last_checkpoint
    assert path is not None
    other = adapted(base=1)
    before = [each.clone() for each in other.model.parameters()]
    refusal = r"frozen weights.*2 of 2.*model\.0\.weight"
    with pytest.raises(ValueError, match=refusal):
        trained(tmp_path / "again", other, resume=path)
    with pytest.raises(ValueError, match=refusal):
        load_weights(other, path)
    assert all(torch.equal(one, each) for one, each in zip(before, other.model.parameters(), strict=True))
    half = adapted()
    half.model.get_submodule("0").to(torch.bfloat16)
    with pytest.raises(ValueError, match=refusal):
        load_weights(half, path)


def test_a_frozen_weight_that_changes_is_saved(tmp_path: Path) -> None:
    """An average that a task keeps, say, which is written past the counters of torch."""

    def average(run: Any, event: StepEnd) -> None:
        run.modules["model"][0].weight.data.mul_(0.9)

    def fit(folder: Path, **options: Any) -> Supervised:
        task = adapted()
        saving = [SaveSchedule(Every(steps=2)), Checkpoint(folder, keep_last=None, **options), TrainedOnly()]
        trainer = Trainer([RNGCapture(), *saving], device="cpu")
        trainer.bus.on(StepEnd, average)
        kit.fit(trainer, task=task, train=BATCHES, steps=4)
        return task

    whole = fit(tmp_path)
    middle = tmp_path / "run_epoch_0_iter_2.pth"
    assert saved_modules(middle).keys() == HEAD | {"0.weight"}
    again = fit(tmp_path / "again", resume=middle)
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


def test_frozen_weights_that_change_places_are_saved(tmp_path: Path) -> None:
    """A vocabulary in another order, say, whose sum is the same."""

    def swap(run: Any, event: StepEnd) -> None:
        if run.progress.steps == 1:
            weight = run.modules["model"][0].weight.data
            weight[:2] = weight[[1, 0]]

    trainer = Trainer([Checkpoint(tmp_path, every=Every(steps=2)), TrainedOnly()], device="cpu")
    trainer.bus.on(StepEnd, swap)
    path = kit.fit(trainer, task=adapted(), train=BATCHES, steps=2).last_checkpoint
    assert path is not None
    assert saved_modules(path).keys() == HEAD | {"0.weight"}
    again = adapted()
    assert trained(tmp_path / "again", again, resume=path, steps=4).resume is not None
    assert torch.equal(again.model.get_submodule("0").weight[[1, 0]], adapted().model.get_submodule("0").weight[:2])  # type: ignore[index]


def test_what_is_unfrozen_on_the_way_is_saved_from_then_on(tmp_path: Path) -> None:
    task = adapted()
    trainer = Trainer([SaveSchedule(Every(steps=2)), Checkpoint(tmp_path, keep_last=None), TrainedOnly()], device="cpu")

    def unfreeze(run: Any, event: BatchEnd) -> None:
        if run.progress.steps == 2:
            run.modules["model"][0].bias.requires_grad_(True)

    trainer.bus.on(BatchEnd, unfreeze)
    kit.fit(trainer, task=task, train=BATCHES, steps=4, optimizer=kit.sgd(), allow_unused_parameters=True)
    held = [saved_modules(path).keys() for path in sorted(tmp_path.glob("*.pth"))]
    assert held[-1] == HEAD | {"0.bias"}


def test_weights_are_loaded_onto_the_base_and_the_best_ones_loaded_back(tmp_path: Path) -> None:
    task = adapted()
    saving = [Checkpoint(tmp_path, keep_best=1, monitor="validation/loss"), TrainedOnly(), LoadBest()]
    plugins = [ValidationSchedule(Every(steps=1)), SaveSchedule(Every(steps=1)), *saving]
    result = kit.fit(*plugins, task=task, train=BATCHES, validation=BATCHES)
    assert result.best_checkpoint is not None
    other = adapted()
    assert load_weights(other, result.best_checkpoint).modules == ("model",)
    alone = adapted()
    load_weights(alone.model, result.best_checkpoint)
    for one, each, single in zip(*(each.model.parameters() for each in (task, other, alone)), strict=True):
        assert torch.equal(one, each)
        assert torch.equal(one, single)


def test_where_all_is_trained_it_says_so(tmp_path: Path) -> None:
    result = trained(tmp_path, kit.linear_classifier(), steps=2)
    assert_each(result.warnings, ("TrainedOnly", "no effect", "requires_grad_(False)"))


def trained_together(folder: str, resume: str | None) -> list[list[float]]:
    """Train on all ranks; return the weights of this one."""
    task = adapted()
    saving = [SaveSchedule(Every(steps=1)), Checkpoint(folder, keep_last=None, resume=resume), TrainedOnly()]
    trainer = Trainer([RNGCapture(), *saving], engine=DDPEngine(device="cpu"))
    trainer.fit(task, BATCHES, optimizer=kit.sgd(), epochs=1)
    return [each.flatten().tolist() for each in task.model.parameters()]


def test_ranks_save_and_resume_what_is_trained(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks(2).run(trained_together, str(tmp_path), None)
    middle = tmp_path / "run_epoch_0_iter_1.pth"
    assert saved_modules(middle).keys() == HEAD
    assert ranks(2).run(trained_together, str(tmp_path / "again"), str(middle)) == whole


def test_weights_divided_among_ranks_are_refused(ranks: Pool, tmp_path: Path) -> None:
    (message,) = ranks(1).run(refusal_of_shards, str(tmp_path))
    assert_facts(message, "TrainedOnly", "full weights", "FSDPEngine")


def refusal_of_shards(folder: str) -> str:
    trainer = Trainer([Checkpoint(folder, every=Every(steps=1)), TrainedOnly()], engine=FSDPEngine(device="cpu"))
    try:
        trainer.fit(adapted(), BATCHES, optimizer=kit.sgd(), epochs=1)
    except ValueError as error:
        return str(error)
    return ""


def test_any_plugin_can_leave_something_out_of_a_state(tmp_path: Path) -> None:
    class Forgetful(Plugin):
        def __init__(self) -> None:
            self.is_full: list[bool] = []

        @on(CheckpointSaved)
        def note(self, run: Run, event: CheckpointSaved) -> None:
            self.is_full.append("2.bias" in saved_modules(event.path))

        def reduce_state(self, run: Run, state: dict[str, Any]) -> dict[str, Any]:
            kept = {name: each for name, each in state["modules"]["model"].items() if name != "2.bias"}
            return {**state, "modules": {"model": kept}}

    forgetful = Forgetful()
    for background in (False, True):
        saving = Checkpoint(tmp_path / str(background), every=Every(steps=2), background=background)
        kit.fit(saving, forgetful, task=adapted(), train=BATCHES, steps=2)
    assert forgetful.is_full == [False, False]
