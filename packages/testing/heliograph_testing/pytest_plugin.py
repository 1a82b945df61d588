"""The pytest fixture `golden`; pytest loads this module at its start, so it imports torch only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .golden_run import GoldenCheck, MakeTrainer

OPTION = "--golden-update"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records golden runs again."""
    parser.addoption(OPTION, action="store_true", help="record the golden runs of the tests again")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., GoldenCheck]:
    """Return a function that compares a training with its record; it has the options of `record_golden` and `rtol=`.

    The record is `golden/<name of the test>.json` beside the test file. `pytest --golden-update` writes it.
    """
    path = Path(request.path.parent, "golden", f"{request.node.name}.json")

    def check(
        make_trainer: MakeTrainer, *, steps: int = 50, every: int = 10, operators: bool = False, rtol: float = 0.0
    ) -> GoldenCheck:
        from .golden_run import GoldenCheck, check_golden, record_golden

        if request.config.getoption(OPTION):
            path.parent.mkdir(exist_ok=True)
            golden = record_golden(make_trainer, path, steps=steps, every=every, operators=operators)
            return GoldenCheck(golden.recorded_steps)
        if not path.exists():
            pytest.fail(f"There is no golden run {path}: record it with pytest {OPTION}.", pytrace=False)
        result = check_golden(make_trainer, path, rtol=rtol)
        if not result.is_equal:
            pytest.fail(str(result), pytrace=False)
        return result

    return check
