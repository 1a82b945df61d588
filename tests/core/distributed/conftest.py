"""Named pipes for ranks to wait for each other, and a check that launch leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Return a named pipe: who opens it waits until it is open at its other end as well."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Check that launch leaves no process, thread, variable or signal handler"""
    before, children = _found(), {each.pid for each in multiprocessing.active_children()}  # the `ranks` of other tests
    threads = _threads()  # kept ranks of other tests
    yield
    assert [each for each in multiprocessing.active_children() if each.pid not in children] == []
    assert _threads() - threads == set()
    assert _found() == before


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("heliograph")}


def _found() -> tuple[dict[str, str], list[object]]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return variables, [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
