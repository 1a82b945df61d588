"""Trainings that meet faults until they end: as those without faults, or the first difference is named."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import heliograph as h
import pytest
import torch
from heliograph.core.program import UsageError
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.kit import adam, dropout_task, fit, kept_generators, random_batches, saving
from heliograph_recorder import Recorder
from heliograph_testing.chaos import Chaos, Fault, check_function
from heliograph_testing.chaos.fault import HARMLESS, draw_faults
from heliograph_trackers import CSVLog
from torch import nn

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process need a Unix")
QUICK = tuple(kind for kind in HARMLESS if kind != "hang")


class Forgets(h.Plugin):
    """Scales the loss by a number that no checkpoint has."""

    def __init__(self) -> None:
        self.factors = iter([1.0] * 8 + [0.5] * 100)

    @h.on(h.BatchStart, lane=h.Lane.TRANSFORM)
    def scale(self, run: h.Run, event: h.BatchStart) -> None:
        run.control.scale_loss(next(self.factors), "it forgets")


def train(*plugins: Callable[[], h.Plugin], resume: str | None = "auto", epochs: int = 3) -> None:
    """Train in the current folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    task = h.Supervised(model, nn.functional.mse_loss)
    own = [h.GradientAccumulation(2), h.ValidationSchedule(h.Every(epochs=1)), h.LogSchedule(h.Every(steps=2))]
    own += [h.Preemption(), *(make() for make in plugins)]
    save = saving(Path("runs"), h.Every(steps=3), resume=resume)
    fit(*own, *save, task=task, train=random_batches(8), validation=random_batches(2), optimizer=adam(), epochs=epochs)


def test_a_training_survives_every_kind_of_fault() -> None:
    report = check_function(train, seed=4, faults=12, kinds=QUICK)
    assert report.verdict == "equal", str(report)
    assert report.is_good
    assert len(report.acted) > 6
    assert report.batches == 24
    assert report.batches_done > 24
    assert 0 < report.goodput < 1
    assert str(report).endswith("and the final state")


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(20))
def test_it_survives_many(seed: int) -> None:
    report = check_function(train, seed=seed, faults=50)
    assert report.verdict == "equal", str(report)


@pytest.mark.whole
def test_what_hangs_is_ended_by_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heliograph_testing.chaos.check.SHORTEST", 5.0)
    report = check_function(train, faults=[Fault("hang", count=11)])
    assert (report.verdict, report.hung, report.attempts) == ("equal", 1, 2), str(report)


@pytest.mark.whole
def test_the_same_seed_does_the_same() -> None:
    one, other = (check_function(train, seed=5, faults=3, kinds=["kill", "full-disk"]) for _ in range(2))
    assert [(str(met.fault), met.where) for met in one.met] == [(str(met.fault), met.where) for met in other.met]
    assert one.batches_done == other.batches_done


def test_what_no_checkpoint_has_makes_a_difference(tmp_path: Path) -> None:
    faults = [Fault("kill", count=15)]
    task = h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
    fit(Chaos([], journal=tmp_path / "own"), task=task, train=random_batches(2), optimizer=adam(), epochs=1)
    report = check_function(partial(train, Forgets), faults=faults, folder=tmp_path / "run")
    assert report.folder == tmp_path / "run"
    assert report.verdict == "differs", str(report)
    assert not report.is_good
    assert_facts(report.difference, "the loss differs", "epoch 1, batch 7", "step 7: ")


def test_a_training_that_never_resumes_loses_work(tmp_path: Path) -> None:
    faults = [Fault("kill", count=15)]
    report = check_function(partial(train, resume=None), faults=faults, folder=tmp_path / "run")
    assert (report.verdict, report.is_good) == ("lost work", False), str(report)
    assert (report.resumed, report.restarted, report.batches_done) == (0, 1, 24 + 15)
    assert "checkpoint of batch 12" in report.difference


def test_a_training_that_saves_nothing_cannot_be_ended() -> None:
    def train_alone() -> None:
        torch.manual_seed(0)
        fit(task=h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss), train=random_batches(3))

    with pytest.raises(UsageError, match=r"ends it \(kill\)"):
        check_function(train_alone, faults=2, kinds=["kill", "slow"])
    assert check_function(train_alone, faults=2, kinds=["slow"]).verdict == "equal"


def test_a_notice_after_the_last_save_of_a_training_that_does_not_save_its_end() -> None:
    def train_on() -> None:
        save = [h.SaveSchedule(steps=5, at_end=False), h.Checkpoint("runs", resume="auto"), h.Preemption()]
        fit(h.RNGCapture(), *save, task=dropout_task(), train=random_batches(12, inputs=16, outputs=1))

    report = check_function(train_on, faults=[Fault("preempt", count=11)])
    assert (report.verdict, report.attempts) == ("equal", 2), str(report)


def test_what_cannot_act_is_said() -> None:
    class Keeps(h.Plugin):
        @h.on(h.SavePoint)
        def keep(self, run: h.Run, event: h.SavePoint) -> None:
            run.state_dict()  # no file is written

    def train_in_memory() -> None:
        torch.manual_seed(0)
        task = h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
        fit(Keeps(), h.SaveSchedule(steps=1), task=task, train=random_batches(3))

    report = check_function(train_in_memory, faults=2, kinds=["full-disk", "slow"])
    assert (report.verdict, [met.fault.kind for met in report.acted]) == ("equal", ["slow"]), str(report)
    assert "1 did not" in str(report)
    report = check_function(train_in_memory, faults=[Fault("slow", count=7)])
    assert (report.acted, len(report.met)) == ((), 1)


def test_numbers_that_somebody_notices() -> None:
    report = check_function(partial(train, h.NaNGuard), faults=[Fault("nan-loss", count=11)])
    assert report.verdict == "equal", str(report)  # the run fails, and the next one does the step again
    assert report.met[0].noticed_by == "nan_guard"
    skips = check_function(partial(train, partial(h.NaNGuard, "skip")), faults=[Fault("nan-loss", count=11)])
    assert (skips.verdict, skips.is_good) == ("differs", True), str(skips)


def test_numbers_that_nobody_notices_are_silent(tmp_path: Path) -> None:
    report = check_function(train, seed=3, faults=[Fault("bit-in-weight", count=4)], folder=tmp_path / "run")
    assert (report.verdict, report.is_good, len(report.silent)) == ("differs", False, 1), str(report)
    assert "not noticed" in str(report)


def test_what_fails_without_a_fault_is_no_training_to_judge() -> None:
    def fails() -> None:
        sys.exit("no data")

    with pytest.raises(UsageError, match="without faults: attempt 1"):
        check_function(fails)
    with pytest.raises(UsageError, match=r"^The script trained"):
        check_function(lambda: None)


def test_what_damages_its_checkpoints_is_not_judged() -> None:
    class Damages(h.Plugin):
        @h.on(h.CheckpointSaved)
        def damage(self, run: h.Run, event: h.CheckpointSaved) -> None:
            content = bytearray(event.path.read_bytes())
            content[200] ^= 1
            event.path.write_bytes(content)

    text = "attempt 1 .*run_epoch_0_iter_3.pth.* damaged"
    with pytest.raises(UsageError, match=text):
        check_function(partial(train, Damages))


def test_a_training_that_removes_its_checkpoints_at_its_end_is_judged() -> None:
    class Removes(h.Plugin):
        @h.on(h.RunClosed, lane=h.Lane.PERSIST)
        def remove(self, run: h.Run, event: h.RunClosed) -> None:
            if event.status == "completed":
                for path in Path("runs").glob("run*"):
                    path.unlink()

    report = check_function(partial(train, Removes), faults=[Fault("kill", count=15)])
    assert (report.verdict, report.resumed) == ("equal", 1), str(report)


def test_what_differs_by_itself_is_not_judged(tmp_path: Path) -> None:
    def draws() -> None:
        torch.seed()
        task = h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
        fit(h.LogSchedule(h.Every(epochs=1)), task=task, train=random_batches(3))

    with pytest.raises(UsageError, match="training is not deterministic"):
        check_function(draws, folder=tmp_path / "run")


def content_of(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def write_to(folder: Path, *, epochs: int = 1, resume: str | Path = "auto") -> None:
    """Train with all that writes files."""
    torch.manual_seed(0)
    logs = [h.LogSchedule(steps=1), h.FileLog(folder), h.JsonlLog(folder / "a.jsonl"), CSVLog(folder / "a.csv")]
    recorder = Recorder(folder, digests=True)
    fit(*saving(folder, h.Every(steps=1), resume=resume), *logs, recorder, epochs=epochs)


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_elsewhere_is_refused_and_stays_as_it_was(tmp_path: Path, link: bool) -> None:
    folder = tmp_path / "real"
    with kept_generators():
        write_to(folder)
    before = content_of(folder)
    assert len(before) > 4

    def leave() -> None:
        if link:
            Path("linked").symlink_to(folder)
        write_to(Path("linked") if link else folder, epochs=3)

    with pytest.raises(UsageError) as refused:
        check_function(leave)
    assert content_of(folder) == before
    assert_facts(refused.value, "would write", "linked" if link else "", str(folder), "outside the copy", "--leave-out")


def test_a_checkpoint_elsewhere_is_not_resumed(tmp_path: Path) -> None:
    former = tmp_path / "former.pth"
    text = f"would write to or resume {re.escape(str(former))}.* outside the copy"
    with pytest.raises(UsageError, match=text):
        check_function(lambda: write_to(Path("runs"), resume=former))


def test_only_a_training_in_a_copy_is_confined(tmp_path: Path) -> None:
    with kept_generators():
        result = fit(*saving(tmp_path / "runs", h.Every(steps=1)), Chaos([], journal=tmp_path / "own"))
    assert result.status == "completed"


class Copies(h.Plugin):
    """Writes to a folder."""

    affects_training = False

    def __init__(self, target: Path) -> None:
        self.target = target

    @h.on(h.TrainStart)
    def copy(self, run: h.Run, event: h.TrainStart) -> None:
        """Write."""
        self.target.mkdir(exist_ok=True)
        (self.target / "copy").write_text("kept")


def test_a_plugin_of_ones_own_stays_in_the_copy(tmp_path: Path) -> None:
    report = check_function(partial(train, lambda: Copies(Path("own"))), faults=[Fault("slow", count=2)])
    assert report.verdict == "equal", str(report)
    with pytest.raises(UsageError, match=f"write to or resume {tmp_path / 'target'} .*outside"):
        check_function(partial(train, lambda: Copies(tmp_path / "target")))
    assert not (tmp_path / "target").exists()


def test_a_plugin_that_is_enabled_later_is_refused_then(tmp_path: Path) -> None:
    class Enables(h.Plugin):
        """Enables another one later."""

        @h.on(h.BatchEnd)
        def enable(self, run: h.Run, event: h.BatchEnd) -> None:
            """Enable it."""
            if not run.plugins.is_enabled("copies"):
                run.plugins.enable("copies")

    def train_both() -> None:
        copies = Copies(tmp_path / "target")
        trainer = h.Trainer([*saving(Path("runs"), h.Every(steps=1)), Enables(), copies], device="cpu")
        trainer.plugins.disable("copies")
        trainer.fit(
            h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss), random_batches(3), optimizer=adam(), epochs=1
        )

    with pytest.raises(UsageError, match=f"write to or resume {tmp_path / 'target'} .*outside"):
        check_function(train_both)


def test_a_validation_elsewhere_is_refused(tmp_path: Path) -> None:
    def validates() -> None:
        trainer = h.Trainer([h.FileLog(tmp_path / "logs")], device="cpu")
        trainer.validate(h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss), random_batches(2))

    with pytest.raises(UsageError, match=f"write to or resume {tmp_path / 'logs'} .*outside"):
        check_function(validates)
    assert not (tmp_path / "logs").exists()


def test_a_plan_is_a_function_of_its_seed_and_spreads_over_the_events() -> None:
    counts = {"batch_end": 100, "step_end": 50, "save_point": 5, "forward_end": 100}
    one, other = (draw_faults(seed, 60, counts, HARMLESS) for seed in (1, 2))
    assert one == draw_faults(1, 60, counts, HARMLESS) != other
    assert {fault.kind for fault in one} == set(HARMLESS)
    assert {fault.at for fault in one} == set(counts)
    assert all(1 <= fault.count <= counts[fault.at] for fault in one)
    assert sum(fault.kind == "kill" and fault.operation > 0 for fault in one) >= 2
    assert len({fault.count for fault in draw_faults(1, 40, {"batch_end": 100}, ["kill"])}) == 40


def train_on_ranks() -> None:
    """Train as one of several ranks, in the current folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    engine = h.DDPEngine(device="cpu", timeout=20.0, grace=2.0)
    trainer = h.Trainer(saving(Path("runs"), h.Every(steps=2), resume="auto"), engine=engine)
    trainer.fit(h.Supervised(model, nn.functional.mse_loss), random_batches(8), optimizer=adam(), epochs=2)


def test_a_fault_on_one_of_several_ranks() -> None:
    report = check_function(train_on_ranks, faults=[Fault("kill", count=5, rank=1)], ranks=2)
    assert (report.verdict, report.attempts, report.resumed) == ("equal", 2, 1), str(report)
    assert_facts(report.met[0].where, "epoch 1, batch 1", "step 5", "batch_end")
