"""A worker's own side of the launcher, without a cluster."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.builtin_callbacks.ray.launcher import worker
from heliograph.builtin_callbacks.ray.launcher.failures import WorkerFailed
from heliograph.builtin_callbacks.ray.launcher.host import RayHost
from heliograph.builtin_callbacks.ray.launcher.mailbox import (
    Commands,
    Ended,
    Exited,
    Failed,
    Message,
    QueueItem,
    Started,
    Value,
)
from heliograph.builtin_callbacks.ray.launcher.worker import Call, run_worker
from heliograph.builtin_callbacks.ray.session import Notice, current_session
from heliograph.core.distributed.launch import child_queue, queue
from heliograph.core.distributed.launch.exceptions import rebuild
from heliograph.core.host import current_host
from torch import nn

TRACEBACK = 'Traceback (most recent call last):\n  File "theirs.py", line 1, in load\nKeyError: "label"'
NOTICE = Notice("ray", "its price rose")


class FakeChannel:
    """Keeps what is sent.

    Attributes:
        sent: the messages.
        done: what else was asked of it.
    """

    def __init__(self, *place: object) -> None:
        self.place, self.sent, self.done = place, list[Message](), list[Any]()
        self.commands = Commands()

    def send(self, message: Message) -> None:
        """Keep a message."""
        self.sent.append(message)

    def flush(self) -> None:
        """Take note of it."""
        self.done.append("flushed")

    def wait_for_release(self, seconds: float) -> None:
        """Take note of it."""
        self.done.append(seconds)

    def close(self) -> None:
        """Take note of it."""
        self.done.append("closed")


class FakeSession:
    """A line to nobody."""

    def __init__(self, call: str, channel: FakeChannel, *, is_restart: bool) -> None:
        self.call, self.is_restart = call, is_restart
        self.exit_notice: Notice | None = None


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeChannel]]:
    """Be worker 1 of 2 of Ray's; return the channels that are made."""
    made: list[FakeChannel] = []

    def make(*place: object) -> FakeChannel:
        made.append(FakeChannel(*place))
        return made[-1]

    context = SimpleNamespace(get_world_rank=lambda: 1, get_world_size=lambda: 2)
    group = SimpleNamespace(id=SimpleNamespace(hex=lambda: "group"))
    ray = SimpleNamespace(
        get=lambda answer: answer,
        cloudpickle=pickle,
        exceptions=__import__("ray").exceptions,
        get_context=lambda: context,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "node"),
        util=SimpleNamespace(get_current_placement_group=lambda: group),
    )
    monkeypatch.setattr(worker, "require", lambda *args, **kwargs: ray)
    monkeypatch.setattr(worker, "WorkerChannel", make)
    monkeypatch.setattr(worker, "TrainSession", FakeSession)
    monkeypatch.setattr(queue, "_queues", {})
    yield made
    assert current_host() is None


def call(
    function: Callable[..., Any], *args: Any, number: int = 1, sizes: tuple[int, ...] = (1, 2), **kwargs: Any
) -> Call:
    """Return what has a worker call a function."""
    mailbox = SimpleNamespace(register_group=SimpleNamespace(remote=lambda group: number))
    return Call("call", "fit", mailbox, pickle.dumps((function, args, kwargs)), 3.0, sizes)


def test_a_worker_says_that_it_begins_and_what_came_of_it(channels: list[FakeChannel]) -> None:
    run_worker(call(put_and_tell, 3, factor=2))
    (channel,) = channels
    assert channel.place[1:] == ("fit", "group", 1)
    assert channel.sent == [
        Started(2, "node"),
        QueueItem(pickle.dumps("hello")),
        Value(pickle.dumps((6, "call", False))),
    ]
    assert channel.done == ["flushed", "closed"]


def test_in_all_but_the_first_group_it_is_a_restart(channels: list[FakeChannel]) -> None:
    run_worker(call(put_and_tell, 3, factor=2, number=2))
    assert channels[0].sent[-1] == Value(pickle.dumps((6, "call", True)))


def test_where_so_many_workers_will_not_do_they_leave_at_once(channels: list[FakeChannel]) -> None:
    run_worker(call(fail, KeyError("label"), sizes=(1, 4)))
    reason = "there was room for 2 workers, which do not divide as_ranks"
    assert channels[0].sent == [Started(2, "node"), Exited(Notice("launcher", reason))]
    assert channels[0].done == ["flushed", "closed"]


def test_an_error_is_told_and_leaves_when_the_others_have_ended(channels: list[FakeChannel]) -> None:
    with pytest.raises(WorkerFailed, match="rank 1 failed with KeyError") as caught:
        run_worker(call(fail, KeyError("label")))
    assert caught.value.__cause__ is caught.value.__context__ is None
    told = channels[0].sent[-1]
    assert isinstance(told, Failed)
    assert (told.is_secondary, told.is_exit) == (False, False)
    assert repr(rebuild(told.error)) == "KeyError('label')"
    assert channels[0].done == ["flushed", 3.0, "closed"]


def test_what_a_task_of_rays_raised_is_told_as_its_own_error(channels: list[FakeChannel]) -> None:
    with pytest.raises(WorkerFailed, match="rank 1 failed with KeyError"):
        run_worker(call(fail_in_task))
    told = channels[0].sent[-1]
    assert isinstance(told, Failed)
    assert type(rebuild(told.error)) is KeyError
    assert 'File "theirs.py", line 1, in load' in told.error.text


def test_who_exits_with_status_0_does_not_end_the_others(channels: list[FakeChannel]) -> None:
    run_worker(call(fail, SystemExit(0)))
    told = channels[0].sent[-1]
    assert isinstance(told, Failed)
    assert told.is_exit
    assert channels[0].done == ["flushed", "closed"]


def test_who_leaves_says_so(channels: list[FakeChannel]) -> None:
    run_worker(call(leave))
    assert channels[0].sent[1:] == [Exited(NOTICE), Value(pickle.dumps(None))]
    run_worker(call(leave, SystemExit(143)))
    assert channels[1].sent[1:] == [Exited(NOTICE)]
    with pytest.raises(WorkerFailed, match="KeyError"):
        run_worker(call(leave, KeyError("label")))
    assert isinstance(channels[2].sent[-1], Failed)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"rubbish", "A worker could not load the function or its arguments: UnpicklingError"),
        (pickle.dumps((iter, [[1]], {})), None),
        (None, "Rank 1 returned a generator that cannot be pickled, and so cannot be sent"),
    ],
)
def test_what_cannot_travel_is_an_error(
    channels: list[FakeChannel], payload: bytes | None, message: str | None
) -> None:
    given = call(generate)
    given = given if payload is None else Call("call", "fit", given.mailbox, payload, 3.0, (2,))
    if message is None:
        run_worker(given)
        return
    with pytest.raises(WorkerFailed):
        run_worker(given)
    told = channels[0].sent[-1]
    assert isinstance(told, Failed)
    assert str(rebuild(told.error)).startswith(message)


def test_what_fails_before_the_function_is_called_is_no_lost_worker(
    channels: list[FakeChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ImportError("Ray 9.9 does not have it")

    monkeypatch.setattr(worker, "TrainSession", refuse)
    with pytest.raises(WorkerFailed, match="ImportError"):
        run_worker(call(put_and_tell, 3, factor=2))
    told = channels[0].sent[-1]
    assert isinstance(told, Failed)
    assert not told.is_secondary
    assert str(rebuild(told.error)) == "Ray 9.9 does not have it"


def test_every_training_reports_to_ray_and_the_main_worker_tells_how_it_ended() -> None:
    for is_main in (True, False):
        channel: Any = FakeChannel()
        host = RayHost(SimpleNamespace(), channel, is_main=is_main)
        trainer, own = h.Trainer(use_cpu=True), h.Trainer([h.RayReport(interval=3.0)], use_cpu=True)
        host.prepare(trainer.plugins)
        host.prepare(trainer.plugins)
        host.prepare(own.plugins)
        assert trainer.plugins.names() == own.plugins.names() == ["ray_report"]
        assert own.plugins[h.RayReport].interval == 3.0
        result = h.Trainer(use_cpu=True).fit(
            h.Supervised(nn.Linear(1, 1), nn.functional.mse_loss),
            [(torch.ones(1, 1), torch.ones(1, 1))],
            optimizer=torch.optim.SGD,
            epochs=1,
        )
        host.ended(result)
        assert [type(each) for each in channel.sent] == [Ended] * is_main
        for each in channel.sent:
            assert pickle.loads(each.result).status == result.status


def put_and_tell(number: int, *, factor: int) -> tuple[int, str, bool]:
    """Do what a function does on a worker."""
    line, session = child_queue(), current_session()
    assert line is not None
    assert isinstance(session, FakeSession)
    line.put("hello")
    return number * factor, session.call, session.is_restart


def fail(error: BaseException) -> None:
    """Raise an error."""
    raise error


def leave(error: BaseException | None = None) -> None:
    """End upon a notice."""
    session = current_session()
    assert isinstance(session, FakeSession)
    session.exit_notice = NOTICE
    if error is not None:
        raise error


def generate() -> Iterator[int]:
    """Return what cannot be pickled."""
    return (each for each in [1])


def fail_in_task() -> None:
    """Fail as `ray.get` does with what a task has raised."""
    task_error = __import__("ray").exceptions.RayTaskError("load", TRACEBACK, KeyError("label"))
    raise task_error.as_instanceof_cause()
