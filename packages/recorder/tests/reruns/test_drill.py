"""The operator by which two runs differ is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.recorder.tests.mutated_programs import Program, make
from heliograph.packages.tests.facts import assert_facts
from heliograph_recorder import Recorder, drill
from heliograph_recorder.plugin import Digests
from torch import Tensor, nn


def trained(folder: Path, program: Program) -> None:
    """Train."""
    trainer, options = make(program, folder)
    trainer.fit(**options)


def of(program: Program) -> Any:
    """Return a program as `drill` takes it."""
    return lambda folder: make(program, folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mutation", "named"),
    [
        ("operator", "aten.mul.Tensor in the second"),
        ("backward operator", "aten.clone.default in the second"),
        ("rate", "is given "),
        ("draw", "aten.rand.default"),
    ],
)
def test_the_first_operator_that_differs(mutation: str, named: str, tmp_path: Path) -> None:
    program = Program(3)
    trained(tmp_path / "a", program)
    trained(tmp_path / "b", program.mutated(mutation))
    found = drill(tmp_path / "a", tmp_path / "b", of(program), of(program.mutated(mutation)))
    assert found.repeats == (True, True)
    assert found.operator is not None
    assert named in found.operator
    assert f"first difference: {found.operator}." in str(found)


class Doubled(nn.Module):
    """Doubles a gradient in the second batch of a step; the outputs stay as they are."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times, self.calls = times, 0

    def forward(self, values: Tensor) -> Tensor:
        """Return the values."""
        self.calls += 1
        if values.requires_grad and self.calls % 4 == 2:
            values.register_hook(lambda gradient: gradient * self.times)  # type: ignore[no-untyped-call]  # torch's
        return values


def accumulating(folder: Path, times: float = 1.0) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Doubled(times), nn.Linear(4, 1))
    plugins = [h.GradientAccumulation(4), h.SaveSchedule(steps=1), h.Checkpoint(folder, keep_last=None), h.RNGCapture()]
    recorder = Recorder(folder, digests=Digests(gradients=1, weights=1))
    options = {
        "task": h.Supervised(model, nn.functional.mse_loss),
        "train": [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(12)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "epochs": 1,
    }
    return h.Trainer([*plugins, recorder], device="cpu"), options


def test_where_gradients_are_accumulated_the_operator_may_be_in_an_earlier_batch(tmp_path: Path) -> None:
    for name, times in (("a", 1.0), ("b", 2.0)):
        trainer, options = accumulating(tmp_path / name, times)
        trainer.fit(**options)
    found = drill(tmp_path / "a", tmp_path / "b", accumulating, lambda folder: accumulating(folder, 2.0))
    assert found.divergence.first is not None
    assert (found.divergence.first.kind, found.divergence.first.batch) == ("gradients", 4)
    assert_facts(str(found.operator), "aten.mul.Tensor", "1.0 in the first", "2.0 in the second")
    assert found.repeats == (True, True)


def test_a_run_that_is_not_what_it_was_is_named(tmp_path: Path) -> None:
    program = Program(3)
    trained(tmp_path / "a", program)
    trained(tmp_path / "b", program.mutated("operator"))
    found = drill(tmp_path / "a", tmp_path / "b", of(program))
    assert (found.operator, found.repeats) == (None, (True, False))
    assert found.operators > 10
    assert f"{found.operators} operators" in str(found)
    assert "b/run_" in str(found).splitlines()[-1]
    assert "differs from its rerun" in str(found).splitlines()[-1]


def test_a_request_is_no_operator(tmp_path: Path) -> None:
    program = Program(3)
    trained(tmp_path / "a", program)
    trained(tmp_path / "b", program.mutated("skip_step"))
    found = drill(tmp_path / "a", tmp_path / "b", of(program))
    assert found.divergence.first is not None
    assert (found.divergence.first.kind, found.operators) == ("request", 0)
    assert str(found).startswith(f"{found.divergence}\nNo batch was repeated")


def test_equal_runs_have_nothing_to_look_at(tmp_path: Path) -> None:
    for name in "ab":
        trained(tmp_path / name, Program(3))
    found = drill(tmp_path / "a", tmp_path / "b", of(Program(3)))
    assert (found.divergence.first, found.operators) == (None, 0)


def test_a_metric_is_no_batch(tmp_path: Path) -> None:
    class Odd(h.Supervised):
        """Measures another loss."""

        def validation_step(self, run: h.Run, batch: Any) -> dict[str, float]:
            """Return it."""
            return {"loss": float(Path(run.report.recording or "").parent.name == "b")}

    def odd(folder: Path) -> Any:
        trainer, options = make(Program(3), folder)
        options["task"] = Odd(options["task"].model, options["task"].loss_fn)
        options["train"] = [batch[:2] for batch in options["train"]]
        return trainer, options

    for name in "ab":
        trainer, options = odd(tmp_path / name)
        trainer.fit(**options)
    found = drill(tmp_path / "a", tmp_path / "b", odd)
    assert found.divergence.first is not None
    assert (found.divergence.first.kind, found.operators) == ("metric", 0)
