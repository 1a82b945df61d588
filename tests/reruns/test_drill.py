"""The operator by which two runs differ is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.tests.mutated_programs import Program, make


def trained(folder: Path, program: Program) -> None:
    """Train."""
    trainer, options = make(program, folder)
    trainer.fit(**options)


def of(program: Program) -> Any:
    """Return a program as `drill` takes it."""
    return lambda folder: make(program, folder)


@pytest.mark.parametrize(
    ("mutation", "named"),
    [
        ("operator", "and aten.mul.Tensor in the second"),
        ("backward operator", "and aten.clone.default in the second"),
        ("rate", "is given "),
        ("draw", "aten.rand.default"),
    ],
)
def test_the_first_operator_that_differs(mutation: str, named: str, tmp_path: Path) -> None:
    program = Program(3)
    trained(tmp_path / "a", program)
    trained(tmp_path / "b", program.mutated(mutation))
    found = h.drill(tmp_path / "a", tmp_path / "b", of(program), of(program.mutated(mutation)))
    assert found.repeats == (True, True)
    assert found.operator is not None
    assert named in found.operator
    assert f"Done again, the first difference: {found.operator}." in str(found)


def test_a_run_that_is_not_what_it_was_is_named(tmp_path: Path) -> None:
    program = Program(3)
    trained(tmp_path / "a", program)
    trained(tmp_path / "b", program.mutated("operator"))
    found = h.drill(tmp_path / "a", tmp_path / "b", of(program))
    assert (found.operator, found.repeats) == (None, (True, False))
    assert found.operators > 10
    assert f"none of the {found.operators} operators of that batch differs" in str(found)
    assert "b/run_" in str(found).splitlines()[-1]
    assert "is not what it is when it is done again" in str(found).splitlines()[-1]


def test_a_request_is_no_operator(tmp_path: Path) -> None:
    program = Program(3)
    trained(tmp_path / "a", program)
    trained(tmp_path / "b", program.mutated("skip_step"))
    found = h.drill(tmp_path / "a", tmp_path / "b", of(program))
    assert found.divergence.first is not None
    assert (found.divergence.first.kind, found.operators) == ("request", 0)
    assert str(found) == str(found.divergence)


def test_equal_runs_have_nothing_to_look_at(tmp_path: Path) -> None:
    for name in "ab":
        trained(tmp_path / name, Program(3))
    found = h.drill(tmp_path / "a", tmp_path / "b", of(Program(3)))
    assert (found.divergence.first, found.operators) == (None, 0)


def test_a_metric_is_no_batch(tmp_path: Path) -> None:
    class Odd(h.Supervised):
        """Measures another loss in one of two runs."""

        def validation_step(self, run: h.Run, batch: Any) -> dict[str, float]:
            """Return it."""
            return {"loss": float(Path(run.recording or "").parent.name == "b")}

    def odd(folder: Path) -> Any:
        trainer, options = make(Program(3), folder)
        options["task"] = Odd(options["task"].model, options["task"].loss_fn)
        options["train"] = [batch[:2] for batch in options["train"]]
        return trainer, options

    for name in "ab":
        trainer, options = odd(tmp_path / name)
        trainer.fit(**options)
    found = h.drill(tmp_path / "a", tmp_path / "b", odd)
    assert found.divergence.first is not None
    assert (found.divergence.first.kind, found.operators) == ("metric", 0)
