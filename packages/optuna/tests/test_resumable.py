"""Studies that can be resumed: what counts as a trial, who may optimize, what is refused."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import optuna
import pytest
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_optuna.resumable_study import ResumableStudy
from heliograph_optuna.study import open_study
from optuna.samplers import BruteForceSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/study.db"


def objective(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", 0, 1)


def states(study: ResumableStudy) -> list[str]:
    return [each.state.name for each in study.trials]


class Failing:
    """Raises in one trial, after its first suggestion."""

    def __init__(self, error: BaseException, number: int = 2) -> None:
        self.error, self.number = error, number
        self.called: list[int] = []

    def __call__(self, trial: optuna.Trial) -> float:
        self.called.append(trial.number)
        value = trial.suggest_float("x", 0, 1)
        if trial.number == self.number:
            raise self.error
        return value + trial.suggest_float("y", 0, 1)


def test_the_number_of_trials_is_that_of_the_study_in_the_end(url: str) -> None:
    open_study("study", storage=url).optimize(objective, n_trials=3)
    study = open_study("study", storage=url)
    study.optimize(objective, n_trials=5)
    study.optimize(objective, n_trials=5)

    assert states(study) == ["COMPLETE"] * 5


def test_it_is_a_study_of_optuna_s_that_all_of_optuna_can_read(url: str) -> None:
    study = open_study("study", storage=url, sampler=TPESampler(seed=1))
    study.optimize(objective, n_trials=4)
    plain = optuna.create_study(sampler=TPESampler(seed=1))
    plain.optimize(objective, n_trials=4)

    assert isinstance(study, optuna.Study)
    assert study.best_params == plain.best_params
    assert optuna.load_study(study_name="study", storage=url).best_value == plain.best_value


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_leaves_the_trial_running_and_the_next_call_continues_with_it(
    url: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(error)
    with pytest.raises(type(error)) as info:
        open_study("study", storage=url, sampler=RandomSampler(seed=1)).optimize(failing, n_trials=5)
    assert info.value is error
    study = open_study("study", storage=url, sampler=RandomSampler(seed=1))
    assert states(study) == ["COMPLETE", "COMPLETE", "RUNNING"]
    chosen = study.trials[2].params

    failing.number = -1
    with caplog.at_level(logging.INFO, "heliograph"):
        study.optimize(failing, n_trials=5)
    plain = optuna.create_study(sampler=RandomSampler(seed=1))
    plain.optimize(Failing(error, -1), n_trials=5)
    assert_each(caplog.messages, ("trial 2", "'study'", "continues"))
    assert failing.called == [0, 1, 2, 2, 3, 4]
    assert study.trials[2].params["x"] == chosen["x"]
    assert [each.params for each in study.trials] == [each.params for each in plain.trials]


def test_an_exception_of_the_objective_fails_the_trial_and_the_next_call_begins_another(url: str) -> None:
    failing = Failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        open_study("study", storage=url).optimize(failing, n_trials=4)
    study = open_study("study", storage=url)
    study.optimize(failing, n_trials=4)

    assert failing.called == [0, 1, 2, 3]
    assert states(study) == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]


def test_what_is_caught_fails_the_trial_only(url: str) -> None:
    study = open_study("study", storage=url)
    study.optimize(Failing(ZeroDivisionError()), n_trials=4, catch=ZeroDivisionError)

    assert states(study) == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_sampler_that_has_tried_everything_ends_it_in_a_trial_that_goes_on_too(url: str) -> None:
    def choose(trial: optuna.Trial) -> float:
        value: int = trial.suggest_int("n", 1, 2)
        if trial.number == 1 and not went_on:
            raise KeyboardInterrupt
        return value

    went_on: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        open_study("study", storage=url, sampler=BruteForceSampler(seed=1)).optimize(choose)
    went_on.append(True)
    study = open_study("study", storage=url, sampler=BruteForceSampler(seed=1))
    study.optimize(choose)

    assert sorted(each.params["n"] for each in study.trials) == [1, 2]


def test_a_trial_that_was_queued_comes_after_the_one_that_continues(url: str) -> None:
    failing = Failing(KeyboardInterrupt(), 0)
    study = open_study("study", storage=url)
    with pytest.raises(KeyboardInterrupt):
        study.optimize(failing, n_trials=2)
    study.enqueue_trial({"x": 0.25, "y": 0.5})
    failing.number = -1
    study.optimize(failing, n_trials=2)

    assert failing.called == [0, 0, 1]
    assert study.trials[1].params == {"x": 0.25, "y": 0.5}


def test_one_process_at_a_time(url: str, tmp_path: Path) -> None:
    refused: list[str] = []

    def also(trial: optuna.Trial) -> float:
        with pytest.raises(ValueError, match=r"Study 'study' in .*study\.db") as info:
            open_study("study", storage=url).optimize(objective, n_trials=1)
        refused.append(str(info.value))
        open_study("other", storage=url).optimize(objective, n_trials=1)
        return 0.0

    open_study("study", storage=url).optimize(also, n_trials=1)
    assert len(refused) == 1
    assert_facts(refused[0], "study of another name")
    assert [path.name for path in tmp_path.iterdir()] == ["study.db"]


def test_several_jobs_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="n_jobs must be 1,"):
        open_study("study", storage=url).optimize(objective, n_trials=1, n_jobs=2)


def test_one_of_several_ranks_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    study = open_study("study", storage=url)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(RuntimeError, match=r"one of 2 ranks.*objective"):
        study.optimize(objective, n_trials=1)


@pytest.mark.parametrize("storage", ["sqlite://", "sqlite:///:memory:", InMemoryStorage()])
def test_a_study_in_memory_is_refused(storage: Any) -> None:
    with pytest.raises(ValueError, match=r"in memory.*call optuna\.create_study\(\)"):
        open_study("study", storage=storage)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_storage_that_fails_the_trials_of_the_dead_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="heartbeat_interval="):
        open_study("study", storage=RDBStorage(url, heartbeat_interval=60))


def test_another_direction_is_refused(url: str) -> None:
    open_study("study", storage=url, direction="maximize")

    with pytest.raises(ValueError, match="direction maximize, got minimize"):
        open_study("study", storage=url)


def test_a_study_of_several_objectives_is_refused(url: str) -> None:
    optuna.create_study(study_name="study", storage=url, directions=["minimize", "maximize"])

    with pytest.raises(ValueError, match="direction minimize and maximize,"):
        open_study("study", storage=url)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"name": 3}, TypeError, "name .*got 3"),
        ({"storage": None}, TypeError, "URL of a database"),
        ({"storage": "study.db"}, ValueError, "database, .* got 'study.db'"),
        ({"storage": "sqlite:////nowhere/study.db"}, FileNotFoundError, "/nowhere .*not exist"),
        ({"sampler": "tpe"}, TypeError, r"sampler= .*got 'tpe'"),
        ({"sampler": TPESampler}, TypeError, "must be an optuna"),
        ({"pruner": "median"}, TypeError, r"pruner= .*got 'median'"),
        ({"direction": "min"}, ValueError, "or 'maximize', got 'min'"),
    ],
)
def test_what_makes_no_study_is_refused(url: str, given: dict[str, Any], kind: type[Exception], words: str) -> None:
    options = {"name": "study", "storage": url, **given}
    with pytest.raises(kind, match=words):
        open_study(options.pop("name"), **options)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_sampler_that_keeps_more_is_warned_of(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "heliograph"):
        open_study("study", storage=url)
        open_study("study", storage=url, sampler=GPSampler())

    (message,) = caplog.messages
    assert_facts(message, "GPSampler", "study 'study'")


def test_a_relative_path_means_the_same_file_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = open_study("study", storage="sqlite:///study.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    copy = pickle.loads(pickle.dumps(study))
    copy.optimize(objective, n_trials=2)

    assert len(study.trials) == 2
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_trial_reaches_another_process(tmp_path: Path) -> None:
    journal = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    seen: list[Any] = []

    def elsewhere(trial: optuna.Trial) -> float:
        value = trial.suggest_float("x", 0, 1)
        copy = pickle.loads(pickle.dumps(trial))
        copy.report(value, 1)
        seen.append((copy.number, copy.params, copy.should_prune()))
        return value + trial.suggest_float("y", 0, 1)

    study = open_study("study", storage=journal, sampler=RandomSampler(seed=1))
    study.optimize(elsewhere, n_trials=2)
    assert seen == [(each.number, {"x": each.params["x"]}, False) for each in study.trials]
    assert all(each.intermediate_values.keys() == {1} for each in study.trials)


def test_suggestions_in_another_process_do_not_repeat_themselves(url: str) -> None:
    """As where the objective launches one rank, in which the parameters are suggested."""

    def elsewhere(trial: optuna.Trial) -> float:
        return pickle.loads(pickle.dumps(trial)).suggest_float("x", 0, 1)  # type: ignore[no-any-return]

    study = open_study("study", storage=url, sampler=RandomSampler(seed=1))
    study.optimize(elsewhere, n_trials=3)
    plain = optuna.create_study(sampler=RandomSampler(seed=1))
    plain.optimize(objective, n_trials=3)
    assert [each.params for each in study.trials] == [each.params for each in plain.trials]


def test_a_copy_continues_as_the_study_did(url: str) -> None:
    study = open_study("study", storage=url, sampler=TPESampler(seed=1, n_startup_trials=2))
    study.optimize(Failing(KeyError(), -1), n_trials=8)
    study.copy_before(5, "again")
    again = open_study("again", storage=url, sampler=TPESampler(n_startup_trials=2))
    assert [each.number for each in again.trials] == [0, 1, 2, 3, 4]
    again.optimize(Failing(KeyError(), -1), n_trials=8)

    assert [each.params for each in again.trials] == [each.params for each in study.trials]
    assert len(study.trials) == 8


def test_what_cannot_be_copied_is_refused(url: str) -> None:
    study = open_study("study", storage=url)
    with pytest.raises(KeyboardInterrupt):
        study.optimize(Failing(KeyboardInterrupt(), 1), n_trials=3)

    with pytest.raises(ValueError, match=r"\[1\] before 2"):
        study.copy_before(2, "again")
    for number in (4, -1, "1", True):
        with pytest.raises(ValueError, match=f"most 2; got {number!r}"):
            study.copy_before(number, "again")  # type: ignore[arg-type]
    assert optuna.get_all_study_names(url) == ["study"]
    study.copy_before(1, "again")
    with pytest.raises(optuna.exceptions.DuplicatedStudyError):
        study.copy_before(1, "again")
    assert open_study("again", storage=url).trials[0].state == TrialState.COMPLETE
