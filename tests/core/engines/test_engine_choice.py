"""Which engine a trainer gets, and what is refused with which words."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import DataParallelEngine, DDPEngine, DeviceEngine, FSDPEngine, Trainer
from heliograph.core.distributed.membership import Membership
from heliograph.core.engines.device_choice import GROUP, choose_device, find_engine
from heliograph.core.engines.engine_choice import choose_engine
from heliograph.plugins import discovery

ALONE = Membership()


def member(local_rank: int, local_world_size: int | None = 2) -> Membership:
    return Membership(local_rank, local_rank, 2, local_world_size, "127.0.0.1", 29500)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets torch see so many GPUs, and no Apple one."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

    return see


@pytest.fixture
def with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the second of two that were started together."""
    given = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


# One process.


@pytest.mark.parametrize(
    ("count", "options", "device"),
    [
        (0, {}, "cpu"),
        (2, {}, "cuda"),
        (0, {"use_cpu": True}, "cpu"),
        (2, {"use_cpu": True}, "cpu"),
        (2, {"use_cpu": False}, "cuda"),
        (2, {"gpus": [1]}, "cuda:1"),
        (2, {"device": "cuda:1"}, "cuda:1"),
        (2, {"device": torch.device("cpu")}, "cpu"),
        (0, {"device": None, "gpus": None, "use_cpu": None}, "cpu"),
    ],
)
def test_one_process_gets_one_device(gpus: Any, count: int, options: Any, device: str) -> None:
    gpus(count)
    for engine in (choose_engine(**options), Trainer(**options).engine):
        assert type(engine) is DeviceEngine
        assert engine.device == torch.device(device)


def test_an_apple_gpu_is_taken_where_there_is_no_other(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_engine().device.type == "mps"
    assert choose_engine(use_cpu=False).device.type == "mps"
    with pytest.raises(RuntimeError, match="use_cpu=False needs a GPU"):
        choose_device(member(0), {"use_cpu": False})  # it serves one process


def test_an_apple_gpu_that_is_not_there_is_refused(gpus: Any) -> None:
    gpus(0)
    with pytest.raises(ValueError, match="'mps' is not available:"):
        choose_engine(device="mps")


@pytest.mark.parametrize(
    ("count", "options", "error", "words"),
    [
        (2, {"use_cpu": True, "gpus": [0]}, ValueError, r"only one of .* gpus=\[0\], use_cpu=True"),
        (2, {"device": "cpu", "gpus": [0]}, ValueError, "only one of .* device='cpu'"),
        (2, {"device": "cpu", "use_cpu": True}, ValueError, "only one of .* device='cpu'"),
        (0, {"use_cpu": False}, RuntimeError, "use_cpu=False needs a GPU, but torch sees none"),
        (0, {"gpus": [0]}, RuntimeError, r"gpus=\[0\] needs CUDA, but torch sees no CUDA device"),
        (2, {"gpus": [5]}, ValueError, "torch sees 2 CUDA devices"),
        (2, {"gpus": []}, ValueError, "names 0 GPUs, but 1 process"),
        (0, {"device": "cuda"}, ValueError, "Device 'cuda' is not available"),
        (0, {"precison": "bf16"}, TypeError, "Trainer has no option 'precison'. Did you mean 'precision'"),
        (0, {"device": "cpu", "precision": "tf32"}, ValueError, "which allows fp32, bf16, fp16"),
    ],
)
def test_what_contradicts_itself_or_the_machine_is_refused(
    gpus: Any, count: int, options: Any, error: type[Exception], words: str
) -> None:
    gpus(count)
    with pytest.raises(error, match=words):
        Trainer(**options)


def test_several_gpus_in_one_process_are_refused_with_what_to_do(gpus: Any) -> None:
    gpus(4)
    with pytest.raises(ValueError, match="single process uses") as caught:
        Trainer(gpus=[0, 2])
    assert "torchrun --nproc-per-node=2 train.py" in str(caught.value)
    assert "heliograph.launch(main, nprocs=2)" in str(caught.value)
    assert "engine=DataParallelEngine(gpus=[0, 2])" in str(caught.value)


# Several processes.


@pytest.mark.parametrize("options", [{}, {"use_cpu": True}, {"device": "cpu"}])
def test_a_process_that_was_started_with_others_gets_a_group(gpus: Any, with_another: None, options: Any) -> None:
    gpus(0)
    engine = Trainer(**options).engine
    assert type(engine) is DDPEngine
    assert (engine.rank, engine.world_size, engine.device.type) == (1, 2, "cpu")


def test_each_process_of_a_machine_gets_its_gpu(gpus: Any) -> None:
    gpus(4)
    found = [choose_device(member(rank), {"gpus": [3, 1]}) for rank in (0, 1)]
    assert found == [torch.device("cuda", 3), torch.device("cuda", 1)]
    assert choose_device(member(1, None), {"gpus": [3, 1]}) == torch.device("cuda", 1)
    assert choose_device(member(1), {"use_cpu": True}) == "cpu"
    assert choose_device(member(1), {"use_cpu": False}) is None  # the engine knows which
    assert choose_device(member(1), {"device": "cuda"}) == "cuda"


@pytest.mark.parametrize(("given", "count"), [([0], 1), ([0, 1, 2], 3)])
def test_there_is_one_gpu_for_each_process_of_a_machine(gpus: Any, given: list[int], count: int) -> None:
    gpus(4)
    with pytest.raises(ValueError, match=f"{count} GPUs, but 2"):
        choose_device(member(0), {"gpus": given})


# By object and by name.


def test_an_engine_object_is_used_as_it_is() -> None:
    engine = DeviceEngine("cpu", precision="bf16")
    assert Trainer(engine=engine).engine is engine
    with pytest.raises(ValueError, match="precision=, device= or engine=,"):
        Trainer(engine=engine, precision="bf16", device="cpu")


def test_the_built_in_engines_are_found_as_any_other() -> None:
    ours = {each.name for each in discovery.discover(GROUP) if each.package == "heliograph"}
    assert ours == {"data_parallel", "ddp", "device", "fsdp"}
    assert find_engine("device") is DeviceEngine
    assert find_engine("heliograph:data_parallel") is DataParallelEngine
    assert find_engine("ddp") is DDPEngine
    assert find_engine("fsdp") is FSDPEngine


def test_an_engine_by_name_is_given_what_it_takes() -> None:
    engine = Trainer(engine="ddp", use_cpu=True, precision="bf16").engine
    assert type(engine) is DDPEngine
    assert (engine.device.type, engine.precision.name, engine.world_size) == ("cpu", "bf16", 1)
    plain = Trainer(engine="data_parallel", precision="bf16").engine
    assert type(plain) is DataParallelEngine
    assert plain.precision.name == "bf16"
    assert type(Trainer(engine="device", device="cpu").engine) is DeviceEngine


def test_what_an_engine_does_not_take_is_refused() -> None:
    with pytest.raises(TypeError, match="'device'"):
        Trainer(engine="data_parallel", device="cpu")


def test_an_unknown_engine_is_named_with_the_nearest() -> None:
    with pytest.raises(LookupError, match=r"you mean 'ddp'\? Known:"):
        Trainer(engine="dpp")


def test_an_engine_of_a_package_that_is_not_installed_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = [engine for engine in discovery.discover(GROUP) if engine.package == "heliograph"]
    monkeypatch.setattr(discovery, "discover", lambda group="": kernel)
    with pytest.raises(LookupError, match=r"heliograph-bridges: pip install ./packages/bridg"):
        Trainer(engine="accelerate")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a package with an engine."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(package: str, name: str, target: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[heliograph.engines]\n{name} = {target}\n")

    return make


def test_an_engine_of_another_package(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    class Quantum(DeviceEngine):
        def __init__(self, precision: Any = "fp32", **own: Any) -> None:
            super().__init__("cpu", precision=precision)
            self.own = own

    module = types.ModuleType("quantum_package")
    monkeypatch.setitem(sys.modules, "quantum_package", module)
    module.Engine = Quantum  # type: ignore[attr-defined]
    install("quantum", "quantum", "quantum_package:Engine")
    install("second", "ddp", "quantum_package:Engine")
    engine = Trainer(engine="quantum", precision="bf16", deterministic=True).engine
    assert type(engine) is Quantum
    assert (engine.precision.name, engine.own) == ("bf16", {"deterministic": True})
    with pytest.raises(LookupError, match=r"'ddp': .*heliograph:ddp, seco"):
        Trainer(engine="ddp")
    assert type(Trainer(engine="second:ddp").engine) is Quantum


def test_a_broken_engine_harms_only_who_asks_for_it(install: Callable[..., None]) -> None:
    install("broken", "broken", "no_such_module:Engine")
    assert type(Trainer(engine="device").engine) is DeviceEngine
    with pytest.raises(ImportError, match=r"package broken 1\.0 \(no_such_module:Engine\)"):
        Trainer(engine="broken")


@pytest.mark.parametrize(
    "engine", [DDPEngine, 3, True, ["ddp"], torch.device("cpu")], ids=lambda each: type(each).__name__
)
def test_what_is_no_engine_is_refused_at_once(engine: Any) -> None:
    with pytest.raises(TypeError, match="engine= takes an engine"):
        Trainer(engine=engine)
