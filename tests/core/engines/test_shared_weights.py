"""Models that several processes compute together are refused at the start: each process would get other batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heliograph import DDPEngine, DeviceEngine, FSDPEngine, Supervised, Trainer
from heliograph.core.engines.weights import refuse_shared_weights
from heliograph.tests.kit import class_batches, sgd
from heliograph.tests.messages import assert_each, assert_facts
from heliograph.tests.ranks_pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

ENGINES: dict[str, Any] = {"device": lambda: DeviceEngine("cpu"), "ddp": DDPEngine, "fsdp": FSDPEngine, "none": None}


def attempted(name: str, kind: str) -> list[str]:
    """Fit, and validate a model that is not plain, within a process group; return the errors."""
    dist.init_process_group("gloo")
    try:
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        if kind == "parallel":
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        elif kind == "buffer":
            model.register_buffer("table", distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        make = ENGINES[name]
        engine: Any = {"use_cpu": True} if make is None else {"engine": make()}
        trainer, task, found = Trainer(**engine), Supervised(model, nn.functional.cross_entropy), []
        fit = partial(trainer.fit, task, class_batches(2), optimizer=sgd(), epochs=1)
        validate = partial(trainer.validate, task, class_batches(2))
        for call in (fit,) if kind == "plain" else (fit, validate):
            try:
                call()
            except ValueError as error:
                found.append(str(error))
        return found
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ENGINES)
def test_a_tensor_parallel_model_is_refused_at_the_start(ranks: Pool, name: str) -> None:
    engine = {"device": "DeviceEngine", "ddp": "DDPEngine", "fsdp": "FSDPEngine", "none": "DDPEngine"}[name]
    batches = "separate model" if name == "device" else "other batches"
    facts = ("model.0.weight", "DTensor", "2 processes", engine, batches, "FSDPEngine()", "build a new task")
    for texts in ranks(2).run(attempted, name, "parallel"):
        assert_each(texts, facts, facts)


@pytest.mark.parametrize("name", ENGINES)
def test_a_plain_model_in_the_same_group_is_trained(ranks: Pool, name: str) -> None:
    assert ranks(2).run(attempted, name, "plain") == [[], []]


def test_a_buffer_counts(ranks: Pool) -> None:
    for first, _ in ranks(2).run(attempted, "ddp", "buffer"):
        assert_facts(first, "model.table", "DTensor", "2 processes")


@pytest.fixture
def group_of_four() -> Iterator[None]:
    """Let this process be the first of four, which do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


class Layer(nn.Linear):
    """A layer that holds something."""

    def __init__(self, held: object) -> None:
        super().__init__(2, 2)
        self.held = held


@pytest.mark.usefixtures("group_of_four")
def test_a_layer_with_a_group_of_some_of_the_processes_is_refused() -> None:
    for held in (dist.new_group([0, 1]), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))):
        with pytest.raises(ValueError, match="2 of the 4"):
            refuse_shared_weights({"model": nn.Sequential(nn.ReLU(), Layer(held))}, "DDPEngine", 4)


@pytest.mark.usefixtures("group_of_four")
def test_other_groups_are_not_in_the_way() -> None:
    part, mesh = dist.new_group([0, 1]), init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    loss = nn.CrossEntropyLoss()
    loss.group = part  # no layer with parameters: each process may take its own batch
    norm = nn.SyncBatchNorm(2, process_group=part)
    modules = {
        "model": nn.Sequential(Layer(dist.group.WORLD), Layer(mesh), Layer(dist.new_group([0])), norm),
        "loss": loss,
    }
    refuse_shared_weights(modules, "DDPEngine", 4)
    refuse_shared_weights({"model": Layer(part)}, "DeviceEngine", 1)


@pytest.mark.usefixtures("group_of_four")
def test_a_mesh_of_one_process_is_not_in_the_way() -> None:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh["tp"], [Shard(0)]))
    refuse_shared_weights({"model": layer}, "DDPEngine", 4)
