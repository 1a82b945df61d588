"""Workers that stay alive between calls, without a cluster."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray.train.torch
from heliograph.core.distributed.failure import Carried
from heliograph.core.system.errors import RankFailed
from heliograph.packages.ray.tests.launcher.test_ray_job import FakeDriverChannel
from heliograph_ray import RayLauncher, cluster
from heliograph_ray.launcher import calls, kept
from heliograph_ray.launcher.failures import WorkerFailed
from heliograph_ray.launcher.kept import KeptWorkers
from heliograph_ray.launcher.mailbox import Envelope, Failed, QueueItem, Started, Value, WorkerCall
from heliograph_ray.launcher.worker import serve_calls
from ray.exceptions import RayActorError
from ray.train import WorkerGroupError


class FakeMailbox(FakeDriverChannel):
    """The caller's channel and the workers' mailbox in one.

    Attributes:
        resets: how often it was reset.
        last: the last call that it was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mailbox = self
        self.resets = 0
        self.last: WorkerCall | None = None
        self._changed = threading.Condition()
        self._assigned: tuple[str, WorkerCall | None] = "", None
        self._lost: str | None = None

    def reset(self) -> None:
        """Count the calls."""
        self.resets += 1

    def assign(self, fit: str, call: WorkerCall | None) -> None:
        """Replace the assignment."""
        self.last = call or self.last
        self._change(assigned=(fit, call))

    def dismiss(self) -> None:
        """End workers that wait."""
        self._change(assigned=("", None))

    def close(self) -> None:
        """End all workers."""
        super().close()
        self.dismiss()

    def lose(self, when: str) -> None:
        """Lose a worker: `waiting`, or `starting` (found only when the next call has begun)."""
        self._change(lost=when)

    def next_call(self, fit: str, done: str) -> WorkerCall | None:
        """Wait for a call, as workers do.

        Raises:
            WorkerGroupError: a worker was lost.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._lost == "waiting" or fit != self._assigned[0] or _id(self._assigned[1]) not in ("", done)
            )
            given, call = self._assigned
            if self._lost is not None:
                self._lost = None
                if given == fit and call is not None:
                    self.put(Envelope(call.fit, "group", 0, Started(2, "node")))
                raise WorkerGroupError("...", {1: RayActorError(error_msg="no heartbeat")})
            return call if given == fit else None

    def _change(self, *, assigned: tuple[str, WorkerCall | None] | None = None, lost: str | None = None) -> None:
        with self._changed:
            self._assigned = assigned or self._assigned
            self._lost = lost or self._lost
            self._changed.notify_all()


def _id(call: WorkerCall | None) -> str:
    return "" if call is None else call.fit


class FakeTrainer:
    """A fake of Ray's trainer, with two workers that serve calls; the function is called in this process.

    Attributes:
        made: all trainers.
        number: of this one, from 1.
    """

    made: list[FakeTrainer]

    def __init__(self, function: Any, *, scaling_config: Any, run_config: Any) -> None:
        assert function.func is serve_calls
        self._mailbox, self._fit = function.args
        self.asked, self.name = scaling_config.num_workers, run_config.name
        self.made.append(self)
        self.number = len(self.made)

    def fit(self) -> None:
        """Serve calls."""
        done = ""
        while (call := self._mailbox.next_call(self._fit, done)) is not None:
            function, args, kwargs = pickle.loads(call.payload)
            for rank in range(2):
                self._send(call, rank, Started(2, "node"), QueueItem(pickle.dumps("hello")))
                try:
                    value = (self.number, function(*args, **kwargs))
                except Exception as error:  # noqa: BLE001  # raised at the caller
                    self._send(call, rank, Failed(Carried.of(error), is_secondary=False))
                    raise WorkerFailed(rank, type(error).__name__) from None
                self._send(call, rank, Value(pickle.dumps(value)))
            done = call.fit

    def _send(self, call: WorkerCall, rank: int, *messages: Any) -> None:
        self._mailbox.put(*(Envelope(call.fit, f"group {self.number}", rank, each) for each in messages))


@pytest.fixture
def mailboxes(monkeypatch: pytest.MonkeyPatch) -> list[FakeMailbox]:
    """Replace Ray; return the mailboxes that are made."""
    made: list[FakeMailbox] = []

    def make() -> FakeMailbox:
        made.append(FakeMailbox())
        return made[-1]

    monkeypatch.setattr(FakeTrainer, "made", [], raising=False)
    monkeypatch.setattr(ray.train.torch, "TorchTrainer", FakeTrainer)
    monkeypatch.setattr(kept, "DriverChannel", make)
    return made


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the connection; return what happens to it."""
    done: list[str] = []

    @contextmanager
    def connect(*args: Any, **kwargs: Any) -> Iterator[None]:
        done.append("connect")
        yield
        done.append("disconnect")

    monkeypatch.setattr(calls, "connect", connect)
    return done


@pytest.fixture
def workers(mailboxes: list[FakeMailbox], connected: list[str], tmp_path: Path) -> Iterator[KeptWorkers]:
    """Return two workers that are kept."""
    made = RayLauncher(2, storage_path=tmp_path, idle=1e6).keep_ranks()
    yield made
    made.close()
    assert not cluster.KEEPERS
    assert connected.count("connect") == connected.count("disconnect")


def test_the_workers_of_the_first_call_serve_the_next_ones(
    workers: KeptWorkers, mailboxes: list[FakeMailbox], connected: list[str]
) -> None:
    first, second, third = (workers.run(max, number, 2) for number in (1, 3, 5))
    assert [first, second, third] == [[(1, 2)] * 2, [(1, 3)] * 2, [(1, 5)] * 2]
    assert first.messages == third.messages == [(0, "hello"), (1, "hello")]
    assert [each.kind for each in third.attempts] == ["completed"]
    assert first.storage == third.storage
    assert [each.resets for each in mailboxes] == [3]
    assert connected == ["connect"]
    workers.close()
    assert connected == ["connect", "disconnect"]
    assert mailboxes[0].closed.is_set()


def test_closed_they_end_and_the_next_call_starts_others(workers: KeptWorkers) -> None:
    assert workers.run(max, 1, 2)[0] == (1, 2)
    (thread,) = [each for each in threading.enumerate() if each.name == "heliograph-ray"]
    workers.close()
    assert not thread.is_alive()
    assert workers.run(max, 1, 2)[0] == (2, 2)


def test_an_error_is_raised_as_it_is_and_ends_them(workers: KeptWorkers, connected: list[str]) -> None:
    workers.run(max, 1, 2)
    with pytest.raises(ValueError, match="invalid literal"):
        workers.run(int, "no number")
    assert connected == ["connect", "disconnect"]
    assert workers.run(max, 1, 2)[0] == (2, 2)


def test_an_error_in_this_process_ends_them(workers: KeptWorkers) -> None:
    def refuse(rank: int, message: object) -> None:
        raise LookupError(message)

    workers.run(max, 1, 2)
    with pytest.raises(LookupError, match="hello"):
        workers.run(max, 1, 2, on_message=refuse)
    assert workers.run(max, 1, 2)[0] == (2, 2)


def test_a_worker_that_is_lost_between_calls_is_replaced(
    workers: KeptWorkers, mailboxes: list[FakeMailbox], connected: list[str]
) -> None:
    workers.run(max, 1, 2)
    (thread,) = [each for each in threading.enumerate() if each.name == "heliograph-ray"]
    mailboxes[0].lose("waiting")
    thread.join(10)
    assert workers.run(max, 1, 2) == [(2, 2)] * 2
    assert not mailboxes[0].closed.is_set()  # with the workers the connection may be gone
    assert connected == ["connect", "connect"]  # the second does nothing, if it is not


def test_a_loss_that_is_found_when_the_next_call_begins_is_no_failure_of_it(
    workers: KeptWorkers, mailboxes: list[FakeMailbox]
) -> None:
    workers.run(max, 1, 2)
    mailboxes[0].lose("starting")
    values = workers.run(max, 1, 2)
    assert values == [(2, 2)] * 2
    assert [each.kind for each in values.attempts] == ["lost", "completed"]
    assert len(mailboxes) == 1


def test_workers_that_are_lost_before_their_first_call_are_a_failure(
    workers: KeptWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose() -> FakeMailbox:
        made = FakeMailbox()
        made.lose("starting")
        return made

    monkeypatch.setattr(kept, "DriverChannel", lose)
    with pytest.raises(RankFailed, match="1 died: no heartbeat"):
        workers.run(max, 1, 2)


def test_without_a_call_for_a_while_they_end_and_the_cluster_stays(
    mailboxes: list[FakeMailbox], connected: list[str], tmp_path: Path
) -> None:
    workers = RayLauncher(2, storage_path=tmp_path, idle=0.01).keep_ranks()
    workers.run(max, 1, 2)
    assert mailboxes[0].closed.wait(10)
    assert connected == ["connect"]
    assert workers.run(max, 1, 2)[0] == (2, 2)
    workers.close()
    assert connected == ["connect", "connect", "disconnect", "disconnect"]


def test_they_make_room_for_others_unless_they_work(workers: KeptWorkers, connected: list[str]) -> None:
    def ask(rank: int, message: object) -> None:
        assert list(cluster.KEEPERS) == [workers]
        workers.close_if_idle()

    assert workers.run(max, 1, 2, on_message=ask) == [(1, 2)] * 2
    workers.close_if_idle()
    assert connected == ["connect", "disconnect"]
    assert workers.run(max, 1, 2)[0] == (2, 2)


@pytest.mark.parametrize("name", [None, "points"])
def test_only_a_name_shares_what_is_stored(
    mailboxes: list[FakeMailbox], connected: list[str], tmp_path: Path, name: str | None
) -> None:
    workers = RayLauncher(2, storage_path=tmp_path, name=name).keep_ranks()
    calls: list[WorkerCall] = []
    for number in range(2):
        workers.run(max, number, 2)
        calls += [call for call in [mailboxes[0].last] if call is not None]
    assert [each.has_own_storage for each in calls] == [name is None] * 2
    assert len({each.name for each in calls}) == 2
    workers.close()


def test_arguments_are_checked_before_anything_starts(workers: KeptWorkers, connected: list[str]) -> None:
    with pytest.raises(TypeError, match="arguments, got 3"):
        workers.run(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_message takes a function"):
        workers.run(max, 1, 2, on_message="x")  # type: ignore[arg-type]
    assert connected == []
