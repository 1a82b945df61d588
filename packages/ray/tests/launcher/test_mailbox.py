"""Envelopes from the workers to the caller, in order, and the caller's commands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from threading import Event as Flag
from types import SimpleNamespace

import pytest
from heliograph_ray.launcher import mailbox
from heliograph_ray.launcher.mailbox import (
    Assignment,
    Commands,
    Envelope,
    Mailbox,
    ProgressUpdate,
    QueueItem,
    WorkerChannel,
)
from heliograph_ray.session import Notice


class GoneError(Exception):
    """Replaces the error of Ray if an actor is gone."""


class FakeBox:
    """A mailbox in this process that is called like an actor.

    Attributes:
        batches: the envelopes of each call of `put`.
        commands: what `put` returns.
        is_open: cleared to make `put` wait.
    """

    def __init__(self) -> None:
        self.batches: list[list[Envelope]] = []
        self.commands = Commands()
        self.is_open = Flag()
        self.is_open.set()
        self.is_process_loss = False
        self.put = SimpleNamespace(remote=self._put)

    @property
    def envelopes(self) -> list[Envelope]:
        """All envelopes, in order of arrival."""
        return [envelope for batch in self.batches for envelope in batch]

    def _put(self, envelopes: Sequence[Envelope]) -> Commands:
        assert self.is_open.wait(10)
        if self.is_process_loss:
            raise GoneError("the caller has left")
        self.batches.append(list(envelopes))
        return self.commands


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> FakeBox:
    """Return a mailbox without Ray."""
    ray = SimpleNamespace(get=lambda answer: answer)
    monkeypatch.setattr(mailbox, "require", lambda *args, **kwargs: ray)
    return FakeBox()


def test_envelopes_are_kept_until_they_are_received() -> None:
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


def test_put_returns_the_commands() -> None:
    async def exchange() -> None:
        mailbox, commands = Mailbox(), Commands(stop=Notice("tune", "it is no good"))
        await mailbox.command(commands)
        assert await mailbox.put([]) == commands

    asyncio.run(exchange())


def test_all_workers_of_a_group_get_its_number() -> None:
    async def begin() -> None:
        mailbox = Mailbox()
        assert [await mailbox.register_group(each) for each in ("a", "a", "b", "a", "b", "c")] == [1, 1, 2, 1, 2, 3]

    asyncio.run(begin())


def test_workers_get_one_call_after_another_until_they_are_ended() -> None:
    async def exchange() -> None:
        mailbox = Mailbox()
        await mailbox.assign(Assignment("fit", "first", ["one"]))
        assert await mailbox.next_call("fit", "") == ["one"]
        assert await mailbox.next_call("former", "") is None
        waiting = [asyncio.create_task(mailbox.next_call("fit", "first")) for _ in range(2)]
        await mailbox.assign(Assignment("fit"))  # as between two calls
        waiting.append(asyncio.create_task(mailbox.next_call("fit", "")))  # a worker that Ray has added meanwhile
        await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        await mailbox.assign(Assignment("fit", "second", ["two"]))
        assert [await each for each in waiting] == [["two"]] * 3
        last = asyncio.create_task(mailbox.next_call("fit", "second"))
        await mailbox.assign(Assignment())
        assert await last is None

    asyncio.run(exchange())


def test_nothing_of_a_call_is_left_for_the_next_one() -> None:
    async def exchange() -> None:
        mailbox = Mailbox()
        await mailbox.put([Envelope("fit", "group", 0, QueueItem(b"late"))])
        await mailbox.command(Commands(exit=Notice("launcher", "Ctrl-C")))
        await mailbox.register_group("former")
        await mailbox.reset()
        assert await mailbox.receive(0) == []
        assert await mailbox.put([]) == Commands()
        assert await mailbox.register_group("group") == 1

    asyncio.run(exchange())


def test_messages_arrive_in_order_and_send_does_not_wait(box: FakeBox) -> None:
    box.is_open.clear()
    channel = WorkerChannel(box, "fit", "group", 3)
    sent = [ProgressUpdate("run", number, number, number) for number in range(100)]
    for each in sent:
        channel.send(each)
    box.is_open.set()
    channel.flush()
    assert box.envelopes == [Envelope("fit", "group", 3, each) for each in sent]
    assert len(box.batches) < 10
    channel.send(ProgressUpdate("run", 7, 7, 7))
    channel.close()
    assert box.envelopes[-1].message == ProgressUpdate("run", 7, 7, 7)


def test_only_the_newest_progress_is_sent_once(box: FakeBox) -> None:
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


def test_new_commands_arrive_without_a_message(box: FakeBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "INTERVAL", 0.01)
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


def test_a_worker_without_a_mailbox_exits(
    box: FakeBox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    box.is_process_loss = True
    WorkerChannel(box, "fit", "group", 0).close()
    assert left == [1]
    assert "RayLauncher.run cannot be reached:" in caplog.text
