"""What the workers tell, sorted by their groups, and the attempts that come of it."""

from __future__ import annotations

from pathlib import Path

from heliograph.builtin_callbacks.ray.launcher.attempts import Journal, Work, attempts
from heliograph.builtin_callbacks.ray.launcher.mailbox import Ended, Letter, Message, Pulse, Resumed, Started, Value


def tell(journal: Journal, fit: str, group: str, *messages: Message, rank: int = 0) -> list[Message | None]:
    """Return what the journal makes of messages of a worker."""
    return [journal.take(Letter(fit, group, rank, each)) for each in messages]


def test_an_attempt_tells_what_it_had_trained_and_what_of_it_was_lost() -> None:
    journal = Journal()
    fit = journal.open()
    tell(journal, fit, "a", Started(2, "n1"), Resumed("run", 0, 0, None), Pulse("run", 7, 5, 70))
    tell(journal, fit, "a", Started(2, "n2"), rank=1)
    journal.close("lost", "rank 1 died")
    journal.open()
    journal.close("lost", "a machine was lost before anybody began")
    fit = journal.open()
    tell(
        journal,
        fit,
        "b",
        Started(1, "n1"),
        Resumed("run", 8, 3, Path("step-3.pt")),
        Pulse("run", 24, 9, 120),
        Value(b""),
    )
    assert journal.group is not None
    assert journal.group.is_complete
    journal.close("completed")

    first, nobody, last = attempts(journal.groups)
    assert (first.number, first.world_size, first.nodes) == (1, 2, ("n1", "n2"))
    assert (first.kind, first.failure) == ("lost", "rank 1 died")
    assert (first.resumed_at, first.lost) == (None, Work(6, 2))
    assert (nobody.number, nobody.world_size, nobody.kind, nobody.lost) == (2, 0, "lost", None)
    assert (last.kind, last.failure, last.resumed_at, last.lost) == ("completed", None, Work(8, 3), None)
    assert all(each.seconds >= 0 for each in (first, nobody, last))


def test_a_pulse_that_is_older_than_the_checkpoint_loses_nothing() -> None:
    journal = Journal()
    tell(journal, journal.open(), "a", Started(1, "n"), Resumed("run", 0, 0, None), Pulse("run", 3, 3, 3))
    journal.close("preempted", "its price rose")
    tell(journal, journal.open(), "b", Started(1, "n"), Resumed("run", 5, 5, Path("step-5.pt")))
    journal.close("completed")
    assert attempts(journal.groups)[0].lost == Work(0, 0)


def test_only_where_the_first_training_of_a_group_began_counts() -> None:
    journal = Journal()
    path = Path("step-5.pt")
    tell(
        journal,
        journal.open(),
        "a",
        Started(1, "n"),
        Resumed("run", 5, 5, path),
        Ended(b""),
        Resumed("run", 0, 0, None),
    )
    journal.close("completed")
    assert attempts(journal.groups)[0].resumed_at == Work(5, 5)


def test_workers_that_begin_anew_within_a_run_of_rays_were_resized() -> None:
    journal = Journal()
    fit = journal.open()
    tell(
        journal, fit, "a", Started(1, "n1"), Resumed("run", 0, 0, None), Pulse("run", 8, 4, 8)
    )  # windows of two batches
    for rank in range(2):
        tell(journal, fit, "b", Started(2, f"n{rank}"), rank=rank)
    tell(journal, fit, "b", Resumed("run", 3, 3, Path("step-3.pt")))
    journal.close("completed")
    first, second = attempts(journal.groups)
    assert (first.kind, first.failure, first.world_size, first.lost) == ("resized", None, 1, Work(2, 1))
    assert (second.kind, second.world_size, second.nodes) == ("completed", 2, ("n0", "n1"))


def test_what_comes_late_from_workers_that_are_no_more_is_dropped() -> None:
    journal = Journal()
    former = journal.open()
    tell(journal, former, "a", Started(1, "n"))
    journal.close("lost", "rank 0 died")
    assert tell(journal, former, "a", Value(b"late")) == [None]
    fit = journal.open()
    assert tell(journal, former, "a", Value(b"late"), Started(1, "n")) == [None, None]
    assert journal.group is None
    tell(journal, fit, "b", Started(2, "n"))
    tell(journal, fit, "c", Started(1, "n"))
    assert tell(journal, fit, "b", Value(b"late"), Started(2, "n")) == [None, None]
    assert journal.group is not None
    assert journal.group.values == {}
    assert (len(journal.groups), journal.incarnation) == (3, "c")


def test_values_of_some_ranks_are_no_completion() -> None:
    journal = Journal()
    fit = journal.open()
    tell(journal, fit, "a", Started(2, "n"), Value(b"0"))
    assert journal.group is not None
    assert not journal.group.is_complete
    tell(journal, fit, "a", Started(2, "n"), Value(b"1"), rank=1)
    assert journal.group.is_complete


def test_trainings_one_after_the_other_are_compared_by_their_names() -> None:
    """The second one of two is lost amid its epochs: the first one is at its end then, and repeats nothing."""
    journal = Journal()
    first, second = Path("first-9.pt"), Path("second-2.pt")
    told = (
        Resumed("first", 0, 0, None),
        Pulse("first", 9, 9, 9),
        Resumed("second", 0, 0, None),
        Pulse("second", 4, 4, 4),
    )
    tell(journal, journal.open(), "a", Started(1, "n"), *told)
    assert journal.group is not None
    assert journal.group.reach == 13
    journal.close("lost", "rank 0 died")
    tell(journal, journal.open(), "b", Started(1, "n"), Resumed("first", 9, 9, first))
    journal.close("lost", "rank 0 died again")
    tell(journal, journal.open(), "c", Started(1, "n"), Resumed("first", 9, 9, first), Resumed("second", 2, 2, second))
    journal.close("completed")
    assert [each.lost for each in attempts(journal.groups)] == [Work(2, 2), None, None]
    assert [each.resumed_at for each in attempts(journal.groups)] == [None, Work(9, 9), Work(11, 11)]
