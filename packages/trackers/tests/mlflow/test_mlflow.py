"""MLflow: runs in a database, as MLflow's own client reads them."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import heliograph as h
import mlflow
import numpy as np
import pytest
import torch
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.tests import kit
from heliograph.tests.builtin_callbacks.tracker_attempts import Die, Noisy, Show, killed, spoiled, train
from heliograph.tests.kit import class_batches
from heliograph_testing import check_tracker
from heliograph_trackers import MLflow
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from PIL import Image

DEPRECATED = "The ``noload`` loader strategy is deprecated"  # in SQLAlchemy, by MLflow's own code
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATED}:DeprecationWarning")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database without runs: to make one takes a second."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{path}")
    return path


@pytest.fixture
def uri(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a database; artifacts lie in the current folder."""
    shutil.copy(empty, tmp_path / "runs.db")
    monkeypatch.chdir(tmp_path)
    with kit.kept_generators():
        yield f"sqlite:///{tmp_path / 'runs.db'}"


def log(uri: str, *plugins: Any, steps: int = 4, tags: dict[str, str] | None = None, **options: Any) -> h.RunResult:
    """Train from the beginning."""
    tracker = MLflow("digits", uri, tags)
    return kit.fit(h.LogSchedule(h.Every(steps=1)), tracker, *plugins, train=class_batches(steps), **options)


def runs_of(uri: str) -> list[Run]:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def run_of(uri: str) -> Run:
    (run,) = runs_of(uri)
    return run


def status_of(uri: str) -> tuple[str, str]:
    """Return the status of the run, for MLflow and in the tag."""
    run = run_of(uri)
    return run.info.status, run.data.tags["heliograph.status"]


def curve(uri: str, name: str = "train/loss") -> list[tuple[int, float]]:
    """Return the steps and values of a metric, in the order in which they came."""
    history = MlflowClient(uri).get_metric_history(run_of(uri).info.run_id, name)
    return [(each.step, each.value) for each in sorted(history, key=lambda each: each.timestamp)]


def points(uri: str) -> dict[str, list[tuple[int, float]]]:
    return {name: curve(uri, name) for name in run_of(uri).data.metrics if name != "rollbacks"}


def test_what_every_tracker_promises(empty: Path, uri: str) -> None:
    def address(folder: Path) -> str:
        path = folder / "runs.db"
        if not path.exists():
            shutil.copy(empty, path)
        return f"sqlite:///{path}"

    def status(folder: Path) -> str:
        return " ".join(status_of(address(folder)))

    check_tracker(
        lambda folder: MLflow("digits", address(folder)),
        lambda folder: points(address(folder)),
        read_status=status,
        statuses={
            "completed": "FINISHED completed",
            "stopped": "FINISHED stopped",
            "preempted": "KILLED preempted",
            "failed": "FAILED failed",
        },
    )


def test_a_run(uri: str) -> None:
    parameters = {"rate": 0.1, "layers": [3, 4], "deep": True}
    result = log(
        uri,
        h.ValidationSchedule(h.Every(steps=2)),
        validation=class_batches(1),
        hyper_parameters=parameters,
        name="first",
        tags={"team": "vision"},
    )

    run = run_of(uri)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {"rate": "0.1", "layers": "[3, 4]", "deep": "True"}
    assert [step for step, _ in curve(uri)] == [1, 2, 3, 4]
    assert [step for step, _ in curve(uri, "validation/loss")] == [2, 4]
    assert curve(uri)[3][1] == result.metrics["train/loss"]
    tags = run.data.tags
    assert {"team": "vision", "heliograph.status": "completed", "heliograph.attempt": "1"}.items() <= tags.items()
    assert "mlflow.user" in tags
    history = MlflowClient(uri).get_metric_history(run.info.run_id, "train/loss")
    assert all(run.info.start_time - 1000 <= each.timestamp <= run.info.end_time + 1000 for each in history)
    assert (result.warnings, result.notes, result.plugin_errors) == ((), (), {})


def test_the_process_is_left_as_it_was(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The active run, the address, the variables, and the generators that a training may draw from."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    address, variables = mlflow.get_tracking_uri(), dict(os.environ)
    drawn: list[float] = []

    class Draw(h.Plugin):
        @h.on(h.StepEnd)
        def draw(self, run: h.Run, event: h.StepEnd) -> None:
            drawn.extend([random.random(), float(np.random.rand()), float(torch.rand(()))])
            assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"

    with kit.kept_generators():
        kit.fit(h.LogSchedule(h.Every(steps=1)), Draw(), train=class_batches(4))
    log(uri, Draw())

    assert drawn[:12] == drawn[12:]
    assert (mlflow.get_tracking_uri(), mlflow.active_run()) == (address, None)
    assert dict(os.environ) == variables


@pytest.mark.parametrize(
    ("status", "shown"),
    [("stopped", "FINISHED"), ("failed", "FAILED"), ("interrupted", "KILLED"), ("preempted", "KILLED")],
)
def test_the_status_is_the_true_one(uri: str, status: str, shown: str) -> None:
    errors: dict[str, BaseException] = {"failed": RuntimeError("a fault"), "interrupted": KeyboardInterrupt()}

    class End(h.Plugin):
        asks = ("stop",)

        @h.on(h.StepEnd)
        def end(self, run: h.Run, event: h.StepEnd) -> None:
            if status in errors:
                raise errors[status]
            run.control.stop("enough", required=status == "preempted")

    if status in errors:
        with pytest.raises(type(errors[status])):
            log(uri, End())
    else:
        log(uri, End())

    assert status_of(uri) == (shown, status)


def test_numbers_that_are_none(uri: str) -> None:
    """The databases of MLflow have no infinity."""
    log(uri, Noisy({"nan": math.nan, "up": math.inf, "down": -math.inf}), steps=1)
    assert math.isnan(curve(uri, "nan")[0][1])
    assert (curve(uri, "up"), curve(uri, "down")) == ([(1, sys.float_info.max)], [(1, -sys.float_info.max)])


def test_names_that_mlflow_refuses_get_another_and_that_is_said(uri: str) -> None:
    metrics = {"recall@5": 1.0, "../up": 3.0, "long" * 100: 4.0, "a:b": 5.0}
    result = log(uri, Noisy(metrics), hyper_parameters={"rate(max)": 1}, steps=2)

    shown = {name: [value for _, value in curve(uri, name)] for name in run_of(uri).data.metrics}
    assert {"recall_5": [1.0] * 2, "up": [3.0] * 2, "a:b": [5.0] * 2}.items() <= shown.items()
    assert shown[("long" * 100)[:250]] == [4.0] * 2
    assert run_of(uri).data.params == {"rate_max_": "1"}
    assert any("mlflow: the name 'recall@5'" in line for line in result.notes)
    assert len(result.notes) == 4
    assert result.warnings == ()


def test_more_than_fits_into_a_request(uri: str) -> None:
    metrics = {f"m{number}": float(number) for number in range(2500)}
    parameters = {f"p{number}": number for number in range(250)}
    log(uri, Noisy(metrics), hyper_parameters=parameters, tags={f"t{n}": "é" * 9000 for n in range(130)}, steps=1)

    run = run_of(uri)
    assert {name: run.data.metrics[name] for name in metrics} == metrics
    assert run.data.params == {name: str(value) for name, value in parameters.items()}
    assert [len(run.data.tags[f"t{number}"]) for number in range(130)] == [5000] * 130


def test_a_long_hyper_parameter_is_cut_and_that_is_said(uri: str) -> None:
    result = log(uri, hyper_parameters={"prompt": "x" * 7000}, steps=1)
    assert run_of(uri).data.params == {"prompt": "x" * 6000}
    assert_each(result.notes, ("prompt", "7000", "6000"))


def test_images_texts_and_files(uri: str, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("kept")

    class Show(h.Plugin):
        @h.on(h.StepEnd)
        def show(self, run: h.Run, event: h.StepEnd) -> None:
            run.log_image("what@it/sees", torch.ones(3, 2, 4))
            run.log_text("says/first", f"step {run.progress.steps}")
            run.log_file("notes", tmp_path / "notes.md")
            run.log_histogram("weights", torch.ones(2))

    result = log(uri, Show(), steps=2)

    client, run_id = MlflowClient(uri), run_of(uri).info.run_id
    images = [each.path for each in client.list_artifacts(run_id, "images") if each.path.endswith(".png")]
    assert sorted(path.split("+timestamp")[0] for path in images) == [
        "images/what_it~sees+step+1",
        "images/what_it~sees+step+2",
    ]
    assert np.asarray(Image.open(client.download_artifacts(run_id, images[0]))).shape == (2, 4, 3)
    assert Path(client.download_artifacts(run_id, "says/first/step_2.txt")).read_text() == "step 2"
    assert Path(client.download_artifacts(run_id, "notes/step_1/notes.md")).read_text() == "kept"
    assert_each(result.notes, ("histogram (2 times)",))
    assert result.warnings == ()


def test_rows_that_wait_go_together(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of them is refused, the others are not lost with it."""
    requests: list[tuple[str, list[int]]] = []
    has_trained = Event()
    create_run, log_batch = MlflowClient.create_run, MlflowClient.log_batch

    def create_later(self: MlflowClient, *arguments: Any, **options: Any) -> Any:
        assert has_trained.wait(60), "no end of training"
        return create_run(self, *arguments, **options)

    def note(self: MlflowClient, run_id: str, metrics: Any = (), **options: Any) -> None:
        if metrics:
            requests.append((run_id, sorted({each.step for each in metrics})))
            if any(each.step == 5 for each in metrics):
                raise mlflow.MlflowException("not this one", error_code=INVALID_PARAMETER_VALUE)
        log_batch(self, run_id, metrics, **options)

    class Release(h.Plugin):
        @h.on(h.TrainEnd)
        def release(self, run: h.Run, event: h.TrainEnd) -> None:
            has_trained.set()

    monkeypatch.setattr(MlflowClient, "create_run", create_later)
    monkeypatch.setattr(MlflowClient, "log_batch", note)
    result = log(uri, Release(), steps=7)

    assert [step for step, _ in curve(uri)] == [1, 2, 3, 4, 6, 7]
    run_id = run_of(uri).info.run_id
    assert requests == [(run_id, steps) for steps in [[*range(1, 8)], *([step] for step in range(1, 8))]]
    (warning,) = result.warnings
    assert_facts(warning, "mlflow lost rows", "(1)", "RuntimeError: not this one")


def test_a_test_after_a_training_is_in_its_run(uri: str) -> None:
    trainer = h.Trainer([h.LogSchedule(h.Every(steps=1)), MLflow("digits", uri)], device="cpu")
    task = kit.linear_classifier()
    trainer.fit(task, class_batches(2), optimizer=kit.sgd(), epochs=1)
    training = run_of(uri).data.tags["heliograph.training"]
    tested = trainer.test(task, class_batches(1))

    assert curve(uri, "test/loss") == [(0, tested.metrics["test/loss"])]
    assert run_of(uri).data.tags["heliograph.training"] == training
    assert run_of(uri).info.status == "FINISHED"


def test_a_killed_run_is_resumed_with_every_step_once(uri: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole.db"
    shutil.copy(tmp_path / "runs.db", whole)

    def attempt(uri: str, folder: str, rate: float, die: int | None = None) -> h.RunResult:
        tracker = MLflow("digits", uri)
        plugins: list[Any] = [h.ValidationSchedule(h.Every(steps=2)), Noisy({"at@once": 1.0}), Show()]
        plugins += [] if die is None else [Die(tracker, die, loads=int(die > 3))]
        options: dict[str, Any] = {"validation": class_batches(1), "hyper_parameters": {"rate": rate, "depth": 2}}
        return train(tmp_path / folder, tracker, *plugins, steps=7, **options)

    for step in (3, 6, 5):
        killed(partial(attempt, uri, "killed", 0.1, step))
    killed_run = run_of(uri)
    result = attempt(uri, "killed", 0.2)
    attempt(f"sqlite:///{whole}", "whole", 0.1)

    assert (killed_run.info.status, killed_run.data.tags["heliograph.status"]) == ("RUNNING", "running")
    run = run_of(uri)
    assert (run.info.run_id, run.info.status) == (killed_run.info.run_id, "FINISHED")
    for name in ("train/loss", "validation/loss", "at_once"):
        assert curve(uri, name) == curve(f"sqlite:///{whole}", name)
    assert [step for step, _ in curve(uri)] == [1, 2, 3, 4, 5, 6, 7]
    client = MlflowClient(uri)
    images = [
        re.fullmatch(r"images/it~sees\+step\+(\d)\+.+\.png", each.path)
        for each in client.list_artifacts(run.info.run_id, "images")
    ]
    assert sorted(each[1] for each in images if each) == list("1234567")
    assert len(client.list_artifacts(run.info.run_id, "says")) == 7
    assert run.data.params == {"rate": "0.1", "depth": "2", "rate.2": "0.2"}
    assert run.data.tags["heliograph.status"] == "completed"
    assert run.data.tags["heliograph.attempt.2"].startswith("resumed at step ")
    assert any("mlflow: rate has changed" in line for line in result.notes)
    assert not [each for each in result.warnings if "mlflow" in each]


def test_a_resumed_run_is_running_again(uri: str, tmp_path: Path) -> None:
    tracker, seen = MLflow("digits", uri), list[tuple[str, str]]()

    class Looks(h.Plugin):
        @h.on(h.StepEnd)
        def look(self, run: h.Run, event: h.StepEnd) -> None:
            if run.progress.steps == 3:
                assert tracker._outbox is not None
                tracker._outbox.drain()
                seen.append(status_of(uri))
                if len(seen) == 1:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, tracker, Looks())
    left = status_of(uri)
    train(tmp_path, tracker, Looks())

    assert (left, status_of(uri)) == (("KILLED", "interrupted"), ("FINISHED", "completed"))
    assert seen == [("RUNNING", "running")] * 2


def test_a_run_that_goes_back_shows_both_ways(uri: str, tmp_path: Path) -> None:
    """Also one that is killed after it went back, and goes back again when it is resumed."""
    whole = tmp_path / "whole.db"
    shutil.copy(tmp_path / "runs.db", whole)

    def attempt(uri: str, folder: str, die: bool = False) -> h.RunResult:
        tracker = MLflow("digits", uri)
        plugins = [h.RollBack(), *([Die(tracker, 7, loads=1)] if die else [])]
        return train(tmp_path / folder, tracker, *plugins, train=spoiled(9, at=6), every=4)

    killed(lambda: attempt(uri, "killed", die=True))
    assert [step for step, _ in curve(uri)] == [1, 2, 3, 4, 5, 6, 5, 6]
    attempt(uri, "killed")
    attempt(f"sqlite:///{whole}", "whole")

    assert [step for step, _ in curve(f"sqlite:///{whole}")] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert curve(f"sqlite:///{whole}", "rollbacks") == [(step, 1.0) for step in (5, 6, 7, 8)]
    for name in ("train/loss", "rollbacks"):
        assert curve(uri, name) == curve(f"sqlite:///{whole}", name)
    tags = run_of(uri).data.tags
    assert tags["heliograph.roll_back.1"].endswith("to step 4")


@pytest.mark.parametrize("deleted", [True, False])
def test_a_run_that_is_gone_is_followed_by_a_new_one(
    uri: str, tmp_path: Path, deleted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MLflow, "is_local", True)  # the checkpoint names the run, and nothing waits in it
    killed(lambda: train(tmp_path, tracker := MLflow("digits", uri), Die(tracker, 3)))
    former = run_of(uri).info.run_id
    other = tmp_path / "other.db"
    if deleted:
        MlflowClient(uri).delete_run(former)
    else:
        shutil.copy(tmp_path / "runs.db", other)
        with sqlite3.connect(other) as database:
            for table in ("latest_metrics", "metrics", "params", "tags", "runs"):
                database.execute(f"delete from {table}")
        uri = f"sqlite:///{other}"
    result = train(tmp_path, MLflow("digits", uri))

    assert run_of(uri).info.run_id != former
    assert [step for step, _ in curve(uri)] == [3, 4]
    (note,) = [each for each in result.notes if each.startswith("mlflow: ")]
    assert former in note
    assert note.endswith("started a new one")


def test_a_run_whose_page_no_checkpoint_names_is_found(uri: str, tmp_path: Path) -> None:
    """As where the answer to the request that made it was lost, or the first checkpoint was saved before it came."""
    tracker = MLflow("digits", uri)
    killed(lambda: train(tmp_path, tracker, Die(tracker, 3)))

    class Forget(MLflow):
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict({**state, "page": None})

    train(tmp_path, Forget("digits", uri))
    assert [step for step, _ in curve(uri)] == [1, 2, 3, 4]


def test_an_experiment_that_was_deleted_is_said(uri: str) -> None:
    client = MlflowClient(uri)
    client.delete_experiment(client.create_experiment("digits"))
    result = log(uri)

    (warning,) = result.warnings
    assert "experiment digits was deleted:" in warning
    assert result.status == "completed"


def log_on_ranks(uri: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", DEPRECATED, DeprecationWarning)
        log(uri)


def test_of_two_ranks_the_main_one_writes(uri: str, ranks: Callable[[int], Any]) -> None:
    ranks(2).run(log_on_ranks, uri)
    assert [step for step, _ in curve(uri)] == [1, 2]  # of four batches each rank has two


def test_without_mlflow_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"mlflow, .*pip install 'heliograph\[mlflow\]'"):
        MLflow("digits")
