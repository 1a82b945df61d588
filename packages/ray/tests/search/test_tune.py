"""A search without a cluster: reports to Tune, its stops, what trials resume, and how results are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heliograph import (
    Checkpoint,
    Every,
    Plugin,
    Run,
    RunClosed,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    ValidationBatchEnd,
    ValidationSchedule,
    on,
)
from heliograph.core.distributed.failure import Carried
from heliograph.core.host import hosted_by
from heliograph.core.metrics.monitor import Monitor
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.tests.kit import sgd
from heliograph_ray.report import RayReport
from heliograph_ray.search.location import Location, find_resumable, search_location, summarize_end
from heliograph_ray.search.results import Search, Trial, _best_stored, _error, _is_reported, tune_results
from heliograph_ray.search.trial import (
    STOPPED,
    TrialFailed,
    TrialHost,
    TrialSession,
    TuneReporter,
    ignore_stop,
)
from heliograph_ray.search.tune import _check_resume, _log_failures, _max_concurrent, tune
from heliograph_ray.session import Notice
from heliograph_ray.storage import StoredFolder
from pyarrow import fs  # type: ignore[import-untyped]
from torch import nn

LOSS = "validation/loss"
LOCAL = fs.LocalFileSystem()


class FakeTune:
    """A fake of `ray.tune`: keeps reports, and ends the function at one of them."""

    def __init__(self, stops_at: int = -1) -> None:
        self.stops_at = stops_at
        self.reports: list[tuple[dict[str, float], list[str]]] = []

    def report(self, metrics: dict[str, float], checkpoint: Any) -> None:
        files = [] if checkpoint is None else sorted(each.name for each in Path(checkpoint.path).iterdir())
        self.reports.append((metrics, files))
        if len(self.reports) == self.stops_at:
            raise SystemExit(0)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], FakeTune]:
    """Return a function that replaces `ray.tune` by a fake."""

    def make(stops_at: int = -1) -> FakeTune:
        fake = FakeTune(stops_at)
        monkeypatch.setattr("ray.tune.report", fake.report)
        return fake

    return make


def fit(
    folder: Path, resumable: list[StoredFolder], *, epochs: int = 4, plugins: tuple[Any, ...] = ()
) -> tuple[Any, ...]:
    """Train in what is a trial; return the result, the host, and how often the run was closed."""
    torch.manual_seed(0)
    data = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(3)]
    each = Every(epochs=1)
    saving = [SaveSchedule(each), Checkpoint(folder, keep_last=None)]
    trainer = Trainer([ValidationSchedule(each), *saving, *plugins], use_cpu=True)
    ends: list[str] = []
    trainer.bus.on(RunClosed, lambda run, event: ends.append(event.status))
    host = TrialHost(TrialSession(TuneReporter(LOSS), resumable))
    with hosted_by(host):
        result = trainer.fit(
            Supervised(nn.Linear(4, 2), nn.functional.mse_loss),
            data,
            validation=data,
            optimizer=sgd(),
            epochs=epochs,
        )
    return result, host, ends


def test_a_trial_reports_each_checkpoint_with_the_metrics_of_its_validation(
    tmp_path: Path, tuned: Callable[..., FakeTune]
) -> None:
    fake = tuned()
    result, host, _ = fit(tmp_path, [])
    assert [(metrics["epoch"], metrics["step"]) for metrics, _ in fake.reports] == [(1, 3), (2, 6), (3, 9), (4, 12)]
    assert fake.reports[-1][0][LOSS] == result.metrics[LOSS]
    assert fake.reports[0][1] == ["run_epoch_1_iter_3.pth"]
    assert (result.status, host.result) == ("completed", result)


def test_a_stop_by_tune_closes_the_run_and_ends_the_reports(tmp_path: Path, tuned: Callable[..., FakeTune]) -> None:
    fake = tuned(2)
    result, host, ends = fit(tmp_path, [], plugins=(SaveSchedule(Every(steps=5), at_end=True).named("more"),))
    assert (result.status, result.stopped_by, result.reason) == ("stopped", "tune", STOPPED)
    assert (result.exit_status, ends) == (0, ["stopped"])
    assert host.session.exit_notice == Notice("tune", STOPPED)
    assert len(fake.reports) == 2
    assert result.last_checkpoint is not None
    assert result.last_checkpoint.exists()


def test_no_training_starts_after_one_that_tune_has_stopped(tmp_path: Path, tuned: Callable[..., FakeTune]) -> None:
    fake = tuned(2)
    _, host, _ = fit(tmp_path, [])
    with ignore_stop(host.session), hosted_by(host):
        Trainer(use_cpu=True).fit(Supervised(nn.Linear(4, 2), nn.functional.mse_loss), [])
        pytest.fail("a training has resumable")
    assert len(fake.reports) == 2
    with pytest.raises(SystemExit, match="3"), ignore_stop(TrialSession(TuneReporter(LOSS), [])):
        raise SystemExit(3)


def test_a_metric_that_is_nan_is_not_reported_twice(tmp_path: Path, tuned: Callable[..., FakeTune]) -> None:
    class Spoil(Plugin):
        @on(ValidationBatchEnd)
        def spoil(self, run: Run, event: ValidationBatchEnd) -> None:
            run.track("noise", math.nan)

    fake = tuned()
    fit(tmp_path, [], plugins=(Spoil(),))
    assert [metrics["epoch"] for metrics, _ in fake.reports] == [1, 2, 3, 4]
    assert math.isnan(fake.reports[0][0]["validation/noise"])


def test_a_metric_is_nan_until_it_is_measured_and_must_be_measured_once(
    tuned: Callable[..., FakeTune],
) -> None:
    fake = tuned()
    reports = TuneReporter("validation/los")
    reports.report({LOSS: 1.0, "step": 1}, None)
    assert math.isnan(fake.reports[0][0]["validation/los"])
    with pytest.raises(ValueError, match=r"never measured metric='validation/los'.*'validation/loss'"):
        reports.check_measured()
    reports.report({"validation/los": 1.0}, None)
    reports.check_measured()


def test_a_trial_may_be_stopped_before_it_measures(tuned: Callable[..., FakeTune]) -> None:
    tuned(1)
    reports = TuneReporter(LOSS)
    reports.report({}, None)
    reports.check_measured()


def test_the_plugins_of_a_trial_are_added_once_and_only_if_missing(tuned: Callable[..., FakeTune]) -> None:
    tuned()
    host = TrialHost(TrialSession(TuneReporter(LOSS), []))
    trainer = Trainer([RayReport(interval=3.0)])
    host.prepare(trainer.plugins)
    host.prepare(trainer.plugins)
    assert [type(plugin).__name__ for plugin in trainer.plugins] == ["RayReport", "Tune"]


def test_a_trial_resumes_whatever_resume_of_its_checkpoint_is(tmp_path: Path, tuned: Callable[..., FakeTune]) -> None:
    tuned()
    whole, _, _ = fit(tmp_path / "whole", [])
    stored = tmp_path / "search" / "trial" / "checkpoint_000001"
    stored.mkdir(parents=True)
    for file in (tmp_path / "whole").glob("*epoch_2*"):
        (stored / file.name).write_bytes(file.read_bytes())
    checkpoint = SimpleNamespace(path=str(stored), filesystem=LOCAL)
    resumable = find_resumable(checkpoint, Location(str(tmp_path), "search/trial"))
    result, _, _ = fit(tmp_path / "again", resumable)
    assert result.resume.step == 6
    assert result.metrics == whole.metrics


def folder(path: Path, sequence: int | None, run: Path) -> None:
    """Store the checkpoint of a run that it has written as the n-th."""
    path.mkdir(parents=True)
    for file in run.glob(f"*epoch_{sequence}_*"):
        (path / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (None, ["2", "1", "3", "0"]),  # Tune knows none: by the order of writing
        ("trial/checkpoint_000002", ["2", "3", "1", "0"]),
        ("other/checkpoint_000001", ["1", "0"]),  # a clone: newer ones do not count, nor its own
        ("gone/checkpoint_000001", []),
    ],
)
def test_a_trial_resumes_tunes_checkpoint_or_a_newer_one_in_its_folder(
    tmp_path: Path, tuned: Callable[..., FakeTune], known: str | None, expected: list[str]
) -> None:
    tuned()
    fit(tmp_path / "run", [])
    for name, sequences in {"trial": [1, 3, 4, 2], "other": [1, 2, 3]}.items():
        for number, sequence in enumerate(sequences):
            folder(tmp_path / "search" / name / f"checkpoint_{number:06d}", sequence, tmp_path / "run")
    (tmp_path / "search" / "trial" / "params.json").write_text("{}")
    checkpoint = None if known is None else SimpleNamespace(path=str(tmp_path / "search" / known), filesystem=LOCAL)
    found = find_resumable(checkpoint, Location(str(tmp_path), "search/trial"))
    assert [each.name[-1] for each in found] == expected
    assert all(each.is_own for each in found)


def test_a_folder_without_an_intact_manifest_comes_last(tmp_path: Path, tuned: Callable[..., FakeTune]) -> None:
    tuned()
    fit(tmp_path / "run", [])
    folder(tmp_path / "search" / "checkpoint_000000", 1, tmp_path / "run")
    (tmp_path / "search" / "checkpoint_000001").mkdir()
    (tmp_path / "search" / "checkpoint_000001" / "run_epoch_2_iter_6.pth").write_text("{")
    found = find_resumable(None, Location(str(tmp_path), "search"))
    assert [each.name[-1] for each in found] == ["0", "1"]


def test_a_location_keeps_plain_data(tmp_path: Path) -> None:
    location = search_location(tmp_path, "search").subfolder("trial_lr=0.1000,b=[1]")
    assert location.read() is None
    location.write({"value": math.inf})
    assert location.read() == {"value": math.inf}
    assert [each.name for each in Path(location.path).iterdir()] == ["heliograph.json"]


@pytest.mark.parametrize("name", ["", "a/b", ".hidden"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name= becomes a folder"):
        search_location(tmp_path, name)


def test_a_location_is_absolute_and_an_address_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert search_location("here", "search").path == f"{tmp_path}/here/search"
    assert search_location("s3://bucket/there/", "search").path == "s3://bucket/there/search"
    for home in (None, "~/ray_results", Path("~/ray_results")):
        assert search_location(home, "search").path == str(Path.home() / "ray_results" / "search")
    wrong: Any = 3
    with pytest.raises(TypeError, match="storage_path is a path"):
        search_location(wrong, "search")


def test_how_a_trial_ended_is_plain_data(tmp_path: Path, tuned: Callable[..., FakeTune]) -> None:
    tuned(2)
    result: RunResult = fit(tmp_path, [])[0]
    end = summarize_end(result, None)
    assert (end["status"], end["stopped_by"], end["notes"]) == ("stopped", "tune", list(result.notes))
    assert end["warnings"] == list(result.warnings)
    assert summarize_end(None, None)["status"] == "completed"
    assert summarize_end(result, KeyError("lr"))["reason"] == "KeyError: 'lr'"


def trial(number: int, value: float | None, **facts: Any) -> Trial:
    given = {
        "status": "completed",
        "reason": "done",
        "stopped_by": None,
        "metrics": {},
        "error": None,
        "notes": (),
        "warnings": (),
        **facts,
    }
    return Trial(number, f"t{number}", {}, value=value, path="", **{"_stored": None, **given})


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 1)])
def test_the_best_trial_has_the_best_value_by_the_mode(mode: str, best: int) -> None:
    values = [None, 3.0, 1.0, 1.0, 2.0]
    search = Search((trial(*each) for each in enumerate(values)), LOSS, mode, "/there")
    assert search.best.number == best


def test_a_search_prints_its_trials() -> None:
    stopped = trial(
        1, 0.5, status="stopped", stopped_by="tune", reason=STOPPED, metrics={"step": 19}, warnings=("lost",)
    )
    search = Search([trial(0, None, status="unfinished", reason="interrupted"), stopped], LOSS, "min", "/there")
    assert_each(
        str(search).splitlines(),
        ("validation/loss (min)", "2 trials", "/there"),
        ("0: not measured", "unfinished: interrupted", "{}"),
        ("1: 0.5", "step 19", f"stopped by tune: {STOPPED}", "{}"),
        ("WARNING: lost",),
    )
    with pytest.raises(ValueError, match="trial has measured 'validation/loss'"):
        Search(search[:1], LOSS, "min", "/there").best  # noqa: B018
    with pytest.raises(ValueError, match="Trial 1 has no"):
        stopped.fetch("anywhere")


def test_the_stored_checkpoint_of_a_value_is_the_earliest_with_it() -> None:
    """A later one only repeats the value of earlier weights."""
    values = [math.nan, 2.0, 1.0, 1.0, 3.0]
    checkpoints = [
        (SimpleNamespace(path=f"/{number}", filesystem=LOCAL), {LOSS: value, "training_iteration": number})
        for number, value in enumerate(values)
    ]
    for mode, name in (("min", "2"), ("max", "4")):
        found = _best_stored(checkpoints[::-1], LOSS, mode)
        assert found is not None
        assert found.name == name
    assert _best_stored([], LOSS, "min") is None


def test_a_checkpoint_is_fetched_and_verified(tmp_path: Path, tuned: Callable[..., FakeTune]) -> None:
    tuned()
    fit(tmp_path / "run", [])
    folder(tmp_path / "stored", 3, tmp_path / "run")
    one = trial(0, 1.0, _stored=StoredFolder(LOCAL, str(tmp_path / "stored"), is_own=False))
    path = one.fetch(tmp_path / "new" / "fetched")
    assert path == tmp_path / "new" / "fetched" / "run_epoch_3_iter_9.pth"
    path.with_suffix(".pth").write_bytes(b"damaged")
    (tmp_path / "stored" / path.name).write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"run_epoch_3_iter_9\.pth"):
        one.fetch(tmp_path / "new" / "fetched")


def test_only_our_own_metrics_are_kept() -> None:
    names = ["validation/loss", "config/lr", "epoch", "step", "time_total_s", "train/config"]
    assert [name for name in names if _is_reported(name)] == ["validation/loss", "epoch", "step", "train/config"]


def test_the_users_own_error_is_unwrapped() -> None:
    rays = SimpleNamespace(cause=TrialFailed(Carried.of(KeyError("lr"))))
    error = _error(rays, 3)
    assert isinstance(error, KeyError)
    assert error.args == ("lr",)
    assert_facts(error.__notes__[0], "raised in trial 3", "KeyError")
    assert _error(None, 0) is None
    assert str(_error("the process is gone", 0)) == "the process is gone"


def test_if_all_trials_failed_the_first_error_is_raised_otherwise_they_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed = [trial(number, None, status="failed", reason="why", error=KeyError(number)) for number in range(2)]
    _log_failures(Search([*failed, trial(2, 1.0)], LOSS, "min", ""))
    assert caplog.messages == ["trial 0 failed: why", "trial 1 failed: why"]
    with pytest.raises(KeyError) as caught:
        _log_failures(Search(failed, LOSS, "min", ""))
    assert caught.value.args == (0,)
    assert_each(caught.value.__notes__, ("all 2 trials", "the first"))


def test_a_missing_search_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="search 'digits'"):
        tune_results(tmp_path, "digits")
    search_location(tmp_path, "digits").write({"metric": LOSS, "mode": "min"})
    with pytest.raises(FileNotFoundError, match="search 'digits'"):
        tune_results(tmp_path, "digits")


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"fn": 3}, TypeError, "function and a dict"),
        ({"space": [1]}, TypeError, "function and a dict"),
        ({"metric": "loss"}, ValueError, "<split>/<name>"),
        ({"metric": "validation/accuracy"}, ValueError, "'validation/accuracy' is unknown"),
        ({"resume": "always"}, ValueError, "None or 'auto'"),
        ({"resume": "auto"}, ValueError, "name="),
        ({"num_workers": 0}, ValueError, "num_workers must be a"),
        ({"num_workers": (1, 2)}, ValueError, "num_workers must be a"),
        ({"max_failures": "all"}, ValueError, "max_failures"),
        ({"num_samples": 0}, ValueError, "num_samples must be a"),
        ({"max_concurrent": True}, ValueError, "max_concurrent must be a"),
        ({"keep": 0}, ValueError, "keep must be a"),
        ({"name": "a/b"}, ValueError, "name= becomes a folder"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_starts(
    given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    options: dict[str, Any] = {"fn": print, "space": {}, "metric": LOSS, **given}
    fn, space = options.pop("fn"), options.pop("space")
    with pytest.raises(kind, match=words):
        tune(fn, space, **options)


def test_an_existing_search_is_continued_only_with_the_same_metric(tmp_path: Path) -> None:
    location = search_location(tmp_path, "search")
    location.write({"metric": LOSS, "mode": "min"})
    (tmp_path / "search" / "experiment_state-1.json").write_text("{}")
    with pytest.raises(ValueError, match="continue it with resume='auto'"):
        _check_resume(location, Monitor(LOSS, None), None)
    with pytest.raises(ValueError, match=r"optimizes .*validation/loss.*: pass"):
        _check_resume(location, Monitor("validation/error", None), "auto")
    _check_resume(location, Monitor(LOSS, None), "auto")
    assert location.has_state()
    assert not search_location(tmp_path, "other").has_state()


def test_the_number_of_concurrent_trials_depends_on_the_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 16.0, "GPU": 5.0})
    assert _max_concurrent({"CPU": 2}, 2) == 4
    assert _max_concurrent({"CPU": 2, "GPU": 1}, 2) == 2
    assert _max_concurrent({"TPU": 1}, 2) == 1
