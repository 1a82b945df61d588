"""The command line on checkpoints in shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heliograph import Checkpoint, Every, FSDPEngine, RNGCapture, SaveSchedule, Supervised, Trainer, load_weights
from heliograph.__main__ import main
from heliograph.core.checkpoint import storage
from heliograph.core.checkpoint.storage import reader
from heliograph.core.checkpoint.storage.reader import shards_path
from heliograph.tests.messages import assert_facts
from heliograph.tests.ranks_pool import Pool
from heliograph_cli.checkpoint_command import consolidate
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NAME = "run_epoch_0_iter_2.pth"


def make_task() -> Supervised:
    torch.manual_seed(0)
    return Supervised(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), nn.functional.mse_loss)


def write(folder: Path, state: str = "sharded") -> dict[str, Tensor]:
    task, generator = make_task(), torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 2, generator=generator))
    engine = FSDPEngine(device="cpu", state=state)  # type: ignore[arg-type]
    trainer = Trainer([RNGCapture(3), SaveSchedule(Every(steps=2), at_end=False), Checkpoint(folder)], engine=engine)
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
    trainer.fit(task, DataLoader(data, batch_size=4, shuffle=True), optimizer=optimizer, steps=2)
    return {name: value.clone() for name, value in task.model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_shards_are_made_one_file(ranks: Pool, tmp_path: Path) -> None:
    weights = ranks(2).run(write, tmp_path / "parts")[0]
    ranks(2).run(write, tmp_path / "whole", "full")
    path = tmp_path / "parts" / "run_epoch_0_iter_2.pth"
    former = storage.read_manifest(path)
    task = make_task()
    load_weights(task, path)
    assert equal(dict(task.model.state_dict()), weights)

    entry = consolidate(path, tmp_path / "copy" / "one.pth")
    assert entry.path == tmp_path / "copy" / "one.pth"
    assert (entry.sequence, entry.judged_by, entry.shards) == (former.sequence, former.judged_by, None)
    assert reader.verify(path).shards
    one, other = reader.load(entry.path), reader.load(tmp_path / "whole" / "run_epoch_0_iter_2.pth")
    assert equal(one["modules"]["model"], other["modules"]["model"])
    assert repr(one["optimizers"]) == repr(other["optimizers"])
    assert "shards" not in one

    consolidate(path, path)
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "run.last",
        "run_epoch_0_iter_2.pth",
    ]
    assert equal(reader.load(path)["modules"]["model"], weights)
    with pytest.raises(ValueError, match="has no shards"):
        consolidate(path, path)


def test_the_command_line_makes_one_file(ranks: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2).run(write, tmp_path)
    path = tmp_path / NAME
    assert main(["checkpoint", "inspect", str(path)]) == 0
    assert "model: 69 values" in capsys.readouterr().out
    one = ["checkpoint", "consolidate", str(path), "--out", str(tmp_path / "one.pth")]
    assert main(one) == 0
    assert_facts(capsys.readouterr().out, path, "one file", tmp_path / "one.pth", "(0.")
    assert main(["checkpoint", "consolidate", str(tmp_path / "one.pth")]) == 1
    assert "has no shards" in capsys.readouterr().err
    next(shards_path(storage.read_manifest(path)).glob("*.distcp")).unlink()
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 1
    assert f"be read: {NAME}." in capsys.readouterr().err
    for words in (["verify", str(path)], ["export", str(path), str(tmp_path / "out.pth")], one[1:]):
        assert main(["checkpoint", *words]) == 1
        assert "is missing" in capsys.readouterr().err
