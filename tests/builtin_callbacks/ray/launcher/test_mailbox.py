"""Letters from the workers to the caller, in their order, and the caller's commands to them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from threading import Event as Flag
from types import SimpleNamespace

import pytest
from heliograph.builtin_callbacks.ray.launcher import worker_channel
from heliograph.builtin_callbacks.ray.launcher.mailbox import Commands, Envelope, Mailbox, ProgressUpdate, QueueItem
from heliograph.builtin_callbacks.ray.launcher.worker_channel import WorkerChannel
from heliograph.builtin_callbacks.ray.session import Notice


class GoneError(Exception):
    """Stands in for what Ray raises where an actor is gone."""


class FakeBox:
    """A mailbox that is called as an actor is, in this process.

    Attributes:
        parcels: what was put into it at once.
        commands: what it answers.
        is_open: clear it to let those wait who put.
    """

    def __init__(self) -> None:
        self.parcels: list[list[Envelope]] = []
        self.commands = Commands()
        self.is_open = Flag()
        self.is_open.set()
        self.is_process_loss = False
        self.put = SimpleNamespace(remote=self._put)

    @property
    def envelopes(self) -> list[Envelope]:
        """All envelopes, in the order in which they came."""
        return [envelope for parcel in self.parcels for envelope in parcel]

    def _put(self, envelopes: Sequence[Envelope]) -> Commands:
        assert self.is_open.wait(10)
        if self.is_process_loss:
            raise GoneError("the caller has left")
        self.parcels.append(list(envelopes))
        return self.commands


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> FakeBox:
    """Return a mailbox without Ray."""
    ray = SimpleNamespace(get=lambda answer: answer)
    monkeypatch.setattr(worker_channel, "require", lambda *args, **kwargs: ray)
    return FakeBox()


def test_letters_wait_until_they_are_taken() -> None:
    async def exchange() -> None:
        mailbox = Mailbox()
        envelopes = [Envelope("fit", "group", 0, QueueItem(bytes([number]))) for number in range(3)]
        assert await mailbox.receive(0) == []
        assert await mailbox.put(envelopes[:2]) == Commands()
        assert await mailbox.receive(0) == envelopes[:2]
        waiting = asyncio.create_task(mailbox.receive(10))
        await asyncio.sleep(0)
        await mailbox.put([])
        await mailbox.put(envelopes[2:])
        assert await waiting == envelopes[2:]
        assert await mailbox.receive(0) == []

    asyncio.run(exchange())


def test_orders_are_the_answer_to_what_is_put() -> None:
    async def exchange() -> None:
        mailbox, commands = Mailbox(), Commands(stop=Notice("tune", "it is no good"))
        await mailbox.command(commands)
        assert await mailbox.put([]) == commands

    asyncio.run(exchange())


def test_all_workers_of_a_group_learn_its_number() -> None:
    async def begin() -> None:
        mailbox = Mailbox()
        assert [await mailbox.register_group(each) for each in ("a", "a", "b", "a", "b", "c")] == [1, 1, 2, 1, 2, 3]

    asyncio.run(begin())


def test_messages_arrive_in_their_order_and_sending_waits_for_nobody(box: FakeBox) -> None:
    box.is_open.clear()
    channel = WorkerChannel(box, "fit", "group", 3)
    sent = [ProgressUpdate("run", number, number, number) for number in range(100)]
    for each in sent:
        channel.send(each)
    box.is_open.set()
    channel.flush()
    assert box.envelopes == [Envelope("fit", "group", 3, each) for each in sent]
    assert len(box.parcels) < 10
    channel.send(ProgressUpdate("run", 7, 7, 7))
    channel.close()
    assert box.envelopes[-1].message == ProgressUpdate("run", 7, 7, 7)


def test_the_newest_pulse_is_told_once(box: FakeBox) -> None:
    channel = WorkerChannel(box, "fit", "group", 0)
    for number in range(3):
        channel.progress = ProgressUpdate("run", number, number, number)
    channel.flush()
    channel.flush()
    channel.progress = ProgressUpdate("run", 9, 9, 9)
    channel.close()
    assert [each.message for each in box.envelopes][-2:] == [
        ProgressUpdate("run", 2, 2, 2),
        ProgressUpdate("run", 9, 9, 9),
    ]


def test_new_orders_come_without_a_message(box: FakeBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_channel, "INTERVAL", 0.01)
    channel = WorkerChannel(box, "fit", "group", 0)
    box.commands = Commands(exit=Notice("launcher", "Ctrl-C"))
    channel.flush()
    assert channel.commands == box.commands
    box.commands = Commands()
    while channel.commands.exit is not None:
        Flag().wait(0.01)
    channel.close()


def test_a_failed_worker_waits_until_its_group_is_released(box: FakeBox) -> None:
    channel = WorkerChannel(box, "fit", "group", 0)
    box.commands = Commands(released=frozenset({"another"}))
    channel.wait_for_release(0.0)
    box.commands = Commands(released=frozenset({"group"}))
    channel.wait_for_release(1e9)
    channel.close()


def test_a_worker_that_nobody_waits_for_ends(
    box: FakeBox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    box.is_process_loss = True
    WorkerChannel(box, "fit", "group", 0).close()
    assert left == [1]
    assert "called RayLauncher.run cannot be reached, so this worker exits: the caller has left" in caplog.text
