"""RayReport: what is reported and when, what a restart resumes, and how a run exits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    Checkpoint,
    CheckpointSaved,
    Every,
    LoadBest,
    Log,
    LogSchedule,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    Trainer,
    ValidationBatchEnd,
    ValidationSchedule,
    WeightsCheckpoint,
    on,
)
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import inventory, reader
from heliograph.packages.ray.tests.fakes import FakeSession, on_ray
from heliograph.packages.tests.facts import assert_facts
from heliograph_ray import report as ray_report
from heliograph_ray.report import RayReport
from heliograph_ray.session import Notice
from heliograph_recorder import Recorder, replay
from heliograph_testing import check_plugin
from torch import Tensor

Make = Callable[..., Any]
Fit = Callable[..., tuple[RunResult, list[Tensor]]]
PREEMPTED = Notice("ray", "the machine of rank 0 will be taken away")


class GoneError(RuntimeError):
    """Replaces the death of a worker."""


class Dies(Plugin):
    """Ends a run at a batch."""

    affects_training = False

    def __init__(self, at: int) -> None:
        self.at = at

    @on(BatchEnd)
    def die(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == self.at:
            raise GoneError


@pytest.fixture
def fit(task: Make, batches: Make, sgd: Make, weights: Make) -> Fit:
    """Return a function that trains for some epochs of five batches, and returns the result and the weights."""

    def train(*plugins: Any, epochs: int = 2, name: str = "run", validates: bool = False) -> Any:
        mine = task(dropout=0.5)
        trainer = Trainer([RNGCapture(0), RayReport(), *plugins], device="cpu")
        options = {"validation": batches(2, seed=1)} if validates else {}
        result = trainer.fit(mine, batches(), optimizer=sgd, epochs=epochs, name=name, **options)
        return result, weights(mine)

    return train


def saving(folder: Path, every: Any = None, **options: Any) -> list[Any]:
    return [SaveSchedule(every or Every(batches=2), at_end=False), Checkpoint(folder, **options)]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


# What is reported, and when.


def test_outside_of_ray_it_does_nothing(fit: Fit, tmp_path: Path) -> None:
    result, _ = fit(*saving(tmp_path), LogSchedule(Every(steps=1)))
    assert result.status == "completed"
    assert not any("Ray" in note for note in result.notes)


def test_a_checkpoint_is_reported_with_its_manifest_and_the_metrics_of_its_save(fit: Fit, tmp_path: Path) -> None:
    schedules = [ValidationSchedule(Every(epochs=1)), *saving(tmp_path / "here", Every(epochs=1))]
    with on_ray(FakeSession(tmp_path / "there")) as session:
        result, _ = fit(*schedules, validates=True)
    facts, names = zip(*session.reports, strict=True)
    assert names == (
        ["run_epoch_1_iter_5.pth"],
        ["run_epoch_2_iter_10.pth"],
    )
    assert [(each["epoch"], each["step"]) for each in facts] == [(1, 5), (2, 10)]
    assert facts[-1]["validation/loss"] == result.metrics["validation/loss"]
    stored = sorted((tmp_path / "there").iterdir())
    assert [path.name for path in stored] == ["checkpoint_000001_one", "checkpoint_000002_one"]
    for folder in stored:
        [path] = folder.glob("*.pth")
        reader.verify(path)
    assert not list((tmp_path / "here").glob(".*"))


def test_only_on_ray_a_locked_folder_is_waited_for(fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that Ray has ended may keep its lock for a moment, while those that replace them start."""
    waits, open_ = [], storage.Store.open

    def note(store: storage.Store, patience: float = 0.0) -> list[str]:
        waits.append(patience)
        return open_(store, patience)

    monkeypatch.setattr(storage.Store, "open", note)
    fit(*saving(tmp_path / "here"))
    with on_ray(FakeSession(tmp_path / "there")):
        fit(*saving(tmp_path / "here"))
    assert waits == [0.0, RayReport.patience]


def test_files_with_only_weights_are_not_reported(fit: Fit, tmp_path: Path) -> None:
    """A restarted trial could not continue from them, nor from a best one among the full ones."""
    weights = WeightsCheckpoint(tmp_path / "w", keep_best=1, monitor="validation/loss")
    schedules = [ValidationSchedule(Every(epochs=1)), *saving(tmp_path / "here", Every(epochs=1)), weights]
    with on_ray(FakeSession(tmp_path / "there")) as session:
        fit(*schedules, validates=True)

    assert [names for _, names in session.reports] == [
        ["run_epoch_1_iter_5.pth"],
        ["run_epoch_2_iter_10.pth"],
    ]
    for path in (tmp_path / "there").glob("*/*.pth"):
        assert not storage.read_manifest(path).weights_only


def test_the_best_checkpoint_is_reported_too_if_it_is_another(
    scripted: Make, batches: Make, sgd: Make, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(tmp_path / "here", keep_best=1, monitor="validation/loss")
    plugins = [ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1)), checkpoint, RayReport()]
    with on_ray(FakeSession(tmp_path / "there")) as session:
        task = scripted([3.0, 1.0, 2.0])
        Trainer(plugins, device="cpu").fit(task, batches(2), validation=batches(1), optimizer=sgd, epochs=3)
    names = [[name for name in names or [] if name.endswith(".pth")] for _, names in session.reports]
    assert names == [
        ["run_epoch_1_iter_2.pth"],
        ["run_epoch_2_iter_4.pth"],
        ["run_epoch_2_iter_4.pth", "run_epoch_3_iter_6.pth"],
    ]


def test_a_validation_without_a_save_is_reported_at_the_next_batch(fit: Fit, tmp_path: Path) -> None:
    seen = []

    class Looks(Plugin):
        @on(BatchEnd)
        def look(self, run: Run, event: BatchEnd) -> None:
            seen.append((run.progress.batches, len(session.reports)))

    with on_ray(FakeSession(tmp_path)) as session:
        result, _ = fit(ValidationSchedule(Every(batches=4), at_end=False), Looks(), validates=True)
    assert [(facts["step"], names) for facts, names in session.reports] == [(4, None), (8, None)]
    assert seen[4:6] == [(5, 1), (6, 1)]
    assert session.reports[-1][0]["validation/loss"] == result.metrics["validation/loss"]


def test_unreported_metrics_are_reported_once_at_the_end(fit: Fit, tmp_path: Path) -> None:
    with on_ray(FakeSession(tmp_path)) as session:
        fit(ValidationSchedule(At(steps=10)), LogSchedule(Every(steps=5)), validates=True)
    assert [facts["step"] for facts, _ in session.reports] == [5, 10]
    assert {"train/loss", "validation/loss"} <= session.reports[-1][0].keys()


def test_logs_are_reported_at_an_interval(fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(ray_report, "monotonic", lambda: clock[0])

    class Ticks(Plugin):
        @on(Log)
        def tick(self, run: Run, event: Log) -> None:
            clock[0] += 4.0

    with on_ray(FakeSession(tmp_path)) as session:
        fit(LogSchedule(Every(steps=1)), Ticks())
    assert [facts["step"] for facts, _ in session.reports] == [1, 4, 7, 10]
    assert session.reports[1][0].keys() == {"train/loss", "epoch", "step"}


def test_a_background_save_is_reported_when_it_is_written(fit: Fit, tmp_path: Path) -> None:
    with on_ray(FakeSession(tmp_path / "there")) as session:
        fit(ValidationSchedule(Every(batches=2)), *saving(tmp_path / "here", background=True), validates=True)
    saved = [facts for facts, names in session.reports if names is not None]
    assert [facts["step"] for facts in saved] == [2, 4, 6, 8, 10]
    for facts, path in zip(saved, sorted((tmp_path / "there").iterdir()), strict=True):
        [checkpoint] = path.glob("*.pth")
        assert facts.items() >= storage.read_manifest(checkpoint).metrics.items()
    assert {facts["step"] for facts, _ in session.reports} == {2, 4, 6, 8, 10}


def test_metrics_measured_after_a_save_are_reported_too(fit: Fit, tmp_path: Path) -> None:
    plugins = [ValidationSchedule(Every(epochs=1)), *saving(tmp_path / "here", At(steps=10), background=True)]
    with on_ray(FakeSession(tmp_path / "there")) as session:
        result, _ = fit(*plugins, validates=True)
    (_, first), (saved, names), (last, none) = session.reports
    assert (first, names is not None, none) == (None, True, None)
    assert saved["step"] == last["step"] == 10
    assert saved["validation/loss"] != last["validation/loss"] == result.metrics["validation/loss"]


def test_a_validation_alone_is_not_reported(task: Make, batches: Make, sgd: Make, tmp_path: Path) -> None:
    trainer, mine = Trainer([RayReport()], device="cpu"), task()
    with on_ray(FakeSession(tmp_path)) as session:
        trainer.validate(mine, batches())
        trainer.fit(mine, batches(), optimizer=sgd, epochs=1)
        trainer.validate(mine, batches())
        trainer.test(mine, batches())
    assert session.reports == []
    assert session.beginnings == [(0, None)]


def test_a_run_that_fails_reports_nothing_more(fit: Fit, tmp_path: Path) -> None:
    with on_ray(FakeSession(tmp_path)) as session, pytest.raises(GoneError):
        fit(LogSchedule(Every(steps=2)), Dies(5))
    assert [facts["step"] for facts, _ in session.reports] == [2]


def test_an_error_of_the_storage_fails_the_run(fit: Fit, tmp_path: Path) -> None:
    session = FakeSession(tmp_path / "there")

    def refuse() -> None:
        raise OSError("the bucket is gone")

    session.before_report = refuse
    with on_ray(session), pytest.raises(OSError, match="the bucket is gone"):
        fit(*saving(tmp_path / "here"))
    assert not list((tmp_path / "here").glob(".run.report"))


def test_an_incomplete_checkpoint_is_refused(fit: Fit, tmp_path: Path) -> None:
    class Damages(Plugin):
        @on(CheckpointSaved)
        def damage(self, run: Run, event: CheckpointSaved) -> None:
            event.path.write_bytes(b"")

    with (
        on_ray(FakeSession(tmp_path / "there")),
        pytest.raises(ValueError, match="is empty"),
    ):
        fit(*saving(tmp_path / "here"), Damages())


# What a restart resumes.


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_restart_elsewhere_equals_the_uninterrupted_run(fit: Fit, tmp_path: Path, resume: str | None) -> None:
    _, whole = fit(*saving(tmp_path / "whole"))
    there = tmp_path / "there"
    with on_ray(FakeSession(there)), pytest.raises(GoneError):
        fit(*saving(tmp_path / "first", resume=resume), Dies(7))
    with on_ray(FakeSession(there, is_restart=True)) as session:
        result, rest = fit(*saving(tmp_path / "second", resume=resume))
    path = tmp_path / "second" / "run_epoch_1_iter_6.pth"
    assert equal(whole, rest)
    assert session.beginnings == [(6, path)]
    assert any(f"fetched {path} from checkpoint_000003_one" in line for line in result.notes)
    assert result.resume is not None
    assert (result.resume.path, result.resume.reasons) == (path, ())
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == [
        "run.last",
        "run_epoch_1_iter_10.pth",
    ]


def test_a_restart_continues_a_branch(fit: Fit, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    fit(*saving(here, keep_last=None))
    options: dict[str, Any] = {"resume": here / "run_epoch_0_iter_2.pth"}
    with on_ray(FakeSession(there)), pytest.raises(GoneError):
        fit(*saving(here, **options), Dies(7))
    with on_ray(FakeSession(there, is_restart=True)) as session:
        result, _ = fit(*saving(here, **options))
    assert session.beginnings == [(6, here / "run-2_epoch_1_iter_6.pth")]
    assert result.last_checkpoint == here / "run-2_epoch_1_iter_10.pth"
    assert (here / "run_epoch_1_iter_10.pth").exists()


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(fit: Fit, tmp_path: Path) -> None:
    there = tmp_path / "there"
    with on_ray(FakeSession(there)), pytest.raises(GoneError):
        fit(*saving(tmp_path / "first"), Dies(9))
    newest, second, *_ = sorted(there.iterdir(), reverse=True)
    [data] = newest.glob("*.pth")
    data.write_bytes(data.read_bytes()[:-100])
    [data] = second.glob("*.pth")
    data.unlink()
    with on_ray(FakeSession(there, is_restart=True)) as session:
        result, _ = fit(*saving(tmp_path / "second"))
    assert session.beginnings == [(4, tmp_path / "second" / "run_epoch_0_iter_4.pth")]
    damaged, cut, fetched = (note for note in result.notes if "Ray's storage" in note)
    assert_facts(damaged, "skipped: checkpoint_000004_one")
    assert "is damaged" in damaged
    assert_facts(cut, "skipped: checkpoint_000003_one", "no manifest")
    assert fetched.startswith("fetched ")
    assert not list((tmp_path / "second").glob(".*"))


def test_a_restart_without_an_intact_checkpoint_starts_from_the_beginning(fit: Fit, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "checkpoint_000001_one").mkdir(parents=True)
    with on_ray(FakeSession(there, is_restart=True)) as session:
        result, _ = fit(*saving(tmp_path / "here"))
    assert session.beginnings == [(0, None)]
    assert any("starts fresh: Ray's storage" in line for line in result.notes)


def test_checkpoints_of_another_run_are_not_resumed(fit: Fit, tmp_path: Path) -> None:
    there = tmp_path / "there"
    with on_ray(FakeSession(there)), pytest.raises(GoneError):
        fit(*saving(tmp_path / "first"), name="before", epochs=1)
        fit(*saving(tmp_path / "first"), Dies(5), name="after")
    with on_ray(FakeSession(there, is_restart=True)) as session:
        before, _ = fit(*saving(tmp_path / "second"), name="before", epochs=1)
        fit(*saving(tmp_path / "second"), name="after")
    assert session.beginnings == [
        (4, tmp_path / "second" / "before_epoch_0_iter_4.pth"),
        (4, tmp_path / "second" / "after_epoch_0_iter_4.pth"),
    ]
    assert session.fetches == ["checkpoint_000002_one", "checkpoint_000004_one"]
    assert before.progress.batches == 5


def test_another_call_resumes_only_with_resume_auto(fit: Fit, tmp_path: Path) -> None:
    there = tmp_path / "there"
    with on_ray(FakeSession(there, "one")):
        fit(*saving(tmp_path / "first"), epochs=1)
    with on_ray(FakeSession(there, "two")) as session:
        fit(*saving(tmp_path / "second"), epochs=1)
        fit(*saving(tmp_path / "third", resume="auto"))
    assert session.beginnings == [(0, None), (4, tmp_path / "third" / "run_epoch_0_iter_4.pth")]
    with on_ray(FakeSession(there, "three", is_restart=True)) as session:
        fit(*saving(tmp_path / "fourth"), epochs=1)
    assert session.beginnings == [(0, None)]


def test_a_second_training_of_a_process_does_not_resume_the_first(fit: Fit, tmp_path: Path) -> None:
    with on_ray(FakeSession(tmp_path / "there")) as session:
        fit(*saving(tmp_path / "here"), epochs=1)
        fit(*saving(tmp_path / "here"), epochs=1)
    assert session.beginnings == [(0, None), (0, None)]


def test_a_checkpoint_in_the_folder_is_not_fetched(fit: Fit, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    with on_ray(FakeSession(there)), pytest.raises(GoneError):
        fit(*saving(here), Dies(7))
    with on_ray(FakeSession(there, is_restart=True)) as session:
        fit(*saving(here))
    assert session.beginnings == [(6, here / "run_epoch_1_iter_6.pth")]
    assert session.fetches == []


def test_a_newer_checkpoint_in_the_folder_is_resumed_and_noted(fit: Fit, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    with on_ray(FakeSession(there)), pytest.raises(GoneError):
        fit(*saving(here, keep_last=2), Dies(7))
    shutil.rmtree(there / "checkpoint_000003_one")
    with on_ray(FakeSession(there, is_restart=True)) as session:
        result, _ = fit(*saving(here))
    path = here / "run_epoch_1_iter_6.pth"
    assert session.beginnings == [(6, path)]
    assert any(f"resumes {path}" in note for note in result.notes)


def test_a_newer_checkpoint_of_another_training_is_not_resumed(fit: Fit, tmp_path: Path) -> None:
    there, stale = tmp_path / "there", tmp_path / "stale"
    fit(*saving(stale))
    with on_ray(FakeSession(there)), pytest.raises(GoneError):
        fit(*saving(tmp_path / "first"), Dies(3))
    with on_ray(FakeSession(there, is_restart=True)) as session:
        result, _ = fit(*saving(stale, keep_last=None))
    assert session.beginnings == [(2, stale / "run_epoch_0_iter_2.pth")]
    assert result.last_checkpoint is not None
    newest, *_ = inventory.entries(stale, "run")[0]
    assert newest.path == result.last_checkpoint


def test_the_best_checkpoint_is_fetched_too(scripted: Make, batches: Make, sgd: Make, tmp_path: Path) -> None:
    def train(folder: Path, values: list[float], epochs: int) -> RunResult:
        savers = [SaveSchedule(Every(epochs=1)), Checkpoint(folder, keep_best=1, monitor="validation/loss"), LoadBest()]
        plugins = [ValidationSchedule(Every(epochs=1)), *savers, RayReport()]
        data = batches(2)
        return Trainer(plugins, device="cpu").fit(
            scripted(values), data, validation=data[:1], optimizer=sgd, epochs=epochs
        )

    with on_ray(FakeSession(tmp_path / "there")):
        train(tmp_path / "first", [1.0, 2.0], 2)
    with on_ray(FakeSession(tmp_path / "there", is_restart=True)):
        result = train(tmp_path / "second", [3.0], 3)
    best = tmp_path / "second" / "run_epoch_1_iter_2.pth"
    assert result.best_checkpoint == best
    assert any(f"checkpoint {best}, validation/loss 1" in line for line in result.notes)


def test_a_run_without_checkpoints_notes_the_consequence(fit: Fit, tmp_path: Path) -> None:
    with on_ray(FakeSession(tmp_path)):
        result, _ = fit(epochs=1)
    assert any("Add a Checkpoint" in note for note in result.notes)


def test_a_finished_training_has_nothing_left_to_do(fit: Fit, tmp_path: Path) -> None:
    with on_ray(FakeSession(tmp_path / "there")):
        fit(*saving(tmp_path / "first", Every(epochs=1)))
    with on_ray(FakeSession(tmp_path / "there", is_restart=True)) as session:
        result, _ = fit(*saving(tmp_path / "second", Every(epochs=1)))
    assert_facts(result.reason, "nothing left to do", "epoch 2", "step 10")
    assert session.beginnings == [(10, tmp_path / "second" / "run_epoch_2_iter_10.pth")]
    assert session.reports == []


# How a run exits.


class Warns(Plugin):
    """Gives a session a notice at a batch."""

    def __init__(self, session: FakeSession, at: int) -> None:
        self.session, self.at = session, at

    @on(BatchEnd)
    def warn(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == self.at:
            self.session.warned = PREEMPTED


def test_a_run_saves_before_its_machine_is_taken_away(fit: Fit, tmp_path: Path) -> None:
    _, whole = fit(*saving(tmp_path / "whole"))
    session = FakeSession(tmp_path / "there")
    with on_ray(session), pytest.raises(SystemExit) as caught:
        fit(*saving(tmp_path / "first", At(epochs=9)), Warns(session, 7))
    assert caught.value.code == 143
    assert session.exit_notice == PREEMPTED
    assert [facts["step"] for facts, _ in session.reports] == [8]
    with on_ray(FakeSession(tmp_path / "there", is_restart=True)) as session:
        _, rest = fit(*saving(tmp_path / "second"))
    assert session.beginnings == [(8, tmp_path / "second" / "run_epoch_1_iter_8.pth")]
    assert equal(whole, rest)


def test_a_validation_is_postponed_if_the_machine_is_taken_away(fit: Fit, tmp_path: Path) -> None:
    session = FakeSession(tmp_path / "there")

    class WarnsInValidation(Plugin):
        @on(ValidationBatchEnd)
        def warn(self, run: Run, event: ValidationBatchEnd) -> None:
            session.warned = PREEMPTED

    with on_ray(session), pytest.raises(SystemExit):
        fit(ValidationSchedule(Every(batches=3)), *saving(tmp_path / "here"), WarnsInValidation(), validates=True)
    facts = [facts for facts, names in session.reports if names][-1]
    assert facts["step"] == 4
    assert "validation/loss" not in facts


def test_a_run_that_ray_ends_stops(fit: Fit, tmp_path: Path) -> None:
    notice = Notice("tune", "stopped by the scheduler")
    with on_ray(FakeSession(tmp_path / "there", answers=(None, notice))) as session:
        result, _ = fit(*saving(tmp_path / "here"))
    assert (result.status, result.stopped_by, result.reason) == ("stopped", "tune", notice.reason)
    assert (result.progress.batches, result.exit_status) == (4, 0)
    assert session.exit_notice == notice
    assert len(session.reports) == 2


def test_a_run_that_stopped_for_another_reason_has_no_exit_notice(fit: Fit, tmp_path: Path) -> None:
    class Stops(Plugin):
        @on(BatchEnd)
        def stop(self, run: Run, event: BatchEnd) -> None:
            run.control.stop("done")

    with on_ray(FakeSession(tmp_path)) as session:
        result, _ = fit(Stops())
    assert result.stopped_by == "stops"
    assert session.exit_notice is None


# The rest.


@pytest.mark.parametrize("hosted", [False, True])
def test_it_conforms(tmp_path: Path, hosted: bool) -> None:
    if not hosted:
        check_plugin(RayReport)
        return
    with on_ray(FakeSession(tmp_path)):
        check_plugin(RayReport)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ("10", "least 0; got '10'"),
        (True, "got True"),
        (-1.0, "got -1.0"),
        (float("inf"), "got inf"),
        (float("nan"), "got nan"),
    ],
)
def test_options_are_checked(interval: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RayReport(interval)


def test_a_run_that_rolled_back_reports_again(fit: Fit, tmp_path: Path) -> None:
    class Returns(Plugin):
        done = False

        @on(BatchEnd)
        def go_back(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 5 and not self.done:
                self.done = True
                assert run.checkpoints.last is not None
                run.roll_back(reader.load(run.checkpoints.last), run.checkpoints.last)

    with on_ray(FakeSession(tmp_path / "there")) as session:
        result, _ = fit(*saving(tmp_path / "here"), Returns())
    assert [facts["step"] for facts, _ in session.reports] == [2, 4, 6, 8, 10]
    assert session.beginnings == [(0, None)]
    assert result.progress.batches == 10


def test_the_save_is_requested_again_after_a_roll_back(fit: Fit, tmp_path: Path) -> None:
    session = FakeSession(tmp_path / "there")

    class Returns(Plugin):
        @on(BatchEnd)
        def go_back(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 3 and session.warned is None:
                session.warned = PREEMPTED
                assert run.checkpoints.last is not None
                run.roll_back(reader.load(run.checkpoints.last), run.checkpoints.last)

    with on_ray(session), pytest.raises(SystemExit):
        fit(*saving(tmp_path / "here", At(batches=2)), Returns())
    assert session.exit_notice == PREEMPTED
    assert [facts["step"] for facts, _ in session.reports][-1] == 2


def test_a_replay_cannot_repeat_what_ray_said(fit: Fit, tmp_path: Path) -> None:
    fit(Recorder(tmp_path))
    [path] = tmp_path.glob("*.recording")
    report = replay(path, [RayReport()])
    assert "the answers of Ray" in str(report)
