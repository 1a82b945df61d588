"""The plugin: each fault at its event, once, and who notices it."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.kit import Losses, fit, random_batches, saving
from heliograph_testing import check_plugin
from heliograph_testing.chaos import Chaos, Fault
from torch import nn

BATCHES = 6


def train(*plugins: Any, **options: Any) -> h.RunResult:
    torch.manual_seed(0)
    task = h.Supervised(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)), nn.functional.mse_loss)
    return fit(*plugins, task=task, train=random_batches(BATCHES), **options)


def losses(*plugins: Any) -> list[float]:
    kept = Losses()
    train(h.RNGCapture(), *plugins, kept)
    return kept.values


def test_it_follows_the_rules_for_plugins() -> None:
    check_plugin(Chaos)
    check_plugin(lambda: Chaos([Fault("slow", seconds=0.0), Fault("clock-jump", count=2, seconds=3600.0)]))
    check_plugin(lambda: Chaos([Fault("nan-gradient", count=2)]))


def test_without_faults_it_changes_nothing() -> None:
    assert losses(Chaos()) == losses()


@pytest.mark.parametrize("kind", ["nan-loss", "nan-gradient", "bit-in-gradient", "bit-in-weight"])
def test_a_fault_in_numbers_changes_what_comes_after_it(kind: str) -> None:
    chaos = Chaos([Fault(kind, count=3)], seed=3)
    found, expected = losses(chaos), losses()
    same = 2 if kind == "nan-loss" else 3
    assert found[:same] == expected[:same]
    assert found[same:] != expected[same:]
    (act,) = chaos.acts
    assert (act.fault.kind, act.batches, act.noticed_by) == (kind, 2, "")
    assert_facts(act.where, "epoch 0, batch 2", f"step {3 if kind == 'bit-in-weight' else 2}", f"in {act.fault.at}")


def test_the_seed_chooses_the_number_and_the_bit() -> None:
    texts = []
    for seed in (1, 1, 2):
        chaos = Chaos([Fault("bit-in-weight")], seed=seed)
        train(chaos)
        texts.append(chaos.acts[0].text)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("bit ")


def test_who_skips_the_step_has_noticed() -> None:
    chaos = Chaos([Fault("nan-loss", count=3)])
    train(h.NaNGuard("skip"), chaos)
    assert chaos.acts[0].noticed_by == "nan_guard"
    assert_facts(chaos.acts[0].answer, "skip_step", "loss is nan")


def test_who_fails_the_run_has_noticed() -> None:
    chaos = Chaos([Fault("nan-loss", count=3)])
    with pytest.raises(FloatingPointError):
        train(h.NaNGuard(), chaos)
    assert chaos.acts[0].noticed_by == "nan_guard"
    assert_facts(chaos.acts[0].answer, "FloatingPointError", "loss is nan", "step 2")


def test_a_full_disk_fails_the_run_and_leaves_what_was_saved_before(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    chaos = Chaos([Fault("full-disk", count=2, operation=3)], disk=folder)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        train(*saving(folder, h.Every(steps=2)), chaos)
    assert [path.name for path in folder.glob("*.pth")] == ["run_epoch_0_iter_2.pth"]
    assert_facts(chaos.acts[0].where, "epoch 0, batch 4", "step 4", "save_point")
    result = train(*saving(folder, h.Every(steps=2), resume="auto"), Chaos(disk=folder))
    assert result.progress.steps == BATCHES


def test_a_slow_disk_only_takes_time(tmp_path: Path) -> None:
    chaos = Chaos([Fault("slow-disk", times=3, seconds=0.001)], disk=tmp_path)
    assert losses(*saving(tmp_path / "run", h.Every(steps=2))[1:], chaos) == losses()
    assert len(chaos.acts) == 1


def test_a_clock_jumps_until_the_run_ends() -> None:
    seen: list[float] = []

    class Watch(h.Plugin):
        @h.on(h.BatchEnd)
        def look(self, run: h.Run, event: h.BatchEnd) -> None:
            seen.append(time.time() - real())

    real = time.monotonic
    train(Watch(), Chaos([Fault("clock-jump", at="batch_start", count=3, seconds=1e6)]))
    offset = time.time() - real()
    assert [abs(each - offset) > 1e5 for each in seen] == [False, False, True, True, True, True]


def test_counts_continue_after_a_resume(tmp_path: Path) -> None:
    class Fail(h.Plugin):
        @h.on(h.BatchEnd)
        def fail(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.batches == 3:
                raise KeyError("once")

    with pytest.raises(KeyError):
        train(*saving(tmp_path, h.Every(steps=2)), Fail(), Chaos())
    chaos = Chaos([Fault("nan-gradient", count=5), Fault("slow", count=2)])
    train(*saving(tmp_path, h.Every(steps=2), resume="auto"), chaos)
    assert [(act.fault.kind, act.batches) for act in chaos.acts] == [("nan-gradient", 4)]  # the other's time was over


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "kil"}, "Did you mean 'kill'?"),
        ({"kind": "kill", "at": "batch_ende"}, "cannot occur at 'batch_ende'"),
        ({"kind": "kill", "at": "run_closed"}, "cannot occur at 'run_closed'"),
        ({"kind": "slow", "at": "verdict"}, "cannot occur at 'verdict'"),
        ({"kind": "nan-loss", "at": "step_end"}, "forward_end, got 'step_end'"),
        ({"kind": "hang", "operation": 2}, "0, got 2"),
        ({"kind": "kill", "count": 0}, "count"),
    ],
)
def test_a_wrong_fault_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Fault(**options)
    assert text in str(caught.value)


def test_what_ends_the_process_needs_a_journal() -> None:
    with pytest.raises(ValueError, match=r"^kill at batch_end 1"):
        Chaos([Fault("kill")])
    with pytest.raises(TypeError, match="a list of Fault"):
        Chaos(["kill"])  # type: ignore[list-item]
