"""The report about the rank that failed first."""

from __future__ import annotations

import pickle

import pytest
from heliograph import RankFailed
from heliograph.core.distributed.failure import Failure
from heliograph.tests.messages import assert_facts


class OwnError(Exception):
    pass


def test_a_failure_survives_the_way_through_the_store() -> None:
    failure = Failure.of(OwnError('on\n"purpose"'), 3, "in train")
    assert failure == Failure(3, f"{__name__}.OwnError", 'on\n"purpose"', "in train")
    assert Failure.read(failure.write().encode()) == failure


def test_an_interrupt_stays_one() -> None:
    failure = Failure.of(KeyboardInterrupt("on rank 1"), 1, "")
    assert failure.interrupt
    assert isinstance(failure.as_error(), KeyboardInterrupt)


def test_the_error_that_others_raise_can_be_pickled() -> None:
    error = Failure(1, "ValueError", "on purpose", "in train").as_error()
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, RankFailed)
    assert (copy.rank, copy.kind, copy.text, copy.place) == (1, "ValueError", "on purpose", "in train")
    assert str(copy) == str(error)
    assert_facts(error, "rank 1", "ValueError", "on purpose", "in train")


@pytest.mark.parametrize(
    ("kind", "reported"), [("left", "rank 1 left"), ("died", "rank 1 died"), ("hung", "rank 1 hung")]
)
def test_what_others_saw_of_a_rank_is_reported_as_such(kind: str, reported: str) -> None:
    assert_facts(Failure(1, kind, "in no collective").as_error(), reported, "in no collective")
