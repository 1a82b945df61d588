"""Checkpoints of Helios, read safely and converted. They are written by classes that are gone when they are read."""

from __future__ import annotations

import enum
import os
import pathlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from heliograph import load_weights
from heliograph.core.checkpoint.checks import check_schema
from heliograph.core.checkpoint.storage.untrusted_files import read_with_stand_ins, records_as_dicts
from heliograph.core.data import rng
from heliograph.packages.cli.tests.checkpoints.helios_files import migrate
from heliograph_cli.helios import RECORDS, TEXTS, convert_from_helios
from torch import nn

COUNTS = {
    "current_iteration": 6,
    "global_iteration": 12,
    "global_epoch": 2,
    "validation_cycles": 1,
    "dataset_iter": 4,
    "early_stop_count": 1,
    "average_iter_time": 0.5,
    "running_iter": 2,
}


@contextmanager
def module(name: str, **members: Any) -> Iterator[ModuleType]:
    """Let a module exist for as long as a file is written."""
    made = ModuleType(name)
    for member, value in members.items():
        value.__module__, value.__qualname__ = name, member
        setattr(made, member, value)
    sys.modules[name] = made
    try:
        yield made
    finally:
        del sys.modules[name]


def training_state(**changes: float) -> Any:
    """Return the counters as an object of a class that will be gone."""

    @dataclass
    class TrainingState:
        current_iteration: int = 0
        global_iteration: int = 0
        global_epoch: int = 0
        validation_cycles: int = 0
        dataset_iter: int = 0
        early_stop_count: int = 0
        average_iter_time: float = 0
        running_iter: int = 0

    return TrainingState(**(COUNTS | changes))  # type: ignore[arg-type]  # counters by name


def user_part() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    return {
        "net": model.state_dict(),
        "criterion": nn.MSELoss().state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "best": 0.25,
    }


def generators() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "rand": random.Random(3).getstate(),
        "numpy": np.random.default_rng(5).bit_generator.state,
    }


def version_1(**more: Any) -> dict[str, Any]:
    state = {"version": "1.1.0", "training_state": training_state(), "model": user_part(), "rng": generators()}
    return state | more


def write(path: Path, state: dict[str, Any]) -> Path:
    counters = state["training_state"]
    classes = {} if isinstance(counters, dict) else {"TrainingState": type(counters)}
    with module("helios"), module("helios.trainer", **classes):
        torch.save(state, path)
    return path


def write_version_2(path: Path, **more: Any) -> Path:
    """Version 2 keeps its own keys as members of enumerations."""

    class _CheckpointKeys(enum.StrEnum):
        VERSION = "version"
        TRAINING_STATE = "training_state"
        MODEL = "model"
        RNG = "rng"
        LOGGERS = "loggers"
        DATAMODULE = "datamodule"

    class _InternalStateKeys(enum.StrEnum):
        AMP_SCALER = "amp_scaler"
        USER = "user"

    counters, key, inner = training_state(), _CheckpointKeys, _InternalStateKeys
    state = {
        key.VERSION: "2.0.0",
        key.TRAINING_STATE: counters,
        key.MODEL: {inner.USER: user_part(), inner.AMP_SCALER: {"scale": 65536.0, "_growth_tracker": 3}},
        key.RNG: generators(),
        key.LOGGERS: {"root": {"log_file": pathlib.PurePosixPath("logs/run.log")}, "wandb": {"run_id": "abc"}},
        key.DATAMODULE: {"phase": 1},
        **more,
    }
    trainer = {"TrainingState": type(counters), "_CheckpointKeys": _CheckpointKeys}
    with (
        module("helios"),
        module("helios.trainer", **trainer),
        module("helios.model"),
        module("helios.model.model", _InternalStateKeys=_InternalStateKeys),
    ):
        torch.save(state, path)
    return path


def read(path: Path) -> tuple[dict[str, Any], list[str]]:
    return convert_from_helios(records_as_dicts(read_with_stand_ins(path, RECORDS, TEXTS)), path)


def test_version_1_is_read_without_its_classes(tmp_path: Path) -> None:
    state, notes = read(write(tmp_path / "net_a_epoch_2_iter_6_acc_0.5.pth", version_1()))
    assert state["run_name"] == "net_a"
    check_schema(state)
    assert state["modules"].keys() == {"net", "criterion"}
    assert state["optimizers"]["optimizer"]["param_groups"][0]["momentum"] == 0.9
    assert state["schedulers"]["optimizer"]["last_epoch"] == 0
    assert notes[0] == "read the layout of Helios 1.1.0; the run is called 'net_a', after the file"
    assert notes[2].startswith("the order changes")
    assert notes[3].startswith("4 batches of the epoch are done")
    assert "left out: model['best']" in notes
    assert notes[-1] == "left out: the count of early stopping"


def test_counters_become_ours(tmp_path: Path) -> None:
    state, _ = read(write(tmp_path / "net_epoch_2_iter_6.pth", version_1()))
    progress = state["progress"]
    assert (progress["epoch"], progress["batch"], progress["earlier_batches"]) == (1, 4, 8)
    assert (progress["steps"], progress["validations"], progress["samples"]) == (6, 1, 0)


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        ({"global_epoch": 2, "dataset_iter": 0}, (2, 0, 12)),  # counted in epochs: saved at a border
        ({"global_epoch": 3, "dataset_iter": 4}, (3, 0, 12)),  # the last batch of an epoch: not the same epoch again
        ({"global_epoch": 1, "dataset_iter": 12}, (0, 12, 0)),  # of the first epoch nobody knows how long it is
    ],
)
def test_positions(tmp_path: Path, counters: dict[str, float], expected: tuple[int, int, int]) -> None:
    written = write(tmp_path / "n_epoch_1_iter_1.pth", version_1(training_state=training_state(**counters)))
    progress = read(written)[0]["progress"]
    assert (progress["epoch"], progress["batch"], progress["earlier_batches"]) == expected


def test_version_2_is_read_with_its_enumerations(tmp_path: Path) -> None:
    state, notes = read(write_version_2(tmp_path / "net_epoch_2_iter_6.pth"))
    assert state["modules"].keys() == {"net", "criterion"}
    assert state["plugins"]["file_log"] == {"file": "run.log"}
    assert "left out: model['best'], the gradient scaler" in notes
    assert state["data"]["phase"] == 1


def test_before_version_1_the_counters_are_a_dict_and_there_is_no_version(tmp_path: Path) -> None:
    state, _ = read(
        write(tmp_path / "old_epoch_2_iter_6.pth", {"training_state": dict(COUNTS), "model": user_part(), "rng": {}})
    )
    assert state["versions"]["helios"] == "before 1.0"
    assert state["progress"]["steps"] == 6
    assert "rng_capture" not in state["plugins"]


def test_the_scaler_of_late_version_1_lies_among_the_users_states(tmp_path: Path) -> None:
    model = user_part() | {"_helios_amp_scaler": {"scale": 2.0}}
    _, notes = read(write(tmp_path / "n_epoch_2_iter_6.pth", version_1(model=model)))
    assert "left out: model['best'], the gradient scaler" in notes


def test_a_users_own_part_called_user_is_no_sign_of_version_2(tmp_path: Path) -> None:
    model = user_part() | {"user": {"weight": torch.ones(1)}}
    state, _ = read(write(tmp_path / "n_epoch_2_iter_6.pth", version_1(model=model)))
    assert state["modules"].keys() == {"net", "criterion", "user"}


def test_random_generators_are_mapped(tmp_path: Path) -> None:
    state, notes = read(write(tmp_path / "n_epoch_2_iter_6.pth", version_1()))
    now = state["plugins"]["rng_capture"]
    assert now["globals"]["python"] == rng.pack_python(random.Random(3).getstate())
    assert now["globals"]["torch"] == torch.get_rng_state().numpy().tobytes()
    assert now["generator"] == np.random.default_rng(5).bit_generator.state
    assert any("NumPy's legacy generator:" in line for line in notes)


def test_paths_of_another_system_become_text(tmp_path: Path) -> None:
    logs = {"log_path": pathlib.PureWindowsPath("C:\\logs\\run.log"), "run_path": pathlib.PurePosixPath("/runs/1")}
    state, _ = read(write(tmp_path / "n_epoch_2_iter_6.pth", version_1(**logs)))
    assert state["plugins"]["file_log"] == {"file": "run.log"}


def test_plugins_keep_their_states_unless_the_name_is_ours(tmp_path: Path) -> None:
    state, notes = read(write(tmp_path / "n_epoch_2_iter_6.pth", version_1(my_plugin={"lr": 0.1}, checkpoint={"x": 1})))
    assert state["plugins"].keys() == {"my_plugin", "rng_capture"}
    assert state["plugins"]["my_plugin"] == {"lr": 0.1}
    assert any("plugin 'checkpoint' left out:" in line for line in notes)


def test_what_could_not_be_read_safely_again_is_left_out_with_its_name(tmp_path: Path) -> None:
    state, notes = read(write(tmp_path / "n_epoch_2_iter_6.pth", version_1(mine={"size": torch.Size([2])})))
    assert "mine" not in state["plugins"]
    assert any("mine['size'] is a torch.Size" in line for line in notes)


def test_two_optimizers_keep_their_names(tmp_path: Path) -> None:
    user = user_part()
    state, notes = read(write(tmp_path / "n_epoch_2_iter_6.pth", version_1(model=user | {"other": user["optimizer"]})))
    assert state["optimizers"] == {"optimizer": user["optimizer"], "other": user["optimizer"]}
    assert any("optimizers optimizer, other: they" in line for line in notes)
    assert any("schedulers scheduler: their optimizers" in line for line in notes)
    assert state["schedulers"] == {}


def test_without_an_optimizer_only_the_weights_serve(tmp_path: Path) -> None:
    user = user_part()
    del user["optimizer"]
    _, notes = read(write(tmp_path / "n_epoch_2_iter_6.pth", version_1(model=user)))
    assert any("0 optimizers: the file" in line for line in notes)


def test_load_weights_reads_what_was_migrated(tmp_path: Path) -> None:
    path, user = tmp_path / "n_epoch_2_iter_6.pth", user_part()
    (name,) = [each for each, state in user.items() if isinstance(state, dict) and "weight" in state]
    layer = nn.Linear(*reversed(user[name]["weight"].shape))
    write(path, version_1(model=user))
    with pytest.raises(ValueError, match=r"checkpoint migrate"):
        load_weights(layer, path)
    migrate(path)

    assert load_weights(layer, path).modules == (name,)
    assert torch.equal(layer.weight, user[name]["weight"])


def test_counters_that_are_missing_are_an_error(tmp_path: Path) -> None:
    written = write(tmp_path / "n_epoch_2_iter_6.pth", version_1(training_state={"global_epoch": 1}))
    with pytest.raises(ValueError, match="numbers for current_iteration, global_iteration"):
        read(written)


class Bomb:
    def __init__(self, act: Callable[..., Any], *arguments: Any) -> None:
        self.act, self.arguments = act, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.act, self.arguments


def test_a_malicious_file_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    written = write(tmp_path / "n_epoch_2_iter_6.pth", version_1(evil=Bomb(Path.touch, victim)))
    with pytest.raises(ValueError, match=r"holds objects of .*getattr.*refused") as caught:
        read(written)
    assert not victim.exists()
    assert "--as-data" in str(caught.value)


def test_even_a_class_that_is_vouched_for_runs_nothing(tmp_path: Path) -> None:
    written = tmp_path / "n_epoch_2_iter_6.pth"
    ran: list[int] = []

    class Trick:
        def __init__(self) -> None:
            self.value = 3

        def __setstate__(self, state: dict[str, Any]) -> None:
            ran.append(1)

    with module("mine", Trick=Trick), module("helios"), module("helios.trainer"):
        torch.save({"counters": Trick()}, written)
        saved = records_as_dicts(read_with_stand_ins(written, (r"mine\.Trick",)))
    assert saved == {"counters": {"value": 3}}
    assert not ran


def test_a_flipped_bit_is_noticed_without_a_manifest(tmp_path: Path) -> None:
    written = tmp_path / "weights.pth"
    torch.save({"weight": torch.arange(100.0)}, written)
    whole = bytearray(written.read_bytes())
    whole[whole.index(torch.arange(100.0).numpy().tobytes()) + 17] ^= 1
    written.write_bytes(whole)
    with pytest.raises(ValueError, match=r"written by torch.save: .*data/0"):
        read_with_stand_ins(written)


def test_counters_of_a_scheduler_stay_what_they_are() -> None:
    milestones = Counter([3, 3, 5])
    assert records_as_dicts({"milestones": milestones})["milestones"] is milestones


def test_an_archive_that_is_not_torchs_is_refused(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(ValueError, match="cannot be read: RuntimeError"):
        read_with_stand_ins(tmp_path / "a.pth")


def test_a_module_that_torch_blocks_stays_blocked(tmp_path: Path) -> None:
    written = write(tmp_path / "n_epoch_2_iter_6.pth", version_1(evil=Bomb(os.system, "touch victim")))
    with pytest.raises(ValueError, match=r"holds objects of posix\.system"):
        read(written)
    with pytest.raises(ValueError, match=r"read: UnpicklingError: .*blocked"):
        read_with_stand_ins(written, (*RECORDS, r"posix\.system"))


def test_a_flipped_bit_anywhere_is_noticed_or_harmless(tmp_path: Path) -> None:
    written = tmp_path / "a.pth"
    torch.save({"weight": torch.arange(200.0), "steps": 3, "name": "run", "list": [1, 2, {"a": None}]}, written)
    content, whole, draw = written.read_bytes(), read_with_stand_ins(written), random.Random(1)
    harmless = 0
    for _ in range(300):
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        written.write_bytes(changed)
        try:
            found = read_with_stand_ins(written)
        except ValueError:
            continue
        harmless += 1
        assert torch.equal(found.pop("weight"), whole["weight"])
        assert found == {name: value for name, value in whole.items() if name != "weight"}
    assert 0 < harmless < 100


def test_two_schedulers_start_fresh(tmp_path: Path) -> None:
    user = user_part()
    state, notes = read(write(tmp_path / "n_epoch_2_iter_6.pth", version_1(model=user | {"other": user["scheduler"]})))
    assert state["schedulers"] == {}
    assert any("schedulers scheduler, other:" in line for line in notes)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"text"])
def test_what_is_no_file_of_torch_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights.pth").write_bytes(content)
    with pytest.raises(ValueError, match=r"weights.pth"):
        read_with_stand_ins(tmp_path / "weights.pth")
