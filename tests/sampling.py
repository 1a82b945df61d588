"""Which tests run: all with `--whole`, otherwise a part of what is marked, drawn by a seed.

`@pytest.mark.whole`: runs with `--whole` only. On a parameter (`pytest.param(..., marks=...)`) it leaves out that case.
`@pytest.mark.sample(n)`: of the parametrized cases of this test, n are drawn.
A test by Hypothesis that says nothing else tries 25 examples, and 100 with `--whole`: `conftest.py`.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest


def add_options(parser: pytest.Parser) -> None:
    """Add `--whole` and `--sample-seed`."""
    group = parser.getgroup("heliograph")
    group.addoption("--whole", action="store_true", help="run what is marked `whole` and every case of a `sample`")
    group.addoption("--sample-seed", type=int, help="draw the cases of a `sample` as a former run did, which names it")


def choose_seed(config: pytest.Config) -> None:
    """Choose a seed where none is given; a worker of pytest-xdist takes that of its controller."""
    given: dict[str, int] = getattr(config, "workerinput", {})
    if config.option.sample_seed is None:
        config.option.sample_seed = given.get("sample_seed", random.randrange(1_000_000))


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out of `items` what does not run."""
    if config.option.whole:
        return
    left_out = {item for item in items if item.get_closest_marker("whole")}
    for name, cases in _samples(items).items():
        candidates = [case for case in cases if case not in left_out]
        number = cases[0].get_closest_marker("sample").args[0]  # type: ignore[union-attr]  # they are those that have it
        drawn = random.Random(f"{config.option.sample_seed} {name}").sample(candidates, min(number, len(candidates)))
        left_out.update(set(candidates) - set(drawn))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """Return the values of a parameter that the tests of this file run with, so that a fixture makes no others."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    specs = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return sorted({str(spec[parameter]) for spec in specs if parameter in spec})


def describe(config: pytest.Config) -> str:
    """Return the line that is printed at the end of a session."""
    if config.option.whole:
        return "every case (--whole)"
    return f"a sample: --sample-seed={config.option.sample_seed} repeats it, --whole runs every case"


def _samples(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each test that is marked `sample`, in the order of their names."""
    samples: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):
        if item.get_closest_marker("sample"):
            samples[item.nodeid.partition("[")[0]].append(item)
    return samples
