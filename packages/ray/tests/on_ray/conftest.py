"""A cluster on this machine for the tests, with short intervals.

What is not marked `whole` is the first lane, which `make test` runs on one cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from sys import _current_frames
from time import monotonic
from traceback import format_stack
from typing import Literal

import pytest
import ray

INTERVALS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20"}
TUNED = INTERVALS | {
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore deprecation warnings about Ray's own code."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."))


@pytest.fixture(scope="session", autouse=True)
def _tuned() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TUNED.items():
            patch.setenv(name, value)
        yield


def _scope(fixture_name: str, config: pytest.Config) -> Literal["session", "module"]:
    """With `--whole` some files start clusters of their own, so the others shut theirs down."""
    return "module" if config.option.whole else "session"


@pytest.fixture(scope=_scope)
def local_ray() -> Iterator[None]:
    """Connect to a cluster with 4 CPUs."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """Check that all our threads end soon after a test."""
    yield
    limit = monotonic() + 10
    for thread in threading.enumerate():
        if thread.name.startswith("heliograph"):
            thread.join(max(0.0, limit - monotonic()))
            place = format_stack(_current_frames().get(thread.ident or 0))
            assert not thread.is_alive(), "".join([f"{thread.name} is at\n", *place])
