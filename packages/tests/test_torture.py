"""Killed at any instant, resumed, equal to the last bit: the short form of `make torture`, and what it would notice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.core.checkpoint.schema import SCHEMA
from heliograph.core.checkpoint.storage import Store
from heliograph.packages.tests.facts import assert_facts
from heliograph.packages.tests.torture.checks import first_difference, newest_whole
from heliograph.packages.tests.torture.torture import MISSING
from heliograph.packages.tests.torture.workers import MISSING as WITHOUT_PROC
from heliograph_recorder.demo.training import NAME

SCRIPT = Path(__file__).parent / "torture/torture.py"
CHECKPOINT = f"{NAME}_epoch_1_iter_12.pth"


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.whole
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_five_times_and_equal_bit_for_bit(seed: int) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "5", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.startswith("kill ") for line in done.stdout.splitlines()) >= 5
    assert_facts(done.stdout, "equal to the bit\n")


@pytest.mark.whole
def test_it_is_skipped_where_processes_cannot_be_waited_for() -> None:
    code = f"import os, runpy; del os.pidfd_open; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "skipped: os.pidfd_open is missing: this needs Linux\n"), done.stderr


@pytest.mark.skipif(WITHOUT_PROC is not None, reason=str(WITHOUT_PROC))
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.whole)])
def test_no_worker_outlives_a_main_process_that_is_killed_while_it_starts(kills: int) -> None:
    script = SCRIPT.with_name("workers.py")
    command = [sys.executable, str(script), "--kills", str(kills), "--seed", "4", "--limit", "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_facts(done.stdout, f"{kills} of them", "60 s", "0 had left")


@pytest.fixture
def ended(tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of folders as a training leaves them; the clock shows another time in each."""

    def make(clock: float, *, weight: float = 1.0, loss: float = 0.5) -> Path:
        folder = tmp_path / f"at_{clock}"
        state: dict[str, Any] = {
            "schema": SCHEMA,
            "saved_at": clock,
            "run_name": NAME,
            "training_id": f"{clock}",
            "progress": {"steps": 12, "earlier_seconds": clock},
            "metrics": {"train/samples_per_second": clock},
            "modules": {"model": {"weight": torch.full((4,), weight)}},
            "plugins": {"file_log": {"file": f"{clock}.log"}},
            "optimizers": {},
            "schedulers": {},
            "ranks": [{}],
            "data": {},
            "control": {},
            "world": {"size": 1},
        }
        with closing(Store(folder / "checkpoints", NAME)) as store:
            store.open()
            store.save(CHECKPOINT, state)
        record = {"event": "log", "time": clock, "attempt": clock, "metrics": {"train/loss": loss}}
        (folder / "log.jsonl").write_text(json.dumps(record) + "\n")
        return folder

    return make


def test_clocks_make_no_difference(ended: Callable[..., Path]) -> None:
    assert first_difference(ended(1.0), ended(2.0)) is None


def test_one_bit_of_a_weight_is_a_difference(ended: Callable[..., Path]) -> None:
    difference = first_difference(ended(1.0), ended(2.0, weight=1.0 + 2**-23))
    assert difference is not None
    assert difference.startswith(f"modules.model.weight in {CHECKPOINT} is ")


def test_a_record_of_the_log_is_a_difference(ended: Callable[..., Path]) -> None:
    records = [{"event": "log", "metrics": {"train/loss": loss}} for loss in (0.25, 0.5)]
    difference = first_difference(ended(1.0, loss=0.25), ended(2.0))
    assert_facts(difference, "record 0", str(records[0]), str(records[1]))


def test_a_missing_record_is_a_difference(ended: Callable[..., Path]) -> None:
    folder = ended(1.0)
    (folder / "log.jsonl").write_text("")
    assert_facts(first_difference(folder, ended(2.0)), "0 records", "not 1")


@pytest.mark.parametrize("name", ["log.jsonl.tmp", "left_alone/torn"])
def test_a_file_left_over_is_a_difference(ended: Callable[..., Path], name: str) -> None:
    folder = ended(1.0)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    assert_facts(first_difference(folder, ended(2.0)), "left over", name)


def test_an_aside_among_the_checkpoints_is_a_difference(ended: Callable[..., Path]) -> None:
    folder = ended(1.0)
    (folder / f"checkpoints/.{NAME}.data.tmp").touch()
    difference = first_difference(folder, ended(2.0))
    assert difference is not None
    assert_facts(difference, "checkpoint folder", f"['.{NAME}.data.tmp', ")


def test_a_checkpoint_that_is_not_whole_is_named(ended: Callable[..., Path]) -> None:
    folder = ended(1.0)
    assert newest_whole(folder) == 1
    path = folder / "checkpoints" / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(AssertionError, match=rf"whole: .*{CHECKPOINT}"):
        newest_whole(folder)
