"""Compile: the same checkpoints, plain code where the compiler fails, and nothing left behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heliograph import (
    Compile,
    Every,
    GradientAccumulation,
    LogSchedule,
    Run,
    RunResult,
    Supervised,
    Task,
    Trainer,
    TrainStart,
    ValidationSchedule,
)
from heliograph.tests import kit
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn

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
    assert "NotImplementedError: this backend knows" in result.notes[0]
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
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_torchs_own_compiler(batches: Make, sgd: Any) -> None:
    task, plain = made(), made()
    torch._dynamo.reset()
    result = Trainer([Compile()], device="cpu").fit(task, batches(2), optimizer=sgd, epochs=1)
    assert result.notes == ()
    Trainer(device="cpu").fit(plain, batches(2), optimizer=sgd, epochs=1)
    for ours, theirs in zip(task.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


# The whole step.


class Own(Task):
    """Computes its loss by itself."""

    def __init__(self, *, tracks: bool = False) -> None:
        torch.manual_seed(0)
        self.model, self.tracks = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), tracks

    def training_step(self, run: Run, batch: Any) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        if self.tracks:
            run.track("again", loss)
        return loss


def trained(task: Any, batches: Any, sgd: Any, *plugins: Any, **options: Any) -> RunResult:
    torch._dynamo.reset()
    return Trainer(plugins, device="cpu", **options).fit(task, batches, optimizer=sgd, epochs=2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [made, Own])
@pytest.mark.parametrize("logs", [False, True])
def test_model_and_loss_are_one_function(
    make: Callable[[], Any], precision: str, logs: bool, batches: Make, sgd: Any
) -> None:
    calls: list[int] = []
    task, plain, others = make(), make(), [LogSchedule(steps=2), GradientAccumulation(2)] if logs else []
    compiled = Compile(scope="step", backend=counting(calls))
    result = trained(task, batches(4), sgd, compiled, *others, precision=precision)
    assert len(calls) == 1
    assert result.notes == ()
    assert task.model._compiled_call_impl is None
    expected = trained(plain, batches(4), sgd, *others, precision=precision)
    assert all(map(torch.equal, task.model.parameters(), plain.model.parameters()))
    assert result.metrics == expected.metrics


def test_validations_run_compiled_modules(batches: Make, sgd: Any) -> None:
    calls: list[int] = []
    plugins = [Compile(scope="step", backend=counting(calls)), ValidationSchedule(epochs=1)]
    torch._dynamo.reset()
    task = made()
    Trainer(plugins, device="cpu").fit(task, batches(2), validation=batches(2), optimizer=sgd, epochs=1)
    assert len(calls) == 3  # the step, and the model and the loss in eval mode


def test_a_step_that_is_not_one_function_runs_compiled_in_parts_and_the_result_says_why(
    batches: Make, sgd: Any
) -> None:
    calls: list[int] = []
    task, plain, logs = Own(tracks=True), Own(tracks=True), LogSchedule(steps=2)
    result = trained(task, batches(4), sgd, Compile(scope="step", backend=counting(calls)), logs)
    (note,) = result.notes
    assert_facts(note, "training step", "uncompiled")
    assert len(calls) == 1  # the model
    expected = trained(plain, batches(4), sgd, LogSchedule(steps=2))
    assert all(map(torch.equal, task.model.parameters(), plain.model.parameters()))
    assert result.metrics == expected.metrics


def test_a_step_with_more_shapes_than_the_compiler_takes_runs_compiled_in_parts(sgd: Any) -> None:
    shapes = [(torch.randn(rows, 4), torch.randn(rows, 2)) for rows in range(2, 14)]
    task, plain = made(), made()
    result = trained(task, shapes, sgd, Compile(scope="step", backend="eager", dynamic=False))
    (note,) = result.notes
    assert_facts(note, "training step", "uncompiled")
    assert "recompile_limit" in note
    assert result.progress.steps == 24
    trained(plain, shapes, sgd)
    assert all(map(torch.equal, task.model.parameters(), plain.model.parameters()))


def test_a_step_that_may_come_in_parts_does(batches: Make, sgd: Any) -> None:
    calls: list[int] = []
    compiled = Compile(scope="step", fullgraph=False, backend=counting(calls))
    result = trained(Own(tracks=True), batches(4), sgd, compiled, LogSchedule(steps=2))
    assert result.notes == ()
    assert len(calls) > 1


def test_a_step_that_yields_its_losses_is_refused(batches: Make, sgd: Any) -> None:
    class Pair(Own):
        def training_step(self, run: Run, batch: Any) -> Any:
            yield "one", super().training_step(run, batch)

    trainer = Trainer([Compile(scope="step", backend="eager")], device="cpu")
    task = Pair()
    with pytest.raises(ValueError, match=r'optimizer, .*scope="modules"'):
        trainer.fit(task, batches(2), optimizer={"one": sgd(task.model.parameters())}, epochs=1)


def test_several_ranks_are_refused() -> None:
    run: Any = SimpleNamespace(modules={}, task=made(), engine=SimpleNamespace(world_size=2))
    with pytest.raises(ValueError, match="here: 2 ranks exchange"):
        Compile(scope="step", backend="eager").begin(run, TrainStart())


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Compile\(scope=...\) takes 'modules'"):
        Compile(scope="all")  # type: ignore[arg-type]


def test_a_loop_of_ones_own_runs_the_compiled_step(batches: Make, sgd: Any) -> None:
    calls: list[int] = []
    torch._dynamo.reset()
    trainer = Trainer([Compile(scope="step", backend=counting(calls))], device="cpu")
    with trainer.run(made(), batches(2), optimizer=sgd, epochs=1) as run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(run.stepping.forward(run, batch))
    assert len(calls) == 1


class Halved:
    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.factor * nn.functional.mse_loss(outputs, targets)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


LOSSES: dict[str, Callable[[], Any]] = {
    "torch": lambda: nn.functional.mse_loss,
    "module": nn.MSELoss,
    "function": lambda: own_loss,
    "lambda": lambda: lambda outputs, targets: (outputs - targets).square().mean(),
    "partial": lambda: partial(nn.functional.mse_loss, reduction="mean"),
    "object": Halved,
    "compiled": lambda: torch.compile(own_loss, backend="eager"),
}


def resume_with(tmp_path: Path, batches: Make, loss_fn: Any, epochs: int, *plugins: Any) -> RunResult:
    torch._dynamo.reset()
    plugins = (*kit.saving(tmp_path, Every(epochs=1), resume="auto"), *plugins)
    return kit.fit(*plugins, task=Supervised(made().model, loss_fn), train=batches(3), epochs=epochs)


@pytest.mark.sample(6)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [{}, {"fallback": False}, {"scope": "step"}, None])
def test_a_resume_with_a_compiled_loss_is_exact(
    batches: Make, tmp_path: Path, loss: str, options: dict[str, Any] | None
) -> None:
    for epochs in (1, 2):
        plugins = [] if options is None else [Compile(backend="eager", **options)]
        result = resume_with(tmp_path, batches, LOSSES[loss](), epochs, *plugins)
        assert result.resume is None or result.resume.reasons == ()
        assert not any("loss_fn" in note for note in result.notes)


@pytest.mark.parametrize("before", [{}, {"fallback": False}])
def test_a_resume_with_another_compiled_loss_is_not_exact(
    batches: Make, tmp_path: Path, before: dict[str, Any]
) -> None:
    resume_with(tmp_path, batches, Halved(0.5), 1, Compile(backend="eager", **before))
    result = resume_with(tmp_path, batches, Halved(0.25), 2, Compile(backend="eager", **before))
    assert "task.loss_fn" in str(result.resume)
