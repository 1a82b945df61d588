"""Training through accelerate: equal to our own engines, and back to the user's modules after it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heliograph.core.engines.ddp import DDPEngine
from heliograph.core.engines.device import DeviceEngine
from heliograph.core.engines.device_choice import find_engine
from heliograph.core.engines.options import PrecisionName
from heliograph.tests.core.engines.training import (
    Fitting,
    Generating,
    Training,
    adamw,
    batch,
    equal,
    fitted,
    net,
    weights,
)
from heliograph.tests.core.stepping.test_counts import (
    COUNTS,
    Form,
    by_hand,
    fit_together,
    mean_loss,
    model,
    off,
    token_batches,
    windows,
)
from heliograph.tests.kit import sgd
from heliograph.tests.ranks_pool import Pool
from heliograph_bridges.accelerate import AccelerateEngine, check_accelerator
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="the extra accelerate is not installed")


def state() -> Any:
    """Return what accelerate has set for the whole process."""
    from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]  # it has no types

    return {**PartialState._shared_state, **AcceleratorState._shared_state}


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    assert not state()
    assert not torch.distributed.is_initialized()


def trained(engine: DeviceEngine, *, micro: int = 1, clip: float | None = None, steps: int = 10) -> list[Tensor]:
    with Training(engine, Fitting()) as training:
        training.go(range(steps), micro=micro, clip=clip)
    return weights(training)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("precision", "micro"), [("fp32", 1), ("fp32", 2), ("bf16", 1)])
def test_a_process_alone_trains_as_on_a_device(precision: PrecisionName, micro: int) -> None:
    ours = trained(DeviceEngine("cpu", precision=precision), micro=micro, clip=0.5)
    theirs = trained(AccelerateEngine(device="cpu", precision=precision), micro=micro, clip=0.5)
    assert equal(ours, theirs)


def same_as_ddp(precision: PrecisionName, micro: int) -> list[bool]:
    found = trained(DDPEngine(precision=precision), micro=micro)
    theirs = trained(AccelerateEngine(precision=precision), micro=micro)
    return [equal(found, theirs), bool(state()), torch.distributed.is_initialized()]


@pytest.mark.parametrize(("precision", "micro"), [("fp32", 1), ("fp32", 2), ("bf16", 1)])
def test_ranks_train_as_by_ddp(ranks: Pool, precision: str, micro: int) -> None:
    assert ranks(2).run(same_as_ddp, precision, micro) == [[True, False, False]] * 2


def fitted_as_by_ddp() -> None:
    (expected, weights_then), (result, weights_now) = fitted(DDPEngine()), fitted(AccelerateEngine())
    assert result.metrics == expected.metrics
    assert equal(weights_now, weights_then)


def test_a_fit_is_that_of_ddp(ranks: Pool) -> None:
    ranks(2).run(fitted_as_by_ddp)


def swapped() -> None:
    task: Any = Fitting()
    model, criterion = task.model, nn.CrossEntropyLoss(torch.ones(3))
    task.criterion = criterion  # without parameters
    names = {name: set(vars(each)) for name, each in model.named_modules()}
    engine = AccelerateEngine(precision="bf16")
    with Training(engine, task) as training:
        training.go(range(2))
        assert type(task.model) is nn.parallel.DistributedDataParallel
        assert task.criterion is criterion
        assert engine.accelerator.mixed_precision == "bf16"
        assert task.model(batch(0, 0)).dtype == torch.float32
    assert task.model is model
    assert {name: set(vars(each)) for name, each in model.named_modules()} == names
    assert engine.accelerator is None
    deepcopy(model)(batch(0, 0)).sum().backward()


def test_the_task_has_its_own_modules_back(ranks: Pool) -> None:
    ranks(2).run(swapped)


def evaluated() -> list[float]:
    """Evaluate a model with buffers: rank 0 two batches, rank 1 one; then continue."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    with Training(AccelerateEngine(), Fitting(nn.Sequential(nn.Linear(5, 6), norm, nn.Linear(6, 3)))) as training:
        training.go(range(2))
        wrapped = training.task.model
        with torch.no_grad(), training.engine.evaluating():
            assert training.task.model is training.modules["model"]
            step = training.engine.bind_evaluation(training.task.training_step)
            training.task.model.eval()
            losses = [step(None, batch(number, 0)).item() for number in range(2 - training.engine.rank)]
            training.task.model.train()
        assert training.task.model is wrapped
        training.go(range(2, 4))
    return [losses[0], *(each.sum().item() for each in weights(training))]


def test_evaluations_of_unequal_lengths_need_no_exchange(ranks: Pool) -> None:
    first, second = ranks(2).run(evaluated)
    assert first == second


def cut_window(foreseen: bool) -> list[Tensor]:
    with Training(AccelerateEngine(), Fitting(), sgd()) as training:
        engine = training.engine
        with engine.no_sync():
            engine.backward(training.loss(0))
        if foreseen:
            engine.backward(training.loss(1))
        else:
            with engine.no_sync():
                engine.backward(training.loss(1))
        engine.unscale(training.optimizer)
        engine.bind_step(training.optimizer)()
        engine.bind_zero_grad(training.optimizer)()
    return list(training.task.model.state_dict().values())


def test_a_window_that_ends_unforeseen_is_exchanged(ranks: Pool) -> None:
    foreseen, unforeseen = ranks(2).run(cut_window, True), ranks(2).run(cut_window, False)
    torch.testing.assert_close(foreseen[0], unforeseen[0])
    assert equal(unforeseen[0], unforeseen[1])


@pytest.mark.parametrize("form", ["pair", "weighed"])
@pytest.mark.parametrize("n", [1, 2])
def test_the_tokens_of_all_ranks_count(ranks: Pool, n: int, form: Form) -> None:
    batches = token_batches()
    of_steps = windows(batches, 2 * n)
    _, expected = by_hand(of_steps, clip=0.3)
    for found, tokens, losses in ranks(2).run(fit_together, batches, n, form, AccelerateEngine):
        assert off(found, expected) < 3e-6
        assert tokens == sum(COUNTS)
        assert losses[0] == pytest.approx(mean_loss(model(), of_steps[0]), abs=1e-6)


@pytest.mark.usefixtures("alone")
def test_states_are_those_of_other_engines() -> None:
    with Training(AccelerateEngine(device="cpu"), Fitting()) as whole:
        whole.go(range(2))
        states = whole.pack()
        whole.go(range(2, 4))
    assert list(states[0]["model"]) == list(net().state_dict())
    for engine in (DeviceEngine("cpu"), AccelerateEngine(device="cpu")):
        with Training(engine, Fitting()) as resumed:
            engine.unpack(resumed.modules, resumed.optimizers, states)
            resumed.go(range(2, 4))
        assert equal(weights(whole), weights(resumed))


def with_a_given_one() -> list[bool]:
    """Train twice with an accelerator that is kept."""
    from accelerate import Accelerator  # type: ignore[import-untyped]  # it has no types

    found = trained(DDPEngine())
    accelerator = Accelerator(cpu=True)
    engine = AccelerateEngine(accelerator)
    same = [equal(found, trained(engine)) for _ in range(2)]
    assert engine.accelerator is accelerator
    assert accelerator._models == []
    same.append(torch.distributed.is_initialized())
    accelerator.state._reset_state(reset_partial_state=True)
    torch.distributed.destroy_process_group()
    return same


def test_an_accelerator_of_ones_own_keeps_its_group(ranks: Pool) -> None:
    assert ranks(2).run(with_a_given_one) == [[True, True, True]] * 2


@pytest.mark.usefixtures("alone")
def test_steps_that_the_scaler_skips_are_reported_and_dropped_windows_do_not_confuse_it() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # accelerate itself makes one on GPUs only
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    task = Fitting()
    with Training(AccelerateEngine(accelerator), task) as training:
        engine = training.engine
        step, zero_grad = engine.bind_step(training.optimizer), engine.bind_zero_grad(training.optimizer)
        stepped = []
        for number in range(4):
            engine.backward(training.loss(number))
            if number == 1:
                gradient = training.parameters[0].grad
                assert gradient is not None
                gradient[0, 0] = torch.inf
            engine.unscale(training.optimizer)
            engine.unscale(training.optimizer)
            if number != 2:
                stepped.append(step() is not False)
            zero_grad()
        assert stepped == [True, False, True]
        assert engine.state_dict()["scaler"]["scale"] == 512.0
        engine.load_state_dict({"scaler": {**engine.state_dict()["scaler"], "scale": 256.0}})
        assert engine.state_dict()["scaler"]["scale"] == 256.0
    assert all(each.isfinite().all() for each in task.model.parameters())
    accelerator.state._reset_state(reset_partial_state=True)


# What is refused.


class Whole(nn.Module):
    """A task that is a module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = net()

    def training_step(self, run: Any, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch).mean()
        return loss


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Whole, {}, "Whole is itself a"),
        (Generating, {}, "one loss per step"),
        (Fitting, {"precision": "fp16"}, "no fp16 on the"),
        (Fitting, {"gradient_accumulation_steps": 2}, "use the plugin GradientAccumulation"),
    ],
)
def test_what_would_go_another_way_is_refused(kind: Callable[[], Any], options: Any, message: str) -> None:
    task = kind()
    engine = AccelerateEngine(device="cpu", **options)
    with pytest.raises(ValueError, match=re.escape(message)), Training(engine, task):
        pass
    assert not hasattr(task.model, "_is_accelerate_prepared")


@pytest.mark.parametrize("kind", ["FSDP", "MEGATRON_LM", "XLA"])
def test_other_ways_to_train_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"support accelerate's {kind}:"):
        check_accelerator(SimpleNamespace(distributed_type=SimpleNamespace(value=kind)))


@pytest.mark.usefixtures("alone")
def test_deepspeed_keeps_its_states_and_clips_by_itself() -> None:
    deepspeed = SimpleNamespace(
        device=torch.device("cpu"),
        distributed_type=SimpleNamespace(value="DEEPSPEED"),
        clip_grad_norm_=lambda parameters, norm: 3.0,
    )
    engine = AccelerateEngine(deepspeed)
    with pytest.raises(RuntimeError, match=r"calls run\.engine\.accelerator\.save_state\(folder\) on SavePoint"):
        engine.pack({}, {})
    with pytest.raises(RuntimeError, match="checkpoints cannot contain them"):
        engine.unpack({}, {}, ({}, {}))
    with pytest.raises(ValueError, match="gradient_clipping in its configuration"):
        engine.clip_gradients([], 1.0)
    assert engine.clip_gradients([], None).item() == 3.0
    assert engine.steps_in_backward
    engine._has_unsynced = True
    with pytest.raises(RuntimeError, match="window ended early"):
        engine.unscale(adamw(list(net().parameters())))


@pytest.mark.usefixtures("alone")
def test_an_accelerator_is_given_or_made() -> None:
    given = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(ValueError, match="accelerator or precision="):
        AccelerateEngine(given, precision="bf16")


def test_it_is_found_by_its_name() -> None:
    assert find_engine("accelerate") is AccelerateEngine
    assert find_engine("heliograph-bridges:accelerate") is AccelerateEngine


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match="AccelerateEngine needs accelerate,"):
        AccelerateEngine(device="cpu")
