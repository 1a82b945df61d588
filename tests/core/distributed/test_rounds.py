"""The two ways of messages between ranks: by a board in shared memory, and by gloo."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE
from typing import Any, Never

import pytest
import torch
from heliograph import DDPEngine
from heliograph.core.distributed import group as boards
from heliograph.core.distributed.collective_errors import is_broken_collective, is_late
from heliograph.core.distributed.group import HEAD, SLOTS, Board, GlooRounds, Group
from heliograph.core.distributed.membership import membership
from heliograph.tests.messages import assert_facts
from heliograph.tests.ranks_pool import Pool, Way, travelling
from torch.distributed import DistError

WAYS = ("board", "gloo")


@contextmanager
def joined(way: Way, timeout: float = 60.0) -> Iterator[Group]:
    with travelling(way):
        group = Group(membership(), "gloo", torch.device("cpu"), timeout)
    assert isinstance(group.rounds, Board if way == "board" else GlooRounds)
    yield group
    group.leave()


def posts_with_others_between(way: Way) -> None:
    with joined(way) as group:
        rank, others = group.rank, group.world_size
        for turn in range(3 * SLOTS):
            group.post_summary(bytes([turn, rank]))
            if turn % 2:
                group.post_summary(bytes([turn + 100, rank]))
            if turn % 3 == 0:
                for each in range(10):  # many more than a board has slots
                    assert group.reduce(each + rank, "max") == each + others - 1
            if turn % 5 == 0:
                assert group.gather_objects("x" * 10_000 * rank) == ["x" * 10_000 * each for each in range(others)]
            numbers = (turn, turn + 100) if turn % 2 else (turn,)
            assert group.read_summaries() == [[bytes([each, rank]) for rank in range(others)] for each in numbers]
            assert group.read_summaries() == []
        assert group.vote([rank, -rank]) == [others - 1, 0]


@pytest.mark.parametrize("way", WAYS)
def test_summaries_arrive_in_their_order_whatever_is_exchanged_before_they_are_read(ranks: Pool, way: Way) -> None:
    ranks(2).run(posts_with_others_between, way)
    ranks(3).run(posts_with_others_between, way)


def is_ahead(way: Way) -> list[bool]:
    """Post a summary on rank 0, which rank 1 has not posted yet, then on both."""
    with joined(way) as group:
        missing = []
        if group.rank == 0:
            group.post_summary(b"0")
            missing.append(group.rounds.ready() is None)
            group.store.set("posted", "")
        else:
            group.store.wait(["posted"])
            group.post_summary(b"1")
        assert group.read_summaries() == [[b"0", b"1"]]
        return missing


@pytest.mark.parametrize("way", WAYS)
def test_nobody_waits_who_only_posts_a_summary(ranks: Pool, way: Way) -> None:
    assert ranks(2).run(is_ahead, way) == [[True], []]


def is_elsewhere(way: Way, other: str) -> tuple[str, str]:
    """Read summaries on rank 0 while rank 1 calls another collective; return what rank 1, then rank 0 learns."""
    with joined(way) as group:
        if group.rank == 0:
            group.post_summary(b"")
            with pytest.raises(RuntimeError) as caught:
                group.read_summaries()
        else:
            with pytest.raises(RuntimeError) as caught:
                group.barrier() if other == "barrier" else group.gather_objects("x" * 10_000)
        return str(caught.value).partition(". ")[0], ""


@pytest.mark.parametrize("other", ["barrier", "gather_objects"])
@pytest.mark.parametrize("way", WAYS)
def test_who_calls_another_collective_than_a_boundary_is_named_to_all(ranks: Pool, way: Way, other: str) -> None:
    first, second = ranks(2).run(is_elsewhere, way, other)
    assert first == second
    assert_facts(first[0], "rank 0", "boundary", f"rank 1 in {other}")
    assert first[1] == ""


def leaves_before_it_posts(way: Way) -> bool:
    with joined(way) as group:
        if group.rank == 1:
            return True
        group.post_summary(b"")
        with pytest.raises(RuntimeError) as caught:
            group.read_summaries()
        assert group.waiting_in is None
        return is_broken_collective(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_summaries_of_a_rank_that_has_left_are_waited_for_in_vain(ranks: Pool, way: Way) -> None:
    assert ranks(2).run(leaves_before_it_posts, way) == [True, True]


def posts_and_leaves(way: Way) -> list[list[bytes]]:
    with joined(way) as group:
        group.post_summary(bytes([group.rank]))
        return group.read_summaries()


def test_who_has_posted_may_leave(ranks: Pool) -> None:
    """On the board a summary stays; gloo's is with the others only when they have all received it."""
    assert ranks(2).run(posts_and_leaves, "board") == [[[b"\0", b"\1"]]] * 2


def waits_for_nobody(way: Way) -> bool:
    with joined(way, timeout=3.0) as group:
        if isinstance(group.rounds, Board):
            group.rounds._timeout = 0.2  # after the group has met, which may take longer
        if group.rank == 0:
            group.post_summary(b"")
            with pytest.raises(RuntimeError) as caught:
                group.read_summaries()
            assert is_broken_collective(caught.value)
            group.store.set("done", "")
            return is_late(caught.value)
        while not group.store.check(["done"]):
            os.sched_yield()
        return False


@pytest.mark.parametrize("way", WAYS)
def test_a_wait_ends_in_time(ranks: Pool, way: Way) -> None:
    assert ranks(2).run(waits_for_nobody, way) == [True, False]


def announces_before_it_leaves() -> str:
    """Fail on rank 1, which is held up then; return what rank 0 learns meanwhile."""
    engine = DDPEngine(device="cpu", timeout=20)
    with engine.process():
        assert engine.watch is not None
        assert engine.group is not None
        learned = ""
        if engine.rank == 0:
            with pytest.raises(DistError) as caught:
                engine.vote([1.0])
            learned = str(engine.watch.explain(caught.value)).partition(" (")[0]
            engine.group.store.set("learned", "")
        else:
            engine.watch.announce(KeyError("label"), "train")
            while not engine.group.store.check(["learned"]):
                os.sched_yield()
        engine.abandon()
    return learned


def test_a_failure_ends_a_wait_before_the_rank_has_left(ranks: Pool) -> None:
    first, second = ranks(2).run(announces_before_it_leaves)
    assert_facts(first, "rank 1", "KeyError: 'label'")
    assert second == ""


def sees_the_file(folder: Path) -> tuple[list[str], int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boards, "MEMORY", folder)
        with joined("board") as group:
            assert isinstance(group.rounds, Board)
            group.barrier()
            status = os.fstat(group.rounds._file)
            return [each.name for each in folder.iterdir()], S_IMODE(status.st_mode), status.st_nlink


def test_nobody_else_sees_the_file_and_nothing_is_left_of_it(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(sees_the_file, tmp_path) == [([], 0o600, 0)] * 2


def refuse(*arguments: Any) -> Never:
    raise OSError


def cannot(what: str, folder: Path) -> list[str]:
    """Make a group where there can be no board; return what is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boards, "MEMORY", folder)
        if what == "is on another machine" and os.environ["RANK"] == "1":
            patch.setattr("os.open", refuse)
        if what == "has no such memory":
            patch.setattr(boards, "MEMORY", folder / "missing")
        if what == "has no locks":
            patch.setattr("fcntl.lockf", refuse)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if what == "has no room":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
        group = Group(membership(), "gloo", torch.device("cpu"), 60.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(group.rounds, GlooRounds)
    assert group.vote([group.rank]) == [1]
    group.barrier()
    group.leave()
    return [each.name for each in folder.iterdir() if each.is_file()]


@pytest.mark.parametrize(
    "what",
    [
        "is on another machine",
        "has no room",
        "has no such memory",
        "has no locks",
    ],
)
def test_there_is_no_board_where_one_rank_cannot_see_it(ranks: Pool, tmp_path: Path, what: str) -> None:
    assert ranks(2).run(cannot, what, tmp_path) == [[], []]


def breaks_where_the_board_is_made(rank: int, folder: Path) -> tuple[str, str, list[str]]:
    """Let the broadcast of the file's name fail on one rank."""

    def fail(group: Group, value: object, source: int = 0) -> object:
        if group.rank == rank:
            raise OSError("no memory for that")
        return broadcast(group, value, source)

    broadcast = Group.broadcast
    with pytest.MonkeyPatch.context() as patch, pytest.raises((OSError, RuntimeError)) as caught:
        patch.setattr(boards, "MEMORY", folder)
        patch.setattr(Group, "broadcast", fail)
        with joined("board", timeout=10.0):  # gloo may wait that long for a rank that has left
            pass
    return type(caught.value).__name__, str(caught.value), [each.name for each in folder.iterdir()]


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_where_one_rank_fails_while_the_board_is_made_the_others_fail_too(
    ranks: Pool, tmp_path: Path, rank: int
) -> None:
    outcomes = ranks(4).run(breaks_where_the_board_is_made, rank, tmp_path)
    assert outcomes.pop(rank) == ("OSError", "no memory for that", [])
    for kind, text, left in outcomes:
        assert (kind, left) == ("RuntimeError", [])
        assert_facts(text, "rank exited", "process group", "4")


def breaks_where_the_ranks_are_connected(rank: int) -> tuple[str, str, bool]:
    """Let one rank fail when all know that all are there."""

    def fail(*args: object, **options: object) -> None:
        raise OSError("no memory for that")

    with pytest.MonkeyPatch.context() as patch, pytest.raises((OSError, RuntimeError)) as caught:
        if membership().rank == rank:
            patch.setattr(torch.distributed, "init_process_group", fail)
        with joined("board", timeout=5.0):
            pass
    return type(caught.value).__name__, str(caught.value), torch.distributed.is_initialized()


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_fails_while_all_are_connected_the_others_say_so(ranks: Pool, rank: int) -> None:
    outcomes = ranks(2).run(breaks_where_the_ranks_are_connected, rank)
    assert outcomes.pop(rank) == ("OSError", "no memory for that", False)
    ((kind, text, is_initialized),) = outcomes
    assert (kind, is_initialized) == ("RuntimeError", False)
    assert_facts(text, "rank exited", "process group", "2", f"rank {1 - rank}")
    assert "they could not connect:" in text
    assert ranks(2).run(adds_up) == [2, 2]  # the same processes meet again


def adds_up() -> int:
    with joined("board") as group:
        return int(group.reduce(1, "sum"))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Board, Board]]:
    """Return the boards of two ranks, here in one process."""
    path = tmp_path / "board"
    path.write_bytes(bytes(2 * SLOTS * boards.SLOT))
    made = [Board(os.open(path, os.O_RDWR), rank, 2, timeout=boards.LOOK / 10) for rank in (0, 1)]
    yield made[0], made[1]
    for board in made:
        board.close()


def test_a_message_that_is_half_written_is_not_there_yet(pair: tuple[Board, Board]) -> None:
    """Whatever order a processor makes others see its writes in."""
    one, other = pair
    one.post(b"mine")
    other.post(b"a message")
    begin = one._begins[1] + 1 * boards.SLOT
    slot = one._memory[begin : begin + HEAD.size + 9]
    for position in range(len(slot)):  # any byte of it is still the former
        one._memory[begin + position] ^= 1
        assert one.ready() is None
        one._memory[begin + position] ^= 1
    assert one.ready() == [b"mine", b"a message"]


def test_what_a_slot_holds_of_an_earlier_round_is_not_taken_for_the_new_one(pair: tuple[Board, Board]) -> None:
    one, other = pair
    for number in range(SLOTS):
        for board in pair:
            board.post(bytes([number]))
        assert one.ready() == other.ready() == [bytes([number])] * 2
    one.post(b"later")
    assert one.ready() is None


def test_no_more_than_three_rounds_are_open(pair: tuple[Board, Board]) -> None:
    one, _ = pair
    for _ in range(3):
        one.post(b"")
    with pytest.raises(AssertionError):
        one.post(b"")


def test_a_wait_that_is_not_over_at_once_sleeps(pair: tuple[Board, Board], monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than cores would otherwise wait for the one that is not run."""
    one, other = pair
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 8:
            other.post(b"")

    monkeypatch.setattr(boards, "sleep", sleep)
    monkeypatch.setattr(boards, "monotonic", iter(each / 1e4 for each in range(1_000)).__next__)
    one._timeout = 1.0
    one.post(b"")
    assert one.collect() == [b"", b""]
    assert slept[:3] == [50e-6, 100e-6, 200e-6]
    assert slept[-1] == boards.LONGEST_SLEEP


def test_time_for_which_a_process_is_stopped_is_not_waited(
    pair: tuple[Board, Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all ranks were stopped and continued, one that still computes posts only after a while."""
    one, other = pair
    moments = [0.0]

    def sleep(seconds: float) -> None:
        moments.append(moments[-1] + (1_000.0 if len(moments) == 3 else seconds))
        if len(moments) == 8:
            other.post(b"")

    monkeypatch.setattr(boards, "sleep", sleep)
    monkeypatch.setattr(boards, "SPIN", 0.0)
    monkeypatch.setattr(boards, "monotonic", lambda: moments[-1])
    monkeypatch.setattr(one, "_gone", list)  # a process has no locks against itself
    one._timeout = 1.0
    one.post(b"")
    assert one.collect() == [b"", b""]
    assert moments[-1] > 1_000.0


def dies(way: Way) -> int:
    """Fork a child within the group, as a loader's worker is, and let it end."""
    with joined(way) as group:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(boards, "LOOK", 0.0)
            if group.rank == 0:
                group.store.set("go", "")
            else:
                group.store.wait(["go"])
            return int(group.reduce(1, "sum"))


def test_the_end_of_a_workers_process_is_not_taken_for_that_of_its_rank(ranks: Pool) -> None:
    assert ranks(2).run(dies, "board") == [2, 2]
