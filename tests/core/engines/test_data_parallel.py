"""One process on several GPUs: what is wrapped, what is put back, and what nobody sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from heliograph import BatchStart, DataParallelEngine, Run, Task, Trainer
from heliograph.core.engines.data_parallel import Split
from heliograph.core.engines.options import modules_of
from heliograph.tests.kit import Batch, random_batches, sgd
from torch import Tensor, nn

GPUS = torch.cuda.device_count()


def data() -> list[Batch]:
    return random_batches(3, inputs=3)


class Net(nn.Module):
    """Counts its calls, and notes in which type each computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.calls: list[tuple[int, torch.dtype]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        self.calls.append((len(inputs), outputs.dtype))
        return outputs

    def twice(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self(inputs)
        return 2 * outputs


class Wrapped(Task):
    """A model, a loss that is a module, and a model of which another method is called."""

    def __init__(self) -> None:
        self.model, self.loss_fn, self.other = Net(), nn.MSELoss(), Net()

    def training_step(self, run: Run, batch: Batch) -> Tensor:
        outputs = self.model(batch[0]) + self.other.twice(batch[0])
        loss: Tensor = self.loss_fn(outputs, batch[1])
        return loss


class Module(nn.Module):
    """A task that is a module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.loss_fn = Net(), nn.MSELoss()

    def training_step(self, run: Run, batch: Batch) -> Tensor:
        loss: Tensor = self.loss_fn(self.model(batch[0]), batch[1])
        return loss


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stand in for two GPUs: what scatters, replicates and gathers is replaced, nothing of ours is."""

    def scatter(self: Any, inputs: Any, kwargs: Any, devices: Any) -> Any:
        return [(each,) for each in inputs[0].chunk(2)], [{}, {}]

    def parallel_apply(self: Any, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        with torch.autocast("cuda", torch.float16, enabled=False):  # a thread does not know its parent's type
            return [replica(*args, **named) for replica, args, named in zip(replicas, inputs, kwargs, strict=True)]

    def init(self: Any, module: nn.Module, device_ids: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device, self.dim = module, device_ids, device_ids[0], 0
        self.src_device_obj = torch.device("cpu")

    for name, function in {
        "__init__": init,
        "scatter": scatter,
        "parallel_apply": parallel_apply,
        "replicate": lambda self, module, devices: [module, module],
        "gather": lambda self, outputs, device: torch.cat(outputs),
    }.items():
        monkeypatch.setattr(nn.DataParallel, name, function)


def on_two(**options: Any) -> DataParallelEngine:
    engine = DataParallelEngine(**options)
    engine.gpus = [0, 1]
    engine.device = torch.device("cpu")
    return engine


# One GPU, or none.


@pytest.mark.skipif(GPUS > 1, reason="there are several GPUs")
def test_without_a_second_gpu_nothing_is_wrapped() -> None:
    task, engine = Wrapped(), DataParallelEngine()
    seen: list[type] = []
    trainer = Trainer(engine=engine)
    trainer.bus.on(BatchStart, lambda run, event: seen.append(type(task.model)))
    trainer.fit(task, data(), optimizer=sgd(), epochs=1)
    assert set(seen) == {Net}
    assert [size for size, _ in task.model.calls] == [4, 4, 4]
    assert engine.device.type == ("cuda" if GPUS else "cpu")


def test_modules_with_parameters_are_wrapped_while_a_run_goes_on(two_gpus: None) -> None:
    task, alone = Wrapped(), Wrapped()
    order, parts = list(vars(task)), modules_of(task)
    seen: list[tuple[Any, ...]] = []
    trainer = Trainer(engine=on_two())
    trainer.bus.on(
        BatchStart, lambda run, event: seen.append((type(task.model), type(task.loss_fn), run.modules["model"]))
    )
    result = trainer.fit(task, data(), optimizer=sgd(), epochs=1)
    Trainer(device="cpu").fit(alone, data(), optimizer=sgd(), epochs=1)
    assert seen == [(Split, nn.MSELoss, parts["model"])] * 3
    assert modules_of(task) == parts
    assert list(vars(task)) == order
    assert [size for size, _ in task.model.calls] == [2, 2] * 3
    assert [size for size, _ in task.other.calls] == [4] * 3  # another method than a call is not split
    for mine, theirs in zip(parts["model"].parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert result.progress.steps == 3


def test_a_task_that_is_a_module_shows_no_trace_of_wrappers(two_gpus: None) -> None:
    task, names = Module(), [*Module().state_dict()]
    during: list[tuple[Any, ...]] = []
    model = task.model
    trainer = Trainer(engine=on_two())

    def look(run: Any, event: BatchStart) -> None:
        during.append((type(task.model), [*task.state_dict()], [*run.engine.pack(run.modules, {})[0]["task"]]))

    trainer.bus.on(BatchStart, look)
    trainer.fit(task, data(), optimizer=sgd(), epochs=1)
    assert during == [(Split, names, names)] * 3
    assert task.model is model
    assert [*task.state_dict()] == names
    assert "model" not in vars(task)


@pytest.mark.parametrize("kind", [Wrapped, Module])
def test_wrappers_come_off_after_a_failure(two_gpus: None, kind: Any) -> None:
    task = kind()
    model, trainer = task.model, Trainer(engine=on_two())

    def fail(run: Run, event: BatchStart) -> None:
        assert isinstance(task.model, Split)
        raise KeyError("on purpose")

    trainer.bus.on(BatchStart, fail)
    with pytest.raises(KeyError, match="on purpose"):
        trainer.fit(task, data(), optimizer=sgd(), epochs=1)
    assert task.model is model


@pytest.mark.parametrize("enabled", [True, False])
def test_replicas_compute_under_the_autocast_that_holds_around_them(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    seen: list[tuple[bool, torch.dtype]] = []

    class Asking(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
            return inputs

    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        Split(Asking(), [0, 1])(torch.ones(4, 1))
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert seen == [(enabled, torch.bfloat16)] * 2


def test_a_wrapper_answers_for_its_module(two_gpus: None) -> None:
    net = Net()
    split = Split(net, [0, 1])
    assert split.layer is net.layer
    assert split.calls is net.calls
    with pytest.raises(AttributeError, match="attribute 'nothing'"):
        _ = split.nothing


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} of 2 GPUs")
def test_two_gpus_train_as_one_does() -> None:
    split, alone = Wrapped(), Wrapped()
    Trainer(engine=DataParallelEngine([0, 1], precision="bf16")).fit(split, data(), optimizer=sgd(), epochs=1)
    Trainer(device="cuda:0", precision="bf16").fit(alone, data(), optimizer=sgd(), epochs=1)
    for mine, theirs in zip(split.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-2, rtol=1e-2)
