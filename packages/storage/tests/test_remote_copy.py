"""Checkpoints in remote storage: uploaded, fetched, removed, and never lost in an outage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import heliograph as h
import pytest
import torch
from heliograph.__main__ import main
from heliograph.packages.storage.tests.flaky import ALL, FlakyStorage
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.plugins import discovery
from heliograph.spi import Store
from heliograph.tests.kit import adam, class_batches, linear_classifier
from heliograph.tuning import rehearse
from heliograph_storage import remote_copy

URL, REMOTE, LOCAL = "flaky://bucket/run", "bucket/run", Path("runs/flaky/bucket/run")


class Act(h.Plugin):
    """Calls functions at the ends of epochs."""

    affects_training = False

    def __init__(self, acts: dict[int, Any]) -> None:
        self.acts = acts

    @h.on(h.EpochEnd)
    def act(self, run: h.Run, event: h.EpochEnd) -> None:
        if act := self.acts.get(run.progress.epoch):
            act()


def train(
    epochs: int, url: str = URL, *, acts: dict[int, Any] | None = None, name: str = "run", **options: Any
) -> tuple[h.RunResult, torch.Tensor]:
    """Train with a checkpoint per epoch; return the result and the weights."""
    task = linear_classifier()
    checkpoint = h.Checkpoint(url, every=h.Every(epochs=1), **{"resume": "auto", **options})
    plugins = [h.RNGCapture(), h.ValidationSchedule(epochs=1), checkpoint, Act(acts or {})]
    batches = class_batches(2)
    fit = h.Trainer(plugins, device="cpu").fit
    result = fit(task, batches, validation=batches, optimizer=adam(0.5), epochs=epochs, name=name)
    return result, next(task.model.parameters()).detach().clone()


def name(epoch: int, run: str = "run") -> str:
    return f"{run}_epoch_{epoch}_iter_{2 * epoch}.pth"


def lose_machine() -> None:
    shutil.rmtree("runs")


def test_retention_keeps_the_same_files_on_both_sides(storage: FlakyStorage) -> None:
    result, _ = train(4, keep_last=2)

    assert storage.names(REMOTE) == [name(3), name(4)] == sorted(path.name for path in LOCAL.glob("*.pth"))
    assert all(storage.cat_file(f"/{REMOTE}/{file}") == (LOCAL / file).read_bytes() for file in (name(3), name(4)))
    assert f"checkpoints are copied from {LOCAL} to {URL}" in result.notes
    assert result.warnings == ()


def test_another_machine_continues_bit_for_bit(storage: FlakyStorage) -> None:
    train(2)
    lose_machine()
    result, weights = train(5)
    _, uninterrupted = train(5, "runs/elsewhere")

    assert torch.equal(weights, uninterrupted)
    assert f"fetched {LOCAL / name(2)} from {URL}" in result.notes
    assert storage.names(REMOTE) == [name(5)]


def test_another_machine_knows_the_best_and_removes_what_it_never_had(storage: FlakyStorage) -> None:
    options: dict[str, Any] = {
        "keep_last": 2,
        "keep_best": 1,
        "monitor": "validation/loss",
        "mode": "max",
    }  # the first is the best
    train(4, **options)
    assert storage.names(REMOTE) == [name(1), name(3), name(4)]
    lose_machine()
    result, _ = train(6, **options)

    assert result.best_checkpoint == LOCAL / name(1)
    assert storage.names(REMOTE) == [name(1), name(5), name(6)]


def test_pinned_checkpoints_stay_on_every_machine(storage: FlakyStorage) -> None:
    train(1)
    Store(LOCAL, "run").pin(LOCAL / name(1))
    train(2)
    lose_machine()
    train(4)

    assert storage.names(REMOTE) == ["run_epoch_1_iter_2.pinned", name(1), name(4)]


@pytest.mark.parametrize("operation", sorted(ALL - {"get_file"}))
def test_a_failed_operation_is_repeated(operation: str, storage: FlakyStorage) -> None:
    result, _ = train(4, acts={1: lambda: storage.failing.add(operation), 4: lambda: storage.failing.clear()})

    assert storage.names(REMOTE) == [name(4)]
    assert result.warnings == ()
    if operation != "ls":
        assert any("failures: ConnectionError" in note for note in result.notes)


def test_nothing_is_removed_before_a_newer_one_is_there(storage: FlakyStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    train(1)
    monkeypatch.setattr(remote_copy, "PATIENCE", 0.0)
    storage.failing.add("put_file")
    result, _ = train(4)

    assert [file for file in storage.names(REMOTE) if not file.startswith(".")] == [name(1)]
    assert [path.name for path in LOCAL.glob("*.pth")] == [name(4)]
    assert_each(result.warnings, ("Not uploaded", str(LOCAL), URL, name(4), "ConnectionError"))
    storage.failing.clear()
    monkeypatch.setattr(remote_copy, "PATIENCE", 60.0)
    result, _ = train(4, f"{URL}/")
    assert storage.names(REMOTE) == [name(4)]
    assert result.warnings == ()


def test_a_partial_upload_has_no_visible_name(storage: FlakyStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_copy, "PATIENCE", 0.0)
    storage.failing.add("put_file")
    train(1)

    assert storage.names(REMOTE) in ([], [".run.tmp"])  # depends on whether the thread tried before the end


def test_damaged_files_are_skipped(storage: FlakyStorage) -> None:
    train(3, keep_last=3)
    lose_machine()
    content = storage.cat_file(f"/{REMOTE}/{name(2)}")
    middle = len(content) // 2
    storage.pipe_file(f"/{REMOTE}/{name(2)}", content[:middle] + b"damage" + content[middle + 6 :])
    storage.pipe_file(f"/{REMOTE}/{name(3)}", storage.cat_file(f"/{REMOTE}/{name(3)}")[:-100])
    result, weights = train(4, keep_last=3)

    skipped = [note for note in result.notes if note.startswith("skipped")]
    assert_each(skipped, (f"{URL}/{name(3)}", "damaged"), (f"{URL}/{name(2)}", "damaged"))
    assert result.resume is not None
    assert result.resume.step == 2
    assert_each(result.warnings, ("Damaged", URL, name(2)))
    assert storage.names(REMOTE) == [name(2), name(3), name(4)]
    assert storage.cat_file(f"/{REMOTE}/{name(3)}") == (LOCAL / name(3)).read_bytes()
    assert torch.equal(weights, train(4, "runs/elsewhere")[1])


def test_without_storage_a_fresh_machine_does_not_start_over(storage: FlakyStorage) -> None:
    train(1)
    lose_machine()
    storage.failing.update(ALL)
    with pytest.raises(OSError, match=r"ConnectionError.*reach\. Nothing was started") as failure:
        train(2)
    assert failure.value.__suppress_context__  # the traceback of a storage has a hundred lines


def test_without_storage_a_run_continues_from_its_folder(
    storage: FlakyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_copy, "PATIENCE", 0.0)
    train(1)
    storage.failing.update(ALL)
    result, _ = train(2)

    assert result.resume is not None
    assert result.resume.step == 2
    assert_each(result.warnings, (URL, "cannot be listed"), ("Not uploaded", name(2)))


def test_another_training_of_the_name_is_not_overwritten(storage: FlakyStorage) -> None:
    train(2)
    lose_machine()
    with pytest.raises(ValueError, match="another training under the name 'run'") as error:
        train(1, resume=None)
    assert_facts(error.value, URL, name(2), "resume='auto'", "name=")
    train(1, resume=None, name="second")
    train(3)
    assert storage.names(REMOTE) == [name(3), name(1, "second")]


def test_an_older_one_by_its_url_is_a_branch(storage: FlakyStorage) -> None:
    train(3, keep_last=3)
    lose_machine()
    result, _ = train(3, resume=f"{URL}/{name(1)}", keep_last=3)

    assert result.resume is not None
    assert result.resume.step == 2
    assert storage.names(REMOTE) == [name(2, "run-2"), name(3, "run-2"), name(1), name(2), name(3)]
    with pytest.raises(FileNotFoundError, match=r"run_epoch_7.*run_epoch_.*\.pth\. Nothing"):
        train(3, resume=f"{URL}/{name(7)}")
    with pytest.raises(ValueError, match=r"of run 'run'.*'second'.*name='run'"):
        train(3, resume=f"{URL}/{name(1)}", name="second")
    with pytest.raises(ValueError, match="is not in flaky://bucket/run, the URL of Checkpoint"):
        train(3, resume="flaky://bucket/else/a.pth")


def test_shards_are_before_their_manifest(storage: FlakyStorage, tmp_path: Path) -> None:
    from heliograph.core.checkpoint.storage.files import digest_of

    train(1, "runs/source")
    store = Store(LOCAL, "run")
    store.open()
    state = {**store.load(Path("runs/source") / name(1)), "shards": {}}
    folder = store.begin_shards(100)
    (folder / "__0_0.distcp").write_bytes(b"shard")
    entry = store.save("a.pth", state, shards={"__0_0.distcp": digest_of(folder / "__0_0.distcp")})
    copy = remote_copy.RemoteCopy(URL, keep_last=1, keep_best=0, monitor=None)
    uploads = remote_copy.Uploads(copy._remote, store, copy._reasons_to_keep)
    uploads.request(entry.training, set())

    assert uploads.end() == []
    assert entry.shards is not None
    assert storage.names(REMOTE) == [f"{entry.shards[0]}/__0_0.distcp", f"{entry.shards[0]}/digests.json", "a.pth"]
    assert [*storage.store][-1].endswith("a.pth")
    store.close()
    lose_machine()
    again = Store(LOCAL, "run")
    again.open()
    copy.fetch(again, "auto")
    assert again.verify(LOCAL / "a.pth").shards == entry.shards
    again.close()


def test_the_command_lists_a_url(storage: FlakyStorage, capsys: pytest.CaptureFixture[str]) -> None:
    train(2, keep_last=2)
    storage.pipe_file(f"/{REMOTE}/other.pth", b"damage")
    storage.pipe_file(f"/{REMOTE}/{name(1)}".replace(".pth", ".pinned"), b"")
    assert main(["checkpoint", "inspect", f"{URL}/", "--json"]) == 1
    newest, older, other = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (newest["path"], newest["marks"]) == (f"{URL}/{name(2)}", [])
    assert newest["bytes"] == (LOCAL / name(2)).stat().st_size
    assert (older["path"], older["marks"], older["saved_at"][10]) == (f"{URL}/{name(1)}", ["pinned"], "T")
    assert_facts(other["error"], "other.pth", "damaged")
    assert main(["checkpoint", "inspect", URL]) == 0
    head, newest, older, problem = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["FILE", "RUN", "EPOCH", "BATCH", "STEP"]
    assert newest.split()[:5] == [name(2), "run", "2", "0", "4"]
    assert older.split()[0] == name(1)
    assert_facts(problem, "other.pth", "damaged")
    storage.failing.add("ls")
    assert main(["checkpoint", "inspect", URL]) == 1
    assert_facts(capsys.readouterr().err, URL, "ConnectionError")


def test_two_ranks_upload_once_and_both_resume(ranks: Any, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    first = ranks(2).run(on_ranks, url, str(tmp_path / "one"), 1)
    (result, weights), (other, same) = ranks(2).run(on_ranks, url, str(tmp_path / "two"), 2)

    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [name(2)]
    assert (result, other) == ((2, ()), (2, ()))
    assert torch.equal(weights, same)
    assert [facts[0] for facts, _ in first] == [None, None]


def on_ranks(url: str, folder: str, epochs: int) -> tuple[tuple[int | None, tuple[str, ...]], torch.Tensor]:
    """Train on one of two ranks, which have different local folders."""
    place = Path(folder, os.environ.get("RANK", "0"))
    place.mkdir(parents=True)
    os.chdir(place)
    task = linear_classifier()
    checkpoint = h.Checkpoint(url, every=h.Every(epochs=1), resume="auto")
    trainer = h.Trainer([h.RNGCapture(), checkpoint], engine=h.DDPEngine(device="cpu"))
    result = trainer.fit(task, class_batches(4), optimizer=adam(), epochs=epochs)
    step = None if result.resume is None else result.resume.step
    return (step, result.warnings), next(task.model.parameters()).detach().clone()


KILLED = """
import os, signal
from fsspec.implementations.local import LocalFileSystem
from heliograph.packages.storage.tests.test_remote_copy import train

move = LocalFileSystem.mv
def kill(self, source, target, **options):
    if "epoch_2" in target:
        os.kill(os.getpid(), signal.SIGKILL)
    move(self, source, target, **options)

LocalFileSystem.mv = kill
train(3, "file://{store}")
"""


def test_a_run_killed_in_an_upload_continues(tmp_path: Path) -> None:
    store = tmp_path / "store"
    killed = subprocess.run([sys.executable, "-c", KILLED.format(store=store)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in store.iterdir()) == [".run.tmp", name(1)]
    lose_machine()
    _, weights = train(3, f"file://{store}")

    assert sorted(path.name for path in store.iterdir()) == [name(3)]
    assert torch.equal(weights, train(3, "runs/elsewhere")[1])


def test_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("moto.server", reason="moto[server] is not installed").ThreadedMotoServer
    s3fs = pytest.importorskip("s3fs")
    service = server(ip_address="127.0.0.1", port=0, verbose=False)
    service.start()
    try:
        host, port = service.get_host_and_port()
        options = {"key": "a", "secret": "secret-b", "endpoint_url": f"http://{host}:{port}"}
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        with pytest.raises(FileNotFoundError, match=r"s3://bucket/run cannot be listed.*bucket does not exist"):
            train(1, "s3://bucket/run")
        files = s3fs.S3FileSystem(**options)
        files.mkdir("bucket")
        train(2, "s3://bucket/run", keep_last=2)
        lose_machine()
        result, weights = train(3, "s3://bucket/run", keep_last=2)
        files.invalidate_cache()
        assert files.ls("bucket/run", detail=False) == [f"bucket/run/{name(2)}", f"bucket/run/{name(3)}"]
        assert torch.equal(weights, train(3, "runs/elsewhere")[1])
        assert "secret-b" not in str((result, result.notes, result.warnings))
        assert b"secret-b" not in files.cat_file(f"bucket/run/{name(3)}")
    finally:
        service.stop()


@pytest.mark.parametrize(
    ("url", "kind", "facts"),
    [
        ("s4://bucket/run", ValueError, ("s4://bucket/run", "no protocol 's4'", "s3")),
        (Path("s3://bucket/run"), ValueError, ("s3:/bucket/run", "string")),
        ("s3://", ValueError, ("s3://", "bucket/run")),
        ("ftp://user:pass@host/run", ValueError, ("ftp://host/run", "@", "FSSPEC_FTP")),
        ("memory://run?key=pass", ValueError, ("memory://run", "?")),
    ],
)
def test_a_wrong_url_is_refused(url: str | Path, kind: type[Exception], facts: tuple[str, ...]) -> None:
    with pytest.raises(kind) as error:
        h.Checkpoint(url)
    assert_facts(error.value, *facts)
    assert len(str(error.value)) < 200
    assert "pass@" not in str(error.value)
    assert "key=pass" not in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match="pip install gcsfs"):
        h.Checkpoint("gs://bucket/run")


def test_without_this_package_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def discover(group: str = discovery.GROUP) -> list[discovery.Discovered]:
        return [] if group == "heliograph.storage" else installed(group)

    installed = discovery.discover
    monkeypatch.setattr(discovery, "discover", discover)
    with pytest.raises(LookupError, match=r"pip install \./packages/storage"):
        h.Checkpoint(URL)


def test_curves_and_rehearsals_stay_here(storage: FlakyStorage) -> None:
    plugins = h.standard(URL, without=("progress", "early_stopping"))
    trainer = h.Trainer(plugins, device="cpu")
    task, batches = linear_classifier(), class_batches(2)
    trainer.fit(task, batches, validation=batches, optimizer=adam(), epochs=1)

    assert storage.names(REMOTE) == [name(1)]
    assert [path.name[:6] for path in LOCAL.glob("events*")] == ["events"]
    rehearse(trainer, task, batches, validation=batches, optimizer=adam(), epochs=3)
    assert storage.names(REMOTE) == [name(1)]
    trainer.fit(task, batches, validation=batches, optimizer=adam(), epochs=1)
    assert storage.names(REMOTE) == [name(1, "run-2"), name(1)]
