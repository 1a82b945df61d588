"""When ranks act on requests of some or all of them: a model of docs/explanation/ranks.md, and its cases."""

from __future__ import annotations

from pathlib import Path

import heliograph as h
from heliograph.tests.core.distributed.test_agreement import train
from heliograph.tests.ranks_pool import Pool
from heliograph_recorder import Recorder


def veto_on_one_rank(folder: Path) -> tuple[list[tuple[str, int, int, int | None]], str]:
    """Ask for a save after every step, and veto two of them on rank 1; return the vetoes and the story."""

    class Vetoer(h.Plugin):
        @h.on(h.StepEnd)
        def veto(self, run: h.Run, event: h.StepEnd) -> None:
            if run.engine.rank == 1 and run.progress.steps in (3, 4):
                run.control.veto_save("no better")

    saves = h.SaveSchedule(h.Every(steps=1), at_end=False)
    result, _ = train([Vetoer(), saves, h.Checkpoint(folder / "x"), Recorder(folder / "recording")])
    vetoes = [(each.by, each.step, each.times, each.rank) for each in result.history if each.verb == "veto_save"]
    return vetoes, " ".join(result.explain().split())


def test_a_veto_of_one_rank_is_in_the_history_of_all(ranks: Pool, tmp_path: Path) -> None:
    (main, story), (other, _) = ranks(2).run(veto_on_one_rank, tmp_path)
    assert main == [("vetoer", 3, 2, 1)]
    assert other == [("vetoer", 3, 2, None)]
    assert "requested twice (every step)" in story
