"""RayReport on several ranks: all report equally often, and only the main rank has a folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    Checkpoint,
    DDPEngine,
    Every,
    GradientAccumulation,
    LogSchedule,
    Plugin,
    RNGCapture,
    Run,
    RunClosed,
    RunFailed,
    SaveSchedule,
    Supervised,
    Trainer,
    ValidationSchedule,
    on,
)
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import reader
from heliograph.events import Lane
from heliograph.packages.ray.tests.fakes import FakeSession, on_ray
from heliograph.tests.kit import adam
from heliograph.tests.ranks_pool import Pool
from heliograph_ray.report import RayReport
from heliograph_ray.session import Notice
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PREEMPTED = Notice("ray", "the machine of rank 1 will be taken away")


def rank() -> int:
    return DDPEngine(device="cpu").rank


def train(session: FakeSession, folder: Path, *plugins: Any, **options: Any) -> dict[str, Any]:
    """Train on all ranks, each with a folder of its own, as on machines without a shared file system."""
    torch.manual_seed(0)
    task = Supervised(nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1)), nn.functional.mse_loss)
    data = torch.arange(40.0)[:, None] / 40
    checkpoint = Checkpoint(folder / str(rank()), background=options.pop("background", False))
    trainer = Trainer([RNGCapture(3), RayReport(0.0), checkpoint, *plugins], engine=DDPEngine(device="cpu"))
    outcome: dict[str, Any] = {}
    trainer.bus.on(
        RunClosed, lambda run, event: outcome.update(status=event.status, notes=run.report.notes), lane=Lane.REPORT
    )
    with on_ray(session):
        try:
            trainer.fit(
                task,
                DataLoader(TensorDataset(data, data), batch_size=4, shuffle=True),
                validation=DataLoader(TensorDataset(data[:8], data[:8]), batch_size=2),
                optimizer=adam(),
                **{"epochs": 2, **options},
            )
        except (SystemExit, Exception) as error:  # noqa: BLE001  # looked at by the tests
            outcome["error"] = type(error).__name__, str(error)
    return outcome | {
        "reports": [(facts.get("step"), names) for facts, names in session.reports],
        "beginnings": session.beginnings,
        "left": session.exit_notice,
        "weights": [value.clone() for value in task.model.state_dict().values()],
    }


class GoneError(Exception):
    """Replaces the death of a worker."""


class Dies(Plugin):
    """Ends a run at a batch, on every rank."""

    @on(BatchEnd)
    def die(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 7:
            raise GoneError


class Logs(Plugin):
    """Makes requests on one rank only."""

    asks = ("log", "validation", "save")

    @on(BatchEnd)
    def ask(self, run: Run, event: BatchEnd) -> None:
        if run.engine.rank == 1 and run.progress.batches % 3 == 0:
            run.control.request_log("test")
            run.control.request_validation("test")
        if run.engine.rank == 1 and run.progress.batches % 4 == 0:
            run.control.request_save("test")


def resume(folder: Path, background: bool) -> list[dict[str, Any]]:
    schedules = [SaveSchedule(Every(steps=2)), ValidationSchedule(Every(epochs=1))]
    whole = train(FakeSession(folder / "other"), folder / "whole", *schedules)
    train(FakeSession(folder / "there"), folder / "first", *schedules, Dies(), background=background)
    again = FakeSession(folder / "there", is_restart=True)
    return [whole, train(again, folder / "second", *schedules, background=background)]


@pytest.mark.parametrize("background", [False, True])
def test_a_restart_on_other_machines_equals_the_uninterrupted_run(
    ranks: Pool, tmp_path: Path, background: bool
) -> None:
    path = tmp_path / "second" / "0" / "run_epoch_1_iter_6.pth"
    for whole, rest in ranks(2).run(resume, tmp_path, background):
        if not background:
            assert rest["beginnings"] == [(6, path)]
        assert all(map(torch.equal, whole["weights"], rest["weights"]))
    assert not list((tmp_path / "second" / "1").glob("*"))


def lose_one(folder: Path) -> dict[str, Any]:
    schedules = [SaveSchedule(Every(steps=2)), ValidationSchedule(Every(epochs=1))]
    return train(FakeSession(folder / "there"), folder / "first", *schedules, Dies())


def test_a_restart_on_fewer_ranks_refuses_another_global_batch(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(lose_one, tmp_path)

    def restart(number: int, *plugins: Any) -> dict[str, Any]:
        session = FakeSession(tmp_path / "there", is_restart=True)
        schedules = [SaveSchedule(Every(steps=2)), ValidationSchedule(Every(epochs=1))]
        return train(session, tmp_path / f"second-{number}", *schedules, *plugins)

    kind, text = restart(1)["error"]
    assert kind == "ValueError"
    assert "batch_size 4 x accumulation" in text
    assert "batch_size 4 x accumulation" in text
    accumulated = restart(2, GradientAccumulation(2))
    assert "error" not in accumulated
    assert accumulated["reports"][-1][0] == 10


def ask_on_one(folder: Path, background: bool) -> dict[str, Any]:
    schedules = [Logs(), LogSchedule(Every(steps=1))]
    return train(FakeSession(folder / "there"), folder / "here", *schedules, background=background)


@pytest.mark.parametrize("background", [False, True])
def test_every_rank_reports_equally_often(ranks: Pool, tmp_path: Path, background: bool) -> None:
    main, other = ranks(2).run(ask_on_one, tmp_path, background)
    assert [step for step, _ in main["reports"]] == [step for step, _ in other["reports"]]
    assert {step for step, _ in main["reports"]} == set(range(1, 11))
    assert [names[0] for _, names in main["reports"] if names] == ["run_epoch_0_iter_4.pth", "run_epoch_1_iter_8.pth"]
    assert [names for _, names in other["reports"] if names] == []


def warn_one(folder: Path) -> dict[str, Any]:
    session = FakeSession(folder / "there")

    class Warns(Plugin):
        @on(BatchEnd)
        def warn(self, run: Run, event: BatchEnd) -> None:
            if run.engine.rank == 1 and run.progress.batches == 3:
                session.warned = PREEMPTED

    return train(session, folder / "here", SaveSchedule(At(epochs=9)), ValidationSchedule(Every(steps=2)), Warns())


def test_all_ranks_exit_if_one_machine_is_taken_away(ranks: Pool, tmp_path: Path) -> None:
    for each in ranks(2).run(warn_one, tmp_path):
        assert each["error"] == ("SystemExit", "143")
        assert each["left"] == PREEMPTED
        assert each["reports"][-1][0] in (3, 4)
        assert each["status"] == "stopped"
    main, other = ranks(2).run(warn_one, tmp_path / "again")
    assert [step for step, _ in main["reports"]] == [step for step, _ in other["reports"]]


def fail_with_a_save_in_flight(folder: Path) -> dict[str, Any]:
    """Rank 1 fails while the main rank still writes in the background."""
    gate, real = threading.Event(), storage.Store.save

    def save(*arguments: Any, **options: Any) -> Any:
        gate.wait()
        return real(*arguments, **options)

    class Fails(Plugin):
        @on(BatchEnd)
        def fail(self, run: Run, event: BatchEnd) -> None:
            if run.engine.rank == 1 and run.progress.batches == 4:
                raise ArithmeticError("on purpose")

        @on(RunFailed)
        def release(self, run: Run, event: RunFailed) -> None:
            gate.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.Store, "save", save)
        plugins = [SaveSchedule(At(steps=2)), ValidationSchedule(At(epochs=9)), Fails()]
        return train(FakeSession(folder / "there"), folder / "here", *plugins, background=True)


def test_a_save_that_ends_after_the_ranks_left_their_group_is_not_reported(ranks: Pool, tmp_path: Path) -> None:
    main, other = ranks(2).run(fail_with_a_save_in_flight, tmp_path)
    assert (main["error"][0], other["error"][0]) == ("RankFailed", "ArithmeticError")
    path = tmp_path / "here" / "0" / "run_epoch_0_iter_2.pth"
    assert any(f"{path} is not in" in note for note in main["notes"])
    assert (main["reports"], other["reports"]) == ([], [])
    reader.verify(path)


def refuse_on_main(folder: Path) -> dict[str, Any]:
    session = FakeSession(folder / "there")

    def refuse() -> None:
        if rank() == 0:
            raise OSError("the bucket is gone")

    session.before_report = refuse
    return train(session, folder / "here", SaveSchedule(Every(steps=2)), ValidationSchedule(At(epochs=9)))


def test_an_error_of_the_storage_fails_every_rank(ranks: Pool, tmp_path: Path) -> None:
    main, other = ranks(2).run(refuse_on_main, tmp_path)
    assert main["error"] == ("OSError", "the bucket is gone")
    assert other["error"][0] == "RankFailed"
    assert "the bucket is gone" in other["error"][1]
