"""Recordings with digests of a training on a GPU: compared, done again, forked. Its twins on the CPU are here, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core.data import rng
from heliograph.core.objects.equality import Leaf, leaves
from heliograph.tests.kit import dropout_task, random_batches
from heliograph_recorder import Digests, Recorder, diverge, drill, fork, goto
from heliograph_recorder.divergence.compare import Kind
from heliograph_testing.chaos import Chaos, Fault

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
DEVICE = "cuda"
BATCHES, EPOCHS, SAVES = 8, 2, 3
Program = Callable[[Path], tuple[h.Trainer, dict[str, Any]]]


class Change(h.Plugin):
    """Changes something before one batch."""

    def __init__(self, act: Callable[[h.Run], object], before: int) -> None:
        self._act, self._before = act, before

    @h.on(h.BatchStart)
    def change(self, run: h.Run, event: h.BatchStart) -> None:
        if run.progress.steps + 1 == self._before:
            self._act(run)


class Witness(h.Plugin):
    """Keeps the state before every step."""

    affects_training = False

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Leaf]] = {}

    @h.on(h.GradientsReady, lane=h.Lane.REPORT)
    def see(self, run: h.Run, event: h.GradientsReady) -> None:
        self.states[run.progress.steps + 1] = state_of(run)


def state_of(run: h.Run) -> dict[str, Leaf]:
    module = run.modules["model"]
    gradients = [each.grad for each in module.parameters()]
    return leaves([module.state_dict(), gradients, run.optimizer.state_dict(), run.batch, rng.capture()])


def program_of(*plugins: Any, precision: str = "fp32", task: Callable[[], Any] = dropout_task) -> Program:
    """Return a program with dropout, Adam and a checkpoint every third step."""

    def make_trainer(folder: Path) -> tuple[h.Trainer, dict[str, Any]]:
        torch.manual_seed(0)
        recorder = Recorder(folder, digests=Digests(gradients=1, weights=1))
        saving = [h.SaveSchedule(steps=SAVES), h.Checkpoint(folder, keep_last=None, resume="auto")]
        trainer = h.Trainer(
            [h.RNGCapture(1), *saving, recorder, *plugins],
            device=DEVICE,
            deterministic=True,
            precision=precision,  # type: ignore[arg-type]
        )
        batches = random_batches(BATCHES, 8, inputs=16, outputs=1)
        return trainer, {"task": task(), "train": batches, "optimizer": torch.optim.Adam, "epochs": EPOCHS}

    return make_trainer


def train(program: Program, folder: Path, **options: Any) -> None:
    trainer, given = program(folder)
    trainer.fit(**{**given, **options})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_equal_runs_raise_no_alarm_and_a_resumed_one_equals_the_whole(precision: str, tmp_path: Path) -> None:
    program = program_of(precision=precision)
    train(program, tmp_path / "whole")
    train(program, tmp_path / "again")
    train(program, tmp_path / "resumed", epochs=None, steps=5)
    train(program, tmp_path / "resumed")
    for other in ("again", "resumed"):
        divergence = diverge(tmp_path / "whole", tmp_path / other)
        assert (divergence.first, divergence.is_equal, divergence.batches) == (None, True, BATCHES * EPOCHS)


CHANGES: dict[Kind, Callable[[h.Run], object]] = {
    "learning_rate": lambda run: run.optimizer.param_groups[0].update(lr=0.02),
    "draw": lambda run: torch.rand(1, device=DEVICE),
    "loss": lambda run: run.batch[1].add_(1e-3),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("step", [2, 7, 13])
def test_a_change_is_found_at_its_step_with_its_kind(kind: Kind, step: int, tmp_path: Path) -> None:
    train(program_of(), tmp_path / "one")
    train(program_of(Change(CHANGES[kind], before=step)), tmp_path / "other")
    found = diverge(tmp_path / "one", tmp_path / "other").first
    assert found is not None
    assert (found.step, found.kind) == (step, kind)


def test_a_flipped_bit_of_a_weight_is_found_in_the_weights_of_its_step(tmp_path: Path) -> None:
    train(program_of(), tmp_path / "one")
    train(program_of(Chaos([Fault("bit-in-weight", count=7)])), tmp_path / "other")
    found = diverge(tmp_path / "one", tmp_path / "other").first
    assert found is not None
    assert (found.step, found.kind) == (7, "weights")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_is_done_again_with_the_state_that_it_had(precision: str, tmp_path: Path) -> None:
    witness = Witness()
    train(program_of(witness, precision=precision), tmp_path)
    for step in (1, 4, 9, 16):
        with goto(tmp_path, program_of(precision=precision), step=step) as paused:
            assert state_of(paused.run) == witness.states[step]
            assert paused.gradients["model.0.weight"].device.type == DEVICE
            assert paused.comparison.first is None


def test_a_fork_equals_its_parent_up_to_its_change(tmp_path: Path) -> None:
    program = program_of()
    train(program, tmp_path / "parent")
    fork(tmp_path / "parent", program, at=5, into=tmp_path / "null")
    assert diverge(tmp_path / "parent", tmp_path / "null").first is None
    fork(tmp_path / "parent", program, at=5, into=tmp_path / "other", change=CHANGES["learning_rate"])
    found = diverge(tmp_path / "parent", tmp_path / "other").first
    assert found is not None
    assert (found.step, found.kind) == (6, "learning_rate")


class Clamped(h.Supervised):
    """Clamps what goes into the loss."""

    def training_step(self, run: h.Run, batch: Any) -> Any:
        return super().training_step(run, [batch[0], batch[1].clamp(max=0.5)])


def clamped() -> Clamped:
    base = dropout_task()
    return Clamped(base.model, base.loss_fn)


def test_drill_names_the_operator(tmp_path: Path) -> None:
    one, other = program_of(), program_of(task=clamped)
    train(one, tmp_path / "one")
    train(other, tmp_path / "other")
    drilled = drill(tmp_path / "one", tmp_path / "other", one, other)
    assert drilled.repeats == (True, True)
    assert drilled.operator is not None
    assert "clamp" in drilled.operator
