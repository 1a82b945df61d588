"""Precision: what is computed in which type, how fp16 scales losses, and what is set and given back."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    Checkpoint,
    DeviceEngine,
    Every,
    GradientAccumulation,
    GradientClipping,
    GradientsReady,
    LearningRate,
    Log,
    LogSchedule,
    RNGCapture,
    SaveSchedule,
    Supervised,
    Task,
    Trainer,
    ValidationSchedule,
)
from heliograph.core.engines.numerics import LossScaling
from heliograph.core.engines.options import PrecisionName
from heliograph.core.engines.precision import Precision
from heliograph.tests.kit import Batch, random_batches, sgd
from torch import Tensor, nn

HUGE = 1e38  # overflows in fp16, and in fp32 once it is scaled


def data(count: int = 6, bad: tuple[int, ...] = ()) -> list[Batch]:
    pairs = enumerate(random_batches(count, 3))
    return [(inputs * (HUGE if index in bad else 1), targets) for index, (inputs, targets) in pairs]


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss whose gradients fp16 holds with the scale that a run begins with."""
    return nn.functional.mse_loss(outputs, targets) / 64


def make_task() -> Supervised:
    torch.manual_seed(0)
    return Supervised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), loss_fn)


def weights(task: Any) -> list[Tensor]:
    return [each.detach().clone() for each in task.model.parameters()]


def by_hand(
    batches: list[Batch], dtype: torch.dtype, *, window: int = 1, clip: float | None = None
) -> tuple[list[Tensor], int, Any]:
    """Train as torch's manual says; return the weights, the skipped steps and the scaler."""
    task = make_task()
    optimizer = sgd(momentum=0.9)(task.model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    skipped = 0
    for first in range(0, len(batches), window):
        for inputs, targets in batches[first : first + window]:
            with torch.autocast("cpu", dtype):
                loss = loss_fn(task.model(inputs), targets)
            torch.autograd.backward(scaler.scale(loss / window))
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(task.model.parameters(), clip)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        optimizer.zero_grad()
    return weights(task), skipped, scaler


# What is refused.


def test_an_unknown_precision_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'bf16'\? Known: bf16, fp16,"):
        Precision("bf_16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "name", "allowed"),
    [("cpu", "tf32", "fp32, bf16, fp16"), ("meta", "bf16", "fp32"), ("meta", "fp16", "fp32")],
)
def test_what_a_device_does_not_compute_is_refused(device: str, name: PrecisionName, allowed: str) -> None:
    sentence = rf"precision='{name}' .*'{device}', .*allows {allowed}\. "
    with pytest.raises(ValueError, match=sentence):
        Trainer(device=device, precision=name)


@pytest.mark.parametrize("name", ["tf32", "bf16"])
def test_an_old_gpu_computes_in_fp32_and_fp16(monkeypatch: pytest.MonkeyPatch, name: PrecisionName) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(ValueError, match="which allows fp32, fp16"):
        Precision(name).check(torch.device("cuda", 0))
    Precision("fp16").check(torch.device("cuda", 0))


# What is computed.


def test_full_precision_puts_no_function_of_ours_around_torch_s() -> None:
    engine, optimizer = DeviceEngine("cpu"), sgd(momentum=0.9)([nn.Parameter(torch.ones(1))])

    def forward() -> None: ...

    assert engine.bind(forward) is forward
    assert engine.bind_evaluation(forward) is forward
    assert engine.backward is Tensor.backward
    assert engine.bind_step(optimizer) == optimizer.step
    assert engine.bind_zero_grad(optimizer) == optimizer.zero_grad


class Looking(Supervised):
    """Notes the types of what it computes, and whether autocast is on."""

    def __init__(self, task: Supervised) -> None:
        super().__init__(task.model, task.loss_fn)
        self.seen: set[Any] = set()

    def training_step(self, run: Any, batch: Any) -> Tensor:
        self.seen.add(self.model(batch[0]).dtype)
        return super().training_step(run, batch)

    def validation_step(self, run: Any, batch: Any) -> Any:
        self.seen.add(self.model(batch[0]).dtype)
        return super().validation_step(run, batch)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_forward_passes_run_under_autocast_and_nothing_else_does(name: PrecisionName, dtype: torch.dtype) -> None:
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], device="cpu", precision=name)
    task, around = Looking(make_task()), []
    trainer.bus.on(GradientsReady, lambda run, event: around.append(torch.is_autocast_enabled("cpu")))
    trainer.fit(task, data(2), validation=data(1), optimizer=sgd(momentum=0.9), epochs=1)
    trainer.validate(task, data(1))
    assert task.seen == {dtype}
    assert around == [False, False]
    assert {each.dtype for each in task.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("window", [1, 2])
def test_a_run_equals_a_loop_by_hand(name: PrecisionName, dtype: torch.dtype, window: int) -> None:
    task = make_task()
    trainer = Trainer([GradientAccumulation(window)] if window > 1 else [], device="cpu", precision=name)
    result = trainer.fit(task, data(), optimizer=sgd(momentum=0.9), epochs=1)
    expected, skipped, _ = by_hand(data(), dtype, window=window)
    assert all(map(torch.equal, weights(task), expected))
    assert (result.progress.steps, skipped) == (6 // window, 0)


def test_autocast_is_at_hand_for_loops_of_ones_own() -> None:
    layer = nn.Linear(2, 2)
    with DeviceEngine("cpu", precision="bf16").autocast():
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    with DeviceEngine("cpu").autocast():
        assert layer(torch.ones(1, 2)).dtype == torch.float32


# The scale of fp16.


@pytest.mark.parametrize("window", [1, 2])
def test_a_step_with_infinite_gradients_is_skipped_and_counted(window: int) -> None:
    task, trainer = make_task(), None
    plugins = [GradientAccumulation(window)] if window > 1 else []
    trainer = Trainer([*plugins, LearningRate("step")], device="cpu", precision="fp16")
    scheduler: list[torch.optim.lr_scheduler.StepLR] = []

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
        scheduler.append(torch.optim.lr_scheduler.StepLR(optimizer, 100))
        return scheduler[0]

    result = trainer.fit(task, data(bad=(2,)), optimizer=sgd(momentum=0.9), scheduler=schedule, epochs=1)
    expected, skipped, scaler = by_hand(data(bad=(2,)), torch.float16, window=window)
    assert skipped == 1
    assert (result.progress.steps, result.progress.skipped_steps) == (6 // window - 1, 1)
    assert scheduler[0].last_epoch == result.progress.steps
    assert all(map(torch.equal, weights(task), expected))
    assert trainer.engine.state_dict() == {"scaler": scaler.state_dict()}
    assert trainer.engine.state_dict()["scaler"]["scale"] == 2.0**15


@pytest.mark.filterwarnings("ignore:.*fused.*")
def test_a_skipped_step_of_a_fused_optimizer_is_counted_too() -> None:
    task, trainer = make_task(), Trainer(device="cpu", precision="fp16")
    result = trainer.fit(task, data(bad=(2,)), optimizer=sgd(momentum=0.9, fused=True), epochs=1)
    expected, _, _ = by_hand(data(bad=(2,)), torch.float16)
    assert (result.progress.steps, result.progress.skipped_steps) == (5, 1)
    assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(weights(task), expected, strict=True))


def test_gradients_are_true_ones_before_anybody_sees_or_clips_them() -> None:
    task, norms = make_task(), []
    trainer = Trainer([GradientClipping(0.5), LogSchedule(Every(steps=1))], device="cpu", precision="fp16")
    trainer.bus.on(Log, lambda run, event: norms.append(event.metrics["train/gradient_norm"]))
    trainer.fit(task, data(), optimizer=sgd(momentum=0.9), epochs=1)
    expected, _, _ = by_hand(data(), torch.float16, clip=0.5)
    assert all(map(torch.equal, weights(task), expected))
    assert 0 < max(norms) < 100  # the scale is 65536


def test_every_run_begins_with_a_scale_of_its_own() -> None:
    trainer = Trainer(device="cpu", precision="fp16")
    trainer.fit(make_task(), data(bad=(0, 1, 2)), optimizer=sgd(momentum=0.9), epochs=1)
    assert trainer.engine.state_dict()["scaler"]["scale"] == 2.0**13
    trainer.fit(make_task(), data(), optimizer=sgd(momentum=0.9), epochs=1)
    assert trainer.engine.state_dict()["scaler"]["scale"] == 2.0**16


def test_the_scale_is_continued() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = sgd(momentum=0.9)([parameter])
    first, second, other = (DeviceEngine("cpu", precision=name) for name in ("fp16", "fp16", "fp32"))
    for engine in (first, second, other):
        engine.set_up(None, {}, {"optimizer": optimizer})
    first.backward(parameter.sum() * HUGE)
    assert first.bind_step(optimizer)() is False
    first.bind_zero_grad(optimizer)()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.state_dict()["scaler"]["scale"] == 2.0**15
    other.load_state_dict(first.state_dict())  # another precision has no use for it
    second.load_state_dict(other.state_dict())
    assert other.state_dict() == {}
    assert second.state_dict() == first.state_dict()


def test_a_resumed_run_continues_with_the_scale(tmp_path: Path) -> None:
    def fit(folder: Path, steps: int) -> tuple[list[Tensor], dict[str, Any], Any]:
        task, plugins = make_task(), [Checkpoint(folder, resume="auto"), SaveSchedule(Every(steps=1)), RNGCapture()]
        trainer = Trainer(plugins, device="cpu", precision="fp16")
        result = trainer.fit(task, data(bad=(1,)), optimizer=sgd(momentum=0.9), epochs=2, steps=steps)
        return weights(task), trainer.engine.state_dict(), result.progress

    uninterrupted = fit(tmp_path / "one", 8)
    fit(tmp_path / "two", 3)
    resumed = fit(tmp_path / "two", 8)
    assert all(map(torch.equal, uninterrupted[0], resumed[0]))
    assert uninterrupted[1] == resumed[1]
    assert uninterrupted[1]["scaler"]["scale"] == 2.0**14
    assert (resumed[2].steps, resumed[2].skipped_steps) == (8, 2)


class Pair(Task):
    """Two models with a loss each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)
        self.scales: list[float] = []

    def training_step(self, run: Any, batch: Any) -> Any:
        for name in ("left", "right"):
            loss = loss_fn(getattr(self, name)(batch[0]), batch[1])
            self.scales.append(run.engine.precision.scaling.scaler.scale(torch.ones(())).item())
            yield name, loss * (HUGE if name == "left" and run.progress.batch == 1 else 1)


@pytest.mark.parametrize("window", [1, 2])
def test_several_optimizers_share_a_scale_that_moves_where_no_gradients_are_left(window: int) -> None:
    task = Pair()
    trainer = Trainer([GradientAccumulation(window)] if window > 1 else [], device="cpu", precision="fp16")
    optimizers = {name: sgd(momentum=0.9)(getattr(task, name).parameters()) for name in ("left", "right")}
    before = [each.detach().clone() for each in task.left.parameters()]
    trainer.fit(task, data(2), optimizer=optimizers, epochs=1)
    # The third loss overflows; it shows at the fourth, unless gradients of that one are left from the first batch.
    assert task.scales == [2.0**16] * 3 + [2.0**15 if window == 1 else 2.0**16]
    assert trainer.engine.state_dict()["scaler"]["scale"] == 2.0**15
    assert (window == 2) == all(map(torch.equal, task.left.parameters(), before))
    assert optimizers["right"].state_dict()["state"]


def test_a_window_that_is_dropped_leaves_the_next_one_as_it_would_be() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = sgd(momentum=0.9)([parameter])
    scaling = LossScaling("cpu", [optimizer])
    torch.autograd.backward(scaling.scaler.scale(parameter.sum()))
    scaling.unscale(optimizer)
    scaling.unscale(optimizer)  # asked for twice, done once
    assert parameter.grad is not None
    assert parameter.grad.item() == 1.0
    scaling.zero_grad(optimizer)  # no step
    torch.autograd.backward(scaling.scaler.scale(parameter.sum()))
    assert scaling.step(optimizer) is True
    scaling.zero_grad(optimizer)
    assert parameter.item() == pytest.approx(0.9)
    scaling.zero_grad(optimizer)  # nothing to drop
    assert scaling.scaler.state_dict()["_growth_tracker"] == 2


def test_an_optimizer_may_step_twice_while_another_has_gradients() -> None:
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second = torch.optim.SGD([one], 0.1), torch.optim.SGD([two], 0.1)
    scaling = LossScaling("cpu", [first, second])
    torch.autograd.backward(scaling.scaler.scale(two.sum()))
    for loss in (one.sum(), one.sum() * HUGE):
        torch.autograd.backward(scaling.scaler.scale(loss))
        stepped = scaling.step(first)
        scaling.zero_grad(first)
    assert stepped is False
    assert scaling.scaler.state_dict()["scale"] == 2.0**16
    assert scaling.step(second) is True  # its gradients are of the scale that still holds
    scaling.zero_grad(second)
    assert scaling.scaler.state_dict()["scale"] == 2.0**15
    assert one.item() == two.item() == pytest.approx(0.9)


# TensorFloat-32.


def tensor_float() -> tuple[str, bool]:
    """Return torch's settings for it."""
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_tensor_float_is_allowed_within_a_run_only() -> None:
    before, precision = tensor_float(), Precision("tf32")
    with pytest.raises(KeyError), precision.running(), precision.running():
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        raise KeyError
    assert tensor_float() == before
    with Precision("fp32").running():
        assert tensor_float() == before


# On a GPU.

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_tensor_float_changes_what_a_gpu_computes() -> None:
    if not torch.cuda.is_tf32_supported():
        pytest.skip("no TensorFloat-32")
    matrix = torch.randn(512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    engine = DeviceEngine("cuda", precision="tf32")
    full = matrix @ matrix
    with engine.process():
        assert not torch.equal(matrix @ matrix, full)
    assert torch.equal(matrix @ matrix, full)
