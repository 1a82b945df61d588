"""What tests of every room share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import gettempdir
from time import process_time
from types import ModuleType
from typing import Any

import pytest
from heliograph.tests import sampling
from heliograph.tests.ranks_pool import Pool
from hypothesis import HealthCheck, settings

# A store looks up the name of its own address; where nobody answers that, the default lets a test wait for seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, for the first test that uses a GPU
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # which would be sent by a network that is not there
os.environ.setdefault("TRACKIO_DIR", str(Path(gettempdir()) / "heliograph-trackio"))  # read when it is imported
# A shell without job control begins `make test &` with SIGINT ignored; tests that send one would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = 0.03  # seconds of a full collection, after which the collector is kept from what it looked at
COLLECTION = {"began": 0.0, "seconds": 0.0}  # the latest full one
RUNNING: list[pytest.Item | None] = [None]

# How long an example takes says how busy the machine is.
settings.register_profile("whole", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("sample", settings.get_profile("whole"), max_examples=25)


def pytest_addoption(parser: pytest.Parser) -> None:
    sampling.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    sampling.choose_seed(config)
    settings.load_profile("whole" if config.option.whole else "sample")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the seed."""
    node.workerinput["sample_seed"] = node.config.option.sample_seed


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector: it takes a quarter of the time, and all of it is kept anyway."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sampling.select(config, items)


def pytest_collection_finish() -> None:
    """Show a training the variables of the running test's module only; keep the collector from what was imported."""
    from heliograph.core.objects import run_state  # imports torch, which the controller of pytest-xdist does not need

    run_state.user_modules = own_modules
    gc.callbacks.append(measure_collection)
    freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze again if a test has imported a large library, or left many objects."""
    RUNNING[0] = item
    if COLLECTION["seconds"] > SLOW:
        freeze()


def own_modules() -> dict[str, ModuleType]:
    """Return the module of the running test; a process that runs all tests has imported hundreds."""
    module = getattr(RUNNING[0], "module", None)
    return {module.__name__: module} if isinstance(module, ModuleType) else {}


def freeze() -> None:
    """Keep the garbage collector from what was imported: full collections took most of the time of many tests."""
    gc.collect()
    gc.freeze()
    COLLECTION["seconds"] = 0.0


def measure_collection(phase: str, info: dict[str, int]) -> None:
    """Measure a full collection, as a callback of the collector."""
    if info["generation"] == 2:
        if phase == "start":
            COLLECTION["began"] = process_time()
        else:
            COLLECTION["seconds"] = process_time() - COLLECTION["began"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(sampling.describe(terminalreporter.config))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Return living processes: `ranks(2).run(function, *args)` runs a module-level function on 2 ranks.

    They are made when first needed and kept for the session.
    """
    pool = Pool()
    yield pool
    pool.close()
