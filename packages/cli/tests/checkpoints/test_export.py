"""Weights exported to files that need no heliograph: complete or not there, and the same values."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import EMA, Checkpoint, Every, SaveSchedule, Supervised, ValidationSchedule, load_weights
from heliograph.__main__ import main
from heliograph.core.checkpoint.storage import Files
from heliograph.core.checkpoint.weights import WeightsFile
from heliograph.tests import kit
from heliograph.tests.kit import class_batches
from heliograph.tests.messages import assert_facts
from heliograph_cli.weights_export import export_weights
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn


class Tied(nn.Module):
    """A small language model with one tensor for the first and the last layer, a buffer, and a slice as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(2, 4), nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.norm(inputs @ self.embedding.weight.T @ self.embedding.weight))  # type: ignore[no-any-return]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Return the checkpoint of a training with an average."""
    torch.manual_seed(0)
    task = Supervised(Tied(), nn.functional.cross_entropy)
    plugins = [SaveSchedule(Every(epochs=1)), ValidationSchedule(Every(epochs=1)), EMA(0.5)]
    result = kit.fit(*plugins, Checkpoint(tmp_path / "run"), task=task, validation=class_batches(1), epochs=2)
    assert result.last_checkpoint is not None
    return result.last_checkpoint


def command(*arguments: Any) -> int:
    return main(["checkpoint", "export", *map(str, arguments)])


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("ending", ["safetensors", "pth", "pt"])
def test_what_is_exported_is_what_load_weights_loads(trained: Path, tmp_path: Path, ending: str) -> None:
    out, expected, read = tmp_path / f"out.{ending}", Tied(), Tied()
    for options, average in (([], None), (["--average", "ema"], "ema"), (["--trained"], False)):
        assert command(trained, out, *options, "--force") == 0
        load_weights(expected, trained, average=average)  # type: ignore[arg-type]
        load_weights(read, out)
        assert same(read.state_dict(), expected.state_dict())


def test_a_tied_tensor_is_stored_once_and_found_by_safetensors(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, expected, read = tmp_path / "out.safetensors", Tied(), Tied()
    assert command(trained.parent, out) == 0
    load_weights(expected, trained)
    load_model(read, out)

    assert same(read.state_dict(), expected.state_dict())
    assert load_file(out).keys() == expected.state_dict().keys() - {"out.weight"}
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    assert {name: metadata[name] for name in ("format", "module", "average", "run", "step", "out.weight")} == {
        "format": "pt", "module": "model", "average": "ema", "run": "run", "step": "4",
        "out.weight": "embedding.weight",
    }  # fmt: skip
    said = capsys.readouterr().out
    assert_facts(said, trained, out, "7 tensors", "0.001 MB", "module model", "average ema", "run run")
    assert_facts(said, "1 names", "stored once")


def test_a_plain_file_needs_no_heliograph(trained: Path, tmp_path: Path) -> None:
    command(trained, tmp_path / "out.pth", "--trained")
    content = torch.load(tmp_path / "out.pth", weights_only=True)
    model = Tied()
    model.load_state_dict(content)

    assert content["out.weight"].data_ptr() == content["embedding.weight"].data_ptr()


def test_an_existing_file_is_replaced_by_force_only(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    assert command(trained, out) == 1
    assert f"{out} exists" in capsys.readouterr().err
    assert out.read_bytes() == b"precious"
    assert command(trained, out, "--force") == 0
    assert load_file(out).keys() >= {"embedding.weight"}
    assert command(trained, trained, "--force") == 1
    load_weights(Tied(), trained)
    (tmp_path / "folder.pth").mkdir()
    assert command(trained, tmp_path / "folder.pth", "--force") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["out.onnx"], ".safetensors, .pth or"),
        (["out.pth", "--module", "modle"], "'modle'. Did you mean"),
        (["out.pth", "--average", "swa"], "a plugin 'swa'"),
        (["out.pth", "--which", "best"], "which= and run_name= select"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    trained: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(trained, tmp_path / arguments[0], *arguments[1:]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / arguments[0]).exists()


def test_one_of_several_modules_is_chosen(tmp_path: Path) -> None:
    file = WeightsFile(tmp_path / "a.pth", {"generator": {"w": torch.ones(2)}, "critic": {"w": torch.zeros(3)}})
    with pytest.raises(ValueError, match="modules critic, generator:"):
        export_weights(file, tmp_path / "out.pth")
    export_weights(file, tmp_path / "out.pth", module="generator")

    assert torch.equal(torch.load(tmp_path / "out.pth")["w"], torch.ones(2))


def test_missing_frozen_weights_are_reported(tmp_path: Path) -> None:
    file = WeightsFile(tmp_path / "a.pth", {"model": {"w": torch.ones(2)}}, frozen={"model": {"a": "0", "b": "0"}})
    assert_facts(export_weights(file, tmp_path / "head.pth"), "2 frozen tensors", "missing")


def test_views_of_one_storage_are_stored_apart_and_only_as_far_as_they_reach(tmp_path: Path) -> None:
    whole = torch.arange(1000.0)
    weights = OrderedDict(a=whole[:2], b=whole[1:3], c=torch.eye(2).expand(3, 2, 2), d=torch.empty(0), e=torch.empty(0))
    for name in ("out.safetensors", "out.pth"):
        export_weights(WeightsFile(tmp_path / "a.pth", {"": weights}), tmp_path / name)
        assert (tmp_path / name).stat().st_size < 4000
    read = load_file(tmp_path / "out.safetensors")

    assert same(read, dict(weights))
    assert same(torch.load(tmp_path / "out.pth"), dict(weights))


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2), "_extra_state": {"count": 3}}
    file = WeightsFile(tmp_path / "a.pth", {"": weights})
    with pytest.raises(ValueError, match="_extra_state"):
        export_weights(file, tmp_path / "out.safetensors")
    export_weights(file, tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth")["_extra_state"] == {"count": 3}


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
@pytest.mark.parametrize("operation", ["write", "sync", "rename"])
def test_a_full_disk_leaves_the_former_file(
    tmp_path: Path, operation: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / f"out.{ending}"
    out.write_bytes(b"former")
    file = WeightsFile(tmp_path / "a.pth", {"": {"w": torch.ones(2)}})

    def write(content: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        fail()

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if operation != "write":
        monkeypatch.setattr(Files, operation, fail)
    else:
        monkeypatch.setattr("safetensors.torch.save_file", write)
        monkeypatch.setattr("torch.save", write)
    with pytest.raises(OSError, match=r"written: .*existing") as caught:
        export_weights(file, out, overwrite=True)

    assert caught.value.errno == errno.ENOSPC
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {out.name: b"former"}


def test_what_a_killed_export_left_is_no_obstacle(tmp_path: Path) -> None:
    aside = tmp_path / ".out.pth.tmp"
    aside.mkdir()
    (aside / "out.pth").write_bytes(b"half")
    export_weights(WeightsFile(tmp_path / "a.pth", {"": {"w": torch.ones(2)}}), tmp_path / "out.pth")

    assert [path.name for path in tmp_path.iterdir()] == ["out.pth"]


def test_the_package_is_named_where_it_is_missing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    assert command(trained, tmp_path / "out.safetensors") == 1
    assert "pip install 'heliograph[safetensors]'" in capsys.readouterr().err
