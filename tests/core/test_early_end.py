"""The early end of a run that is out of memory."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core import early_end
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CPU_TEXT = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate"


class Greedy(h.Task):
    """Has no memory in its third step."""

    def __init__(self, error: BaseException) -> None:
        self.model, self.error = nn.Linear(100, 50), error

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        if run.progress.batch == 2:
            raise self.error
        loss: Tensor = self.model(batch["inputs"]).square().mean()
        return loss


def note_of(error: BaseException, batch_size: int = 8) -> str:
    samples = [{"inputs": torch.randn(100), "label": index} for index in range(32)]
    data: Any = DataLoader(samples, batch_size=batch_size)  # type: ignore[arg-type]  # a list is a dataset
    trainer = h.Trainer(device="cpu")
    options: Any = {"optimizer": torch.optim.Adam, "epochs": 1}
    with pytest.raises(type(error)) as raised:
        trainer.fit(Greedy(error), data, **options)
    return "\n".join(getattr(raised.value, "__notes__", ()))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError(CPU_TEXT)])
def test_it_has_the_place_the_batch_and_the_sizes(error: BaseException) -> None:
    assert_facts(
        note_of(error),
        *("out of memory", "epoch 0, batch 2, step 2", "inputs [8, 100] float32", "label [8] int64"),
        *("parameters: 0.0 MB", "optimizer: 0.0 MB", "batches of 4", "find_batch_size"),
    )


def test_a_batch_of_one_cannot_be_halved() -> None:
    assert "GradientAccumulation" not in note_of(MemoryError(), batch_size=1)


def test_another_error_has_no_report() -> None:
    assert "out of memory" not in note_of(RuntimeError("shapes differ"))


def test_sizes_are_those_of_parameters_gradients_and_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def keep(values: Any) -> float:
        seen.append(sum(value.nbytes for value in values))
        return seen[-1] / 1e6

    monkeypatch.setattr(early_end, "_megabytes", keep)
    note_of(MemoryError())
    weights = (100 * 50 + 50) * 4
    assert seen == [weights, 0, 2 * weights + 2 * 4]  # the gradients are dropped after a step


def test_an_evaluation_has_a_report_too() -> None:
    class Fails(Greedy):
        def validation_step(self, run: h.Run, batch: Any) -> dict[str, Tensor]:
            raise self.error

    trainer, data = h.Trainer(device="cpu"), TensorDataset(torch.randn(4, 100))
    with pytest.raises(MemoryError) as raised:
        trainer.validate(Fails(MemoryError()), data, loader_params={"batch_size": 2})
    assert_facts("\n".join(raised.value.__notes__), "out of memory", "[2, 100] float32", "parameters")


def test_on_a_gpu_a_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU twin of a test that needs a GPU: torch's functions are replaced."""
    monkeypatch.setattr(early_end, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1e6, 8e6))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5e6)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"total_size": 5}])
    lines = list(early_end._cuda_lines(torch.device("cuda")))
    assert_facts(lines[0], "allocated: 5.0 MB", "free: 1.0 MB", "total: 8.0 MB")
    (path,) = tmp_path.iterdir()
    assert str(path) in lines[1]
    assert pickle.loads(path.read_bytes()) == [{"total_size": 5}]
