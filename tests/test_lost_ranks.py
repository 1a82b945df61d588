"""Ranks that cannot say that they failed: killed, or hanging. Some of these processes die: they are not the pool's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from heliograph import RankFailed, launch
from heliograph.tests.lost_rank import train
from heliograph.tests.messages import assert_each, assert_facts


def lose(
    folder: Path, rank: int, how: str, *where: str | int, grace: float = 60.0
) -> tuple[RankFailed, dict[str, Any], str]:
    """Lose one of two ranks; return what launch raised, what the other saw, and what it logged."""
    error, (seen,) = lose_of(2, folder, rank, how, *where, grace=grace)
    return error, seen, (folder / f"{1 - rank}.log").read_text()


def lose_of(
    count: int, folder: Path, rank: int, how: str, *where: str | int, grace: float = 60.0
) -> tuple[RankFailed, list[dict[str, Any]]]:
    """Lose one of several ranks; return what launch raised, and what each of the others saw."""
    with pytest.raises(RankFailed) as caught:
        launch(train, folder, rank, how, *where, nprocs=count, grace=grace)
    assert vars(caught.value)["heliograph_rank"] == rank
    seen = [json.loads((folder / f"{each}.json").read_text()) for each in range(count) if each != rank]
    for each in seen:
        assert each["cause"] in ("RuntimeError", "DistError", "LateRankError")  # of gloo, or of the board
        assert (each["status"], each["ended"]) == ("failed", ["run_failed", "run_closed"])
    return caught.value, seen


@pytest.mark.whole
@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_by_the_other(tmp_path: Path, rank: int) -> None:
    error, seen, _ = lose(tmp_path, rank, "die")
    assert (error.rank, error.kind) == (rank, "died")
    assert (seen["rank"], seen["kind"]) == (rank, "died")
    assert_facts(seen["text"], "no sign of life", "2 s")


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("where", "others"),
    [
        ("batch_start", "work"),  # the summary of a rank is there, and the rank is missed where gradients are exchanged
        ("batch_start", "ask"),
        ("batch_end", "work"),
        ("batch_end", "ask"),  # it is missed where the other waits for its summary
    ],
)
def test_a_rank_that_is_killed_around_its_summary_is_named_by_the_other(
    tmp_path: Path, rank: int, where: str, others: str
) -> None:
    error, seen, _ = lose(tmp_path, rank, "die", where, others, 8)
    assert (error.rank, error.kind) == (rank, "died")
    assert (seen["rank"], seen["kind"]) == (rank, "died")
    assert_facts(seen["text"], "no sign of life", "2 s")


@pytest.mark.whole
@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("way", ["gloo", "board"])
def test_of_three_ranks_each_survivor_names_the_one_that_it_waited_for(tmp_path: Path, rank: int, way: str) -> None:
    """By gloo each rank has a connection of its own to the one that is killed; whichever breaks first."""
    error, seen = lose_of(3, tmp_path, rank, "die", "batch_end", "ask", 12, way)
    assert (error.rank, error.kind) == (rank, "died")
    assert [(each["rank"], each["kind"]) for each in seen] == [(rank, "died")] * 2
    assert_each([each["text"] for each in seen], *[("no sign of life", "2 s")] * 2)


@pytest.mark.whole
@pytest.mark.parametrize("others", ["work", "ask"])
def test_a_rank_that_hangs_before_its_summary_is_named_by_the_other(tmp_path: Path, others: str) -> None:
    error, seen, log = lose(tmp_path, 1, "hang", "batch_end", others, 8)
    assert (error.rank, error.kind) == (1, "hung")
    assert (seen["rank"], seen["kind"]) == (1, "hung")
    waits = {"work": "backward", "ask": "the boundary"}[others]
    assert log.splitlines()[1].startswith(f"  rank 0 waits in {waits} for 1 s; in train, epoch 0, batch 2, step 2; at ")


@pytest.mark.whole
def test_a_rank_that_hangs_is_reported_named_and_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    error, seen, log = lose(tmp_path, 1, "hang")
    assert (error.rank, error.kind) == (1, "hung")
    assert not [note for note in error.__notes__ if "rank 1" in note.partition("\n")[0]]
    assert "(rank 1 hung)." in capfd.readouterr().err
    assert (seen["rank"], seen["kind"]) == (1, "hung")
    assert seen["text"].startswith("it is in no collective; in train, epoch 0, batch 2, step 2; at ")
    assert " < hang_for_ever (lost_rank.py:" in seen["text"]
    first, waits, hangs = log.splitlines()[:3]
    assert first == "rank 0 waits in a collective. Places of the ranks:"
    assert waits.startswith("  rank 0 waits in the boundary for 1 s; in train, epoch 0, batch 2, step 2; at ")
    assert " < hang_for_ever (lost_rank.py:" in hangs
    assert_facts(log, "in no collective: rank 1", "in hang_for_ever", "in Lose.lose")
    assert log.index("stacks of rank 1") < log.index("in hang_for_ever") < log.index("in Lose.lose")


@pytest.mark.whole
def test_a_rank_that_is_stopped_is_named_by_the_other(tmp_path: Path) -> None:
    error, seen, _ = lose(tmp_path, 1, "stop", grace=1.0)
    assert (error.rank, error.kind) == (seen["rank"], seen["kind"]) == (1, "hung")
    assert_facts(error.text, "no sign of life", "2 s", "SIGSTOP")
    assert_facts(error.__notes__[-1], "rank 1", "1 s", "killed")
