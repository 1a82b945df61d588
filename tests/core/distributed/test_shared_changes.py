"""Changes of a run that some ranks request are made by all of them, at the same step and in the same order."""

from __future__ import annotations

import random
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import random_batches
from heliograph.tests.messages import assert_each
from heliograph.tests.ranks_pool import Way, travelling
from torch import nn

STEPS = 12
NAMES = ("one", "two")
EVENTS: tuple[Any, ...] = (h.BatchStart, h.StepEnd, h.BatchEnd, h.Log, h.ValidationEnd, h.ShouldStop)


class Silent(h.Plugin):
    """Does nothing, and can be switched off."""

    affects_training = False

    @h.on(h.EpochEnd)
    def look(self, run: h.Run, event: h.EpochEnd) -> None:
        pass


class Asker(h.Plugin):
    """Requests random changes at random events, other ones on each rank."""

    affects_training = False

    def __init__(self, seed: int, rank: int) -> None:
        self.random, self.rank = random.Random(f"{seed} {rank}"), rank

    @h.on(*EVENTS)
    def ask(self, run: h.Run, event: h.Event) -> None:
        for _ in range(self.random.choice([0, 0, 0, 1, 2])):
            what, by = self.random.randrange(3), self.random.choice(["ann", "bob"])
            if what == 0:
                run.control.set_learning_rate(self.random.choice([0.1, 0.2, 0.3]), "why", by=by)
            elif what == 1:
                run.control.disable_plugin(self.random.choice(NAMES), "why", by=by)
            else:
                run.control.enable_plugin(self.random.choice(NAMES), "why", by=by)


class Served(h.Plugin):
    """Notes what was changed, and where."""

    def __init__(self) -> None:
        self.changes: list[Any] = []
        self.rates: list[float] = []

    @h.on(h.ChangeServed)
    def note(self, run: h.Run, event: h.ChangeServed) -> None:
        enabled = tuple(name in run.plugins and run.plugins.is_enabled(name) for name in NAMES)
        self.changes.append((run.progress.steps, event, run.optimizer.param_groups[0]["lr"], enabled))

    @h.on(h.GradientsReady)
    def keep(self, run: h.Run, event: h.GradientsReady) -> None:
        self.rates.append(run.optimizer.param_groups[0]["lr"])


def train(seed: int, way: Way) -> Any:
    with travelling(way):
        torch.manual_seed(0)
        task, served = h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss), Served()
        engine = h.DDPEngine(device="cpu", timeout=20)
        every = h.Every(steps=3)
        schedules = [h.LogSchedule(every), h.ValidationSchedule(every)]
        plugins = [Silent().named(name) for name in NAMES]
        trainer = h.Trainer([*schedules, *plugins, Asker(seed, engine.rank), served], engine=engine)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
        size = engine.world_size
        result = trainer.fit(
            task, random_batches(size * STEPS), validation=random_batches(2 * size), optimizer=optimizer, epochs=1
        )
        asked = {str(each) for each in result.history if each.verb.endswith(("rate", "plugin"))}
        weights = torch.cat([each.detach().flatten() for each in task.model.parameters()]).tolist()
    return served.changes, served.rates, weights, asked


@pytest.mark.parametrize("way", ["board", "gloo"])
@pytest.mark.parametrize("seed", range(3))
def test_random_changes_are_made_alike_on_all_ranks(ranks: Any, seed: int, way: Way) -> None:
    outcomes = ranks(2).run(train, seed, way)
    (changes, rates, weights, _), *others = outcomes
    assert len(changes) > 10
    assert all((each[0], each[1], each[2]) == (changes, rates, weights) for each in others)
    last = [each for each in changes if each[1].verb == "set_learning_rate"][-1]
    assert last[2] == last[1].value


def ask_on_rank_1() -> Any:
    class Once(h.Plugin):
        @h.on(h.BatchEnd)
        def ask(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.engine.rank == 1 and run.progress.batch == 4:
                for rate in (0.2, 0.3):
                    run.control.set_learning_rate(rate, "why", by="ann")

    task, served = h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss), Served()
    trainer = h.Trainer([Once(), served], engine=h.DDPEngine(device="cpu", timeout=20))
    result = trainer.fit(task, random_batches(2 * STEPS), optimizer=torch.optim.SGD, epochs=1)
    return served.changes, [str(each) for each in result.history]


def test_the_history_of_every_rank_names_who_asked(ranks: Any) -> None:
    first, second = ranks(2).run(ask_on_rank_1)
    assert first[0] == second[0]
    assert [(step, each.value, each.by) for step, each, *_ in first[0]] == [(5, 0.2, "ann"), (5, 0.3, "ann")]
    assert_each(first[1], *[("step 4", "ann on rank 1", f"set_learning_rate {rate}", "why") for rate in ("0.2", "0.3")])


def enable_what_may_skip() -> Any:
    class Skipping(h.Plugin):
        asks = ("skip_batch",)

        @h.on(h.BatchStart)
        def skip(self, run: h.Run, event: h.BatchStart) -> None:
            run.control.skip_batch("never reached")

    class Once(h.Plugin):
        @h.on(h.BatchEnd)
        def ask(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.batch == 4:
                run.control.enable_plugin("skipping", "why", by="ann")

    task, served = h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss), Served()
    trainer = h.Trainer(
        [Once(), Skipping(), *(Silent().named(name) for name in NAMES), served],
        engine=h.DDPEngine(device="cpu", timeout=20),
    )
    trainer.plugins.disable("skipping")
    result = trainer.fit(task, random_batches(2 * STEPS), optimizer=torch.optim.SGD, epochs=1)
    return result.progress.steps, served.changes[0][1].refusal


def test_a_plugin_that_the_ranks_would_have_to_vote_on_is_not_enabled(ranks: Any) -> None:
    first, second = ranks(2).run(enable_what_may_skip)
    assert first == second
    assert first[0] == STEPS
    assert first[1].startswith("plugin 'skipping' requests skip_batch")
