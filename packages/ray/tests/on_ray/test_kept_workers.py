"""Workers that stay alive between calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.ray.tests.creators import creators
from heliograph.packages.ray.tests.creators.creators import make, weights
from heliograph.packages.ray.tests.on_ray import calls
from heliograph.packages.ray.tests.on_ray.fault_runs import Fault, Scenario, read_samples, train
from heliograph.tests.core.distributed.jobs import pid_and_sum
from heliograph.tests.core.distributed.test_launch import has_ended
from heliograph_ray import RayLauncher
from heliograph_ray.creators import LocalLauncher
from heliograph_ray.launcher.attempts import Work
from heliograph_ray.launcher.kept import KeptWorkers

OPTIONS: dict[str, Any] = {
    "scheduler_creator": creators.scheduler,
    "scheduler_step_freq": "epoch",
    "validation_function": creators.validate_as_usual,
}


@pytest.fixture
def workers(local_ray: None, tmp_path: Path) -> Iterator[KeptWorkers]:
    """Return two workers that are kept."""
    made = RayLauncher(2, storage_path=tmp_path / "storage").keep_ranks()
    yield made
    made.close()


@pytest.mark.timeout(150)
def test_passes_on_the_same_workers_equal_those_of_one_call(local_ray: None, tmp_path: Path) -> None:
    local = make(**OPTIONS, config={"dropout": 0.2}, launcher=LocalLauncher(2))
    expected = local.train(passes=3)
    launcher = RayLauncher(2, storage_path=tmp_path)
    trainer = make(**OPTIONS, config={"dropout": 0.2}, launcher=launcher, initialization_hook=creators.send_pid)
    pids = set[int]()
    for call in (trainer.train, trainer.train, trainer.validate, trainer.train):
        metrics = call()
        assert len(trainer.messages) == 2
        pids |= {pid for _, pid in trainer.messages}
    assert metrics == expected
    assert torch.equal(weights(trainer), weights(local))
    assert trainer.validate() == local.validate()
    assert len(pids) == 2
    for each in (trainer, local):
        each.shutdown()
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.whole
@pytest.mark.timeout(120)
def test_a_worker_that_died_while_it_waited_is_replaced(workers: KeptWorkers) -> None:
    first = workers.run(pid_and_sum, 1)
    os.kill(first[1][0], signal.SIGKILL)
    assert has_ended(first[1][0])
    second = workers.run(pid_and_sum, 10)  # Ray does not know of the death yet
    assert [total for _, total in second] == [30.0, 30.0]  # 10 + 20, over the ranks
    assert not {pid for pid, _ in first} & {pid for pid, _ in second}
    third = workers.run(pid_and_sum, 1)
    assert [pid for pid, _ in second] == [pid for pid, _ in third]


@pytest.mark.whole
@pytest.mark.timeout(120)
def test_an_error_ends_them(workers: KeptWorkers, tmp_path: Path) -> None:
    first = workers.run(pid_and_sum, 1)
    with pytest.raises(calls.OwnError, match="own"):
        workers.run(calls.fail, tmp_path)
    assert all(has_ended(pid) for pid, _ in first)
    second = workers.run(pid_and_sum, 1)
    assert not {pid for pid, _ in first} & {pid for pid, _ in second}


@pytest.mark.whole
@pytest.mark.timeout(120)
def test_on_an_interrupt_the_trainings_save_and_stop(workers: KeptWorkers, tmp_path: Path) -> None:
    def interrupt(rank: int, message: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    first = workers.run(pid_and_sum, 1)
    with pytest.raises(KeyboardInterrupt):
        workers.run(calls.train_forever, tmp_path, on_message=interrupt)
    assert all((tmp_path / f"ended-{rank}").read_text().startswith("stopped: ") for rank in range(2))
    assert list(tmp_path.glob("run_*.pth"))
    assert all(has_ended(pid) for pid, _ in first)


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_a_worker_that_is_lost_in_a_later_call_is_replaced_within_it(local_ray: None, tmp_path: Path) -> None:
    local = make(**OPTIONS, config={"dropout": 0.2}, launcher=LocalLauncher(2))
    local.train(passes=3)
    trouble = tmp_path / "trouble"
    trouble.touch()
    config = {"dropout": 0.2, "file": trouble, "step": 6, "what": "die"}
    launcher = RayLauncher(2, storage_path=tmp_path / "ray", max_failures=1)
    trainer = make(**OPTIONS, config=config, plugin_creator=creators.trouble, launcher=launcher)
    for _ in range(3):
        trainer.train()
    assert not trouble.exists()
    assert torch.equal(weights(trainer), weights(local))
    for each in (trainer, local):
        each.shutdown()


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_a_worker_that_hangs_in_a_later_call_is_replaced_within_it(local_ray: None, tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "hung", faults=(Fault(1, 20, how="hang"),), timeout=8.0)
    whole = replace(scenario, folder=tmp_path / "whole", faults=())
    for each in (scenario, whole):
        each.folder.mkdir()
    launcher = RayLauncher(2, max_failures=1, backoff=0.01, storage_path=tmp_path / "storage")
    workers = launcher.keep_ranks()
    first = workers.run(pid_and_sum, 1)
    values = workers.run(train, scenario)
    assert list(values) == list(h.launch(train, whole, nprocs=2))
    assert read_samples(scenario.folder) == read_samples(whole.folder)
    assert [(each.kind, each.resumed_at) for each in values.attempts] == [("hung", None), ("completed", Work(32, 16))]
    assert all(has_ended(pid) for pid, _ in first)
    workers.close()
