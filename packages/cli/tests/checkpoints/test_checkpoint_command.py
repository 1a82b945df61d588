"""The command line on checkpoints."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import closing
from math import nan
from pathlib import Path
from subprocess import run as call
from typing import Any

import pytest
import torch
from heliograph.__main__ import main
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.schema import SCHEMA
from heliograph.core.checkpoint.storage import Entry, Store, reader
from heliograph.tests.kit import damage
from heliograph.tests.messages import assert_facts, has_facts
from heliograph.tests.stores import seal, seal_as, unseal

OLD, OTHER = "golden_epoch_1_iter_6.pth", "golden_epoch_1_iter_4.pth"
Make = Callable[..., Any]
Names = Callable[[], list[str]]


class Said:
    """What a command printed."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self.out = self.error = ""

    def __call__(self, *words: object) -> int:
        status = main(["checkpoint", *map(str, words)])
        self.out, self.error = self._capture.readouterr()
        return status


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


@pytest.fixture
def write(state: Make, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a checkpoint, whose loss it is given, into the test's folder."""

    def make(step: int, loss: float, *, name: str = "run", judged: bool = False, **more: Any) -> Path:
        progress = {"epoch": step // 10, "batch": step % 10, "steps": step, "samples": 4 * step, "validations": 1}
        cut = state(
            step,
            name=name,
            progress=progress | {"earlier_batches": 0, "earlier_seconds": 1.5},
            metrics={"validation/loss": loss, "validation/accuracy": 1 - loss},
            optimizers={"optimizer": {"state": {}, "param_groups": [{}, {}]}},
            optimizer_kinds={"optimizer": "SGD"},
            plugins={"early_stopping": {"best": 0.5, "count": 1}, "bar": {}},
            **more,
        )
        store = Store(tmp_path, name)
        store.open()
        judged_by = ("validation/loss", "min", loss) if judged else None
        try:
            return store.save(f"{name}_{step}.pth", cut, judged_by=judged_by).path
        finally:
            store.close()

    return make


def test_json_has_a_row_for_each_checkpoint(command: Said, write: Make, tmp_path: Path) -> None:
    path = write(12, nan, judged=True)
    write(14, 0.5).with_suffix(".pinned").touch()
    assert command("inspect", tmp_path, "--json") == 0
    facts = json.loads(command.out)
    assert facts["schema"] == "heliograph.checkpoints/1"
    newest, first = facts["checkpoints"]
    assert (first["path"], first["run_name"], first["progress"]["steps"]) == (str(path), "run", 12)
    assert (first["metrics"]["validation/loss"], first["verified"], first["error"]) == ("nan", False, None)
    assert (first["saved_at"], newest["marks"]) == ("1970-01-01T00:16:52Z", ["pinned"])
    assert command("verify", path, "--json") == 0
    (row,) = json.loads(command.out)["checkpoints"]
    assert row["verified"]
    assert row["contents"]["optimizers"] == ["optimizer: SGD, 2 groups"]


@pytest.mark.parametrize("words", [("verify",), ("export", "out.pth"), ("prune", "--keep-last", "1"), ("migrate",)])
def test_only_inspect_reads_urls(command: Said, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(words[0], "s3://bucket/run", *words[1:])
    assert_facts(capsys.readouterr().err, "s3://bucket/run", "inspect")
    assert command("inspect", "s3://bucket/run/a.pth") == 1
    assert_facts(command.error, "s3://bucket/run/a.pth is a file", "folder")


def test_json_has_the_error_of_a_damaged_checkpoint(command: Said, write: Make, tmp_path: Path) -> None:
    damage(write(12, 0.5))
    torch.save({}, tmp_path / "plain.pth")
    assert command("inspect", tmp_path, "--json") == 0  # the digests are not verified
    assert [row["foreign"] for row in json.loads(command.out)["checkpoints"]] == [True, False]
    assert command("verify", tmp_path, tmp_path / "nowhere", "--json") == 1
    plain, damaged, missing = json.loads(command.out)["checkpoints"]
    assert_facts(plain["error"], "no manifest")
    assert (damaged["verified"], damaged["run_name"]) == (False, "run")
    assert command("verify", damaged["path"]) == 1
    assert command.error == f"heliograph checkpoint: {damaged['error']}\n"
    assert_facts(missing["error"], "nowhere")


def test_inspect_reports_what_a_checkpoint_holds(command: Said, write: Make) -> None:
    path = write(12, 0.25, judged=True)
    path.with_suffix(".pinned").touch()
    path.with_name("run.best").write_text("run_12.pth\n")
    assert command("inspect", path) == 0
    lines = command.out.splitlines()
    assert lines[0] == str(path)
    facts = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines[1:]]
    reported = dict(fact for fact in facts if len(fact) == 2)
    assert reported["layout"] == f"schema {SCHEMA}"
    assert reported["run"] == "run"
    assert_facts(reported["position"], "epoch 1", "batch 2", "step 12")
    assert_facts(reported["so far"], "48 samples", "1 validations", "1.5 s")
    assert reported["marks"] == "best, pinned"
    assert reported["versions"] == "heliograph 0"
    assert reported["judged by"] == "validation/loss (min) 0.25"
    assert_facts(reported["modules"], "model", "50 values", "1 tensors")
    assert reported["optimizers"] == "optimizer: SGD, 2 groups"
    assert reported["plugins"] == "bar: no state"
    assert lines[-1].strip() == "early_stopping: best, count"


def test_inspect_reports_the_origin_of_a_fork(command: Said, write: Make) -> None:
    origin = {"training": "abc", "step": 9, "recording": "runs/y"}
    assert command("inspect", write(12, 0.25, forked_from=origin)) == 0
    assert "fork of     training abc at step 9, runs/y" in command.out


@pytest.mark.parametrize("changes", [{"modules": 3}, {"metrics": {"a": "b"}}, {"versions": None}, {"progress": {}}])
def test_inspect_refuses_contents_of_other_types(
    command: Said, state: Make, tmp_path: Path, changes: dict[str, Any]
) -> None:
    torch.save(state(**changes), tmp_path / "a.pth")
    seal_as(tmp_path / "a.pth", Entry(tmp_path / "a.pth", "run", 1, 1000.0, 0, ""))
    assert command("inspect", tmp_path / "a.pth") == 1
    assert "is not a checkpoint" in command.error


def test_a_forged_manifest_is_an_error_and_the_file_is_kept(command: Said, write: Make, tmp_path: Path) -> None:
    write(1, 0.5)
    path = write(2, 0.5)
    seal(path, lambda size, sha256: b'{"format": "heliograph checkpoint"}')
    assert command("inspect", tmp_path) == command("verify", tmp_path) == 1
    assert command("prune", tmp_path, "--keep-last", "1") == 0
    assert path.exists()


def test_odd_files_beside_checkpoints_are_ignored(command: Said, write: Make, tmp_path: Path) -> None:
    write(1, 0.5)
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "run.best").write_bytes(b"\xff\xfe\0/../x\x1b[31m")
    assert command("inspect", tmp_path) == command("verify", tmp_path) == 0
    assert command("prune", tmp_path, "--keep-last", "1") == 0


def test_names_do_not_steer_the_terminal(command: Said, write: Make, tmp_path: Path) -> None:
    name = "\x1b[2J\u202eevil\nintact   everything"
    with closing(Store(tmp_path, name)) as store:
        store.open()
        saved = reader.load(write(4, 0.5)) | {"run_name": name, "modules": {"\x07": {}}}
        entry = store.save("a.pth", saved)
    assert command("inspect", tmp_path, entry.path) == 0
    assert "\\x1b[2J\\u202eevil" in command.out
    assert all(line.isprintable() for line in command.out.split("\n"))
    assert command("verify", tmp_path) == 0
    assert all(line.isprintable() for line in command.out.split("\n"))


def test_inspect_refuses_checkpoints_of_helios(command: Said, old: Path) -> None:
    assert command("inspect", old / OLD) == 1
    assert "checkpoint migrate" in command.error


def test_inspect_lists_a_folder_by_run_the_newest_first(command: Said, write: Make, old: Path, tmp_path: Path) -> None:
    write(1, 0.5, name="b")
    write(9, 0.5)
    write(10, nan)
    (old / OTHER).unlink()
    assert command("inspect", tmp_path) == 0
    head, *rows, unreadable = command.out.splitlines()
    assert head.split() == ["FILE", "RUN", "EPOCH", "BATCH", "STEP", "SAVED", "SIZE", "MARKS", "METRICS"]
    assert [row.split()[0] for row in rows] == ["b_1.pth", "run_10.pth", "run_9.pth"]
    assert rows[1].split()[1:5] == ["run", "1", "0", "10"]
    assert rows[1].endswith("validation/accuracy=nan validation/loss=nan")
    assert unreadable.startswith(f"{tmp_path / OLD} has no manifest")


def test_inspect_fits_the_terminal(command: Said, write: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(12, 0.25, name="x" * 60)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    assert command("inspect", tmp_path) == 0
    head, row = command.out.splitlines()
    assert head.split()[0] == "FILE"
    assert "STEP" in head
    assert "RUN" not in head
    assert max(len(head), len(row)) <= 70
    assert "xxx..." in row.split()[0]
    assert row.split()[0].endswith(".pth")


@pytest.mark.parametrize("words", [("inspect",), ("verify",), ("export",), ("prune", "--keep-last", "1")])
def test_a_missing_folder_is_named(command: Said, words: tuple[str, ...], tmp_path: Path) -> None:
    out = [tmp_path / "out.pth"] * (words == ("export",))
    assert command(*words, tmp_path / "gone", *out) == 1
    assert command.error.endswith(f"{tmp_path / 'gone'} does not exist.\n")


def test_inspect_reports_what_a_damaged_checkpoint_holds_and_that_it_is_damaged(command: Said, write: Make) -> None:
    path = write(12, 0.25)
    damage(path)
    assert command("inspect", path) == 1
    assert_facts(command.out, "position", "epoch 1", "batch 2", "step 12")
    assert_facts(command.error, "heliograph checkpoint: ", path, "damaged")


def test_inspect_marks_in_a_folder_what_has_another_size(command: Said, write: Make, tmp_path: Path) -> None:
    write(1, 0.5)
    cut = write(2, 0.5)
    cut.write_bytes(cut.read_bytes()[:-1])
    assert command("inspect", tmp_path) == 1
    _, first, reason = command.out.splitlines()
    assert reason.startswith(f"{cut} is damaged")
    assert "damaged" not in first
    assert_facts(command.error, tmp_path, "damaged", ": run_2.pth.\n")


def test_inspect_lists_in_a_folder_what_cannot_be_read(command: Said, write: Make, tmp_path: Path) -> None:
    write(1, 0.5)
    write(2, 0.5).write_text("torn")
    assert command("inspect", tmp_path) == 1
    assert f"{tmp_path / 'run_2.pth'}" in command.out.splitlines()[-1]
    assert_facts(command.error, tmp_path, "damaged", ": run_2.pth.\n")


@pytest.mark.parametrize("words", [("inspect",), ("verify",), ("migrate",), ("prune", "--keep-last", "1")])
def test_a_folder_that_this_user_may_not_read_is_named(
    command: Said, write: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    write(1, 0.5)

    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert command(words[0], tmp_path, *words[1:]) == 1
    assert command.out == ""
    assert "Permission denied" in command.error
    assert str(tmp_path) in command.error


@pytest.mark.parametrize("words", [("inspect",), ("verify",), ("migrate",), ("consolidate",), ("prune",)])
def test_an_empty_path_is_not_the_current_folder(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """As an unset variable of a shell gives."""
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", *words, ""])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("got an empty text")


@pytest.mark.parametrize("name", ["inspect", "verify", "migrate"])
def test_what_is_not_there_is_reported(command: Said, tmp_path: Path, name: str) -> None:
    assert command(name, tmp_path / "a.pth", tmp_path) == 1
    assert command.out == ""
    one, other = command.error.splitlines()
    assert_facts(one, "no checkpoint", tmp_path / "a.pth")
    assert_facts(other, "heliograph checkpoint: ", "no checkpoint")
    assert str(tmp_path) in other


def test_verify_lists_the_whole_and_the_bad(command: Said, write: Make, tmp_path: Path) -> None:
    write(1, 0.5)
    damage(write(2, 0.5))
    write(3, 0.5).write_bytes(b"")
    unseal(write(4, 0.5))
    (tmp_path / "results.json").write_text('{"accuracy": 1.0}')
    assert command("verify", tmp_path) == 1
    assert_facts(command.out, "intact", tmp_path / "run_1.pth", "'run'", "step 1")
    assert [re.search(r"run_\d\.pth", line)[0] for line in command.error.splitlines()] == [  # type: ignore[index]
        "run_2.pth",
        "run_3.pth",
        "run_4.pth",
    ]
    assert "damaged" in command.error.splitlines()[0]
    assert command("verify", tmp_path / "run_1.pth") == 0


def test_verify_refuses_what_is_not_safe_to_load(command: Said, write: Make) -> None:
    path = write(1, 0.5)
    entry = storage.read_manifest(path)
    torch.save({"evil": Path}, path)
    seal_as(path, entry)
    assert command("verify", path) == 1
    assert f"The checkpoint {path}" in command.error
    assert "it is intact" in command.error
    assert "cannot be read: UnpicklingError" in command.error


@pytest.mark.parametrize("words", [["verify"], ["inspect"], ["export", "--trained"]])
def test_a_lack_of_memory_is_said_and_is_no_damage(
    command: Said, write: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    path = write(1, 0.5)

    def load(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", load)
    assert command(*words, path, *([tmp_path / "out.pth"] if words[0] == "export" else [])) == 1
    assert f"memory The checkpoint {path}" in command.error
    assert "is damaged" not in command.error


def test_migrate_prints_what_it_changed(command: Said, old: Path, tmp_path: Path) -> None:
    assert command("migrate", "--dry-run", tmp_path) == 0
    assert f"{tmp_path / OLD}: would be migrated" in command.out
    assert command("migrate", tmp_path) == 0
    assert_facts(
        command.out, tmp_path / OLD, "migrated", f"schema {SCHEMA}", f"{OLD}.backup", "Helios 1.1.0", "'golden'"
    )
    assert command("migrate", tmp_path / OLD) == 0
    assert_facts(command.out, tmp_path / OLD, "up to date", f"schema {SCHEMA}")


def test_migrate_continues_after_a_bad_one(command: Said, old: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_text("nothing")
    assert command("migrate", "--no-backup", tmp_path) == 1
    assert command.error.startswith(f"heliograph checkpoint: {tmp_path / 'a.pth'} is damaged")
    assert reader.load(tmp_path / OLD)["schema"] == SCHEMA
    assert not list(tmp_path.glob("*.backup"))


def test_prune_keeps_the_newest_the_best_and_the_pinned(command: Said, write: Make, tmp_path: Path) -> None:
    for step, loss in ((1, 0.1), (2, 0.3), (3, 0.2), (4, 0.4), (5, nan), (6, 0.9)):
        write(step, loss)
    (tmp_path / "run_2.pinned").touch()
    options = ("--keep-last", 1, "--keep-best", 2, "--monitor", "validation/loss")
    assert command("prune", tmp_path, *options, "--dry-run") == 0
    assert command.out.splitlines()[1:3] == [
        f"would be removed {tmp_path / 'run_5.pth'}",
        f"would be removed {tmp_path / 'run_4.pth'}",
    ]
    assert len(list(tmp_path.glob("*.pth"))) == 6
    assert command("prune", tmp_path, *options) == 0
    assert command.out.splitlines() == [
        f"kept     {tmp_path / 'run_6.pth'}: among the newest",
        f"removed  {tmp_path / 'run_5.pth'}",
        f"removed  {tmp_path / 'run_4.pth'}",
        f"kept     {tmp_path / 'run_3.pth'}: among the best by validation/loss",
        f"kept     {tmp_path / 'run_2.pth'}: pinned",
        f"kept     {tmp_path / 'run_1.pth'}: among the best by validation/loss",
    ]
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["run_1.pth", "run_2.pth", "run_3.pth", "run_6.pth"]


def test_prune_by_a_metric_that_grows(command: Said, write: Make, tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
        write(step, loss)
    options = ("--keep-last", 1, "--keep-best", 1, "--monitor", "validation/accuracy", "--mode", "max")
    assert command("prune", tmp_path, *options) == 0
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["run_2.pth", "run_3.pth"]


def test_prune_believes_what_a_run_was_judged_by(command: Said, write: Make, tmp_path: Path) -> None:
    write(1, 0.5, judged=True)
    write(2, 0.1)  # of other weights: it was measured before
    write(3, 0.6, judged=True)
    write(4, 0.6)
    options = ("--keep-last", 1, "--keep-best", 1, "--monitor", "validation/loss")
    assert command("prune", tmp_path, *options) == 0
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["run_1.pth", "run_4.pth"]


def test_prune_spares_what_the_run_calls_its_best(command: Said, write: Make, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(step, 0.5)
    (tmp_path / "run.best").write_text("run_1.pth\n")
    assert command("prune", tmp_path, "--keep-last", 1) == 0
    assert any(has_facts(line, "kept", tmp_path / "run_1.pth", "by its run") for line in command.out.splitlines())
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["run_1.pth", "run_3.pth"]


def test_a_damaged_checkpoint_counts_for_nothing(command: Said, write: Make, tmp_path: Path) -> None:
    for step in (1, 2):
        write(step, 0.5)
    damage(write(3, 0.5))
    assert command("prune", tmp_path, "--keep-last", 1) == 0
    damaged, newest, removed = command.out.splitlines()
    assert_facts(damaged, "kept", tmp_path / "run_3.pth", "damaged")
    assert_facts(newest, "kept", tmp_path / "run_2.pth", "newest")
    assert removed == f"removed  {tmp_path / 'run_1.pth'}"


def test_prune_deals_with_every_run_or_with_one(command: Said, write: Make, tmp_path: Path) -> None:
    for step in (1, 2):
        write(step, 0.5, name="a")
        write(step, 0.5, name="b")
    assert command("prune", tmp_path, "--keep-last", 1, "--run", "a") == 0
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["a_2.pth", "b_1.pth", "b_2.pth"]
    assert command("prune", tmp_path, "--keep-last", 1) == 0
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["a_2.pth", "b_2.pth"]


def test_prune_keeps_something_of_every_training_of_a_name(
    command: Said, opened: Make, state: Make, tmp_path: Path
) -> None:
    store = opened()
    for step, name in ((1, "run"), (2, "run-2"), (3, "run-2"), (4, "run")):
        store.write_as("12"[name == "run"] * 32, name)
        store.save(f"{name}_{step}.pth", state(step, training_id="12"[name == "run"] * 32))
    store.close()
    assert command("prune", tmp_path, "--keep-last", 1, "--run", "run-2") == 0
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["run-2_3.pth", "run_1.pth", "run_4.pth"]
    assert command("prune", tmp_path, "--keep-last", 1) == 0
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["run-2_3.pth", "run_4.pth"]


def test_prune_removes_a_damaged_one_only_if_an_intact_one_is_newer(command: Said, write: Make, tmp_path: Path) -> None:
    for step in (1, 2, 4):
        write(step, 0.5)
    damage(write(5, 0.5))
    damage(tmp_path / "run_2.pth")
    assert command("prune", tmp_path, "--keep-last", 2) == 0
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["run_1.pth", "run_4.pth", "run_5.pth"]


def test_prune_keeps_what_helios_wrote(command: Said, opened: Make, state: Make, tmp_path: Path) -> None:
    store = opened()
    for step in (1, 2):
        store.save(f"run_{step}.pth", state(step, versions={"helios": "1.1.0"}))
    store.close()
    assert command("prune", tmp_path, "--keep-last", 1) == 0
    assert any(has_facts(line, "kept", tmp_path / "run_1.pth", "Helios") for line in command.out.splitlines())


def test_prune_removes_nothing_if_a_checkpoint_cannot_be_read(
    command: Said, write: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1, 0.5)
    write(2, 0.5)

    def refused(path: Path, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(storage.reader, "verify", refused)
    assert command("prune", tmp_path, "--keep-last", 1) == 1
    assert "Permission denied" in command.error
    assert len(list(tmp_path.glob("*.pth"))) == 2


def test_prune_leaves_alone_what_has_no_manifest(command: Said, write: Make, old: Path, tmp_path: Path) -> None:
    write(1, 0.5)
    assert command("prune", tmp_path, "--keep-last", 1) == 0
    assert (tmp_path / OLD).exists()


def test_prune_refuses_where_a_process_trains(command: Said, write: Make, opened: Make, tmp_path: Path) -> None:
    write(1, 0.5)
    write(2, 0.5)
    opened()
    assert command("prune", tmp_path, "--keep-last", 1) == 1
    assert "are written by process" in command.error
    assert len(list(tmp_path.glob("*.pth"))) == 2


def test_prune_says_what_there_is_not(command: Said, write: Make, tmp_path: Path) -> None:
    assert command("prune", tmp_path / "nowhere", "--keep-last", 1) == 1
    assert str(tmp_path / "nowhere") in command.error
    (tmp_path / "empty").mkdir()
    assert command("prune", tmp_path / "empty", "--keep-last", 1) == 1
    assert command.error.endswith(f"There is no checkpoint in {tmp_path / 'empty'}.\n")
    assert not (tmp_path / "nowhere").exists()
    write(1, 0.5)
    assert command("prune", tmp_path, "--keep-last", 1, "--run", "other") == 1
    assert "'other'" in command.error
    options = ("--keep-best", 1, "--monitor", "validation/los", "--mode", "min")
    assert command("prune", tmp_path, "--keep-last", 1, *options) == 1
    assert "metric 'validation/los'. Did" in command.error


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((), "required"),
        (("prune", "folder"), "--keep-last"),
        (("prune", "folder", "--keep-last", "0"), "got '0'"),
        (("prune", "folder", "--keep-last", "1", "--keep-best", "1"), "--monitor METRIC"),
        (
            ("prune", "folder", "--keep-last", "1", "--keep-best", "1", "--monitor", "validation/f1"),
            "'validation/f1'",
        ),
        (("inspect",), "PATH"),
        (("burn", "x"), "invalid choice"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], fault: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", *words])
    assert caught.value.code == 2
    assert fault in capsys.readouterr().err


def test_it_runs_as_a_module(write: Make, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "heliograph", "checkpoint", "inspect", str(write(12, 0.25))]
    done = call(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "run run" in " ".join(done.stdout.split())
    assert done.stderr == ""
