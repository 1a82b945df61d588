"""A cluster on this machine for the tests, with short intervals.

What is not marked `whole` is the first lane, which `make test` runs with `run.py`, on one cluster if nothing fails.
"""

from __future__ import annotations

import os
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


JOURNAL = os.environ.get("HELIOGRAPH_JOURNAL")  # of `run.py`: the tests that began, and their outcomes
OUTCOMES: dict[str, str] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore deprecation warnings about Ray's own code; leave out the tests that ran in an earlier process."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."))
    if JOURNAL:
        begun = {line.partition(" ")[2] for line in Path(JOURNAL).read_text(encoding="utf-8").splitlines()}
        items[:] = [item for item in items if item.nodeid not in begun]


def pytest_runtest_logstart(nodeid: str) -> None:
    note("begun", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if OUTCOMES.get(report.nodeid, "passed") == "passed":
        OUTCOMES[report.nodeid] = report.outcome
    if report.when == "teardown":
        note(OUTCOMES[report.nodeid], report.nodeid)


def note(word: str, nodeid: str) -> None:
    if JOURNAL:
        with Path(JOURNAL).open("a", encoding="utf-8") as file:
            file.write(f"{word} {nodeid}\n")


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
