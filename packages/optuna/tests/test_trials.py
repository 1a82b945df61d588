"""What a trial's run is called, and whose a checkpoint is."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import optuna
import pytest
from heliograph_optuna.plugin import check_identity, identity, mode_of, run_name, values_of


@pytest.fixture
def trial() -> optuna.Trial:
    trial = optuna.create_study(direction="maximize").ask()
    trial.suggest_float("rate", 0.5, 0.5)
    trial.suggest_categorical("layer", ["relu"])
    return trial


def test_the_number_stands_after_the_name(trial: optuna.Trial) -> None:
    assert run_name("digits", trial) == "digits_trial-0"


def test_a_name_that_would_lose_the_number_is_refused(trial: optuna.Trial) -> None:
    with pytest.raises(ValueError, match=r"name=.nnn.* too long"):
        run_name("n" * 85, trial)


def test_the_study_says_which_way_is_better(trial: optuna.Trial) -> None:
    assert (mode_of(trial), mode_of(optuna.create_study().ask())) == ("max", "min")


def test_a_choice_is_its_index(trial: optuna.Trial) -> None:
    assert values_of(trial) == {"rate": 0.5, "layer": 0.0}


@pytest.mark.parametrize(
    "change",
    [
        {"number": 1},
        {"parameters": {"rate": 0.5, "layer": 1.0}},
        {"parameters": {"rate": 0.5}},
        {"began": (datetime.now() - timedelta(hours=1)).isoformat()},
    ],
)
def test_a_checkpoint_of_another_trial_is_refused(trial: optuna.Trial, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"0 of .* name="):
        check_identity(trial, {**identity(trial), **change})


def test_a_database_may_round_when_a_trial_began(trial: optuna.Trial) -> None:
    saved = identity(trial)
    rounded = datetime.fromisoformat(saved["began"]).replace(microsecond=0)
    check_identity(trial, {**saved, "began": rounded.isoformat()})
