"""The state between calls: saved, restored, read, released."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core.checkpoint.storage import inventory, reader
from heliograph.packages.ray.tests.creators import creators
from heliograph.packages.ray.tests.creators.creators import make, weights
from heliograph.tests.core.distributed.test_launch import has_ended
from heliograph_ray.creators import LocalLauncher
from heliograph_ray.creators.train_job import unpack_state

OPTIONS: dict[str, Any] = {
    "scheduler_creator": creators.scheduler,
    "scheduler_step_freq": "epoch",
    "config": {"dropout": 0.2},
}
PAIR: dict[str, Any] = {
    "model_creator": creators.pair,
    "optimizer_creator": creators.pair_of_optimizers,
    "train_function": creators.train_pair,
    "scheduler_creator": creators.pair_of_schedulers,
    "scheduler_step_freq": "epoch",
}


@pytest.mark.parametrize("options", [OPTIONS, PAIR], ids=["one", "several"])
def test_a_restored_trainer_equals_an_uninterrupted_one(options: dict[str, Any], tmp_path: Path) -> None:
    whole, first, second = make(**options), make(**options), make(**options)
    expected = whole.train(passes=4)
    first.train(passes=2)
    path = first.save(tmp_path / "after_two.pth")
    assert path == tmp_path / "after_two.pth"
    second.restore(path)
    assert torch.equal(weights(second), weights(first))
    assert second.train(passes=2) == expected
    assert torch.equal(weights(second), weights(whole))


def test_a_saved_state_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    trainer = make(**OPTIONS)
    trainer.train()
    path = trainer.save(tmp_path / "model.pth")
    entry = reader.verify(path)
    assert (entry.run_name, entry.progress["epoch"]) == ("run", 1)
    state = reader.load(path)
    assert {"creators", "rng_capture", "learning_rate"} >= {name for name, each in state["plugins"].items() if each}
    assert state["plugins"]["rng_capture"]["globals"].keys() == {"python", "numpy", "torch", "cuda"}
    task = h.Supervised(creators.model({}), torch.nn.CrossEntropyLoss())
    h.load_weights(task, path)
    assert torch.equal(torch.cat([each.detach().flatten() for each in task.model.parameters()]), weights(trainer))


def test_a_save_replaces_the_file_and_a_failed_one_keeps_it(tmp_path: Path) -> None:
    trainer = make()
    trainer.train()
    path = trainer.save(tmp_path / "model.pth")
    trainer.train()
    assert trainer.save(path) == path
    assert reader.load(path)["progress"]["epoch"] == 2
    with pytest.raises(ValueError, match="pth"):
        trainer.save(tmp_path / "model.txt")
    assert reader.verify(path).progress["epoch"] == 2


def test_a_checkpoint_of_a_fit_can_be_restored_within_a_pass(tmp_path: Path) -> None:
    def save(config: Any) -> list[h.Plugin]:
        return [h.SaveSchedule(h.Every(steps=3)), h.Checkpoint(tmp_path, keep_last=None)]

    saving, resumed, whole = make(plugin_creator=save), make(), make()
    saving.train(passes=2)
    entries, _ = inventory.entries(tmp_path, "run")
    assert [entry.progress["steps"] for entry in entries] == [8, 6, 4, 3]  # at the end of each pass, too
    resumed.restore(entries[1].path)
    for _ in range(2):
        resumed.train()
    assert resumed.result is not None
    assert (resumed.result.progress.epoch, resumed.result.progress.steps) == (3, 12)
    whole.train(passes=3)
    assert torch.equal(weights(resumed), weights(whole))


def test_a_newer_state_that_a_plugin_has_found_is_returned(tmp_path: Path) -> None:
    def keep(config: Any) -> list[h.Plugin]:
        return [h.SaveSchedule(h.Every(epochs=1)), h.Checkpoint(tmp_path, resume="auto")]

    first, second = make(plugin_creator=keep), make(plugin_creator=keep)
    metrics = first.train(passes=3)
    assert second.train() == metrics
    assert torch.equal(weights(second), weights(first))
    assert second.train() == make().train(passes=4)


def test_a_damaged_file_is_refused_without_a_change(tmp_path: Path) -> None:
    trainer = make()
    trainer.train()
    before, path = weights(trainer), trainer.save(tmp_path / "model.pth")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        trainer.restore(path)
    with pytest.raises(FileNotFoundError):
        trainer.restore(tmp_path / "another.pth")
    assert torch.equal(weights(trainer), before)


def test_another_model_is_refused(tmp_path: Path) -> None:
    trainer = make()
    trainer.train()
    other = make(model_creator=lambda config: torch.nn.Linear(4, 2))
    other.restore(trainer.save(tmp_path / "model.pth"))
    with pytest.raises(ValueError, match="another network"):
        other.get_model()
    with pytest.raises(ValueError, match="another network"):
        other.train()


def test_a_new_trainer_has_its_initial_weights() -> None:
    trainer = make(optimizer_creator=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.0))
    before = weights(trainer)
    trainer.train()
    assert torch.equal(weights(trainer), before)
    assert trainer.get_model() is not trainer.get_model()
    assert [type(each) for each in make(**PAIR).get_model()] == [torch.nn.Linear, torch.nn.Linear]


def test_a_scheduler_is_stepped_manually() -> None:
    trainer = make(scheduler_creator=creators.plateau, scheduler_step_freq="manual")
    with pytest.raises(RuntimeError, match="no trained state"):
        trainer.update_scheduler(1.0)
    rates = []
    for metric in (1.0, 0.5, 0.7, 0.4):
        trainer.train()
        trainer.update_scheduler(metric)
        rates.append(_rate(trainer))
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01])


def test_a_scheduler_without_a_metric_is_stepped_manually() -> None:
    by_hand = make(scheduler_creator=creators.scheduler, scheduler_step_freq="manual")
    by_epoch = make(scheduler_creator=creators.scheduler, scheduler_step_freq="epoch")
    for _ in range(3):
        by_hand.train()
        by_hand.update_scheduler(0.0)
        by_epoch.train()
    assert torch.equal(weights(by_hand), weights(by_epoch))


def test_a_manual_step_needs_scheduler_step_freq_manual() -> None:
    for options in ({}, {"scheduler_creator": creators.scheduler}, {"scheduler_step_freq": "manual"}):
        with pytest.raises(ValueError, match=r"update_scheduler\(metric\) needs scheduler_creator="):
            make(**options).update_scheduler(1.0)


def test_after_shutdown_every_call_is_refused(tmp_path: Path) -> None:
    trainer = make()
    with pytest.raises(RuntimeError, match="no trained state"):
        trainer.save(tmp_path / "model.pth")
    trainer.train()
    path = trainer.save(tmp_path / "model.pth")
    trainer.shutdown()
    trainer.shutdown()
    calls: list[Callable[[], object]] = [
        trainer.train,
        trainer.validate,
        trainer.get_model,
        lambda: trainer.save(path),
        lambda: trainer.restore(path),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="was shut down"):
            call()


def _rate(trainer: Any) -> float:
    """Return the learning rate of the state that is kept."""
    rate: float = unpack_state(trainer._state)["optimizers"]["optimizer"]["param_groups"][0]["lr"]
    return rate


def test_the_processes_of_a_local_launcher_stay_alive_until_shutdown() -> None:
    trainer = make(launcher=LocalLauncher(1), initialization_hook=creators.send_pid)
    pids = []
    for call in (trainer.train, trainer.validate, trainer.train):
        call()
        pids += [pid for _, pid in trainer.messages]
    assert len(pids) == 3
    assert len(set(pids)) == 1
    trainer.shutdown()
    assert has_ended(pids[0])


class OwnLauncher:
    """A launcher of somebody's own, with one rank in this process."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def run(self, fn: Callable[..., Any], /, *args: Any, on_message: Any = None) -> list[Any]:
        self.done.append("run")
        return [fn(*args)]

    def close(self) -> None:
        self.done.append("close")


class KeepingLauncher(OwnLauncher):
    """One that can keep its rank."""

    def keep_ranks(self) -> OwnLauncher:
        self.kept = OwnLauncher()
        return self.kept


def test_a_launcher_of_ones_own_may_keep_its_ranks_too() -> None:
    keeping, plain = KeepingLauncher(), OwnLauncher()
    for launcher in (keeping, plain):
        trainer = make(launcher=launcher)
        trainer.validate()
        trainer.validate()
        trainer.shutdown()
    assert (keeping.done, keeping.kept.done) == ([], ["run", "run", "close"])
    assert plain.done == ["run", "run"]  # what it may close is its owner's
