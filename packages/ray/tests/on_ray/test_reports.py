"""Reports to Ray Train, and their use by another call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from heliograph import launch
from heliograph.core.checkpoint.storage import reader
from heliograph.packages.ray.tests.on_ray import report_runs
from heliograph_ray.launcher.launcher import RayLauncher

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.mark.whole
@pytest.mark.timeout(150)
def test_another_call_on_other_machines_resumes_the_newest_intact_checkpoints(tmp_path: Path) -> None:
    launcher = RayLauncher(2, storage_path=tmp_path / "there", name="reports", keep=None)
    launcher.run(report_runs.train_both, tmp_path / "first", 7)
    there = tmp_path / "there" / "reports"
    folders = sorted(there.glob("checkpoint_0*"))
    names = [sorted(path.name for path in folder.glob("*.pth")) for folder in folders]
    assert names == [
        [f"{name}_epoch_0_iter_{step}.pth" for step in steps]
        for name in ("plain", "sharded")
        for steps in ([2], [4], [4, 6])
    ]
    snapshot = json.loads((there / "checkpoint_manager_snapshot.json").read_text())
    facts = [each["metrics"] for each in snapshot["checkpoint_results"]]
    assert [(each["step"], each["validation/loss"]) for each in facts] == [(2, 4.0), (4, 0.0), (6, 4.0)] * 2
    for folder, found in zip(folders, names, strict=True):
        for name in found:
            reader.verify(folder / name)

    record = there / "checkpoint_manager_snapshot.json"
    record.write_text(record.read_text()[:100])  # as if Ray was killed while writing it
    (folders[2] / "plain_epoch_0_iter_6.pth").write_bytes(b"half")
    next(folders[5].glob("sharded_epoch_0_iter_6.*.shards/__1_*")).unlink()
    again = RayLauncher(2, storage_path=tmp_path / "there", name="reports", keep=None)
    values = again.run(report_runs.train_both, tmp_path / "second", 12, resume="auto")
    assert record.with_name(f"{record.name}.damaged").exists()
    whole = launch(report_runs.train_both, tmp_path / "whole", 12, nprocs=2)
    for rank in range(2):
        for (weights, _), (expected, _) in zip(values[rank], whole[rank], strict=True):
            assert all(map(torch.equal, weights, expected))
    (_, plain), (_, sharded) = values[0]
    call = folders[0].name.split("_")[-1]
    for result, folder, name, number in (
        (plain, tmp_path / "second" / "of rank 0", "plain", 3),
        (sharded, tmp_path / "second" / "shared", "sharded", 6),
    ):
        assert result.resume is not None
        assert (result.resume.path, str(result.resume)) == (folder / f"{name}_epoch_0_iter_4.pth", "exact")
        assert any(note.startswith(f"skipped: checkpoint_{number:06d}_{call} in Ray's") for note in result.notes)
        fetched = f"fetched {result.resume.path} from checkpoint_{number:06d}_{call} in Ray's storage"
        assert fetched in result.notes
        assert result.best_checkpoint == result.resume.path
    assert not (tmp_path / "second" / "of rank 1").exists()


@pytest.mark.whole
@pytest.mark.timeout(60)
def test_a_storage_that_breaks_fails_the_run(tmp_path: Path) -> None:
    launcher = RayLauncher(1, storage_path=tmp_path / "there", name="broken", max_failures=3)
    with pytest.raises(RuntimeError, match="set up cluster storage"):
        launcher.run(report_runs.break_the_storage, tmp_path / "here", tmp_path / "there" / "broken")
