"""What only a GPU can show; each has its twin on the CPU beside the code that it tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.tests.waits import NoWaits, keep_a_gpu_busy, no_waits_on_a_gpu, usual_plugins
from heliograph.tests.kit import Batch, dropout_task, random_batches, sgd
from heliograph_recorder import Digests, Recorder, Remote, StepCheck, StepChecked, Verdicts
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
STEPS = 24


def batches(count: int = STEPS) -> list[Batch]:
    return random_batches(count, 8, inputs=16, outputs=1)


def weights_after(*plugins: Any, precision: str = "fp32", **options: Any) -> list[Tensor]:
    task = dropout_task()
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


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_step_that_is_repeated_changes_nothing(precision: Any) -> None:
    checks: list[str] = []

    class Seen(h.Plugin):
        @h.on(StepChecked)
        def keep(self, run: h.Run, event: StepChecked) -> None:
            checks.append(event.difference)

    plain = weights_after(precision=precision, epochs=2)
    assert all(map(torch.equal, plain, weights_after(StepCheck(3), Seen(), precision=precision, epochs=2)))
    assert set(checks) == {""}


OTHERS: dict[str, Callable[[Path], list[Any]]] = {
    "usual": lambda folder: [
        *usual_plugins(folder),
        h.NaNGuard(),
        h.Checkpoint(folder, background=True),
        h.SaveSchedule(h.Every(epochs=1)),
    ],
    "roll back": lambda folder: [h.RollBack(), h.Checkpoint(folder), h.SaveSchedule(h.Every(epochs=1))],
    "norms": lambda folder: [h.GradientNorm(per_module=True), h.NaNGuard("skip")],
    "values": lambda folder: [h.GradientClipping(value=0.5), h.NaNGuard("stop")],
    "times": lambda folder: [h.HandlerTimes(), h.PhaseTimes(), Recorder(folder / "records")],
    "mixed": lambda folder: [h.Mixup()],
    "checked": lambda folder: [StepCheck(1000)],
    "digests": lambda folder: [Recorder(folder / "records", digests=Digests(gradients=1, weights=1))],
    "remote": lambda folder: [Remote(folder)],
    "verdicts": lambda folder: [Verdicts(1), Recorder(folder / "records")],
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_steady_state_step_never_waits_for_the_device(name: str, precision: Any, tmp_path: Path) -> None:
    watch, others = NoWaits(no_waits_on_a_gpu, range(4, STEPS - 4)), OTHERS[name](tmp_path)
    pinned = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches(2 * STEPS)]
    task = dropout_task()
    plugins = [h.RNGCapture(), *others, h.LogSchedule(h.Every(epochs=1)), watch]
    trainer = h.Trainer(plugins, device="cuda", precision=precision)
    trainer.fit(task, pinned, optimizer=torch.optim.SGD(task.model.parameters(), lr=0.05), epochs=1)
    assert watch.batches >= STEPS - 8


class SlowBackward(torch.autograd.Function):
    """Keeps the device busy for a second in the backward pass."""

    @staticmethod
    def forward(context: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        keep_a_gpu_busy(1.0)
        return gradient


@pytest.mark.parametrize("action", ["raise", "skip", "stop"])
def test_a_guard_waits_for_the_forward_pass_only(action: Any) -> None:
    class Slow(h.Supervised):
        def training_step(self, run: h.Run, batch: Any) -> Tensor:
            return SlowBackward.apply(super().training_step(run, batch))  # type: ignore[no-any-return,no-untyped-call]

    busy: list[bool] = []

    def look(run: h.Run, event: h.GradientsReady) -> None:
        busy.append(not torch.cuda.current_stream().query())

    base = dropout_task()
    trainer = h.Trainer([h.NaNGuard(action)], device="cuda")
    trainer.bus.on(h.GradientsReady, look, lane=h.Lane.REPORT)
    trainer.fit(Slow(base.model, base.loss_fn), batches(3), optimizer=sgd(), epochs=1)
    assert busy[1:] == [True, True]  # in the first, torch makes what it makes once


@pytest.mark.parametrize("action", ["raise", "stop"])
def test_a_guard_keeps_the_weights_of_the_last_good_step(action: Any) -> None:
    def trained(*plugins: Any, bad: int | None = None) -> list[Tensor]:
        torch.manual_seed(0)
        task = h.Supervised(nn.Linear(16, 1), nn.functional.mse_loss)
        data = batches(6)[: 3 if bad is None else 6]
        if bad is not None:
            data[bad][0].fill_(float("nan"))
        ends = pytest.raises(FloatingPointError, match="at step 3") if action == "raise" and bad else nullcontext()
        with ends:
            h.Trainer(plugins, device="cuda").fit(task, data, optimizer=sgd(), epochs=1)
        return [each.detach().cpu() for each in task.model.parameters()]

    assert all(map(torch.equal, trained(h.NaNGuard(action), bad=3), trained()))


def test_fp16_counts_the_steps_that_its_scaler_skips() -> None:
    class Overflowing(h.Supervised):
        def training_step(self, run: h.Run, batch: Any) -> Tensor:
            loss = super().training_step(run, batch)
            # Small, so that none overflows by itself: the scale begins at 65,536.
            return loss * (float("inf") if run.progress.batch == 3 else 2**-10)

    base = dropout_task()
    task = Overflowing(base.model, base.loss_fn)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = h.Trainer([h.LearningRate("step")], device="cuda", precision="fp16")
    progress = trainer.fit(task, batches(6), optimizer=optimizer, scheduler=scheduler, epochs=1).progress
    assert (progress.steps, progress.skipped_steps) == (5, 1)
    assert optimizer.param_groups[0]["lr"] == 0.05 * 0.5**5
    assert all(torch.isfinite(each).all() for each in task.model.parameters())


@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of differs from version to version
@pytest.mark.parametrize("scope", ["modules", "step"])
def test_compiled_code_trains_alike(scope: Any) -> None:
    def trained(*plugins: Any) -> tuple[list[Tensor], tuple[str, ...]]:
        torch.manual_seed(0)
        task = h.Supervised(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)), nn.functional.mse_loss)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05)
        result = h.Trainer(plugins, device="cuda").fit(task, batches(8), optimizer=optimizer, epochs=1)
        return [each.detach().cpu() for each in task.model.parameters()], result.notes

    (plain, _), (compiled, notes) = trained(), trained(h.Compile(scope=scope))
    assert notes == ()
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
