"""The worker beside the loop: one job at a time, errors raised once and never lost, waiting that Ctrl-C ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from heliograph.builtin_callbacks.checkpoint import background_writer
from heliograph.builtin_callbacks.checkpoint.background_writer import BackgroundWorker


class LateError(Exception):
    """What a job fails with."""


def fail() -> None:
    raise LateError("too late")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before  # one of another test may have ended meanwhile


@pytest.fixture
def on_waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that says what happens when the worker is about to be waited for, and how long that takes."""

    def arrange(action: Callable[[], object], seconds: float = 0.0) -> None:
        times = iter([(action, 100.0), (lambda: None, 100.0 + seconds)])

        def clock() -> float:
            act, time = next(times)
            act()
            return time

        monkeypatch.setattr(background_writer, "perf_counter", clock)

    return arrange


def test_a_job_runs_in_a_thread_and_is_reported_in_this_one() -> None:
    worker, reported = BackgroundWorker(), []
    worker.submit(threading.get_ident, lambda ident: reported.append((ident, threading.get_ident())))
    worker.drain()

    ((worked, received),) = reported
    assert worked != received == threading.get_ident()
    assert worker.is_idle


def test_poll_reports_a_done_job_only() -> None:
    worker, gate, reported = BackgroundWorker(), threading.Event(), list[str]()
    worker.poll()
    worker.submit(lambda: f"opened: {gate.wait()}", reported.append)
    worker.poll()
    assert (reported, worker.is_idle) == ([], False)

    gate.set()
    while not worker.is_idle:
        worker.poll()
    assert reported == ["opened: True"]
    worker.poll()
    assert reported == ["opened: True"]


def test_a_second_job_waits_for_the_first_and_says_how_long(on_waiting: Callable[..., None]) -> None:
    worker, gate, order = BackgroundWorker(), threading.Event(), list[str]()

    def first() -> None:
        gate.wait()
        order.append("first done")

    worker.submit(first, lambda result: order.append("first reported"))
    on_waiting(gate.set, seconds=2.5)
    worker.submit(lambda: order.append("second done"))
    worker.drain()

    assert order == ["first done", "first reported", "second done"]
    assert worker.waited == 2.5


def test_at_most_one_is_in_flight() -> None:
    worker, running, most = BackgroundWorker(), [0], [0]

    def work() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        running[0] -= 1

    for _ in range(50):
        worker.submit(work)
    worker.drain()

    assert most == [1]


@pytest.mark.parametrize("ask", ["poll", "drain", "submit"])
def test_an_error_is_raised_once_by_whoever_asks_first(ask: str) -> None:
    worker, began = BackgroundWorker(), []
    worker.submit(fail)
    with pytest.raises(LateError, match="too late"):
        while True:
            worker.submit(lambda: began.append(1)) if ask == "submit" else getattr(worker, ask)()

    assert began == []
    assert worker.is_idle
    worker.poll()
    worker.drain()


def test_what_a_job_brings_up_is_waited_for_too() -> None:
    worker, order = BackgroundWorker(), []
    worker.submit(lambda: "written", lambda result: worker.submit(lambda: order.append(f"{result}, pruned")))
    worker.drain()

    assert order == ["written, pruned"]


def test_an_error_in_reporting_leaves_no_job_behind() -> None:
    worker = BackgroundWorker()
    worker.submit(lambda: None, lambda result: fail())
    with pytest.raises(LateError):
        worker.drain()

    assert worker.is_idle


def test_ctrl_c_gets_through_and_leaves_the_job_alone(on_waiting: Callable[..., None]) -> None:
    worker, gate, waiting = BackgroundWorker(), threading.Event(), threading.Event()
    reported: list[str] = []

    def work() -> str:
        waiting.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        gate.wait()
        return "done"

    worker.submit(work, reported.append)
    on_waiting(waiting.set)
    with pytest.raises(KeyboardInterrupt):
        worker.drain()
    assert (reported, worker.is_idle) == ([], False)

    gate.set()
    on_waiting(lambda: None)
    worker.drain()
    assert reported == ["done"]
