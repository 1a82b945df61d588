"""Sockets that forked children do not inherit."""

from __future__ import annotations

import gc
import os
import socket

import pytest
from heliograph.core.distributed.group import close_in_children

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def open_in_a_child(*numbers: int) -> list[bool]:
    """Return which of these descriptors are open in a forked child."""
    gc.collect()  # what is collected in a child may wait for threads that it does not have
    gc.disable()
    try:
        child = os.fork()
    finally:
        gc.enable()
    if not child:
        found = 0
        for place, number in enumerate(numbers):
            try:
                os.fstat(number)
                found += 1 << place
            except OSError:
                pass
        os._exit(found)
    found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [bool(found >> place & 1) for place in range(len(numbers))]


def test_a_child_keeps_only_what_was_opened_outside() -> None:
    before = socket.socket()
    with close_in_children():
        within = socket.socket()
        pipe = os.pipe()
    after = socket.socket()
    numbers = [before.fileno(), within.fileno(), after.fileno(), *pipe]
    assert open_in_a_child(*numbers) == [True, False, True, True, True]
    assert within.fileno() == numbers[1]
    for each in (before, within, after):
        each.close()
    for number in pipe:
        os.close(number)


def test_a_number_that_is_used_again_is_another_socket() -> None:
    with close_in_children():
        within = socket.socket()
    number = within.detach()
    other = socket.socket()
    os.dup2(other.fileno(), number)
    assert open_in_a_child(number) == [True]
    os.close(number)
    other.close()
