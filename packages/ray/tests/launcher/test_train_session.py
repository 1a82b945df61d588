"""TrainSession: its calls of `ray.train`, which is a fake here, and its messages to the caller."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from heliograph.events import Progress
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_ray.launcher import worker
from heliograph_ray.launcher.mailbox import Commands, Message, ProgressUpdate, Reported, Resumed
from heliograph_ray.launcher.worker import TrainSession
from heliograph_ray.session import Notice
from heliograph_ray.storage import report_name
from pyarrow.fs import LocalFileSystem  # type: ignore[import-untyped]


@dataclass
class FakeCheckpoint:
    """A fake of `ray.train.Checkpoint`."""

    path: str

    @classmethod
    def from_directory(cls, path: Path) -> FakeCheckpoint:
        return cls(str(path))


@dataclass
class FakeTrain:
    """A fake of `ray.train` for one rank."""

    storage: Path
    rank: int = 0
    skips: bool = False
    reports: list[tuple[Any, ...]] = field(default_factory=list)
    newest: FakeCheckpoint | None = None
    known: tuple[str, ...] = ()
    Checkpoint = FakeCheckpoint

    def get_context(self) -> Any:
        storage = SimpleNamespace(storage_filesystem=LocalFileSystem(), experiment_fs_path=str(self.storage))
        return SimpleNamespace(get_world_rank=lambda: self.rank, get_storage=lambda: storage)

    def report(
        self, metrics: dict[str, float], checkpoint: FakeCheckpoint | None, checkpoint_dir_name: str | None
    ) -> None:
        self.reports.append((metrics, checkpoint_dir_name))
        if checkpoint is not None and checkpoint_dir_name is not None and not self.skips:
            shutil.copytree(checkpoint.path, self.storage / checkpoint_dir_name)
            self.newest = FakeCheckpoint(str(self.storage / checkpoint_dir_name))

    def get_all_reported_checkpoints(self) -> list[Any]:
        return [SimpleNamespace(checkpoint=FakeCheckpoint(str(self.storage / name))) for name in self.known]

    def get_checkpoint(self) -> FakeCheckpoint | None:
        return self.newest


class FakeChannel:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.commands = Commands()
        self.progress: ProgressUpdate | None = None

    def send(self, message: Message) -> None:
        self.sent.append(message)


class Worker:
    """A session with a fake of Ray and of the channel."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        storage: Path,
        call: str = "one",
        *,
        rank: int = 0,
        preemption: Any = None,
        **options: bool,
    ) -> None:
        self.train, self.channel = FakeTrain(storage, rank), FakeChannel()
        self.preemption = preemption or SimpleNamespace(preemption_info=None)
        inner = SimpleNamespace(get_train_context=lambda: SimpleNamespace(preemption_context=self.preemption))
        modules = {"ray.train": self.train, "ray.train.v2._internal.execution.context": inner}
        modules["ray"] = SimpleNamespace(__version__="9.9")
        patch.setattr(worker, "require", lambda module, purpose, extra: modules[module])
        channel: Any = self.channel
        self.session = TrainSession(call, channel, is_restart=False, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "a.pth").write_bytes(b"1")
    return path


def test_reports_are_numbered_and_sent_to_the_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "there" / "checkpoint_000007_former").mkdir(parents=True)
    worker = Worker(monkeypatch, tmp_path / "there")
    worker.train.known = ("checkpoint_000007_former",)
    assert worker.session.report({"loss": 1.0}, folder) is None
    assert worker.session.report({"loss": 2.0}, None) is None
    assert worker.session.report({"loss": 3.0}, folder) is None
    assert worker.train.reports == [
        ({"loss": 1.0}, "checkpoint_000008_one"),
        ({"loss": 2.0}, None),
        ({"loss": 3.0}, "checkpoint_000009_one"),
    ]
    there = tmp_path / "there"
    assert worker.channel.sent == [
        Reported({"loss": 1.0}, str(there / "checkpoint_000008_one")),
        Reported({"loss": 2.0}, None),
        Reported({"loss": 3.0}, str(there / "checkpoint_000009_one")),
    ]


def test_folders_of_a_dead_process_are_removed_after_a_newer_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    there = tmp_path / "there"
    for number in (3, 4, 5):
        (there / f"checkpoint_00000{number}_one").mkdir(parents=True)
    worker = Worker(monkeypatch, there)
    worker.train.known = ("checkpoint_000003_one", "checkpoint_000004_one")
    assert len(worker.session.stored_reports()) == 3
    worker.session.report({}, None)
    assert (there / "checkpoint_000005_one").exists()
    worker.session.report({}, folder)
    assert sorted(path.name for path in there.iterdir()) == [
        "checkpoint_000003_one",
        "checkpoint_000004_one",
        "checkpoint_000006_one",
    ]


def test_only_the_main_rank_sends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = Worker(monkeypatch, tmp_path, rank=1)
    worker.channel.commands = Commands(stop=Notice("tune", "enough"))
    assert worker.session.report({}, None) is None
    assert (worker.train.reports, worker.channel.sent) == ([({}, None)], [])


def test_a_report_returns_the_callers_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = Worker(monkeypatch, tmp_path)
    worker.channel.commands = Commands(stop=Notice("tune", "enough"))
    assert worker.session.report({}, None) == Notice("tune", "enough")


def test_a_checkpoint_that_ray_does_not_store_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    worker = Worker(monkeypatch, tmp_path / "there")
    worker.session.report({}, folder)
    worker.train.skips = True
    with pytest.raises(RuntimeError, match=r"store .*_000002_one'; .*_000001_one"):
        worker.session.report({}, folder)


def test_an_error_of_the_storage_has_a_note_with_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left")

    worker = Worker(monkeypatch, tmp_path / "there")
    worker.train.report = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space left") as caught:
        worker.session.report({}, folder)
    assert_each(caught.value.__notes__, (report_name(1, "one"), f"{tmp_path}/there"))


def test_own_reports_are_those_of_this_call_before_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    there = tmp_path / "there"
    for number, call in enumerate(("former", "one"), 1):
        (there / report_name(number, call)).mkdir(parents=True)
    worker = Worker(monkeypatch, there, "one")
    worker.train.known = (report_name(1, "former"), report_name(2, "one"))
    worker.session.report({}, folder)
    assert [(each.name, each.is_own) for each in worker.session.stored_reports()] == [
        ("checkpoint_000003_one", False),
        ("checkpoint_000002_one", True),
        ("checkpoint_000001_former", False),
    ]


def test_what_other_calls_of_kept_workers_have_stored_is_not_to_be_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "there" / report_name(1, "former")).mkdir(parents=True)
    worker = Worker(monkeypatch, tmp_path / "there", "one", has_own_storage=True)
    worker.session.report({}, folder)
    assert [each.name for each in worker.session.stored_reports()] == ["checkpoint_000002_one"]


def test_a_preemption_is_a_notice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = Worker(monkeypatch, tmp_path)
    assert worker.session.notice() is None
    worker.preemption.preemption_info = SimpleNamespace(preempted_ranks=[0, 2], deadline_ms=5500)
    assert_facts(worker.session.notice(), "'ray'", "rank 0, 2", "5.5")
    worker.preemption.preemption_info = SimpleNamespace(preempted_ranks=[1], deadline_ms=None)
    assert_facts(worker.session.notice(), "'ray'", "rank 1")


def test_another_version_of_ray_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"Ray 9\.9.*>=2\.60"):
        Worker(monkeypatch, tmp_path, preemption=object())


def test_the_progress_is_sent_by_the_channel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker, progress = Worker(monkeypatch, tmp_path), Progress()
    worker.session.record_start("run", progress, None)
    for _ in range(5):
        progress.batch += 1
        worker.session.update_progress("run", progress)
    assert (worker.channel.sent, worker.channel.progress) == (
        [Resumed("run", 0, 0, None)],
        ProgressUpdate("run", 5, 0, 0),
    )
