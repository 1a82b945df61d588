"""Warnings while the cluster has no room for workers, and the error when Ray gives up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from heliograph.packages.tests.facts import assert_facts
from heliograph_ray.launcher import capacity
from heliograph_ray.launcher.capacity import Sizes, StartupMonitor, explain_start_timeout
from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError


def test_a_range_is_asked_for_unless_there_is_one_number() -> None:
    assert Sizes(2, 8, {"CPU": 1.0}).asked == (2, 8)
    assert Sizes(4, 4, {"CPU": 1.0}).asked == 4


THERE = {"CPU": 2.0, "memory": 4e9, "object_store_memory": 1e9, "node:192.0.2.2": 1.0, "GPU": 1.0}
UNICORNS = Sizes(1, 2, {"unicorn": 1.0, "CPU": 0.0})
LINE = "unicorn: 0 of 0 free"


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a cluster without unicorns, and a clock."""
    free = {"CPU": 1.0, "memory": 4e9}
    made = SimpleNamespace(cluster_resources=lambda: THERE, available_resources=lambda: free, now=0.0)
    monkeypatch.setattr(capacity, "require", lambda *args, **kwargs: made)
    monkeypatch.setattr(capacity, "monotonic", lambda: made.now)
    return made


def test_a_warning_about_missing_resources_is_repeated_at_an_interval(
    cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wait = StartupMonitor(UNICORNS)
    counts = []
    for now in (0.0, 14.9, 15.0, 15.2, 74.9, 75.0, 100.0):
        cluster.now = now
        wait.check()
        counts.append(len(caplog.messages))
    assert counts == [0, 0, 1, 1, 1, 2, 2]
    (message,) = set(caplog.messages)
    assert_facts(message, "waiting for 1..2 workers", "{'unicorn': 1.0}", LINE)


def test_if_ray_gives_up_the_error_has_the_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "2")
    error = ControllerError(WorkerGroupStartupTimeoutError(2))
    ours = explain_start_timeout(error, UNICORNS)
    assert isinstance(ours, TimeoutError)
    assert ours.__cause__ is error
    assert_facts(str(ours), "num_workers=1..2", "resources_per_worker={'unicorn': 1.0}", LINE)
    assert str(ours).endswith("or increase start_timeout=2 seconds.")


@pytest.mark.parametrize("error", [None, KeyError("label"), ControllerError(KeyError("label"))])
def test_other_errors_stay_as_they_are(error: BaseException | None) -> None:
    assert explain_start_timeout(error, UNICORNS) is error
