"""MLflow: a server that cannot be reached, for a while or for good, changes nothing of a training."""

from __future__ import annotations

import logging
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event as Flag

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.packages.tests.facts import assert_facts
from heliograph.packages.trackers.tests.mlflow.server import Server, free_port
from heliograph.tests import kit
from heliograph.tests.builtin_callbacks.tracker_attempts import Show
from heliograph.tests.kit import class_batches
from heliograph_trackers import MLflow
from mlflow import MlflowClient
from mlflow.entities import Run
from PIL import Image
from torch import Tensor

LONG = 120.0  # seconds after which a test that waits gives up


class Script(h.Plugin):
    """Calls a function when a step begins; the training draws from all generators."""

    def __init__(self, **actions: Callable[[], object]) -> None:
        self.actions = actions

    @h.on(h.BatchStart)
    def act(self, run: h.Run, event: h.BatchStart) -> None:
        if (action := self.actions.get(f"step_{run.progress.steps}")) is not None:
            action()
        inputs, targets = run.batch
        run.batch = (inputs + random.random() + float(np.random.rand()) + torch.rand(()), targets)


class Noticed(logging.Handler):
    """Waits until a tracker has said that it waits."""

    def __init__(self) -> None:
        super().__init__()
        self._flag = Flag()

    def emit(self, record: logging.LogRecord) -> None:
        if "cannot be written to" in record.getMessage():
            self._flag.set()

    def wait(self) -> None:
        assert self._flag.wait(LONG), "the outage was not noticed"


@pytest.fixture
def noticed() -> Iterator[Noticed]:
    handler = Noticed()
    logging.getLogger("heliograph").addHandler(handler)
    yield handler
    logging.getLogger("heliograph").removeHandler(handler)


@pytest.fixture(scope="module")
def server_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture
def server(server_of_all: Server) -> Server:
    """Return a server that answers."""
    server_of_all.start()
    return server_of_all


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")


def trained(*plugins: h.Plugin, steps: int = 8) -> tuple[list[Tensor], h.RunResult]:
    """Return the weights after a training, and its result."""
    task = kit.linear_classifier()
    random.seed(0)
    np.random.seed(0)
    with kit.kept_generators():
        torch.manual_seed(1)
        result = kit.fit(h.LogSchedule(h.Every(steps=1)), *plugins, task=task, train=class_batches(steps))
    return [each.detach().clone() for each in task.model.parameters()], result


def assert_as_alone(weights: list[Tensor], result: h.RunResult) -> None:
    """The training is, bit for bit, the one without a tracker."""
    alone, expected = trained(Script())
    assert all(map(torch.equal, weights, alone))
    assert (result.status, result.progress.steps) == (expected.status, expected.progress.steps)
    assert (result.metrics["train/loss"], result.plugin_errors) == (expected.metrics["train/loss"], {})


def run_of(uri: str, experiment: str) -> Run:
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    return run


def steps(uri: str, run: Run) -> list[int]:
    return sorted(each.step for each in MlflowClient(uri).get_metric_history(run.info.run_id, "train/loss"))


def test_an_address_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MLflow, "patience", 0.3)
    weights, result = trained(MLflow("digits", f"http://127.0.0.1:{free_port()}"), Script())

    assert_as_alone(weights, result)
    (warning,) = result.warnings
    assert warning.startswith("mlflow lost ")
    assert "rows of metrics (8)" in warning
    assert "Connection refused" in warning


@pytest.mark.whole
def test_a_server_that_stands_still_for_a_while(server: Server, noticed: Noticed, tmp_path: Path) -> None:
    """It may have taken a request that it did not answer: that one is sent again, and is there once."""

    tracker = MLflow("still", server.uri)
    script = Script(
        step_3=lambda: server.send(signal.SIGSTOP),
        step_5=noticed.wait,
        step_6=lambda: server.send(signal.SIGCONT),
    )
    weights, result = trained(tracker, script, Show())

    assert_as_alone(weights, result)
    assert result.warnings == ()
    client, run = MlflowClient(server.uri), run_of(server.uri, "still")
    assert (run.info.status, steps(server.uri, run)) == ("FINISHED", [1, 2, 3, 4, 5, 6, 7, 8])
    texts = client.list_artifacts(run.info.run_id, "says")
    assert sorted(each.path for each in texts) == [f"says/step_{step}.txt" for step in range(1, 9)]
    image = next(each.path for each in client.list_artifacts(run.info.run_id, "images") if each.path.endswith(".png"))
    with Image.open(client.download_artifacts(run.info.run_id, image, str(tmp_path))) as opened:
        assert opened.size == (4, 2)


@pytest.mark.whole
def test_a_server_that_is_killed_and_started_again(server: Server, noticed: Noticed) -> None:
    script = Script(step_3=server.kill, step_5=noticed.wait, step_6=server.start)
    weights, result = trained(MLflow("again", server.uri), script)

    assert_as_alone(weights, result)
    assert result.warnings == ()
    run = run_of(server.uri, "again")
    assert (run.info.status, steps(server.uri, run)) == ("FINISHED", [1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.whole
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_server_that_is_gone_for_good(
    server: Server, monkeypatch: pytest.MonkeyPatch, how: str, noticed: Noticed
) -> None:
    """What was logged after that is counted, with the reason; the run is shown as running."""
    monkeypatch.setattr(MLflow, "patience", 5.0)
    tracker = MLflow(how, server.uri)

    def leave() -> None:
        assert tracker._outbox is not None
        tracker._outbox.drain()
        if how == "killed":
            server.kill()
        else:
            server.send(signal.SIGSTOP)

    weights, result = trained(tracker, Script(step_4=leave, step_7=noticed.wait))

    assert_as_alone(weights, result)
    (warning,) = result.warnings
    assert_facts(warning, "mlflow lost rows", "(4)", "the ending (1)", "ConnectionError")
    assert ("Connection refused" if how == "killed" else "Read timed out") in warning
    server.kill()
    server.start()
    run = run_of(server.uri, how)
    assert (run.info.status, steps(server.uri, run)) == ("RUNNING", [1, 2, 3, 4])
