"""Ranks that stay alive between calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from heliograph.core.distributed.launcher import KeptRanks
from heliograph.tests.core.distributed import jobs
from heliograph.tests.core.distributed.test_launch import has_ended

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def ranks() -> Iterator[KeptRanks]:
    made = KeptRanks(2, grace=30.0)
    yield made
    made.close()


def ignore(rank: int, message: Any) -> None:
    """Take a message that no test looks at."""


def run(ranks: KeptRanks, fn: Any, *args: Any) -> Any:
    return ranks.run(fn, *args, on_message=ignore)


def test_the_processes_of_the_first_call_make_the_next_ones(ranks: KeptRanks) -> None:
    first = run(ranks, jobs.pid_and_sum, 1)
    second = run(ranks, jobs.pid_and_sum, 10)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in first}) == 2
    assert [total for _, total in first] == [3.0, 3.0]  # 1 + 2, over the ranks
    assert [total for _, total in second] == [30.0, 30.0]  # 10 + 20


def test_messages_arrive_in_every_call(ranks: KeptRanks) -> None:
    for word in ("a", "b"):
        messages: list[tuple[int, Any]] = []
        ranks.run(jobs.put, word, on_message=lambda rank, message, kept=messages: kept.append((rank, message)))  # type: ignore[misc]
        assert sorted(messages) == [(0, word), (1, word)]


@pytest.mark.whole
def test_closed_they_end_and_the_next_call_starts_others(ranks: KeptRanks) -> None:
    first = run(ranks, jobs.pid_and_sum, 1)
    ranks.close()
    assert all(has_ended(pid) for pid, _ in first)
    second = run(ranks, jobs.pid_and_sum, 1)
    assert not {pid for pid, _ in first} & {pid for pid, _ in second}


def test_an_error_is_raised_as_it_is_and_ends_them(ranks: KeptRanks) -> None:
    first = run(ranks, os.getpid)  # without torch, processes start in a tenth of the time
    with pytest.raises(ValueError, match="refused"):
        run(ranks, jobs.refuse)
    assert all(map(has_ended, first))
    second = run(ranks, os.getpid)
    assert not set(first) & set(second)


def test_a_rank_that_died_while_it_waited_is_replaced(ranks: KeptRanks) -> None:
    first = run(ranks, os.getpid)
    os.kill(first[1], signal.SIGKILL)
    assert has_ended(first[1])
    second = run(ranks, jobs.pid_and_sum, 1)
    assert [total for _, total in second] == [3.0, 3.0]
    assert has_ended(first[0])


def test_without_a_call_for_a_while_they_end() -> None:
    ranks = KeptRanks(1, idle=0.01)
    (pid,) = run(ranks, os.getpid)
    assert has_ended(pid)
    ranks.close()


@pytest.mark.parametrize("options", [{"nprocs": 0}, {"grace": 0}, {"idle": -1}])
def test_arguments_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        run(KeptRanks(**{"nprocs": 1, **options}), jobs.pid_and_sum, 1)
