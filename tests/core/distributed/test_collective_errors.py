"""Errors of collectives, and the groups that an error must not keep open."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import traceback
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from heliograph.core.distributed.collective_errors import (
    LateRankError,
    is_broken_collective,
    is_late,
    release_groups,
)
from torch.distributed import (  # type: ignore[attr-defined]  # public all the same
    DistBackendError,
    HashStore,
    ProcessGroup,
    ProcessGroupGloo,
)

IMPORTED_LATE = """
import torch
from heliograph.core.distributed.group import Group
from heliograph.core.distributed.membership import Membership

group = Group(Membership(), "gloo", torch.device("cpu"), 60.0)
import torch._dynamo
from torch.distributed.nn import functional

held = [each for function in vars(functional).values() for each in getattr(function, "__defaults__", None) or ()]
print(sum(isinstance(each, torch.distributed.ProcessGroup) for each in held))
group.leave()
"""


class OwnError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "is_broken"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), True),
        (RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 100ms for recv operation"), True),
        (DistBackendError("NCCL error in: ..."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 3x4)"), False),
        (ValueError("gloo is not a number"), False),
    ],
)
def test_a_broken_collective_is_known_by_its_type_or_backend(error: Exception, is_broken: bool) -> None:
    assert is_broken_collective(error) == is_broken


def test_only_the_text_of_a_backend_says_that_a_rank_is_late() -> None:
    late = RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 100ms for recv operation")
    users = RuntimeError("Timed out waiting for the data")
    wrapped = KeyError("of a plugin")
    wrapped.__cause__ = late
    broken = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")
    assert [is_late(each) for each in (LateRankError("the board"), late, wrapped, users, broken)] == [True] * 3 + [
        False
    ] * 2


def pair(timeout: float) -> list[ProcessGroup]:
    """Return both ends of a gloo group of two, in this process."""
    store, made = HashStore(), dict[int, Any]()

    def join(rank: int) -> None:
        made[rank] = ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [made[0], made[1]]


def test_a_backends_own_error_is_known_wherever_it_came_up() -> None:
    waiting, _ = pair(timeout=0.1)  # the other never comes
    for _ in range(2):  # gloo finds other words for it the second time
        with pytest.raises(RuntimeError) as caught:
            waiting.allreduce([torch.ones(1)]).wait()
        assert is_broken_collective(caught.value)
        wrapped = KeyError("of a plugin")
        wrapped.__context__ = caught.value
        assert is_broken_collective(wrapped)


def test_what_user_code_raises_is_its_own_whatever_it_says() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("no gloo ProcessGroup here")
    assert not is_broken_collective(caught.value)


def test_a_chain_of_errors_may_bite_its_own_tail() -> None:
    error, other = ValueError(), KeyError()
    error.__cause__, other.__cause__ = other, error
    assert not is_broken_collective(error)


def test_an_error_lets_go_of_the_groups_of_the_functions_that_it_left() -> None:
    groups = []
    own = ProcessGroup(HashStore(), 0, 1)

    def train() -> None:
        group = ProcessGroup(HashStore(), 0, 1)
        groups.append(weakref.ref(group))
        raise OwnError

    try:
        train()
    except OwnError as error:
        caught = error
    assert groups[0]() is not None
    release_groups(caught)
    gc.collect()
    assert groups[0]() is None
    assert own.size() == 1  # of a function that still runs
    assert [frame.name for frame in traceback.extract_tb(caught.__traceback__)][-1] == "train"


def test_the_default_group_is_in_no_functions_default_arguments() -> None:
    command = [sys.executable, "-c", IMPORTED_LATE]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "0\n"
