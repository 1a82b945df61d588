"""Search with Tune: stopped trials are closed, cloned ones continue exactly, and results are read again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from heliograph import Supervised, load_weights
from heliograph.packages.ray.tests.on_ray import search_trials
from heliograph.packages.ray.tests.on_ray.search_trials import NotTodayError, read_log
from heliograph_ray.search.pbt import Tune
from heliograph_ray.search.results import Search, tune_results
from heliograph_ray.search.tune import tune
from ray import tune as ray_tune
from ray.tune import schedulers
from torch import nn

pytestmark = pytest.mark.usefixtures("local_ray")
CONFIG = {"lr": 0.2, "momentum": 0.9}
STEPS = 3  # of an epoch
# Tune does not close its own logs when it is interrupted.
TUNES_OWN = (
    r"ignore:Exception ignored in. <_io.FileIO name='.*/driver_artifacts/:pytest.PytestUnraisableExceptionWarning"
)


def start(fn: Any, folder: Path, space: dict[str, Any], **options: Any) -> Search:
    """Search with a storage in the test's folder."""
    space = {**CONFIG, "folder": str(folder), "key": "only", **space}
    return tune(fn, space, metric="validation/loss", storage_path=folder / "ray", name="search", **options)


@pytest.mark.whole
@pytest.mark.timeout(180)
def test_asha_stops_trials_and_another_process_reads_the_best(tmp_path: Path) -> None:
    rates = [0.1, 0.03, 6e-5, 5e-5, 4e-5, 3e-5, 2e-5, 1e-5]  # each worse than those before
    search = start(
        search_trials.digits,
        tmp_path,
        {"lr": ray_tune.grid_search(rates), "epochs": 4},
        scheduler=schedulers.ASHAScheduler(time_attr="epoch", max_t=9, grace_period=1, reduction_factor=3),
        max_concurrent=2,
    )
    assert [trial.config["lr"] for trial in search] == rates
    assert search.best.number == 0
    assert (search.best.status, search.best.metrics["epoch"]) == ("completed", 4)
    for trial in search[2:]:
        assert (trial.status, trial.stopped_by, trial.metrics["step"]) == ("stopped", "tune", 19), trial
        _, ends = read_log(tmp_path, f"{trial.config['lr']:g}")
        assert [(end["closed"], end["step"]) for end in ends] == [("stopped", 19)]

    script = "\n".join(
        [
            "from heliograph_ray.search.results import tune_results",
            f"best = tune_results({str(tmp_path / 'ray')!r}, 'search').best",
            f"print(best.number, repr(best.value), best.status, best.fetch({str(tmp_path / 'fetched')!r}).name)",
        ]
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split()[:3] == ["0", repr(search.best.value), "completed"]
    checkpoint = tmp_path / "fetched" / found.stdout.split()[3]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    metrics = load_weights(Supervised(model, nn.functional.cross_entropy), checkpoint).metrics
    assert metrics["validation/loss"] == search.best.value


@pytest.mark.timeout(180)
def test_a_clone_continues_with_the_perturbed_hyper_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worse of two trials resumes the better one's checkpoint with half its rate and momentum."""
    half = schedulers.PopulationBasedTraining(
        time_attr="epoch",
        perturbation_interval=3,
        hyperparam_mutations={"lr": ray_tune.uniform(0, 1), "momentum": ray_tune.uniform(0, 1)},
        perturbation_factors=(0.5, 0.5),
        resample_probability=0,
        quantile_fraction=0.5,
        synch=True,
    )
    search = start(
        search_trials.log_by_trial_id,
        tmp_path,
        {"lr": ray_tune.grid_search([0.2, 1e-6])},
        scheduler=half,
        max_concurrent=2,
    )
    _, worse = search
    assert [trial.status for trial in search] == ["completed", "completed"]
    assert (worse.config["lr"], worse.config["momentum"]) == (0.1, 0.45)
    epochs, ends = read_log(tmp_path, "1")
    assert [each["epoch"] for each in epochs] == [1, 2, 3, 4, 5]
    assert [end["closed"] for end in ends] == ["stopped", "completed"]
    assert any("0.2 -> 0.1, momentum" in line for line in worse.notes)

    for name in ("whole", "cloned"):
        (tmp_path / name).mkdir()
    whole = {**CONFIG, "folder": str(tmp_path / "whole"), "key": "0"}
    monkeypatch.chdir(tmp_path / "whole")
    search_trials.scheduled(whole, Tune())
    assert read_log(tmp_path, "0")[0] == read_log(tmp_path / "whole", "0")[0]

    monkeypatch.chdir(tmp_path / "cloned")
    search_trials.scheduled({**whole, "folder": str(tmp_path / "cloned")}, Tune(), epochs=3)
    cloned = {**whole, "lr": 0.1, "momentum": 0.45, "folder": str(tmp_path / "cloned")}
    search_trials.scheduled(cloned, Tune(), resume="auto")
    alone = read_log(tmp_path / "cloned", "0")[0]
    assert epochs[3:] == alone[3:]
    assert [each["lr"] for each in alone[2:]] == pytest.approx([0.2 / 4, 0.1 / 8, 0.1 / 16])


@pytest.mark.timeout(120)
def test_a_failed_trial_has_its_own_error_and_the_others_continue(tmp_path: Path) -> None:
    search = start(
        search_trials.failing,
        tmp_path,
        {"fails": ray_tune.grid_search([True, False])},
        max_concurrent=2,
    )
    failed, other = search
    assert (failed.status, other.status, other.error) == ("failed", "completed", None)
    assert isinstance(failed.error, NotTodayError)
    assert (failed.error.args, failed.error.day) == (("trial only fails",), "Friday")
    assert failed.config == {**CONFIG, "folder": str(tmp_path), "key": "only", "fails": True}
    assert "in failing\n" in "".join(failed.error.__notes__)
    assert search.best is other


@pytest.mark.whole
@pytest.mark.timeout(180)
def test_a_search_whose_driver_was_killed_resumes_its_trials(tmp_path: Path) -> None:
    script = "\n".join(
        [
            "import os",
            "from pathlib import Path",
            "from heliograph.packages.ray.tests.on_ray.search_trials import fail_once",
            "from heliograph.packages.ray.tests.on_ray.test_tune import start",
            f"start(fail_once, Path({str(tmp_path)!r}), {{'victim': os.getpid()}})",
        ]
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    found = tune_results(tmp_path / "ray", "search")
    assert ([trial.status for trial in found], found.is_finished) == (["unfinished"], False)
    with pytest.raises(ValueError, match="'search': continue"):
        start(search_trials.fail_once, tmp_path, {})

    (trial,) = start(search_trials.fail_once, tmp_path, {}, resume="auto")
    assert (trial.status, trial.metrics["epoch"], trial.metrics["step"]) == ("completed", 5, 5 * STEPS)
    epochs, ends = read_log(tmp_path, "only")
    assert [each["epoch"] for each in epochs] == [1, 2, 3, 4, 5]
    assert [end["closed"] for end in ends] == ["completed"]


@pytest.mark.filterwarnings(TUNES_OWN)
@pytest.mark.timeout(120)
def test_on_ctrl_c_the_trials_close_and_the_same_call_continues(tmp_path: Path) -> None:
    former = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        start(search_trials.fail_once, tmp_path, {"victim": os.getpid(), "signum": signal.SIGINT})
    assert signal.getsignal(signal.SIGINT) is former
    (trial,) = start(search_trials.fail_once, tmp_path, {}, resume="auto")
    assert (trial.status, trial.metrics["step"]) == ("completed", 5 * STEPS)
    epochs, ends = read_log(tmp_path, "only")
    assert [each["epoch"] for each in epochs] == [1, 2, 3, 4, 5]
    assert [end["closed"] for end in ends] == ["stopped", "completed"]


@pytest.mark.whole
@pytest.mark.timeout(180)
def test_a_trial_on_two_workers_is_stopped_and_resumes_after_a_failure(tmp_path: Path) -> None:
    stopping = schedulers.ASHAScheduler(time_attr="epoch", max_t=4, grace_period=4)
    options = {"num_workers": 2, "scheduler": stopping}
    with pytest.raises(NotTodayError, match="disk is on fire") as caught:
        start(search_trials.fail_once, tmp_path, {}, **options)
    assert (caught.value.day, vars(caught.value)["heliograph_rank"]) == ("Friday", 0)

    (trial,) = start(search_trials.fail_once, tmp_path, {}, resume="auto", **options)
    assert (trial.status, trial.stopped_by, trial.metrics["step"]) == ("stopped", "tune", 4 * STEPS)
    epochs, ends = read_log(tmp_path, "only")
    assert [each["epoch"] for each in epochs] == [1, 2, 3, 4]
    assert [end["closed"] for end in ends] == ["failed", "stopped"]
    assert "iter_12" in trial.fetch(tmp_path / "fetched").name
