"""Compile: the same checkpoints, plain code where the compiler fails, and nothing left behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heliograph import Compile, Supervised, Trainer
from torch import nn

Make = Callable[..., Any]
# torch's compiler imports what torch itself deprecates, and hides a warning of its own only when it is shown
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def made() -> Supervised:
    torch.manual_seed(0)
    return Supervised(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), nn.functional.mse_loss)


def counting(calls: list[int]) -> Callable[..., Any]:
    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph.forward

    return backend


def test_modules_and_the_loss_run_compiled_and_are_plain_again(batches: Make, sgd: Any) -> None:
    task, plain, calls = made(), made(), list[int]()
    loss_fn, keys = task.loss_fn, task.model.state_dict().keys()
    torch._dynamo.reset()
    result = Trainer([Compile(backend=counting(calls))], device="cpu").fit(task, batches(3), optimizer=sgd, epochs=1)
    assert len(calls) == 2
    assert task.model._compiled_call_impl is None
    assert task.loss_fn is loss_fn
    assert task.model.state_dict().keys() == keys
    assert result.notes == ()
    Trainer(device="cpu").fit(plain, batches(3), optimizer=sgd, epochs=1)
    assert all(map(torch.equal, task.model.parameters(), plain.model.parameters()))


def failing(graph: Any, inputs: Any) -> Any:
    raise NotImplementedError("this backend knows no graph")


def test_what_cannot_be_compiled_runs_as_it_is_and_the_result_says_why(batches: Make, sgd: Any) -> None:
    task, plain = made(), made()
    torch._dynamo.reset()
    result = Trainer([Compile(backend=failing)], device="cpu").fit(task, batches(3), optimizer=sgd, epochs=1)
    assert [note.split(":")[0] for note in result.notes] == ["model runs uncompiled", "loss_fn runs uncompiled"]
    assert "NotImplementedError: this backend knows no graph" in result.notes[0]
    Trainer(device="cpu").fit(plain, batches(3), optimizer=sgd, epochs=1)
    assert all(map(torch.equal, task.model.parameters(), plain.model.parameters()))


def test_without_fallback_a_failing_compiler_fails_the_run(batches: Make, sgd: Any) -> None:
    task = made()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        Trainer([Compile(fallback=False, backend=failing)], device="cpu").fit(task, batches(1), optimizer=sgd, epochs=1)
    assert task.model._compiled_call_impl is None


def test_an_error_of_the_model_is_the_models_own(batches: Make, sgd: Any) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, inputs: Any) -> Any:
            return self.layer(inputs[:, :2])

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="shapes"):
        Trainer([Compile(backend="eager")], device="cpu").fit(
            Supervised(Broken(), nn.functional.mse_loss), batches(1), optimizer=sgd, epochs=1
        )


@pytest.mark.whole
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's own compiler needs g++")
def test_torchs_own_compiler(batches: Make, sgd: Any) -> None:
    task, plain = made(), made()
    torch._dynamo.reset()
    result = Trainer([Compile()], device="cpu").fit(task, batches(2), optimizer=sgd, epochs=1)
    assert result.notes == ()
    Trainer(device="cpu").fit(plain, batches(2), optimizer=sgd, epochs=1)
    for ours, theirs in zip(task.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
