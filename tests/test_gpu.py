"""What only a GPU can show; each has its twin on the CPU beside the code that it tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import Batch, random_batches
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
STEPS = 24


def made_task() -> h.Supervised:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    return h.Supervised(model, nn.functional.mse_loss)


def batches(count: int = STEPS) -> list[Batch]:
    return random_batches(count, 8, inputs=16, outputs=1)


def weights_after(*plugins: Any, precision: str = "fp32", **options: Any) -> list[Tensor]:
    task = made_task()
    trainer = h.Trainer([h.RNGCapture(), *plugins], device="cuda", precision=precision, deterministic=True)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9)
    trainer.fit(task, batches(), optimizer=optimizer, **options)
    return [each.detach().cpu() for each in task.model.state_dict().values()]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_equals_the_whole_one(precision: str, background: bool, tmp_path: Path) -> None:
    """Dropout draws from the GPU's generator; fp16 has the scale of its scaler; a background save has pinned memory."""

    def saving(resume: str | None = None) -> list[Any]:
        return [
            h.Checkpoint(tmp_path, background=background, resume=resume, keep_last=None),
            h.SaveSchedule(h.Every(steps=5)),
        ]

    whole = weights_after(precision=precision, epochs=2)
    weights_after(*saving(), precision=precision, steps=13)
    resumed = weights_after(*saving("auto"), precision=precision, epochs=2)
    assert all(map(torch.equal, whole, resumed))


class NoWaits(h.Plugin):
    """Makes torch refuse every wait for the device, in the steps between two logs."""

    def __init__(self) -> None:
        self.steps = 0

    @h.on(h.BatchEnd, lane=h.Lane.REPORT)
    def watch(self, run: h.Run, event: h.BatchEnd) -> None:
        watched = 4 <= run.progress.steps < STEPS - 4
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        self.steps += watched

    def close(self) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_steady_state_step_never_waits_for_the_device(precision: str, tmp_path: Path) -> None:
    usual = [
        h.EMA(0.99, validate=False),
        h.GradientClipping(1.0),
        h.GradientAccumulation(2),
        h.JsonlLog(tmp_path / "log.jsonl"),
        h.TensorBoard(tmp_path / "tensorboard"),
        h.ProgressBar(),
        h.LogSchedule(h.Every(epochs=1)),
        h.Checkpoint(tmp_path),
        h.SaveSchedule(h.Every(epochs=1)),
    ]
    watch = NoWaits()
    pinned = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches(2 * STEPS)]
    task = made_task()
    trainer = h.Trainer([h.RNGCapture(), *usual, watch], device="cuda", precision=precision)  # type: ignore[arg-type]
    trainer.fit(task, pinned, optimizer=torch.optim.SGD(task.model.parameters(), lr=0.05), epochs=1)
    assert watch.steps >= STEPS - 8


def test_fp16_counts_the_steps_that_its_scaler_skips() -> None:
    class Overflowing(h.Supervised):
        def training_step(self, run: h.Run, batch: Any) -> Tensor:
            loss = super().training_step(run, batch)
            return loss * float("inf") if run.progress.batch == 3 else loss

    base = made_task()
    task = Overflowing(base.model, base.loss_fn)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = h.Trainer([h.LearningRate("step")], device="cuda", precision="fp16")
    progress = trainer.fit(task, batches(6), optimizer=optimizer, scheduler=scheduler, epochs=1).progress
    assert (progress.steps, progress.skipped_steps) == (5, 1)
    assert optimizer.param_groups[0]["lr"] == 0.05 * 0.5**5
    assert all(torch.isfinite(each).all() for each in task.model.parameters())


def test_compiled_code_trains_alike() -> None:
    def trained(*plugins: Any) -> tuple[list[Tensor], tuple[str, ...]]:
        torch.manual_seed(0)
        task = h.Supervised(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)), nn.functional.mse_loss)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05)
        result = h.Trainer(plugins, device="cuda").fit(task, batches(8), optimizer=optimizer, epochs=1)
        return [each.detach().cpu() for each in task.model.parameters()], result.notes

    (plain, _), (compiled, notes) = trained(), trained(h.Compile())
    assert notes == ()
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
