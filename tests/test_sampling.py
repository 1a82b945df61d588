"""Which cases of a marked test run."""

from __future__ import annotations

import re
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from heliograph.tests import sampling


class Case:
    """What of a pytest.Item is looked at."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.marks = nodeid, {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)


def names(*, whole: bool = False, seed: int = 0) -> list[str]:
    sample, left_out = pytest.mark.sample(3), pytest.mark.whole
    items: Any = [Case(f"f.py::sampled[{n}]", sample) for n in range(20)]
    items += [Case("f.py::whole", left_out), Case("f.py::each[0]"), Case("f.py::each[1]", left_out)]
    items += [Case("f.py::both[0]", sample), Case("f.py::both[1]", sample, left_out)]
    deselected: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config: Any = SimpleNamespace(option=Namespace(whole=whole, sample_seed=seed), hook=hook)
    everything = list(items)
    sampling.select(config, items)
    assert {*items, *deselected} == {*everything}
    assert len(items) + len(deselected) == len(everything)
    return [item.nodeid.removeprefix("f.py::") for item in items]


def test_a_sample_and_what_is_not_marked_run() -> None:
    chosen = names()
    sampled = [name for name in chosen if name.startswith("sampled")]
    assert (len(sampled), len(set(sampled))) == (3, 3)
    assert chosen[3:] == ["each[0]", "both[0]"]


def test_the_seed_decides_which() -> None:
    assert names(seed=1) == names(seed=1)
    assert len({tuple(names(seed=seed)) for seed in range(20)}) > 10


def test_in_the_end_every_case_was_drawn() -> None:
    assert {name for seed in range(100) for name in names(seed=seed)} >= {f"sampled[{n}]" for n in range(20)}


def test_with_whole_everything_runs() -> None:
    assert len(names(whole=True)) == 25


def test_a_seed_is_chosen_unless_one_is_given_and_is_printed(pytestconfig: pytest.Config) -> None:
    for given in (None, 7):
        config: Any = SimpleNamespace(option=Namespace(whole=False, sample_seed=given))
        sampling.choose_seed(config)
        assert given in (None, config.option.sample_seed)
        assert re.search(f"--sample-seed={config.option.sample_seed} ", sampling.describe(config))
    assert pytestconfig.option.sample_seed is not None
