"""Temporary signal handlers, and deadlines."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from heliograph.core.system import signals
from heliograph.core.system.signals import Deadline, SignalHook
from heliograph.tests.messages import assert_each


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    former = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for each, handler in former.items():
        signal.signal(each, handler)


def me(signum: int) -> None:
    os.kill(os.getpid(), signum)


def test_it_handles_signals_and_restores_the_former_handlers() -> None:
    received: list[int] = []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    former = signal.getsignal(signal.SIGTERM)
    hook = SignalHook([signal.SIGTERM, signal.SIGUSR1], received.append)
    for _ in range(2):
        hook.install()
        hook.install()
        me(signal.SIGTERM)
        me(signal.SIGUSR1)
        hook.restore()
        hook.restore()
        assert signal.getsignal(signal.SIGTERM) is former
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert received == [signal.SIGTERM, signal.SIGUSR1] * 2


def test_a_former_python_handler_is_called_afterwards() -> None:
    received: list[Any] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: received.append((signum, frame is not None)))
    hook = SignalHook([signal.SIGUSR1], lambda signum: received.append("mine"))
    hook.install()
    me(signal.SIGUSR1)
    hook.restore()
    me(signal.SIGUSR1)
    assert received == ["mine", (signal.SIGUSR1, True), (signal.SIGUSR1, True)]


def test_python_s_own_interrupt_handler_is_not_called() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    received: list[int] = []
    hook = SignalHook([signal.SIGINT], received.append)
    hook.install()
    me(signal.SIGINT)
    hook.restore()
    assert received == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_came_later_stays() -> None:
    hook = SignalHook([signal.SIGUSR1], lambda signum: None)
    hook.install()
    later = lambda signum, frame: None  # noqa: E731
    signal.signal(signal.SIGUSR1, later)
    hook.restore()
    assert signal.getsignal(signal.SIGUSR1) is later


def test_only_the_main_thread_can_install() -> None:
    errors: list[BaseException] = []

    def install() -> None:
        try:
            SignalHook([signal.SIGTERM], lambda signum: None).install()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert_each(errors, ("SIGTERM", "main thread"))


def test_a_handler_that_python_does_not_know_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    hook, former = SignalHook([signal.SIGTERM], lambda signum: None), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda signum: None)
        with pytest.raises(ValueError, match="installed from Python"):
            hook.install()
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.parametrize("given", [(), (signal.SIGKILL,), (signal.SIGTERM, signal.SIGSTOP), (0,), (9_999,)])
def test_signals_that_cannot_be_handled_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="SIGKILL or SIGSTOP;"):
        SignalHook(given, lambda signum: None)


def in_child(received: Any) -> None:
    me(signal.SIGUSR1)
    received.put(signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN)


def test_a_forked_child_that_inherits_the_handlers_ignores_the_first_signal() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    received: list[int] = []
    hook = SignalHook([signal.SIGUSR1], received.append)
    hook.install()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=in_child, args=(answers,))
    child.start()
    assert answers.get() is True
    child.join()
    hook.restore()
    assert (child.exitcode, received) == (0, [])


# Deadlines.


def test_a_deadline_interrupts_what_blocks_and_does_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "REPEAT", 0.01)
    waits = False

    def handle(signum: int) -> None:
        nonlocal waits
        if deadline.is_over and waits:
            waits = False  # once for each wait, however slow the way to the next one is
            raise TimeoutError(signal.Signals(signum).name)

    hook, deadline = SignalHook([signal.SIGUSR1], handle), Deadline(0.01)
    hook.install()
    deadline.start(signal.SIGUSR1)
    for wait in (SimpleQueue[int]().get, threading.Event().wait):
        with pytest.raises(TimeoutError, match="SIGUSR1"):
            waits = True
            wait()
    assert deadline.is_over
    deadline.close()
    deadline.close()
    hook.restore()


@pytest.mark.parametrize("started", [False, True])
def test_a_deadline_that_is_closed_in_time_sends_nothing(started: bool) -> None:
    before = threading.active_count()
    deadline = Deadline(3600)
    if started:
        deadline.start(signal.SIGUSR1)
    deadline.close()
    assert (deadline.is_over, threading.active_count()) == (False, before)


ELSEWHERE = """
import os, signal, threading
for name in ("SIGKILL", "SIGSTOP", "SIGUSR1", "pthread_kill"):
    delattr(signal, name)
from heliograph import Preemption
from heliograph.core.system import signals
from heliograph.core.system.signals import Deadline

signals.REPEAT = 3600.0
received = []
def handle(signum):
    received.append(signum)
    if deadline.is_over:
        raise TimeoutError
    deadline.start(signum)

hook, deadline = Preemption(deadline=60.0)._hook, Deadline(0.01)
hook._handle = handle
hook.install()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    while deadline._thread.is_alive():
        threading.Event().wait(0.01)
except TimeoutError:
    deadline.close()
hook.restore()
print(*received)
"""


def test_where_some_signals_and_calls_are_missing_it_works_with_the_others() -> None:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("15 15\n", 0), done.stderr
