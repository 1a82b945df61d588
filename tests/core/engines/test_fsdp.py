"""Sharded training on two gloo ranks: equal to plain averaging, and back to plain modules after it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from heliograph import BatchStart, Event, GradientsReady, Plugin, RankFailed, Run, StepEnd, ValidationBatchEnd, on
from heliograph.core.engines.ddp import DDPEngine
from heliograph.core.engines.device import DeviceEngine
from heliograph.core.engines.fsdp import FSDPEngine
from heliograph.core.engines.options import is_sharding
from heliograph.core.engines.sharded_states import empty_tensors, join_states
from heliograph.tests.core.engines.training import (
    Fitting,
    Generating,
    Make,
    Training,
    adamw,
    batch,
    equal,
    fitted,
    net,
    weights,
)
from heliograph.tests.kit import sgd
from heliograph.tests.messages import assert_facts, pattern
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn


class Net(nn.Module):
    """A task that is a module itself, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = net(), nn.Parameter(torch.ones(3))

    def training_step(self, run: Any, batch: Tensor) -> Tensor:
        loss: Tensor = (self.body(batch) * self.scale).square().mean()
        return loss

    validation_step = training_step


def same_as_ddp(steps: int, micro: int) -> bool:
    found = []
    for kind in (DDPEngine, FSDPEngine):
        with Training(kind(), Fitting()) as training:
            training.go(range(steps), micro=micro)
        found.append(weights(training))
    return equal(*found)


@pytest.mark.parametrize(("steps", "micro"), [(40, 1), (10, 2)])
def test_trains_as_ddp_does_to_the_bit(ranks: Pool, steps: int, micro: int) -> None:
    assert ranks(2).run(same_as_ddp, steps, micro) == [True, True]


def plain_again() -> None:
    """Train, and look at what is left."""
    task = Fitting()
    kinds = [type(each) for each in task.model.modules()]
    names = [set(vars(each)) for each in task.model.modules()]
    before = list(task.model.parameters())
    own = task.model.register_forward_hook(lambda module, inputs, output: output)
    with Training(FSDPEngine(), task) as training:
        training.go(range(3))
        shards = list(task.model.parameters())
        assert all(hasattr(each, "full_tensor") for each in shards)
        assert all(now is shard for now, shard in zip(training.parameters, shards, strict=True))
    assert [type(each) for each in task.model.modules()] == kinds
    assert [set(vars(each)) for each in task.model.modules()] == names
    assert all(now is then for now, then in zip(task.model.parameters(), before, strict=True))
    assert all(now is then for now, then in zip(training.parameters, before, strict=True))
    assert list(task.model._forward_hooks) == [own.id]
    for each in task.model.modules():
        hooks = (each._forward_pre_hooks, each._state_dict_pre_hooks, each._load_state_dict_pre_hooks)
        assert not any(hooks)
        assert not each._load_state_dict_post_hooks
    parts = [part for values in training.optimizer.state.values() for part in values.values()]
    assert parts
    assert not any(hasattr(each, "full_tensor") for each in parts)
    deepcopy(task.model)(batch(0, 0)).sum().backward()
    training.optimizer.step()


def test_leaves_plain_modules_and_optimizers(ranks: Pool) -> None:
    ranks(2).run(plain_again)


def trained_twice() -> list[Tensor]:
    task = Fitting()
    with Training(FSDPEngine(), task) as first:
        first.go(range(2))
    with Training(FSDPEngine(), task, lambda parameters: first.optimizer) as second:
        second.go(range(2, 4))
    with Training(FSDPEngine(), Fitting()) as whole:
        whole.go(range(4))
    assert equal(weights(whole), weights(second))
    return weights(second)


def test_trains_the_same_task_again_with_the_state_of_its_optimizer(ranks: Pool) -> None:
    first, second = ranks(2).run(trained_twice)
    assert equal(first, second)


def begun_apart() -> list[Tensor]:
    task = Fitting()
    with torch.no_grad():
        for each in task.model.parameters():
            each.add_(FSDPEngine().rank)
    with Training(FSDPEngine(), task):
        pass
    return list(task.model.state_dict().values())


def test_all_ranks_begin_with_the_weights_of_the_main_one(ranks: Pool) -> None:
    for found in ranks(2).run(begun_apart):
        assert equal(found, list(net().state_dict().values()))


def micro_and_clipped(kind: Callable[[], DeviceEngine], micro: int, clip: float) -> tuple[list[float], list[Tensor]]:
    with Training(kind(), Fitting(), sgd()) as training:
        norms = training.go(range(5), micro=micro, clip=clip)
    return norms, list(training.task.model.state_dict().values())


def in_one_process(clip: float) -> tuple[list[float], list[Tensor]]:
    model, norms = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        for part in range(2):
            for rank in range(2):
                (model(batch(step, 10 * part + rank)).square().mean() / 4).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, list(model.state_dict().values())


def test_accumulates_and_clips_as_one_process(ranks: Pool) -> None:
    expected_norms, expected = in_one_process(0.05)
    assert all(norm > 0.05 for norm in expected_norms)
    for norms, found in ranks(2).run(micro_and_clipped, FSDPEngine, 2, 0.05):
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def norms_of(norm_type: float) -> list[float]:
    with Training(FSDPEngine(), Fitting()) as training:
        training.engine.backward(training.loss(0))
        sharded = training.engine.clip_gradients(training.parameters, None, norm_type)
        assert type(sharded) is Tensor
        gradients = [each.grad.full_tensor() for each in training.parameters]  # type: ignore[union-attr]
        return [sharded.item(), nn.utils.get_total_norm(gradients, norm_type).item()]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_measures_norms_over_all_shards(ranks: Pool, norm_type: float) -> None:
    for sharded, whole in ranks(2).run(norms_of, norm_type):
        assert sharded == pytest.approx(whole)


def cut_window(foreseen: bool) -> list[Tensor]:
    """Take a window of two micro-batches, of which the second is, or is not, known to be the last."""
    with Training(FSDPEngine(), Fitting(), sgd()) as training:
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
        with engine.no_sync():
            engine.backward(training.loss(2))
        engine.bind_zero_grad(training.optimizer)()  # a window that is dropped leaves nothing to the next
        training.go(range(3, 5))
    return list(training.task.model.state_dict().values())


def test_a_window_that_ends_unforeseen_is_exchanged(ranks: Pool) -> None:
    foreseen, unforeseen = ranks(2).run(cut_window, True), ranks(2).run(cut_window, False)
    assert equal(foreseen[0], unforeseen[0])
    assert equal(foreseen[1], unforeseen[1])


# States.


def saved_and_resumed() -> tuple[Any, list[Tensor]]:
    """Save whole states halfway; continue from them with fresh objects; return them with the end."""
    with Training(FSDPEngine(), Fitting()) as whole:
        whole.go(range(2))
        states = whole.pack()
        whole.go(range(2, 4))
    assert (states == ({}, {})) == (whole.engine.rank > 0)
    with Training(FSDPEngine(), Fitting(deepcopy(net()))) as resumed:
        engine = resumed.engine
        states = engine.broadcast(states)
        with torch.no_grad():
            for each in resumed.parameters:
                each.zero_()
        engine.unpack(resumed.modules, resumed.optimizers, states)
        resumed.go(range(2, 4))
    assert equal(weights(whole), weights(resumed))
    return states, weights(whole)


def resumed_elsewhere(states: Any) -> list[Tensor]:
    with Training(DDPEngine(), Fitting()) as training:
        training.engine.unpack(training.modules, training.optimizers, states)
        training.go(range(2, 4))
    return weights(training)


def resumed_here(states: Any) -> list[Tensor]:
    with Training(FSDPEngine(), Fitting()) as training:
        training.engine.unpack(training.modules, training.optimizers, states)
        training.go(range(2, 4))
    return weights(training)


def packed_by_ddp() -> Any:
    with Training(DDPEngine(), Fitting()) as training:
        training.go(range(2))
        return training.pack()


def test_whole_states_are_those_of_plain_modules(ranks: Pool) -> None:
    (states, end), _ = ranks(2).run(saved_and_resumed)
    model = net()
    assert list(states[0]["model"]) == list(model.state_dict())
    assert all(type(each) is Tensor for each in states[0]["model"].values())
    optimizer = adamw(list(model.parameters()))
    model.load_state_dict(states[0]["model"])
    optimizer.load_state_dict(deepcopy(states[1]["optimizer"]))
    assert set(states[1]["optimizer"]["state"]) == {0, 1, 2, 3, 4}
    assert equal(ranks(2).run(resumed_elsewhere, states)[0], end)
    (by_ddp, _) = ranks(2).run(packed_by_ddp)
    assert equal(ranks(2).run(resumed_here, by_ddp)[0], end)


def sharded(folder: str, *, is_async: bool) -> Any:
    """Save shards halfway; continue from them with fresh objects; return the rest, with the whole states."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    with Training(FSDPEngine(state="sharded"), Fitting()) as whole:
        assert is_sharding(whole.engine)
        whole.go(range(2))
        states = whole.pack()
        tensors, rest = whole.engine.shard_state(whole.modules, whole.optimizers)
        group = whole.engine.saving_group()
        if is_async:
            future = async_save(tensors, checkpoint_id=folder, process_group=group)
            whole.go(range(2, 4))
            future.result()  # type: ignore[union-attr]  # a future, unless other stagers are asked for
        else:
            save(tensors, checkpoint_id=folder, process_group=group)
            whole.go(range(2, 4))
    with Training(FSDPEngine(), Fitting()) as resumed:
        assert is_sharding(resumed.engine)
        resumed.go(range(7, 8))
        resumed.engine.load_shard_state(
            resumed.modules, resumed.optimizers, rest, lambda room: load(room, checkpoint_id=folder)
        )
        resumed.go(range(2, 4))
    assert equal(weights(whole), weights(resumed))
    return rest, states


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_shards_resume_to_the_bit_and_can_be_consolidated(ranks: Pool, tmp_path: Any, is_async: bool) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    (rest, states), (rest_1, _) = ranks(2).run(sharded, str(tmp_path), is_async=is_async)
    assert rest == rest_1
    tensors = empty_tensors(rest)
    load(tensors, checkpoint_id=tmp_path, no_dist=True)
    modules, optimizers = join_states(tensors, rest)
    assert equal(list(modules["model"].values()), list(states[0]["model"].values()))
    assert optimizers["optimizer"]["param_groups"] == states[1]["optimizer"]["param_groups"]
    for number, values in states[1]["optimizer"]["state"].items():
        assert values.keys() == optimizers["optimizer"]["state"][number].keys()
        for key, value in values.items():
            assert torch.equal(value, optimizers["optimizer"]["state"][number][key])


def loaded_elsewhere(rest: Any) -> None:
    with Training(FSDPEngine(), Fitting(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)))) as training:
        assert is_sharding(training.engine)
        training.engine.load_shard_state(training.modules, training.optimizers, rest, dict.clear)


def rest_of_a_training() -> Any:
    with Training(FSDPEngine(), Fitting()) as training:
        training.go(range(1))
        assert is_sharding(training.engine)
        return training.engine.shard_state(training.modules, training.optimizers)[1]


def test_shards_of_another_network_are_refused(ranks: Pool) -> None:
    rest = ranks(2).run(rest_of_a_training)[0]
    with pytest.raises(ValueError, match="network than the task's:"):
        ranks(2).run(loaded_elsewhere, rest)


# Precision.


def in_bf16() -> tuple[list[Tensor], list[Tensor], str]:
    found, dtypes = [], []
    for kind in (DDPEngine, FSDPEngine):
        with Training(kind(precision="bf16"), Fitting()) as training:
            training.task.model[0].register_forward_pre_hook(lambda layer, inputs: dtypes.append(layer.weight.dtype))
            training.go(range(3))
        found.append(weights(training))
    assert {each.dtype for each in found[1]} == {torch.float32}
    return found[0], found[1], str(dtypes[-1])


def test_bf16_gathers_sixteen_bits_and_trains_as_ddp(ranks: Pool) -> None:
    for plain, found, dtype in ranks(2).run(in_bf16):
        assert equal(plain, found)
        assert dtype == "torch.bfloat16"


def normalized() -> list[Tensor]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(5, 6), norm, nn.Linear(6, 3))
    with Training(FSDPEngine(precision="bf16"), Fitting(model)) as training:
        training.go(range(3))
        assert norm.running_mean is not None
        own = norm.running_mean.clone()
        with training.engine.evaluating():
            shared = norm.running_mean.clone()
            assert type(norm.weight) is nn.Parameter
            assert norm.weight.dtype == torch.float32
    return [own, shared]


def test_running_statistics_stay_in_32_bits_and_are_shared_for_an_evaluation(ranks: Pool) -> None:
    (own_0, shared_0), (own_1, shared_1) = ranks(2).run(normalized)
    assert not torch.equal(own_0, own_1)
    assert torch.equal(shared_0, own_0)
    assert torch.equal(shared_1, own_0)


def overflowing() -> tuple[list[bool], list[float], list[Tensor]]:
    """Let the gradients of rank 1 alone be infinite in the second of four steps, in one shard."""
    stepped: list[bool] = []
    with Training(FSDPEngine(precision="fp16"), Fitting(), sgd()) as training:
        engine, scales = training.engine, []
        step, zero_grad = engine.bind_step(training.optimizer), engine.bind_zero_grad(training.optimizer)
        for number in range(4):
            engine.backward(training.loss(number))
            if number == 1 and engine.rank == 1:
                gradient: Any = training.parameters[0].grad
                gradient.to_local()[0, 0] = torch.inf
            stepped.append(step() is not False)
            zero_grad()
            scales.append(engine.state_dict()["scaler"]["scale"])
    return stepped, scales, list(training.task.model.state_dict().values())


def test_fp16_skips_a_step_on_all_ranks_alike(ranks: Pool) -> None:
    (stepped, scales, found), other = ranks(2).run(overflowing)
    assert stepped == [True, False, True, True]
    assert scales[1] == scales[0] / 2 == scales[3]
    assert other[0] == stepped
    assert other[1] == scales
    assert equal(other[2], found)
    assert all(each.isfinite().all() for each in found)


# Evaluation.


def evaluated(fewer: int, *, before: bool) -> list[float]:
    """Evaluate two batches on rank 0, fewer on rank 1."""
    with Training(FSDPEngine(), Fitting()) as training:
        engine = training.engine
        if not before:
            training.go(range(2))
        with torch.no_grad(), engine.evaluating():
            step = engine.bind_evaluation(training.task.training_step)
            losses = [step(None, batch(number, 0)).item() for number in range(2 - fewer * engine.rank)]
        training.go(range(2, 4))
    return [*losses, *(each.sum().item() for each in weights(training))]


@pytest.mark.parametrize("fewer", [1, 2])
@pytest.mark.parametrize("before", [False, True])
def test_evaluations_of_unequal_lengths_need_no_exchange(ranks: Pool, before: bool, fewer: int) -> None:
    first, second = ranks(2).run(evaluated, fewer, before=before)
    assert first[: 2 - fewer] == second[: 2 - fewer]
    assert first[2:] == second[2 - fewer :]
    if before:
        assert first[0] == net()(batch(0, 0)).square().mean().item()


def evaluated_in_parts() -> float:
    engine = FSDPEngine(whole_evaluations=False)
    with Training(engine, Fitting()) as training, torch.no_grad(), engine.evaluating():
        assert all(hasattr(each, "full_tensor") for each in training.task.model.parameters())
        return training.loss(0).item()


def test_evaluations_may_gather_layer_by_layer(ranks: Pool) -> None:
    expected = [net()(batch(0, rank)).square().mean().item() for rank in range(2)]
    assert ranks(2).run(evaluated_in_parts) == expected


# What is gathered apart.


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)])
        self.layers[2].weight = self.layers[0].weight

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def wrapped_names(model: nn.Module, shard: Any = None) -> list[str]:
    with Training(FSDPEngine(shard=shard), Fitting(model)) as training:
        training.go(range(1))
        return [name for name, each in model.named_modules() if type(each).__name__.startswith("FSDP")]


def wraps() -> None:
    assert wrapped_names(net()) == ["", "0", "2", "4"]
    assert wrapped_names(nn.Sequential(nn.Sequential(nn.Linear(5, 5)), nn.Linear(5, 3))) == ["", "0", "1"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(5, 5)), nn.Linear(5, 3))
    assert wrapped_names(nested, nn.Linear) == ["", "0.0", "1"]
    assert wrapped_names(net(), lambda module: False) == [""]
    assert wrapped_names(net(), [nn.Conv2d]) == [""]
    tied = Tied()
    assert wrapped_names(tied) == ["", "layers.1"]
    assert tied.layers[0].weight is tied.layers[2].weight


def test_layers_are_gathered_apart_by_a_rule(ranks: Pool) -> None:
    ranks(2).run(wraps)


def test_a_state_is_full_or_sharded() -> None:
    with pytest.raises(ValueError, match="state= must be 'full'"):
        FSDPEngine(device="cpu", state="both")  # type: ignore[arg-type]


class Nested(Fitting):
    """A task that names a part of its model, and a loss without parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4)), nn.Linear(4, 3)))
        self.head = self.model[0][1]  # type: ignore[index]  # a sequential one
        self.criterion = nn.CrossEntropyLoss(torch.ones(3))


def named_part() -> Any:
    task = Nested()
    with Training(FSDPEngine(), task) as training:
        training.go(range(1))
        assert type(task.head).__name__ == "FSDPLinear"
        states = training.pack()
    assert type(task.head) is nn.Linear
    return states[0], task.head.weight


def test_a_part_that_the_task_names_is_gathered_apart(ranks: Pool) -> None:
    (packed, weight), _ = ranks(2).run(named_part)
    assert set(packed) == {"model", "head", "criterion"}
    assert torch.equal(packed["head"]["weight"], packed["model"]["0.1.weight"])
    assert torch.equal(packed["head"]["weight"], weight)


class Listed(Fitting):
    """A task whose model is a list, which has no forward."""

    def training_step(self, run: Any, batch: Tensor) -> Tensor:
        for layer in self.model.children():
            batch = layer(batch)
        return batch.square().mean()


def listed() -> list[Tensor]:
    task = Listed(nn.ModuleList(net().children()))
    with Training(FSDPEngine(), task) as training:
        training.go(range(3))
    with Training(DDPEngine(), Fitting()) as plain:
        plain.go(range(3))
    assert equal(weights(training), weights(plain))
    return weights(training)


def test_a_model_may_be_a_list_of_layers(ranks: Pool) -> None:
    assert equal(*ranks(2).run(listed))


def a_module_as_task() -> list[Tensor]:
    task = Net()
    with Training(FSDPEngine(), task) as training:
        training.go(range(3))
        with torch.no_grad(), training.engine.evaluating():
            task.validation_step(None, batch(0, 0))
        training.go(range(3, 5))
    assert "training_step" not in vars(task)
    return weights(training)


def as_ddp() -> list[Tensor]:
    with Training(DDPEngine(), Net()) as training:
        training.go(range(5))
    return weights(training)


def test_a_task_may_be_a_module_itself(ranks: Pool) -> None:
    assert equal(ranks(2).run(a_module_as_task)[0], ranks(2).run(as_ddp)[0])


# In a fit.


def fitted_as_by_ddp() -> None:
    (expected, weights_then), (result, weights_now) = fitted(DDPEngine()), fitted(FSDPEngine())
    assert result.metrics == expected.metrics
    assert result.progress == expected.progress
    assert equal(weights_now, weights_then)


def test_a_fit_is_that_of_ddp(ranks: Pool) -> None:
    ranks(2).run(fitted_as_by_ddp)


class Failing(Plugin):
    """Fails on rank 1, while rank 0 continues to gather weights."""

    @on(BatchStart)
    def fail(self, run: Run, event: BatchStart) -> None:
        if run.engine.rank == 1 and run.progress.steps == 3:
            raise KeyError("a failure")


def failed_in_a_fit() -> tuple[str, bool]:
    engine = FSDPEngine()
    with pytest.raises((KeyError, RankFailed)) as caught:
        fitted(engine, Failing())
    return type(caught.value).__name__, engine.group is None


def test_a_rank_that_fails_lets_the_others_go(ranks: Pool) -> None:
    assert ranks(2).run(failed_in_a_fit, timeout=60) == [("RankFailed", True), ("KeyError", True)]


# In one process.


def test_a_process_alone_trains_as_on_a_device() -> None:
    found = []
    for engine in (DeviceEngine("cpu"), FSDPEngine(device="cpu")):
        with Training(engine, Fitting()) as training:
            training.go(range(5), micro=2, clip=0.1)
        found.append(weights(training))
    assert equal(*found)
    assert not torch.distributed.is_initialized()


class Uncalled(nn.Module):
    """Parameters that nothing gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Sharing(Fitting):
    """Two modules that share a parameter."""

    def __init__(self) -> None:
        first, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
        super().__init__(first)
        self.other.weight = first.weight


@pytest.mark.parametrize(
    ("kind", "make", "facts"),
    [
        (
            Sharing,
            adamw,
            ("Linear and Linear share", "[5, 5]", "FSDPEngine"),
        ),
        (Generating, adamw, ("FSDPEngine", "one loss", "several")),
        (lambda: Fitting(Uncalled()), adamw, ("'model'", "Uncalled", "without a forward")),
        (Fitting, lambda each: adamw([nn.Parameter(torch.ones(2))]), ("shape [2]", "in no")),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_anything_is(
    kind: Callable[[], Any], make: Make, facts: tuple[str, ...]
) -> None:
    task = kind()
    before = [type(each) for each in task.model.parameters()]
    with pytest.raises(ValueError, match=pattern(*facts)), Training(FSDPEngine(device="cpu"), task, make):
        pass
    assert [type(each) for each in task.model.parameters()] == before
    assert not torch.distributed.is_initialized()


def test_a_failed_process_alone_gets_its_modules_back() -> None:
    task = Fitting()
    with pytest.raises(KeyError), Training(FSDPEngine(device="cpu"), task) as training:
        training.go(range(1))
        raise KeyError("a failure")
    assert type(task.model) is nn.Sequential
    assert task.model(batch(0, 0)).shape == (4, 3)


def failing() -> str:
    task = Fitting()
    try:
        with Training(FSDPEngine(), task):
            raise KeyError("a failure")
    except KeyError:
        pass
    try:
        with Training(FSDPEngine(), task):
            pass
    except ValueError as error:
        return str(error)
    return ""


def test_a_failed_run_leaves_shards_that_are_refused_later(ranks: Pool) -> None:
    for message in ranks(2).run(failing):
        assert_facts(message, "failed run", "FSDPEngine", "build a new task")


class OfTheMain(Plugin):
    """Does something on the main rank only."""

    ranks = "main"

    def __init__(self, does: str) -> None:
        self.does = does

    @on(StepEnd, GradientsReady)
    def act(self, run: Run, event: Event) -> None:
        task: Any = run.task
        engine: Any = run.engine
        if self.does == "forward":
            task.model(batch(0, 0))
        elif self.does == "part":
            task.model[0](batch(0, 0))
        elif self.does == "clip_gradients":
            engine.clip_gradients(list(task.model.parameters()), 1.0)
        elif self.does in ("pack", "shard_state"):
            getattr(engine, self.does)(run.modules, run.optimizers)

    @on(ValidationBatchEnd)
    def look(self, run: Run, event: ValidationBatchEnd) -> None:
        task: Any = run.task
        assert task.model(batch(0, 0)).shape == (4, 3)


def does_on_the_main_rank(does: str) -> tuple[str, str]:
    try:
        return fitted(FSDPEngine(), OfTheMain(does))[0].status, ""
    except RuntimeError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("does", "called"),
    [
        ("forward", "forward"),
        ("part", "forward"),
        ("clip_gradients", "clip_gradients"),
        ("pack", "pack"),
        ("shard_state", "shard_state"),
    ],
)
def test_what_needs_all_ranks_is_refused_on_some(ranks: Pool, does: str, called: str) -> None:
    main, other = ranks(2).run(does_on_the_main_rank, does)
    assert (main[0], other[0]) == ("RuntimeError", "RankFailed")
    for _, text in (main, other):
        assert_facts(text, "of_the_main", called, "gradients_ready", "some ranks")


def test_a_rank_may_use_a_model_by_itself_while_it_is_whole(ranks: Pool) -> None:
    assert ranks(2).run(does_on_the_main_rank, "") == [("completed", "")] * 2
