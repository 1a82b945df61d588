"""The states of plugins in the checkpoints of the Trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import EMA, EarlyStopping, Plugin, Run, SaveSchedule, StepEnd, on
from heliograph.packages.bridges.tests.huggingface.trainers import killed
from heliograph.packages.bridges.tests.huggingface.trainers.trainings import make
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_recorder.format.reader import read as read_recording

SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
VALIDATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.whole
def test_killed_and_resumed(tmp_path: Path) -> None:
    """Counts of plugins and of rules continue, and one recording has both attempts."""
    subprocess.run([sys.executable, killed.__file__, str(tmp_path)], check=True, capture_output=True)
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    # losses 1 to 4 are saved; 2, 3, 4 fail; then 5 and 6: the rule is patient for four of 2, 3, 4, 5, 6
    assert found["by"] == "rule_controller"
    assert (found["step"], found["steps"], found["samples"]) == (6, 6, 12)
    assert (found["best"], found["readings"]) == (1.0, 5)
    (path,) = (tmp_path / "records").glob("*.recording")
    assert [each.status for each in read_recording(path).attempts] == [None, "stopped"]
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert_each(found["notes"], ("heliograph.Script resumed", "epoch 0, batch 4", "step 4", str(checkpoint)))


class Keep(Plugin):
    """Has a state of every plain type."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    @on(StepEnd)
    def step(self, run: Run, event: StepEnd) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = dict(state)


PLAIN: dict[str, Any] = {
    "numbers": [1, 2.5, float("inf"), True, None, -0.0],
    "tuple": (1, (2, "three"), []),
    "keys": {1: "one", (2, 3): "pair", None: "none", "text": "text"},
    "bytes": b"\x00\xff",
    "counter": Counter("abca"),
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "empty": {},
    "text": "!dict",
}


@pytest.mark.parametrize("restores", [False, True])
def test_states_survive(restores: bool, tmp_path: Path) -> None:
    state = {**PLAIN, "tensors": [torch.arange(3), {"half": torch.tensor(0.5, dtype=torch.float16)}]}
    first, _ = make(tmp_path, Keep(state), max_steps=2, **SAVES)
    first.train()
    options: dict[str, Any] = {"restore_callback_states_from_checkpoint": restores}
    second, callback = make(tmp_path, Keep({"other": 1}), max_steps=3, **SAVES, **options)
    second.train(resume_from_checkpoint=True)
    loaded = callback.plugins[Keep].state
    assert {name: loaded[name] for name in PLAIN} == PLAIN
    assert [type(loaded[name]) for name in PLAIN] == [type(value) for value in PLAIN.values()]
    assert torch.equal(loaded["tensors"][0], torch.arange(3))
    assert loaded["tensors"][1]["half"].dtype == torch.float16
    assert callback in second.callback_handler.callbacks
    assert callback.result is not None
    assert callback.result.resume is not None
    assert callback.result.resume.path == tmp_path / "checkpoint-2"


@pytest.mark.parametrize("damage", ["missing", "of another save"])
def test_a_checkpoint_whose_states_are_missing_is_refused(damage: str, tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, EMA(0.5), max_steps=4, **SAVES)
    trainer.train()
    file = tmp_path / "checkpoint-2" / "heliograph.pt"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes((tmp_path / "checkpoint-4" / "heliograph.pt").read_bytes())
    again, _ = make(tmp_path, EMA(0.5), max_steps=4, **SAVES)
    with pytest.raises(ValueError, match=r"checkpoint-2 has no heliograph\.pt"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_averaged_weights_continue(tmp_path: Path) -> None:
    whole, one = make(tmp_path / "whole", EMA(0.5), max_steps=4, **SAVES)
    whole.train()
    part, _ = make(tmp_path / "part", EMA(0.5), max_steps=4, **SAVES)
    part.train()
    rest, other = make(tmp_path / "part", EMA(0.5), max_steps=4, **SAVES)
    rest.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-2"))
    for name, average in one.plugins[EMA].weights["model"].items():
        assert torch.equal(average, other.plugins[EMA].weights["model"][name])


def test_a_checkpoint_that_was_written_without_us(tmp_path: Path) -> None:
    plain, callback = make(tmp_path, max_steps=2, rows=6, **SAVES)
    plain.remove_callback(callback)
    plain.train()
    assert callback.result is None
    trainer, ours = make(tmp_path, SaveSchedule(steps=1, at_end=False), max_steps=4, rows=6)
    trainer.train(resume_from_checkpoint=True)
    assert ours.result is not None
    assert (ours.result.progress.steps, ours.result.progress.epoch, ours.result.progress.batches) == (4, 1, 4)
    assert_facts(ours.result.notes[0], "checkpoint-2 without states", "start fresh")
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").exists()


def test_one_that_ignores_the_position_of_the_data_counts_as_the_trainer_does(tmp_path: Path) -> None:
    first, _ = make(tmp_path, max_steps=3, rows=8, save_strategy="steps", save_steps=3)
    first.train()
    second, callback = make(tmp_path, max_steps=5, rows=8, ignore_data_skip=True)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert callback.result is not None
    assert "epoch 0, batch 0," in callback.result.notes[1]
    assert (callback.result.progress.batches, callback.result.progress.steps) == (5, 5)


def test_a_stop_is_repeated_after_a_resume(tmp_path: Path) -> None:
    """The Trainer looks at it after a batch only."""
    options: dict[str, Any] = {"max_steps": 9, **VALIDATES, "save_strategy": "steps", "save_steps": 1}
    first, _ = make(tmp_path, EarlyStopping(patience=2), losses=[1.0, 2.0, 3.0], **options)
    first.train()
    assert first.state.global_step == 3
    second, callback = make(tmp_path, EarlyStopping(patience=2), losses=[4.0], **options)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 4
    assert callback.result is not None
    assert (callback.result.status, callback.result.stopped_by) == ("stopped", "early_stopping")
    assert_facts(callback.result.notes[-1], "stop only after")
