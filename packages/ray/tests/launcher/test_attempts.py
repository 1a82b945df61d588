"""The workers' messages by worker group, and the summaries of the attempts."""

from __future__ import annotations

from pathlib import Path

from heliograph_ray.launcher.attempts import GroupTracker, Work, summarize_attempts
from heliograph_ray.launcher.mailbox import Ended, Envelope, Message, ProgressUpdate, Resumed, Started, Value


def record(tracker: GroupTracker, fit: str, group: str, *messages: Message, rank: int = 0) -> list[Message | None]:
    """Record messages of a worker; return the results."""
    return [tracker.record(Envelope(fit, group, rank, each)) for each in messages]


def test_an_attempt_has_the_work_that_it_did_and_lost() -> None:
    tracker = GroupTracker()
    fit = tracker.start_fit()
    record(tracker, fit, "a", Started(2, "n1"), Resumed("run", 0, 0, None), ProgressUpdate("run", 7, 5, 70))
    record(tracker, fit, "a", Started(2, "n2"), rank=1)
    tracker.end_fit("lost", "rank 1 died")
    tracker.start_fit()
    tracker.end_fit("lost", "a machine was lost")
    fit = tracker.start_fit()
    record(
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

    first, empty, last = summarize_attempts(tracker.groups)
    assert (first.number, first.world_size, first.nodes) == (1, 2, ("n1", "n2"))
    assert (first.kind, first.failure) == ("lost", "rank 1 died")
    assert (first.resumed_at, first.lost) == (None, Work(6, 2))
    assert (empty.number, empty.world_size, empty.kind, empty.lost) == (2, 0, "lost", None)
    assert (last.kind, last.failure, last.resumed_at, last.lost) == ("completed", None, Work(8, 3), None)
    assert all(each.seconds >= 0 for each in (first, empty, last))


def test_no_work_is_lost_if_the_checkpoint_is_newer_than_the_progress() -> None:
    tracker = GroupTracker()
    record(
        tracker, tracker.start_fit(), "a", Started(1, "n"), Resumed("run", 0, 0, None), ProgressUpdate("run", 3, 3, 3)
    )
    tracker.end_fit("preempted", "its price rose")
    record(tracker, tracker.start_fit(), "b", Started(1, "n"), Resumed("run", 5, 5, Path("step-5.pt")))
    tracker.end_fit("completed")
    assert summarize_attempts(tracker.groups)[0].lost == Work(0, 0)


def test_only_the_first_start_of_a_run_counts() -> None:
    tracker = GroupTracker()
    path = Path("step-5.pt")
    record(
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


def test_workers_that_restart_within_a_fit_were_resized() -> None:
    tracker = GroupTracker()
    fit = tracker.start_fit()
    record(
        tracker, fit, "a", Started(1, "n1"), Resumed("run", 0, 0, None), ProgressUpdate("run", 8, 4, 8)
    )  # windows of two batches
    for rank in range(2):
        record(tracker, fit, "b", Started(2, f"n{rank}"), rank=rank)
    record(tracker, fit, "b", Resumed("run", 3, 3, Path("step-3.pt")))
    tracker.end_fit("completed")
    first, second = summarize_attempts(tracker.groups)
    assert (first.kind, first.failure, first.world_size, first.lost) == ("resized", None, 1, Work(2, 1))
    assert (second.kind, second.world_size, second.nodes) == ("completed", 2, ("n0", "n1"))


def test_late_messages_of_ended_groups_are_dropped() -> None:
    tracker = GroupTracker()
    former = tracker.start_fit()
    record(tracker, former, "a", Started(1, "n"))
    tracker.end_fit("lost", "rank 0 died")
    assert record(tracker, former, "a", Value(b"late")) == [None]
    fit = tracker.start_fit()
    assert record(tracker, former, "a", Value(b"late"), Started(1, "n")) == [None, None]
    assert tracker.group is None
    record(tracker, fit, "b", Started(2, "n"))
    record(tracker, fit, "c", Started(1, "n"))
    assert record(tracker, fit, "b", Value(b"late"), Started(2, "n")) == [None, None]
    assert tracker.group is not None
    assert tracker.group.values == {}
    assert (len(tracker.groups), tracker.group_id) == (3, "c")


def test_a_group_is_complete_when_all_ranks_have_returned() -> None:
    tracker = GroupTracker()
    fit = tracker.start_fit()
    record(tracker, fit, "a", Started(2, "n"), Value(b"0"))
    assert tracker.group is not None
    assert not tracker.group.is_complete
    record(tracker, fit, "a", Started(2, "n"), Value(b"1"), rank=1)
    assert tracker.group.is_complete


def test_several_trainings_are_compared_by_their_names() -> None:
    """The second one of two is lost within an epoch: the first one has ended, and repeats nothing."""
    tracker = GroupTracker()
    first, second = Path("first-9.pt"), Path("second-2.pt")
    messages = (
        Resumed("first", 0, 0, None),
        ProgressUpdate("first", 9, 9, 9),
        Resumed("second", 0, 0, None),
        ProgressUpdate("second", 4, 4, 4),
    )
    record(tracker, tracker.start_fit(), "a", Started(1, "n"), *messages)
    assert tracker.group is not None
    assert tracker.group.batches_done == 13
    tracker.end_fit("lost", "rank 0 died")
    record(tracker, tracker.start_fit(), "b", Started(1, "n"), Resumed("first", 9, 9, first))
    tracker.end_fit("lost", "rank 0 died again")
    record(
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
