"""How the processes of a group find each other: a store of their own for every attempt, and for every run.

torchrun starts a failed attempt again with the same port and the same store, in which the addresses of dead processes
are left; its restart count differs between machines, so that it cannot distinguish the attempts. Here rank 0 draws a
nonce and offers it; each rank answers with a nonce of its own, and takes part only once rank 0 confirms just that one.
What a dead attempt has left confirms no living process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from uuid import uuid4

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not for strict checkers
    DistError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from .membership import Membership

OFFER = "heliograph/offer"
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks; a wait within the store itself warns on stderr
_stores: dict[tuple[str, int], Store] = {}  # the one connection of this process, kept for later runs


def rendezvous(member: Membership, timeout: float) -> Store:
    """Return a store that only the processes of this group and this attempt use. Every rank must call it.

    Args:
        member: this process's place, with the address of the store.
        timeout: seconds after which a rank that did not come is missing.

    Raises:
        TimeoutError: not every rank came; says which.
        RuntimeError: the store cannot be hosted, or went away.
    """
    if member.world_size == 1:
        return HashStore()
    end = time.monotonic() + timeout
    store = _connected(member, timeout)
    try:
        nonce = _invite(store, member, timeout, end) if member.rank == 0 else _accept(store, member, timeout, end)
    except DistError as error:
        raise RuntimeError(
            f"The store at {member.address}:{member.port} went away while rank {member.rank} of {member.world_size} "
            f"waited for the others there: the process that hosts it has ended ({error})."
        ) from error
    return PrefixStore(nonce, store)


def _connected(member: Membership, timeout: float) -> Store:
    """Return the connection of an earlier run where it is still open, else a new one."""
    place = (member.address, member.port)
    if (store := _stores.get(place)) is not None:
        with suppress(DistError):
            store.check([OFFER])
            return store
    _stores.clear()
    store = _stores[place] = _connect(member, timeout)
    return store


def _connect(member: Membership, timeout: float) -> Store:
    """Return the store that torchrun's agent hosts, or else rank 0."""
    hosts = member.rank == 0 and not member.agent_store
    try:
        return TCPStore(
            member.address,
            member.port,
            is_master=hosts,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except DistError as error:
        at = f"{member.address}:{member.port}"
        if hosts:
            raise RuntimeError(
                f"Rank 0 cannot host the store by which the ranks find each other at {at} ({error}): set MASTER_PORT "
                f"to a free port."
            ) from error
        host = "torchrun's agent" if member.agent_store else "rank 0"
        raise TimeoutError(
            f"Rank {member.rank} of {member.world_size} found no store at {at} within {timeout:g} s: {host} should "
            f"host it. Is it running, and is MASTER_ADDR its machine?"
        ) from error


def _invite(store: Store, member: Membership, timeout: float, end: float) -> str:
    """Offer a nonce, and confirm it to all when all have answered; return it."""
    nonce = uuid4().hex
    answers = {rank: _answer(nonce, rank) for rank in range(1, member.world_size)}
    store.set(OFFER, json.dumps([nonce, member.world_size]))
    for _ in _looks(end):
        if store.check(list(answers.values())):
            confirmed = [nonce, *(store.get(key).decode() for key in answers.values())]
            store.set(_go(nonce), json.dumps(confirmed))
            return nonce
    missing = [rank for rank, key in answers.items() if not store.check([key])]
    raise TimeoutError(_missing(missing, member, timeout))


def _accept(store: Store, member: Membership, timeout: float, end: float) -> str:
    """Answer each offer of rank 0 until it confirms this very answer; return what it offered."""
    nonce = uuid4().hex
    offer, answered, world_size = "", "", member.world_size
    for _ in _looks(end):
        if not store.check([OFFER]):
            continue
        offer, world_size = _offered(store)
        if world_size != member.world_size:  # of an attempt with another number of processes
            continue
        if offer != answered:
            store.set(_answer(offer, member.rank), nonce)
            answered = offer
        if store.check([_go(offer)]) and json.loads(store.get(_go(offer)))[member.rank] == nonce:
            return offer
    if world_size != member.world_size:
        raise TimeoutError(
            f"Rank {member.rank} expects {member.world_size} ranks, but rank 0 gathers {world_size}: set the same "
            f"WORLD_SIZE for all."
        )
    absent = [rank for rank in range(1, world_size) if not store.check([_answer(offer, rank)])]
    is_open = offer and not store.check([_go(offer)])
    raise TimeoutError(_missing(absent if is_open and absent else [0], member, timeout))


def _offered(store: Store) -> tuple[str, int]:
    offer, world_size = json.loads(store.get(OFFER))
    return offer, world_size


def _looks(end: float) -> Iterator[None]:
    """Yield at once, and then after ever longer pauses, until the end."""
    pause = FIRST_PAUSE
    yield
    while time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        yield


def _answer(offer: str, rank: int) -> str:
    return f"heliograph/{offer}/join/{rank}"


def _go(offer: str) -> str:
    return f"heliograph/{offer}/go"


def _missing(ranks: list[int], member: Membership, timeout: float) -> str:
    names = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    return (
        f"{names} of {member.world_size} did not come within {timeout:g} s; rank {member.rank} waited. Was every "
        f"process started, does each run the same script, and does none end before its training begins?"
    )
