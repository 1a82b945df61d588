"""Letters from the workers to the caller, in their order, and the caller's orders to them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from threading import Event as Flag
from types import SimpleNamespace

import pytest
from heliograph.builtin_callbacks.ray.launcher import worker_channel
from heliograph.builtin_callbacks.ray.launcher.mailbox import Letter, Mailbox, Orders, Pulse, Told
from heliograph.builtin_callbacks.ray.launcher.worker_channel import Post
from heliograph.builtin_callbacks.ray.session import Notice


class GoneError(Exception):
    """Stands in for what Ray raises where an actor is gone."""


class FakeBox:
    """A mailbox that is called as an actor is, in this process.

    Attributes:
        parcels: what was put into it at once.
        orders: what it answers.
        is_open: clear it to let those wait who put.
    """

    def __init__(self) -> None:
        self.parcels: list[list[Letter]] = []
        self.orders = Orders()
        self.is_open = Flag()
        self.is_open.set()
        self.is_gone = False
        self.put = SimpleNamespace(remote=self._put)

    @property
    def letters(self) -> list[Letter]:
        """All letters, in the order in which they came."""
        return [letter for parcel in self.parcels for letter in parcel]

    def _put(self, letters: Sequence[Letter]) -> Orders:
        assert self.is_open.wait(10)
        if self.is_gone:
            raise GoneError("the caller has left")
        self.parcels.append(list(letters))
        return self.orders


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> FakeBox:
    """Return a mailbox without Ray."""
    ray = SimpleNamespace(get=lambda answer: answer)
    monkeypatch.setattr(worker_channel, "require", lambda *args, **kwargs: ray)
    return FakeBox()


def test_letters_wait_until_they_are_taken() -> None:
    async def exchange() -> None:
        mailbox = Mailbox()
        letters = [Letter("fit", "group", 0, Told(bytes([number]))) for number in range(3)]
        assert await mailbox.take(0) == []
        assert await mailbox.put(letters[:2]) == Orders()
        assert await mailbox.take(0) == letters[:2]
        waiting = asyncio.create_task(mailbox.take(10))
        await asyncio.sleep(0)
        await mailbox.put([])
        await mailbox.put(letters[2:])
        assert await waiting == letters[2:]
        assert await mailbox.take(0) == []

    asyncio.run(exchange())


def test_orders_are_the_answer_to_what_is_put() -> None:
    async def exchange() -> None:
        mailbox, orders = Mailbox(), Orders(stop=Notice("tune", "it is no good"))
        await mailbox.order(orders)
        assert await mailbox.put([]) == orders

    asyncio.run(exchange())


def test_all_workers_of_a_group_learn_its_number() -> None:
    async def begin() -> None:
        mailbox = Mailbox()
        assert [await mailbox.begin(each) for each in ("a", "a", "b", "a", "b", "c")] == [1, 1, 2, 1, 2, 3]

    asyncio.run(begin())


def test_messages_arrive_in_their_order_and_sending_waits_for_nobody(box: FakeBox) -> None:
    box.is_open.clear()
    post = Post(box, "fit", "group", 3)
    sent = [Pulse("run", number, number, number) for number in range(100)]
    for each in sent:
        post.send(each)
    box.is_open.set()
    post.flush()
    assert box.letters == [Letter("fit", "group", 3, each) for each in sent]
    assert len(box.parcels) < 10
    post.send(Pulse("run", 7, 7, 7))
    post.close()
    assert box.letters[-1].message == Pulse("run", 7, 7, 7)


def test_the_newest_pulse_is_told_once(box: FakeBox) -> None:
    post = Post(box, "fit", "group", 0)
    for number in range(3):
        post.pulse = Pulse("run", number, number, number)
    post.flush()
    post.flush()
    post.pulse = Pulse("run", 9, 9, 9)
    post.close()
    assert [each.message for each in box.letters][-2:] == [Pulse("run", 2, 2, 2), Pulse("run", 9, 9, 9)]


def test_new_orders_come_without_a_message(box: FakeBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_channel, "BEAT", 0.01)
    post = Post(box, "fit", "group", 0)
    box.orders = Orders(leave=Notice("launcher", "Ctrl-C"))
    post.flush()
    assert post.orders == box.orders
    box.orders = Orders()
    while post.orders.leave is not None:
        Flag().wait(0.01)
    post.close()


def test_a_failed_worker_waits_until_its_group_is_released(box: FakeBox) -> None:
    post = Post(box, "fit", "group", 0)
    box.orders = Orders(released=frozenset({"another"}))
    post.wait_for_release(0.0)
    box.orders = Orders(released=frozenset({"group"}))
    post.wait_for_release(1e9)
    post.close()


def test_a_worker_that_nobody_waits_for_ends(
    box: FakeBox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    box.is_gone = True
    Post(box, "fit", "group", 0).close()
    assert left == [1]
    assert "who called this run cannot be reached, so this worker ends: the caller has left" in caplog.text
