"""When ranks act on what some or all of them ask for: a model of the definition in docs/ranks.md, and its cases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph.tests.kit import random_batches
from heliograph.tests.ranks_pool import Pool
from heliograph_recorder import Recorder
from hypothesis import strategies as st
from torch import nn

STEPS = 8  # of an epoch
VERBS = ("log", "validation", "save")
SERVED = {h.Log: "log", h.ValidationEnd: "validation", h.SavePoint: "save", h.EpochEnd: "epoch_end"}
Asked = Mapping[int, Mapping[int, tuple[str, ...]]]  # by step, by rank
Happened = list[tuple[int, str]]  # at which step, what


class Script(h.Plugin):
    """Asks on each rank for what a script says of the step that is done; notes what happens."""

    asks = ("log", "validation", "save", "stop")

    def __init__(self, asked: Asked, event: type[h.Event] = h.BatchEnd) -> None:
        self.asked, self.event = asked, event
        self.happened: Happened = []

    @h.on(h.BatchEnd, h.SavePoint, h.ShouldStop)
    def ask(self, run: h.Run, event: h.Event) -> None:
        if not isinstance(event, self.event) or not run.progress.batch:
            return
        control = run.control
        for verb in self.asked.get(run.progress.steps, {}).get(run.engine.rank, ()):
            if verb in VERBS:
                getattr(control, f"request_{verb}")("the script says so")
            elif verb == "withdraw":
                control.withdraw("save", "the script says so")
            else:
                getattr(control, verb)("the script says so")

    @h.on(*SERVED)
    def note(self, run: h.Run, event: h.Event) -> None:
        self.happened.append((run.progress.steps, SERVED[type(event)]))


def train(plugins: list[h.Plugin]) -> tuple[h.RunResult, list[Any]]:
    torch.manual_seed(0)
    task = h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
    engine = h.DDPEngine(device="cpu", timeout=60)
    result = h.Trainer(plugins, engine=engine).fit(
        task,
        random_batches(STEPS * engine.world_size),
        validation=random_batches(2, seed=1) if any(isinstance(each, Script) for each in plugins) else None,
        optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1),
        epochs=1,
    )
    return result, [each.tolist() for each in task.model.parameters()]


def scripts(ranks: int) -> st.SearchStrategy[dict[int, dict[int, tuple[str, ...]]]]:
    """Return scripts: at some steps, on some ranks, one or two requests; all of them ask the same now and then."""
    verb = st.sampled_from((*VERBS, *VERBS, *VERBS, "end_epoch", "stop"))
    several = st.lists(verb, min_size=1, max_size=2).map(tuple)
    alike = several.map(lambda verbs: dict.fromkeys(range(ranks), verbs))
    local = st.dictionaries(st.integers(0, ranks - 1), several, min_size=1, max_size=ranks)
    return st.dictionaries(st.integers(1, STEPS), st.one_of(alike, local, local), max_size=4)


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
    assert "requested twice (every step) was never served: vetoed by vetoer (no better)" in story
