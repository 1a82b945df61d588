"""The watch: what ranks report of failures to each other, and what is made of it. Here, threads are ranks."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from time import monotonic
from typing import Any

import pytest
from heliograph import RankFailed
from heliograph.core.distributed.failure import Failure
from heliograph.core.distributed.watch import Limits, Watch
from heliograph.tests.messages import assert_each, assert_facts
from torch.distributed import DistNetworkError, HashStore, TCPStore  # type: ignore[attr-defined]  # public all the same

Made = Callable[..., list[Watch]]
BROKEN = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7562."
LATE = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[str]:
    """Return what is written when the process is to be ended; it continues here."""
    reported: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(os, "write", lambda number, text: reported.put(text.decode()))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    return reported


@pytest.fixture
def made(ended: SimpleQueue[str]) -> Iterator[Made]:  # the threads live shorter than what is patched
    """Return what makes the watches of some ranks over one store; they are closed at the end."""
    watches: list[Watch] = []

    def make(count: int = 2, world_size: int | None = None, **options: Any) -> list[Watch]:
        store = HashStore()
        options = {"waiting": lambda: None, "host": None, "interval": 0.01} | options
        watches.extend(Watch(store, rank, world_size or count, **options) for rank in range(count))
        return watches

    yield make
    for watch in watches:
        watch.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the roll be closed soon, for ranks that never answer."""
    monkeypatch.setattr("heliograph.core.distributed.watch.ANSWERS", 0.3)


def receive(*watches: Watch) -> None:
    """Return when each watch has looked at the store since."""
    for watch in watches:
        for _ in range(2):
            watch._run_job(lambda: None)


def test_a_failure_is_received_by_the_others(made: Made) -> None:
    one, other = made()
    assert other.failure() is None
    one.announce(ValueError("on purpose"), "in train, epoch 0")
    receive(other)
    assert other.failure() == Failure(0, "ValueError", "on purpose", "in train, epoch 0")
    with pytest.raises(RankFailed, match=r"ValueError: on purpose \(in"):
        other.check()


def test_the_first_failure_counts(made: Made) -> None:
    one, other = made()
    one.announce(ValueError("first"), "")
    other.announce(KeyError("second"), "")
    receive(one, other)
    assert one.failure() == other.failure() == Failure(0, "ValueError", "first")


@pytest.mark.parametrize("broken", [RuntimeError(BROKEN), RuntimeError(LATE), DistNetworkError("Broken pipe")])
def test_a_broken_collective_is_explained_by_what_another_rank_announced(made: Made, broken: RuntimeError) -> None:
    one, other = made()
    one.announce(ValueError("on purpose"), "here")
    error = other.explain(broken)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.kind, error.text, error.place) == (0, "ValueError", "on purpose", "here")
    assert error.__cause__ is broken


def test_what_a_broken_collective_led_to_is_explained_too(made: Made) -> None:
    one, other = made()
    one.announce(ValueError("on purpose"), "here")
    wrapped = TypeError("no result")
    wrapped.__cause__ = RuntimeError(BROKEN)
    assert isinstance(other.explain(wrapped), RankFailed)


def test_an_error_of_its_own_stays_what_it_is(made: Made) -> None:
    one, other = made()
    one.announce(ValueError("on purpose"), "here")
    error = RuntimeError("shapes do not fit")
    assert other.explain(error) is error
    assert not hasattr(error, "__notes__")


def test_whoever_announced_a_failure_does_not_blame_itself(made: Made) -> None:
    one, _ = made()
    one.announce(ValueError("on purpose"), "here")
    error = RuntimeError(BROKEN)
    assert one.explain(error) is error


def test_an_interrupt_of_one_rank_is_one_of_all(made: Made) -> None:
    one, other = made()
    one.announce(KeyboardInterrupt(), "here")
    error = other.explain(RuntimeError(BROKEN))
    assert isinstance(error, KeyboardInterrupt)
    assert_facts(error, "rank 0", "KeyboardInterrupt", "here")


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_gives_no_answer_has_died(made: Made) -> None:
    one, other = made(2, world_size=3)
    error = one.explain(RuntimeError(BROKEN))
    assert isinstance(error, RankFailed)
    assert_facts(error, "rank 2 died", "0.3 s")
    head, zero, first, second = error.__notes__[0].splitlines()
    assert_facts(head, "places of the ranks", "rank 0")
    assert_facts(zero, "rank 0", "waiting too")
    assert_facts(first, "rank 1", "no collective")
    assert_facts(second, "rank 2", "no sign of life", "0.3 s")
    receive(other)
    failure = other.failure()
    assert failure is not None
    assert (failure.rank, failure.kind) == (2, "died")
    assert_facts(failure.text, "no sign of life", "0.3 s")


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_gives_no_answer_but_keeps_its_connection_is_stopped(made: Made) -> None:
    one, _ = made(2, world_size=3)
    assert_facts(one.explain(RuntimeError(LATE)), "rank 2 hung", "no sign of life", "0.3 s", "SIGSTOP")


@pytest.mark.parametrize(("text", "kind"), [(LATE, "hung"), (BROKEN, "left")])
def test_a_rank_that_is_in_no_collective_is_named_with_its_functions(made: Made, text: str, kind: str) -> None:
    busy, ready = threading.Event(), threading.Event()

    def work_for_long(watches: list[Watch]) -> None:
        watches += made(1, world_size=2, waiting=lambda: None)
        ready.set()
        busy.wait()

    theirs: list[Watch] = []
    thread = threading.Thread(target=work_for_long, args=(theirs,))
    thread.start()
    ready.wait()
    mine = Watch(theirs[0]._store, 1, 2, waiting=lambda: None, host=None, interval=0.01)
    try:
        error = mine.explain(RuntimeError(text))
    finally:
        busy.set()
        thread.join()
        mine.close()
    assert isinstance(error, RankFailed)
    assert (error.rank, error.kind) == (0, kind)
    assert_facts(error.text, "no collective", "wait (threading.py:")
    assert " < work_for_long (test_watch.py:" in error.text


def test_a_rank_that_is_said_to_hang_says_so_itself_when_it_continues(made: Made) -> None:
    (one, other) = made()
    other._run_job(lambda: other._report_failure(Failure(0, "hung", "in no collective")))
    error = one.explain(RuntimeError(BROKEN))
    assert_facts(error, "rank 0 hung", "in no collective")


def test_ranks_that_wait_for_each_other_are_distinguished(made: Made) -> None:
    one, _ = made(waiting=lambda: ("barrier", monotonic()))
    broken = RuntimeError(LATE)
    assert one.explain(broken) is broken
    assert_facts(broken.__notes__[0], "rank 1", "barrier", "0 s")


def test_notices_are_received_by_all_and_the_first_counts(made: Made) -> None:
    one, other = made()
    assert one.posted("weather") is None
    one.post("weather", "fair")
    assert one.posted("weather") == "fair"
    receive(one, other)
    other.post("weather", "foul")
    other.post("tide", "high")
    receive(other, one)
    assert [watch.posted(topic) for watch in (one, other) for topic in ("weather", "tide")] == ["fair", "high"] * 2


def test_a_long_wait_is_reported_once_for_all_ranks(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    wait = ("vote", monotonic() - 100)
    one, other = made(waiting=lambda: wait)
    receive(one, other, one, other)
    (record,) = [record for record in caplog.records if record.name == "heliograph"]
    assert record.levelno == logging.WARNING
    head, *lines = record.getMessage().splitlines()
    assert_facts(head, "Places of the ranks")
    assert_each([each.split(";")[0] for each in lines[:2]], *[(f"rank {rank}", "vote", "100 s") for rank in (0, 1)])
    stacks = "\n".join(lines[2:])
    assert_facts(stacks, "stacks of rank 0", "thread MainThread", "in receive")
    assert "in no collective" not in stacks


def test_a_report_names_the_ranks_outside_of_the_collective(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    watches = made(3)
    watches[1]._waiting = lambda: ("vote", monotonic() - 100)
    receive(*watches, *watches)
    assert "in no collective: rank 0, 2" in caplog.messages[0].splitlines()


def test_reports_come_at_growing_intervals(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    waits = [("vote", monotonic() - 100)]
    (one,) = made(1, waiting=lambda: waits[0])
    receive(one, one)
    assert (len(caplog.records), round(one._next_report)) == (1, 200)
    one._next_report = 0.0
    receive(one, one)
    assert (len(caplog.records), round(one._next_report)) == (2, 200)
    waits[0] = ("barrier", monotonic())
    receive(one)
    assert (len(caplog.records), one._next_report) == (2, 60.0)


def test_a_store_that_is_gone_is_the_death_of_its_host(made: Made) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    watch = Watch(client, 1, 2, waiting=lambda: None, host=0, interval=0.01)
    del store
    receive(watch)
    error = watch.explain(RuntimeError(BROKEN))
    watch.close()
    assert_facts(error, "rank 0 died", "store")


def test_where_nobody_trains_a_store_may_go() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    watch = Watch(client, 1, 2, waiting=lambda: None, host=None, interval=0.01)
    del store
    receive(watch)
    assert watch.failure() is None
    watch.announce(ValueError("on purpose"), "here")
    broken = RuntimeError(BROKEN)
    assert watch.explain(broken) is broken
    assert_each(broken.__notes__, ("store", "gone"))
    watch.close()


@pytest.mark.parametrize("where", ["in a run", "in a collective"])
def test_a_rank_that_continues_is_ended_at_last(made: Made, ended: SimpleQueue[str], where: str) -> None:
    one, other = made(
        waiting=lambda: ("vote", monotonic()) if where == "in a collective" else None, limits=Limits(grace=0.0)
    )
    if where == "in a run":
        other.place = lambda: "in train, epoch 3"
    one.announce(ValueError("on purpose"), "here")
    text = ended.get()
    assert_facts(text, "rank 1 is ended", "0 s", "rank 0 failed", "ValueError: on purpose", "here")
    assert "waits in vote" in text if where == "in a collective" else "train, epoch 3" in text


def test_a_rank_that_others_saw_hang_says_once_where_it_is(made: Made, ended: SimpleQueue[str]) -> None:
    _, other = made(limits=Limits(grace=0.0))
    other.place = lambda: "in train, epoch 3"
    seen = Failure(1, "hung", "no collective; in train")
    other._run_job(lambda: other._report_failure(seen))
    text = ended.get()
    assert_facts(text, "rank 1 is ended", "0 s", "rank 1 hung")
    assert text.count("no collective; in train") == 1


def test_a_rank_that_writes_a_checkpoint_is_not_ended_before_that_is_done(made: Made, ended: SimpleQueue[str]) -> None:
    one, other = made(limits=Limits(grace=0.0))
    other.place = lambda: "in train"
    with other.writing():
        with other.writing():  # its shards in a thread, say, and something else in the loop
            one.announce(ValueError("on purpose"), "here")
            receive(other)
        receive(other)
        assert other.failure() is not None
        assert ended.empty()
    assert_facts(ended.get(), "rank 1 is ended")


def test_what_follows_a_write_has_the_whole_grace_too(made: Made, ended: SimpleQueue[str]) -> None:
    one, other = made(limits=Limits(grace=1000.0))
    other.place = lambda: "in train"
    one.announce(ValueError("on purpose"), "here")
    receive(other)
    other._grace_since = -10000.0  # so long ago
    with other.writing():
        receive(other)
    receive(other)
    assert ended.empty()


def test_a_rank_that_is_in_no_run_is_left_alone(made: Made, ended: SimpleQueue[str]) -> None:
    one, other = made(limits=Limits(grace=0.0))
    one.announce(ValueError("on purpose"), "here")
    receive(other, other)
    assert other._thread.is_alive()
    assert ended.empty()


def test_a_rank_that_leaves_by_itself_is_not_ended(made: Made, ended: SimpleQueue[str]) -> None:
    one, other = made(limits=Limits(grace=0.0))
    other.place = lambda: "in train"
    other.leaves = True
    one.announce(ValueError("on purpose"), "here")
    receive(other, other)
    assert other.failure() is not None
    assert ended.empty()


def test_a_collective_is_broken_off_where_the_backend_can(made: Made) -> None:
    aborted = threading.Event()
    one, _ = made(waiting=lambda: ("backward", monotonic()), abort=aborted.set)
    one.announce(ValueError("on purpose"), "here")
    assert aborted.wait(60)
