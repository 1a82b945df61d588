"""A sampler continues from where its random states were, wherever its process was killed."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import optuna
import pytest
from heliograph.packages.tests.facts import assert_facts
from heliograph_optuna.plugin import PruningJudge
from heliograph_optuna.resumable_study import ResumableStudy
from heliograph_optuna.sampler import KEY, RELATIVE, RememberingSampler, is_exact
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, PatientPruner, SuccessiveHalvingPruner
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    GPSampler,
    GridSampler,
    NSGAIIISampler,
    NSGAIISampler,
    PartialFixedSampler,
    RandomSampler,
    TPESampler,
)
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
]
TRIALS = 9
WRITES = (
    "create_new_trial", "set_trial_param", "set_trial_state_values", "set_trial_intermediate_value",
    "set_trial_system_attr",
)  # fmt: skip
GRID: dict[str, list[Any]] = {"x": [0.0, 0.5, 1.0], "n": [1, 2, 3], "kind": ["a", "b"], "y": [0.25]}
SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "tpe": lambda: TPESampler(seed=1, n_startup_trials=3),
    "multivariate": lambda: TPESampler(seed=1, n_startup_trials=3, multivariate=True),
    "group": lambda: TPESampler(seed=1, n_startup_trials=3, multivariate=True, group=True),
    "random": lambda: RandomSampler(seed=1),
    "grid": lambda: GridSampler(GRID, seed=1),
    "brute_force": lambda: BruteForceSampler(seed=1),
    "nsga_ii": lambda: NSGAIISampler(seed=1, population_size=3),
    "nsga_iii": lambda: NSGAIIISampler(seed=1, population_size=3),
    "partial": lambda: PartialFixedSampler({"n": 2}, TPESampler(seed=1, n_startup_trials=3)),
}


MakePruner = Callable[[], BasePruner]
PRUNERS: dict[str, MakePruner] = {
    "nop": NopPruner,
    "median": lambda: MedianPruner(2),
    "halving": lambda: PatientPruner(SuccessiveHalvingPruner(reduction_factor=2), 0),
    "bands": lambda: HyperbandPruner(1, 3, 2),
    "automatic_bands": lambda: HyperbandPruner(reduction_factor=2),
}


class KilledError(BaseException):
    """Leaves a process that is killed."""


class Store(InMemoryStorage):
    """Outlives processes, and kills them after their so-many-th write: nothing more is written then."""

    def __init__(self) -> None:
        super().__init__()
        self.left: float = math.inf

    @contextmanager
    def kill_after(self, number: float) -> Iterator[None]:
        """Kill the process within; it ends here."""
        self.left = number
        try:
            yield
        except BaseException:
            if self.left > 0:
                raise
        else:
            assert self.left > 0


def _counting(name: str) -> Callable[..., Any]:
    def write(self: Store, *args: Any, **kwargs: Any) -> Any:
        if self.left > 0:
            done = getattr(super(Store, self), name)(*args, **kwargs)
            self.left -= not str(args[1:2]).startswith("('completed_rung")  # during a decision of the pruner's
        if self.left <= 0:
            raise KilledError
        return done

    return write


for each in WRITES:
    setattr(Store, each, _counting(each))


def objective(trial: optuna.Trial) -> float:
    value = trial.suggest_float("x", 0, 1, step=0.5) + trial.suggest_int("n", 1, 3)
    if trial.suggest_categorical("kind", ["a", "b"]) == "a":
        value += trial.suggest_float("y", 0, 1, step=0.25)
    judge = PruningJudge(trial)
    for step in (1, 2, 3):
        if judge.report(step, value + (trial.number * step) % 3) and judge.prunes(step):
            raise optuna.TrialPruned
    return value


def process(store: InMemoryStorage, sampler: BaseSampler, pruner: BasePruner) -> None:
    """Do what each process does."""
    if not optuna.get_all_study_names(store):
        optuna.create_study(study_name="study", storage=store)
    ResumableStudy("study", store, RememberingSampler(sampler), pruner).optimize(objective, n_trials=TRIALS)


def facts(store: InMemoryStorage) -> list[Any]:
    trials = optuna.load_study(study_name="study", storage=store).trials
    return [(each.number, each.state, each.values, each.params) for each in trials]


def uninterrupted(name: str, pruner: MakePruner) -> list[Any]:
    """Return what Optuna does without us."""
    store = InMemoryStorage()
    study = optuna.create_study(study_name="study", storage=store, sampler=SAMPLERS[name](), pruner=pruner())
    study.optimize(objective, n_trials=TRIALS)
    return facts(store)


def killed(name: str, pruner: MakePruner, kills: Iterable[int]) -> tuple[list[Any], int]:
    """Return the trials of a study that is killed after so many writes, process by process, and how often it was."""
    store, count = Store(), 0
    for kill in chain(kills, [math.inf]):
        with store.kill_after(kill):
            process(store, SAMPLERS[name](), pruner())
            break
        count += 1
    return facts(store), count


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SAMPLERS)
def test_killed_once_at_any_write_it_suggests_what_the_plain_sampler_would_have(name: str) -> None:
    plain, number = uninterrupted(name, NopPruner), 0
    while True:
        number += 1
        trials, kills = killed(name, NopPruner, [number])
        assert trials == plain, f"killed after write {number}"
        if not kills:
            break
    assert number > 4 * TRIALS


@pytest.mark.sample(2)
@pytest.mark.parametrize("pruning", PRUNERS)
@pytest.mark.parametrize("name", ["tpe", "multivariate", "grid"])
def test_killed_again_and_again_it_suggests_what_the_plain_sampler_would_have(name: str, pruning: str) -> None:
    trials, kills = killed(name, PRUNERS[pruning], (4 + number % 3 for number in range(100)))

    assert TRIALS <= kills < 100
    assert trials == uninterrupted(name, PRUNERS[pruning])
    assert any(state == TrialState.PRUNED for _, state, *_ in trials) == (pruning != "nop")


def test_without_a_seed_too_the_draws_continue() -> None:
    store = Store()
    with store.kill_after(12):
        process(store, RandomSampler(), NopPruner())
    assert store.left == 0
    store.left = math.inf
    other = deepcopy(store)
    process(store, RandomSampler(), NopPruner())
    process(other, RandomSampler(), NopPruner())

    assert facts(store) == facts(other)
    assert len(facts(store)) == TRIALS


def test_states_are_plain_json_and_are_written_only_where_they_changed() -> None:
    store = InMemoryStorage()
    process(store, GridSampler(GRID, seed=1), NopPruner())
    for trial in optuna.load_study(study_name="study", storage=store).trials:
        assert not [key for key in trial.system_attrs if key.startswith("heliograph")]

    store = InMemoryStorage()
    process(store, TPESampler(seed=1, n_startup_trials=3), NopPruner())
    trial = optuna.load_study(study_name="study", storage=store).trials[0]
    records = {key: record for key, record in trial.system_attrs.items() if key.startswith("heliograph")}
    assert records.keys() == {KEY.format(0), KEY.format(1)}
    assert json.loads(json.dumps(records)) == records
    assert {record["sampler"] for record in records.values()} == {"TPESampler"}


def test_what_is_drawn_at_once_is_kept_with_the_states() -> None:
    store = InMemoryStorage()
    process(store, TPESampler(seed=1, n_startup_trials=3, multivariate=True), NopPruner())
    trial = optuna.load_study(study_name="study", storage=store).trials[-1]

    assert trial.system_attrs[RELATIVE]["values"]["kind"] == ["a", "b"].index(trial.params["kind"])


def test_another_sampler_begins_with_states_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    with store.kill_after(20):
        process(store, TPESampler(seed=1), NopPruner())
    store.left = math.inf
    with caplog.at_level(logging.WARNING, "heliograph"):
        process(store, RandomSampler(seed=2), NopPruner())

    assert_facts(caplog.messages[0], "TPESampler", "RandomSampler", "new random states")
    assert len(facts(store)) == TRIALS


def test_which_samplers_are_exact() -> None:
    class TPE(TPESampler):
        """Keeps who knows what."""

    assert all(is_exact(make()) for make in SAMPLERS.values())
    assert not is_exact(GPSampler())
    assert not is_exact(TPE())
    assert not is_exact(PartialFixedSampler({}, GPSampler()))


def test_it_is_called_as_the_sampler_and_can_be_reseeded() -> None:
    one, other = TPESampler(seed=1), TPESampler(seed=1)
    remembering = RememberingSampler(one)
    remembering.reseed_rng()

    assert str(remembering) == "TPESampler"
    assert one._rng.rng.rand() != other._rng.rng.rand()
