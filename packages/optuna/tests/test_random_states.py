"""Random states of samplers as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import optuna
import pytest
from heliograph_optuna.sampler import load_states, states_of
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


class Own(BaseSampler):
    """A user's own, with a generator of numpy's."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState(3)
        self.others = [self.generator]

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> float:
        return float(self.generator.rand())


def draws(sampler: BaseSampler) -> list[float]:
    study = optuna.create_study(sampler=sampler)
    return [study.ask().suggest_float("x", 0, 1) for _ in range(3)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(seed=1),
        RandomSampler,
        lambda: TPESampler(seed=1, n_startup_trials=1),
        lambda: PartialFixedSampler({"y": 1}, TPESampler()),
        Own,
    ],
)
def test_states_bring_the_draws_back(make: Any) -> None:
    sampler = make()
    text = json.dumps(states_of(sampler))
    first = draws(sampler)
    fresh = make()
    load_states(fresh, json.loads(text))

    assert len(set(first)) == 3
    assert draws(fresh) == first


def test_half_a_pair_of_normal_draws_is_kept() -> None:
    one, other = Own(), Own()
    one.generator.randn()
    load_states(other, json.loads(json.dumps(states_of(one))))

    assert other.generator.randn() == one.generator.randn()


def test_each_generator_is_there_once() -> None:
    assert list(states_of(Own())) == ["generator"]
    assert len(states_of(TPESampler())) == 2


def test_a_generator_that_the_states_lack_stays_as_it_is() -> None:
    one, other = Own(), Own()
    load_states(one, {"another": states_of(other)["generator"]})

    assert one.generator.rand() == other.generator.rand()
