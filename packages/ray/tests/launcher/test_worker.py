"""A worker of the launcher, without a cluster."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core.distributed import launcher
from heliograph.core.distributed.launcher import child_queue
from heliograph.core.host import current_host
from heliograph_ray import RayReport
from heliograph_ray.launcher import worker
from heliograph_ray.launcher.failures import WorkerFailed
from heliograph_ray.launcher.mailbox import (
    Commands,
    Ended,
    Exited,
    Failed,
    Message,
    QueueItem,
    Started,
    Value,
    WorkerCall,
)
from heliograph_ray.launcher.worker import RayHost, run_worker, serve_calls
from heliograph_ray.session import Notice, current_session
from torch import nn

TRACEBACK = 'Traceback (most recent call last):\n  File "theirs.py", line 1, in load\nKeyError: "label"'
NOTICE = Notice("ray", "its price rose")


class FakeChannel:
    """Keeps what is sent.

    Attributes:
        sent: the messages.
        done: its other calls.
    """

    def __init__(self, *place: object) -> None:
        self.place, self.sent, self.done = place, list[Message](), list[Any]()
        self.commands = Commands()

    def send(self, message: Message) -> None:
        """Keep a message."""
        self.sent.append(message)

    def flush(self) -> None:
        """Record the call."""
        self.done.append("flushed")

    def wait_for_release(self, seconds: float) -> None:
        """Record the call."""
        self.done.append(seconds)

    def close(self) -> None:
        """Record the call."""
        self.done.append("closed")


class FakeSession:
    """A session without Ray."""

    def __init__(self, call: str, channel: FakeChannel, *, is_restart: bool, has_own_storage: bool) -> None:
        self.call, self.is_restart, self.has_own_storage = call, is_restart, has_own_storage
        self.exit_notice: Notice | None = None


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeChannel]]:
    """Make this process worker 1 of 2; yield the channels that are made."""
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
    monkeypatch.setattr(launcher, "_queues", {})
    yield made
    assert current_host() is None


def call(function: Callable[..., Any], *args: Any, number: int = 1, **kwargs: Any) -> WorkerCall:
    """Return a call of a function."""
    mailbox = SimpleNamespace(register_group=SimpleNamespace(remote=lambda group: number))
    return WorkerCall("call", "fit", mailbox, pickle.dumps((function, args, kwargs)), 3.0)


def test_a_worker_sends_its_start_and_its_value(channels: list[FakeChannel]) -> None:
    run_worker(call(put_and_return, 3, factor=2))
    (channel,) = channels
    assert channel.place[1:] == ("fit", "group", 1)
    assert channel.sent == [
        Started(2, "node"),
        QueueItem(pickle.dumps("hello")),
        Value(pickle.dumps((6, "call", False))),
    ]
    assert channel.done == ["flushed", "closed"]


def test_in_all_but_the_first_group_it_is_a_restart(channels: list[FakeChannel]) -> None:
    run_worker(call(put_and_return, 3, factor=2, number=2))
    assert channels[0].sent[-1] == Value(pickle.dumps((6, "call", True)))


def test_a_kept_worker_runs_one_call_after_another(channels: list[FakeChannel]) -> None:
    calls = [replace(call(put_and_return, 3, factor=factor), fit=f"fit {factor}") for factor in (1, 2)]
    given, asked = [[calls[0]], [calls[1]], None], list[tuple[str, str]]()

    def next_call(fit: str, done: str) -> Any:
        asked.append((fit, done))
        return given.pop(0)

    serve_calls(SimpleNamespace(next_call=SimpleNamespace(remote=next_call)), "group's")
    assert asked == [("group's", ""), ("group's", "fit 1"), ("group's", "fit 2")]
    assert [pickle.loads(each.sent[-1].payload) for each in channels if isinstance(each.sent[-1], Value)] == [
        (3, "call", False),
        (6, "call", False),
    ]
    assert all(each.done == ["flushed", "closed"] for each in channels)


@pytest.mark.parametrize("error", [None, SystemExit(143)])
def test_a_kept_worker_ends_after_a_notice(channels: list[FakeChannel], error: BaseException | None) -> None:
    given = [[call(leave, error)]]
    serve_calls(SimpleNamespace(next_call=SimpleNamespace(remote=lambda fit, done: given.pop())), "fit")
    assert channels[0].sent[1] == Exited(NOTICE)


def test_an_error_is_sent_and_raised_after_the_release(channels: list[FakeChannel]) -> None:
    with pytest.raises(WorkerFailed, match="1 failed with KeyError") as caught:
        run_worker(call(fail, KeyError("label")))
    assert caught.value.__cause__ is caught.value.__context__ is None
    sent = channels[0].sent[-1]
    assert isinstance(sent, Failed)
    assert (sent.is_secondary, sent.is_exit) == (False, False)
    assert repr(sent.error.rebuild()) == "KeyError('label')"
    assert channels[0].done == ["flushed", 3.0, "closed"]


def test_the_error_of_a_ray_task_is_sent_without_its_wrapper(channels: list[FakeChannel]) -> None:
    with pytest.raises(WorkerFailed, match="1 failed with KeyError"):
        run_worker(call(fail_in_task))
    sent = channels[0].sent[-1]
    assert isinstance(sent, Failed)
    assert type(sent.error.rebuild()) is KeyError
    assert 'File "theirs.py", line 1,' in sent.error.text


def test_an_exit_with_status_0_does_not_end_the_others(channels: list[FakeChannel]) -> None:
    run_worker(call(fail, SystemExit(0)))
    sent = channels[0].sent[-1]
    assert isinstance(sent, Failed)
    assert sent.is_exit
    assert channels[0].done == ["flushed", "closed"]


def test_an_exit_on_a_notice_is_sent(channels: list[FakeChannel]) -> None:
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
        (b"rubbish", "arguments: UnpicklingError"),
        (pickle.dumps((iter, [[1]], {})), None),
        (None, "returned a generator that"),
    ],
)
def test_what_cannot_be_pickled_is_an_error(
    channels: list[FakeChannel], payload: bytes | None, message: str | None
) -> None:
    given = call(generate)
    given = given if payload is None else WorkerCall("call", "fit", given.mailbox, payload, 3.0)
    if message is None:
        run_worker(given)
        return
    with pytest.raises(WorkerFailed):
        run_worker(given)
    sent = channels[0].sent[-1]
    assert isinstance(sent, Failed)
    assert message in str(sent.error.rebuild())


def test_an_error_before_the_call_is_not_a_lost_worker(
    channels: list[FakeChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ImportError("Ray 9.9 lacks it")

    monkeypatch.setattr(worker, "TrainSession", refuse)
    with pytest.raises(WorkerFailed, match="ImportError"):
        run_worker(call(put_and_return, 3, factor=2))
    sent = channels[0].sent[-1]
    assert isinstance(sent, Failed)
    assert not sent.is_secondary
    assert str(sent.error.rebuild()) == "Ray 9.9 lacks it"


def test_every_training_reports_to_ray_and_the_main_worker_sends_its_result() -> None:
    for is_main in (True, False):
        channel: Any = FakeChannel()
        host = RayHost(SimpleNamespace(), channel, is_main=is_main)
        trainer, own = h.Trainer(use_cpu=True), h.Trainer([RayReport(interval=3.0)], use_cpu=True)
        host.prepare(trainer.plugins)
        host.prepare(trainer.plugins)
        host.prepare(own.plugins)
        assert trainer.plugins.names() == own.plugins.names() == ["ray_report"]
        assert own.plugins[RayReport].interval == 3.0
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


def put_and_return(number: int, *, factor: int) -> tuple[int, str, bool]:
    """Use the queue and the session, as a function on a worker does."""
    line, session = child_queue(), current_session()
    assert line is not None
    assert isinstance(session, FakeSession)
    line.put("hello")
    return number * factor, session.call, session.is_restart


def fail(error: BaseException) -> None:
    """Raise an error."""
    raise error


def leave(error: BaseException | None = None) -> None:
    """Exit on a notice."""
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
