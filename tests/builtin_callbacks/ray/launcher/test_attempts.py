"""What the workers tell, sorted by their groups, and the attempts that come of it."""

from __future__ import annotations

from pathlib import Path

from heliograph.builtin_callbacks.ray.launcher.attempts import GroupTracker, Work, summarize_attempts
from heliograph.builtin_callbacks.ray.launcher.mailbox import (
    Ended,
    Envelope,
    Message,
    ProgressUpdate,
    Resumed,
    Started,
    Value,
)


def tell(tracker: GroupTracker, fit: str, group: str, *messages: Message, rank: int = 0) -> list[Message | None]:
    """Return what the tracker makes of messages of a worker."""
    return [tracker.record(Envelope(fit, group, rank, each)) for each in messages]


def test_an_attempt_tells_what_it_had_trained_and_what_of_it_was_lost() -> None:
    tracker = GroupTracker()
    fit = tracker.start_fit()
    tell(tracker, fit, "a", Started(2, "n1"), Resumed("run", 0, 0, None), ProgressUpdate("run", 7, 5, 70))
    tell(tracker, fit, "a", Started(2, "n2"), rank=1)
    tracker.end_fit("lost", "rank 1 died")
    tracker.start_fit()
    tracker.end_fit("lost", "a machine was lost before anybody began")
    fit = tracker.start_fit()
    tell(
        tracker,
        fit,
        "b",
        Started(1, "n1"),
        Resumed("run", 8, 3, Path("step-3.pt")),
        ProgressUpdate("run", 24, 9, 120),
        Value(b""),
    )
    assert tracker.group is not None
    assert tracker.group.is_complete
    tracker.end_fit("completed")

    first, nobody, last = summarize_attempts(tracker.groups)
    assert (first.number, first.world_size, first.nodes) == (1, 2, ("n1", "n2"))
    assert (first.kind, first.failure) == ("lost", "rank 1 died")
    assert (first.resumed_at, first.lost) == (None, Work(6, 2))
    assert (nobody.number, nobody.world_size, nobody.kind, nobody.lost) == (2, 0, "lost", None)
    assert (last.kind, last.failure, last.resumed_at, last.lost) == ("completed", None, Work(8, 3), None)
    assert all(each.seconds >= 0 for each in (first, nobody, last))


def test_a_pulse_that_is_older_than_the_checkpoint_loses_nothing() -> None:
    tracker = GroupTracker()
    tell(tracker, tracker.start_fit(), "a", Started(1, "n"), Resumed("run", 0, 0, None), ProgressUpdate("run", 3, 3, 3))
    tracker.end_fit("preempted", "its price rose")
    tell(tracker, tracker.start_fit(), "b", Started(1, "n"), Resumed("run", 5, 5, Path("step-5.pt")))
    tracker.end_fit("completed")
    assert summarize_attempts(tracker.groups)[0].lost == Work(0, 0)


def test_only_where_the_first_training_of_a_group_began_counts() -> None:
    tracker = GroupTracker()
    path = Path("step-5.pt")
    tell(
        tracker,
        tracker.start_fit(),
        "a",
        Started(1, "n"),
        Resumed("run", 5, 5, path),
        Ended(b""),
        Resumed("run", 0, 0, None),
    )
    tracker.end_fit("completed")
    assert summarize_attempts(tracker.groups)[0].resumed_at == Work(5, 5)


def test_workers_that_begin_anew_within_a_run_of_rays_were_resized() -> None:
    tracker = GroupTracker()
    fit = tracker.start_fit()
    tell(
        tracker, fit, "a", Started(1, "n1"), Resumed("run", 0, 0, None), ProgressUpdate("run", 8, 4, 8)
    )  # windows of two batches
    for rank in range(2):
        tell(tracker, fit, "b", Started(2, f"n{rank}"), rank=rank)
    tell(tracker, fit, "b", Resumed("run", 3, 3, Path("step-3.pt")))
    tracker.end_fit("completed")
    first, second = summarize_attempts(tracker.groups)
    assert (first.kind, first.failure, first.world_size, first.lost) == ("resized", None, 1, Work(2, 1))
    assert (second.kind, second.world_size, second.nodes) == ("completed", 2, ("n0", "n1"))


def test_what_comes_late_from_workers_that_are_no_more_is_dropped() -> None:
    tracker = GroupTracker()
    former = tracker.start_fit()
    tell(tracker, former, "a", Started(1, "n"))
    tracker.end_fit("lost", "rank 0 died")
    assert tell(tracker, former, "a", Value(b"late")) == [None]
    fit = tracker.start_fit()
    assert tell(tracker, former, "a", Value(b"late"), Started(1, "n")) == [None, None]
    assert tracker.group is None
    tell(tracker, fit, "b", Started(2, "n"))
    tell(tracker, fit, "c", Started(1, "n"))
    assert tell(tracker, fit, "b", Value(b"late"), Started(2, "n")) == [None, None]
    assert tracker.group is not None
    assert tracker.group.values == {}
    assert (len(tracker.groups), tracker.group_id) == (3, "c")


def test_values_of_some_ranks_are_no_completion() -> None:
    tracker = GroupTracker()
    fit = tracker.start_fit()
    tell(tracker, fit, "a", Started(2, "n"), Value(b"0"))
    assert tracker.group is not None
    assert not tracker.group.is_complete
    tell(tracker, fit, "a", Started(2, "n"), Value(b"1"), rank=1)
    assert tracker.group.is_complete


def test_trainings_one_after_the_other_are_compared_by_their_names() -> None:
    """The second one of two is lost amid its epochs: the first one is at its end then, and repeats nothing."""
    tracker = GroupTracker()
    first, second = Path("first-9.pt"), Path("second-2.pt")
    told = (
        Resumed("first", 0, 0, None),
        ProgressUpdate("first", 9, 9, 9),
        Resumed("second", 0, 0, None),
        ProgressUpdate("second", 4, 4, 4),
    )
    tell(tracker, tracker.start_fit(), "a", Started(1, "n"), *told)
    assert tracker.group is not None
    assert tracker.group.batches_done == 13
    tracker.end_fit("lost", "rank 0 died")
    tell(tracker, tracker.start_fit(), "b", Started(1, "n"), Resumed("first", 9, 9, first))
    tracker.end_fit("lost", "rank 0 died again")
    tell(
        tracker,
        tracker.start_fit(),
        "c",
        Started(1, "n"),
        Resumed("first", 9, 9, first),
        Resumed("second", 2, 2, second),
    )
    tracker.end_fit("completed")
    assert [each.lost for each in summarize_attempts(tracker.groups)] == [Work(2, 2), None, None]
    assert [each.resumed_at for each in summarize_attempts(tracker.groups)] == [None, Work(9, 9), Work(11, 11)]
