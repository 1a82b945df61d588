from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from heliograph.core.distributed import group as module
from heliograph.core.distributed.group import OFFER, rendezvous
from heliograph.core.distributed.membership import Membership
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

Join = Callable[..., "Future[Store]"]


@pytest.fixture
def agent() -> Iterator[TCPStore]:
    """Return a store as torchrun's agent hosts it: it outlives every attempt."""
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    module._stores.clear()


@pytest.fixture
def join(agent: TCPStore) -> Iterator[Join]:
    """Return what lets one rank, a thread here, look for the others; without time, it looks once."""
    module._reuse_or_connect(Membership(0, 0, 2, 2, "127.0.0.1", agent.port, agent_store=True), 20.0)
    with ThreadPoolExecutor(8) as threads:

        def join(rank: int, world_size: int = 2, timeout: float = 20.0) -> Future[Store]:
            member = Membership(rank, rank, world_size, world_size, "127.0.0.1", agent.port, agent_store=True)
            return threads.submit(rendezvous, member, timeout)

        yield join


def assert_shared(*waiting: Future[Store]) -> None:
    """Assert that ranks got one store, which nobody used before."""
    first, *others = (each.result() for each in waiting)
    assert not first.check(["key"])
    first.set("key", "of the first")
    assert all(other.get("key") == b"of the first" for other in others)


def dead_attempt(join: Join, *ranks: int, world_size: int) -> None:
    """Write what is left of ranks that die while they wait for the rest."""
    for rank in ranks:
        with pytest.raises(TimeoutError):
            join(rank, world_size, timeout=0.0).result()


def test_all_ranks_get_one_store(join: Join) -> None:
    assert_shared(join(0, 3), join(1, 3), join(2, 3))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_every_attempt_over_one_store_has_its_own(join: Join, order: tuple[int, ...]) -> None:
    for _ in range(3):
        assert_shared(*[join(rank, 3) for rank in order])


def test_a_confirmed_offer_of_a_former_attempt_is_not_accepted(agent: TCPStore, join: Join) -> None:
    assert_shared(join(0), join(1))
    former = agent.get(OFFER).decode()
    answer = agent.get(f"heliograph/{former}/join/1")
    second = join(1)  # comes before rank 0, and answers the dead
    while agent.get(f"heliograph/{former}/join/1") == answer:
        assert not second.done()
    assert_shared(join(0), second)


def test_an_open_offer_of_a_dead_attempt_is_not_accepted(join: Join) -> None:
    dead_attempt(join, 0, 1, world_size=3)
    second, third = join(1, 3), join(2, 3)
    assert_shared(join(0, 3), second, third)


def test_an_attempt_may_have_another_number_of_ranks(join: Join) -> None:
    dead_attempt(join, 0, 1, world_size=3)
    second = join(1, 2)
    assert_shared(join(0, 2), second)


def test_a_rank_that_came_back_is_not_taken_for_its_former_self(agent: TCPStore, join: Join) -> None:
    dead_attempt(join, 0, world_size=2)
    nonce = agent.get(OFFER).decode()
    agent.set(f"heliograph/{nonce}/join/1", "of a dead rank 1")
    agent.set(f"heliograph/{nonce}/go", f'["{nonce}", "of a dead rank 1"]')
    with pytest.raises(TimeoutError, match="rank 0 of 2"):
        join(1, 2, timeout=0.0).result()


def test_says_who_is_missing(join: Join) -> None:
    for rank, missing in [(0, "1, 2, 3, 4"), (2, "1, 3, 4"), (4, "1, 3")]:
        with pytest.raises(TimeoutError, match=f"ranks {missing} of 5"):
            join(rank, 5, timeout=0.0).result()


def test_says_that_rank_0_is_missing(join: Join) -> None:
    with pytest.raises(TimeoutError, match="rank 0 of 2"):
        join(1, timeout=0.0).result()
    assert_shared(join(0), join(1))
    with pytest.raises(TimeoutError, match="rank 0 of 2"):
        join(1, timeout=0.0).result()


def test_a_taken_port_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"127.0.0.1:{port} .*set MASTER_PORT"):
            rendezvous(Membership(0, 0, 2, 2, "127.0.0.1", port), 0.1)


def test_a_store_that_is_not_there_is_reported() -> None:
    with pytest.raises(TimeoutError, match=r"127.0.0.1:1 within 0.1 s:"):
        rendezvous(Membership(1, 1, 2, 2, "127.0.0.1", 1), 0.1)
    with pytest.raises(TimeoutError, match=r"within 0.1 s: torchrun's"):
        rendezvous(Membership(1, 1, 2, 2, "127.0.0.1", 1, agent_store=True), 0.1)


def test_connects_again_where_the_former_store_is_gone(join: Join) -> None:
    former = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = former.port
    members = [Membership(rank, rank, 2, 2, "127.0.0.1", port, agent_store=True) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        assert_shared(*[threads.submit(rendezvous, each, 20.0) for each in members])
        del former
        again = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert_shared(*[threads.submit(rendezvous, each, 20.0) for each in members])
        assert again.check([OFFER])


def test_a_single_process_needs_no_connection() -> None:
    rendezvous(Membership(), 0.0).set("key", "value")
