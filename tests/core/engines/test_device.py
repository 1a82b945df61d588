"""The engine of one process: it is alone, and hands everything on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heliograph import BatchEnd, DeviceEngine, Plugin, Run, Supervised, Trainer, on
from heliograph.core.engines.contract import LoopEngine
from heliograph.core.engines.precision import Precision
from torch import nn


def scaling_of(engine: DeviceEngine) -> object:
    assert isinstance(engine.precision, Precision)
    return engine.precision.scaling


@pytest.fixture
def engine() -> LoopEngine:
    return DeviceEngine("cpu")


def test_it_is_the_only_one(engine: LoopEngine) -> None:
    tensor = torch.ones(2)
    assert (engine.rank, engine.local_rank, engine.world_size) == (0, 0, 1)
    assert (engine.is_main, engine.is_local_main, engine.watch) == (True, True, None)
    reduced = engine.reduce(tensor, "sum")
    assert torch.equal(reduced, tensor)
    assert reduced is not tensor
    assert engine.reduce(3, "max") == 3
    assert engine.gather(tensor) == [tensor]
    assert engine.gather_objects("word") == ["word"]
    assert engine.broadcast("word") == "word"
    assert engine.vote((1.0, 2.0)) == [1.0, 2.0]
    with engine.process(), engine.process(), engine.no_sync(), engine.refusing("plugin", "event"):
        engine.barrier()
    engine.tear_down()
    engine.abandon()


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("gpu", "Unknown device 'gpu'.*'cuda'"),
        ("cuda:99", r"'cuda:99'.*\d+ CUDA devices"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeviceEngine(device)


def test_scaled_losses_add_scaled_gradients(engine: LoopEngine) -> None:
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    engine.backward_scaled(one.sum() + two.sum(), 0.25)
    engine.backward_scaled(one.sum() + two.sum(), 1.0)
    engine.backward_for(one.sum() + two.sum(), 0.5, [one])
    engine.backward_for(one.sum(), 0.5, [one])
    engine.exchange_gradients([one])
    assert one.grad is not None
    assert two.grad is not None
    assert (one.grad.item(), two.grad.item()) == (2.25, 1.25)


def test_gradients_are_clipped_or_measured_only(engine: LoopEngine) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for each, value in zip(parameters, (3.0, 4.0), strict=False):
        each.grad = torch.tensor([value, 0.0])
    assert engine.clip_gradients(iter(parameters), None) == 5.0
    assert engine.clip_gradients(parameters, None, 1.0) == 7.0
    assert engine.clip_gradients(iter(parameters), 1.0) == 5.0
    assert engine.clip_gradients(parameters, None).item() == pytest.approx(1.0)
    assert engine.clip_gradients([], None) == 0.0


def test_states_are_packed_by_name_and_unpacked_as_copies(engine: LoopEngine) -> None:
    def parts() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        net = nn.BatchNorm1d(2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        return {"net": net}, {"optimizer": optimizer}

    modules, optimizers = parts()
    modules["net"](torch.randn(4, 2)).square().sum().backward()
    optimizers["optimizer"].step()
    weights, states = engine.pack(modules, optimizers)
    assert list(weights["net"]) == list(modules["net"].state_dict())
    others, their_optimizers = parts()
    engine.unpack(others, their_optimizers, (weights, states))
    found: Any = engine.pack(others, their_optimizers)
    assert all(torch.equal(value, found[0]["net"][name]) for name, value in weights["net"].items())
    momentum = [state["optimizer"]["state"][0]["momentum_buffer"] for state in (states, found[1])]
    assert torch.equal(*momentum)
    assert momentum[0] is not momentum[1]
    assert engine.state_dict() == {}
    engine.load_state_dict({})


def test_an_engine_is_in_one_run_at_a_time() -> None:
    """A run within another would give the gradient scaler of fp16 a new beginning, say."""

    class Nested(Plugin):
        reported = ""

        @on(BatchEnd)
        def validate(self, run: Run, event: BatchEnd) -> None:
            with pytest.raises(RuntimeError) as caught:
                Trainer(engine=engine).validate(task, data)
            self.reported, self.scaling = str(caught.value), scaling_of(engine)

    engine, nested = DeviceEngine("cpu", precision="fp16"), Nested()
    task, data = Supervised(nn.Linear(2, 1), nn.functional.mse_loss), [(torch.ones(2, 2), torch.ones(2, 1))] * 2
    with Trainer([nested], engine=engine).run(task, data, optimizer=torch.optim.SGD, epochs=1) as run:
        scaling = scaling_of(engine)
        for _ in run.epochs():
            for batch in run.batches():
                run.step(run.stepping.forward(run, batch))
    assert "DeviceEngine" in nested.reported
    assert nested.scaling is scaling
    with pytest.raises(ValueError, match="not to be had"):  # what fails before its beginning lets go of it
        Trainer(engine=Refusing("cpu")).validate(task, data)
    assert Trainer(engine=engine).validate(task, data).status == "completed"


class Refusing(DeviceEngine):
    def set_up(self, *args: Any) -> None:
        raise ValueError("not to be had")
