"""The matrix of resumes on two ranks: killed anywhere, on one of them or on both, against uninterrupted runs."""

from __future__ import annotations

import logging
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph import tuning
from heliograph.core.checkpoint.schema import BatchChange
from heliograph.core.engines.options import PrecisionName
from heliograph.core.task import Losses
from heliograph.tests import test_resume as alone
from heliograph.tests.kit import adam, saving, sgd
from heliograph.tests.messages import assert_each, assert_facts
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

BOTH = (0, 1)
DEALT = (
    *alone.MODES,
    "map",
    "torch",
    "phases",
    "list",
)  # each rank reads its share; of the other kinds each reads what it has
SCHEDULERS: tuple[alone.Steps | None, ...] = (None, "step", "epoch", "plateau")
Events = set[type[h.Event]]


@dataclass(frozen=True, repr=False)
class Kill(alone.Kill):
    """Strikes on some of the ranks only."""

    ranks: tuple[int, ...] = BOTH

    def __repr__(self) -> str:
        return f"{super().__repr__()}, on {self.ranks}"


@dataclass(frozen=True)
class Scenario(alone.Scenario):
    """A run on two ranks. `several` trains two models, each with an optimizer; rank 1 may read `more` samples."""

    precision: PrecisionName = "fp32"
    several: bool = False
    more: int = 0


# The training: the weights are the same on both ranks, what is drawn and asked for is not.


class Pair(h.Task):
    """Two models, whose losses come one by one."""

    def __init__(self, *, counts: bool = False) -> None:
        self.first, self.second, self.counts = alone.Net(), alone.Net(), counts

    def training_step(self, run: h.Run, given: Any) -> Losses:
        batch = alone.joined(given)
        for name, model in run.modules.items():
            outputs: Tensor = model(batch + alone.draw() / 10)
            run.track("loss", (outputs.detach() - batch.sum(1, keepdim=True)).square().mean(), len(batch))
            yield name, alone.loss_of(outputs, batch, counts=self.counts)

    def validation_step(self, run: h.Run, batch: Tensor) -> dict[str, Tensor | float]:
        outputs = self.first(batch) + self.second(batch)
        return {"loss": (outputs - batch.sum(1, keepdim=True)).square().mean(), "draw": alone.draw()}


class Nudge(h.Plugin):
    """Changes weights now and then, at moments that filters count."""

    @h.on(h.StepEnd, when=h.Every(emissions=3))
    def often(self, run: h.Run, event: h.StepEnd) -> None:
        self.nudge(run, 1.01)

    @h.on(h.StepEnd, when=h.Once())
    def once(self, run: h.Run, event: h.StepEnd) -> None:
        self.nudge(run, 1.05)

    def nudge(self, run: h.Run, factor: float) -> None:
        for module in run.modules.values():
            for parameter in module.parameters():
                parameter.data.mul_(factor)


class Meddle(alone.Meddle):
    """Asks on rank 1 only."""

    asks = ("skip_batch", "skip_step")

    @h.on(h.BatchStart)
    def leave_out(self, run: h.Run, event: h.BatchStart) -> None:
        if run.engine.rank:
            super().leave_out(run, event)

    @h.on(h.GradientsReady)
    def drop(self, run: h.Run, event: h.GradientsReady) -> None:
        if run.engine.rank:
            super().drop(run, event)

    @h.on(h.BatchEnd)
    def end(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.engine.rank:
            super().end(run, event)


class Watch(alone.Watch):
    """Takes the final state, for which all ranks are needed, of runs that did not fail."""

    @h.on(*alone.WATCHED, lane=h.Lane.REPORT)
    def receive(self, run: h.Run, event: h.Event) -> None:
        if not isinstance(event, h.RunClosed) or event.status != "failed":
            super().receive(run, event)


class Killer(alone.Killer):
    """Ends an attempt on some ranks; the others learn of it."""

    kill: Kill

    def strike(self, run: h.Run, event: h.Event) -> None:
        if run.engine.rank in self.kill.ranks:
            super().strike(run, event)


def killer(kill: Kill) -> Killer:
    def receive(self: Killer, run: h.Run, event: h.Event) -> None:
        self.count_down(run, event)

    events: set[type[h.Event]] = {kill.event, h.TrainEnd} | ({h.BatchEnd} if kill.event is h.RunFailed else set())
    made: Killer = type("Killer", (Killer,), {"receive": h.on(*events, lane=kill.lane)(receive)})(kill)
    return made


# One attempt, all attempts, and the comparison.


@dataclass
class Attempt:
    """What one rank saw of an attempt, and how it ended there."""

    watch: Watch
    hits: Events
    error: BaseException | None = None
    report: h.ResumeReport | None = None


def rank() -> int:
    return int(os.environ["RANK"])


def optimizers_of(scenario: Scenario) -> dict[str, Any]:
    optimizer: Any = adam(0.05)  # one of several, then
    scheduler = alone.scheduler_of(scenario)
    if not scenario.several:
        return {"optimizer": optimizer, "scheduler": scheduler}
    several = {"first": optimizer, "second": sgd(0.02, momentum=0.9)}
    return {"optimizer": several, "scheduler": scheduler and dict.fromkeys(several, scheduler)}


def plugins_of(scenario: Scenario, folder: Path) -> list[Any]:
    """Return the plugins of a run, all but those that watch and kill."""
    plugins = alone.plugins_of(replace(scenario, nudges=False, meddles=False), folder)
    meddling = [Meddle(), alone.Quarrel()] if scenario.meddles else []
    return plugins + [Nudge()] * scenario.nudges + meddling


def run_attempt(
    scenario: Scenario,
    folder: Path,
    kill: Kill | None = None,
    *,
    number: int = 0,
    task: Any = None,
    rehearse: bool = False,
    **data: Any,
) -> Attempt:
    """Train until the end or until killed, in processes that drew all sorts of numbers before."""
    watch, killers = Watch(), [] if kill is None else [killer(kill)]
    trained_with = plugins_of(scenario, folder)
    plugins = [*trained_with, watch]
    plugins = [*killers, *plugins] if kill is not None and kill.first else [*plugins, *killers]
    torch.manual_seed(1)
    task = task or (Pair if scenario.several else alone.Drawing)(counts=scenario.counts)
    data = data or alone.data_of(replace(scenario, samples=scenario.samples + scenario.more * rank()), 0)
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(2 * number + rank())
    error: BaseException | None = None
    report = None
    logger = logging.getLogger("heliograph")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # hundreds of runs would fill the report of a failure
    arguments = {
        **data,
        "validation": DataLoader(alone.Unseen(5), 2) if scenario.validate else None,
        **optimizers_of(scenario),
        "epochs": scenario.epochs,
        "steps": scenario.steps,
    }
    try:
        if rehearse:
            tuning.rehearse(h.Trainer(trained_with, device="cpu", precision=scenario.precision), task, **arguments)
        report = h.Trainer(plugins, device="cpu", precision=scenario.precision).fit(task, **arguments).resume
    except (alone.Killed, h.RankFailed) as failure:
        error = failure
    finally:
        logger.setLevel(level)
    return Attempt(watch, {event for each in killers for event in each.hits}, error, report)


def check(scenario: Scenario, folder: Path, *series: tuple[Kill, ...]) -> tuple[list[Events], dict[str, Any]]:
    """Interrupt a run in each of these ways; compare it on this rank with an uninterrupted one.

    Returns:
        The events at which it was interrupted, for each way, and the weights in the end.
    """
    whole = run_attempt(scenario, folder / "whole").watch
    hits: list[Events] = []
    for number, kills in enumerate(series):
        killed = folder / f"killed {number}"
        attempts = [
            run_attempt(scenario, killed, kill, number=attempt, rehearse=scenario.rehearses and not attempt)
            for attempt, kill in enumerate((*kills, None))
        ]
        for kill, attempt in zip((*kills, None), attempts, strict=True):
            check_end(kill, attempt)
        check_equal(whole, attempts, kills)
        assert alone.reported(killed) == alone.reported(folder / "whole")
        hits.append({event for attempt in attempts for event in attempt.hits})
    return hits, {path: value for path, value in whole.final.items() if path.startswith("modules.")}


def check_end(kill: Kill | None, attempt: Attempt) -> None:
    """Assert how an attempt ended: by an error of this rank's own, or by one of the other, which is named."""
    error = attempt.error
    if kill is None or kill.how == "stop":
        assert error is None, f"{kill}: {error}"
        # In time to be received: also what is saved during these comes too late.
        if attempt.hits and not attempt.hits & {h.LastBoundary, h.TrainEnd, h.RunClosed}:
            assert attempt.watch.final["status"] == "stopped", str(kill)
    elif kill.ranks == BOTH:
        assert isinstance(error, alone.Killed | h.RankFailed), f"{kill}: {error!r}"
    elif rank() in kill.ranks:
        assert isinstance(error, alone.Killed), f"{kill}: {error!r}"
    else:
        assert isinstance(error, h.RankFailed), f"{kill}: {error!r}"
        assert ((error.rank,), error.kind.rpartition(".")[2]) == (kill.ranks, "Killed"), f"{kill}: {error}"


def check_equal(whole: Watch, attempts: list[Attempt], kills: tuple[Kill, ...]) -> None:
    """Assert that what one attempt or another had is what the uninterrupted run had."""
    facts: dict[tuple[Any, ...], set[Any]] = defaultdict(set)
    for number, (kill, attempt) in enumerate(zip((*kills, None), attempts, strict=True)):
        alone.compare(f"rank {rank()}, attempt {number}, {kill or 'left alone'}", attempt.watch.facts, whole.facts)
        for key, values in attempt.watch.facts.items():
            facts[key] |= values
    missing = [key for key in whole.facts if key not in facts]
    assert not missing, f"never happened in any attempt: {missing[0]}"
    of_the_kills = "plugins.save_schedule.last" if any(kill.how == "stop" for kill in kills) else "nothing"
    last = attempts[-1].watch
    paths = [path for path in alone.differing(whole, last) if not path.endswith(of_the_kills)]
    assert not paths, "\n".join(
        f"rank {rank()}, {path}: {whole.final[path]} uninterrupted, {last.final[path]} in the end" for path in paths[:5]
    )


# The matrix.


def drawn(seed: int) -> Scenario:
    """Draw a run that makes sense, with its kills; seeds that follow on one another give runs of all kinds.

    Hypothesis, which draws hundreds of them for one process, would spend the few examples here on much the same.
    """
    numbers = random.Random(seed)
    pick = numbers.choice
    kind = alone.KINDS[seed % len(alone.KINDS)]
    is_dealt = kind in DEALT
    how: Literal["raise", "stop"] = pick(("raise", "stop"))
    ends = how == "raise" and pick((True, False))  # a stop is an end: what is done there is done once more
    background = pick((True, False))
    schedules = {"batches": numbers.randint(1, 5)}, {"batches": numbers.randint(1, 3), "after": 4}, {"epochs": 1}
    has_length = kind != "phases" and "unsized" not in kind and kind not in ("min", "max")
    # Where to roll back to is certain only with a save at the start, and with none under way.
    going_back: Literal["skip", "roll back"] = "roll back" if ends and not background else "skip"
    poison: Literal["skip", "roll back"] | None = pick((None, "skip", going_back))
    return Scenario(
        kind=kind,
        shuffled=pick((True, False)),
        samples=numbers.randint(10, 20) * (2 if is_dealt else 1),
        more=0 if is_dealt else pick((0, 3)),
        batch_size=numbers.randint(2, 3),
        accumulation=pick((1, 3)),
        epochs=pick((2, *([1.4] if has_length else []))),
        scheduler=pick((*SCHEDULERS, "warmup") if has_length else SCHEDULERS),
        save=pick(schedules),
        validate=pick((None, *schedules)),
        log={"fraction": 0.3} if has_length else {"steps": numbers.randint(1, 3)},
        asks=how == "raise" and poison != "roll back" and pick((True, False)),  # it asks at the end, too
        ends=ends,
        patience=pick((None, 2, 4)),
        poison=poison,
        nudges=pick((True, False)),
        meddles=pick((True, False)),
        background=background,
        precision=pick(("fp32", "bf16", "fp16")),
        several=pick((True, False)),
        kills=tuple(
            Kill(
                pick(alone.EVENTS),
                numbers.randint(1, 6),
                pick(list(h.Lane)),
                pick((True, False)),
                how,
                pick(((0,), (1,), BOTH)),
            )
            for _ in range(3)
        ),
        counts=pick((True, False)),
        rehearses=pick((True, False)),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(14))
def test_a_run_that_is_killed_anywhere_ends_where_an_uninterrupted_one_ends(
    ranks: Pool, tmp_path: Path, seed: int
) -> None:
    scenario = drawn(seed)
    print(scenario)
    (_, weights), (_, others) = ranks(2).run(check, scenario, tmp_path, scenario.kills)
    assert weights == others


CUT_SHORT = Scenario("stateful", samples=11, batch_size=2, more=3, kills=(Kill(h.EpochEnd, ranks=(0,)),) * 3)
FOUND = {
    "a loader that had more than the other rank's continued with that": CUT_SHORT,
    "and one without a length": replace(CUT_SHORT, kind="unsized stateful"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("scenario", FOUND.values(), ids=FOUND)
def test_what_went_wrong_once(ranks: Pool, tmp_path: Path, scenario: Scenario) -> None:
    ranks(2).run(check, scenario, tmp_path, scenario.kills)


RICH = Scenario(
    kind="unsized foreign",
    accumulation=2,
    samples=11,
    more=2,
    batch_size=2,
    scheduler="epoch",
    save={"batches": 3},
    validate={"batches": 4},
    log={"steps": 1},
    patience=4,
    nudges=True,
    meddles=True,
    several=True,
)
ONCE = (h.TrainStart, h.CheckpointLoaded, h.Replay, h.EpochEnd, h.LastBoundary, h.TrainEnd, h.RunFailed, h.RunClosed)


def twice(event: type[h.Event], one: int, other: int) -> tuple[Kill, ...]:
    """Stop at an event on one rank, then kill the other one there; what only a resumed run has, one has to come to."""
    first = Kill(h.BatchEnd, 3) if event is h.Replay else Kill(event)
    second = Kill(event, 1 if event in ONCE else 2, h.Lane.TRANSFORM, first=True)
    return replace(first, how="stop", ranks=(one,)), replace(second, ranks=(other,))


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(3))
def test_every_event_is_a_point_to_be_stopped_and_killed_at(ranks: Pool, tmp_path: Path, part: int) -> None:
    events = list(enumerate(alone.EVENTS))[part::3]
    series = [twice(event, number % 2, 1 - number % 2) for number, event in events]
    for hits, _ in ranks(2).run(check, RICH, tmp_path, *series, timeout=400):
        assert [event for (_, event), hit in zip(events, hits, strict=True) if event not in hit] == []


# Two ranks, then one, then two again.

Rows = dict[tuple[int, int], list[bytes]]


def rows_of(watch: Watch) -> Rows:
    """Return the samples of each batch, by its epoch and place in it."""
    rows = {}
    for (what, epoch, batch), values in watch.facts.items():
        if what == "batch":
            ((_, shape, data),) = values
            size = len(data) // shape[0]
            rows[epoch, batch] = [data[start : start + size] for start in range(0, len(data), size)]
    return rows


def together(of_ranks: Sequence[Rows]) -> Rows:
    """Return the samples of each batch that all ranks had, in the order in which they were dealt out."""
    places = set.intersection(*(set(rows) for rows in of_ranks))
    dealt = {place: zip(*(rows[place] for rows in of_ranks), strict=True) for place in places}
    return {place: [sample for samples in dealt[place] for sample in samples] for place in places}


def read_on(scenario: Scenario, folder: Path, kill: Kill | None, number: int) -> tuple[Rows, h.ResumeReport | None]:
    order: Any = {"shuffle": True}
    if not scenario.shuffled:
        order = {"sampler": WeightedRandomSampler([1.0, 2.0] * (scenario.samples // 2), scenario.samples)}
    params = {"global_batch_size": scenario.batch_size, "draws_per": "sample", **order}
    data: Any = {"train": alone.Samples(scenario.samples), "loader_params": params}
    attempt = run_attempt(scenario, folder, kill, number=number, **data)
    check_end(kill, attempt)
    return rows_of(attempt.watch), attempt.report


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shuffled", "accumulation"), [(True, 1), (False, 3)])
def test_from_two_ranks_to_one_and_back_the_samples_come_in_the_same_order(
    ranks: Pool, tmp_path: Path, shuffled: bool, accumulation: int
) -> None:
    """With `global_batch_size` and `draws_per='sample'` even what is drawn for each of them."""
    scenario = Scenario(
        samples=22, batch_size=4, accumulation=accumulation, shuffled=shuffled, save={"batches": 1}, epochs=3
    )
    whole = together([rows for rows, _ in ranks(2).run(read_on, scenario, tmp_path / "whole", None, 0)])
    first = ranks(2).run(read_on, scenario, tmp_path / "attempts", Kill(h.BatchEnd, 5, ranks=(1,)), 1)
    second = ranks(1).run(read_on, scenario, tmp_path / "attempts", Kill(h.BatchStart, 7, ranks=(0,)), 2)
    third = ranks(2).run(read_on, scenario, tmp_path / "attempts", None, 3)

    seen: Rows = {}
    for attempt in (first, second, third):
        rows = together([rows for rows, _ in attempt])
        assert rows == {place: whole[place] for place in rows}
        assert not rows.keys() <= seen.keys()
        seen |= rows
    assert seen == whole
    for _, report in third:
        assert report is not None
        assert report.reasons
        assert_each(
            [reason.partition(":")[0] for reason in report.reasons],
            ("2 processes", "1 resumed"),
            ("random generators", "rank 1"),
            ("1 processes", "2 resumed"),
            ("rank 1", "no saved state"),
        )


def change_the_batch(folder: Path, size: int, epochs: int, change: BatchChange = "refuse") -> tuple[str, float]:
    """Train on with so many samples per step; return why that was refused, and the learning rate."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = h.Supervised(model, lambda outputs, targets: (outputs - targets).square().mean())
    data = TensorDataset(torch.rand(24, 3), torch.rand(24, 1))
    refused = ""
    try:
        resume = h.Resume("auto", batch_change=change)
        h.Trainer(saving(folder, h.Every(epochs=1), resume=resume), device="cpu").fit(
            task, data, loader_params={"global_batch_size": size}, optimizer=optimizer, epochs=epochs
        )
    except ValueError as error:
        refused = str(error)
    return refused, optimizer.param_groups[0]["lr"]


def test_another_global_batch_is_refused_with_another_number_of_ranks(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(change_the_batch, tmp_path, 4, 1)
    facts = ("2 ranks", "batch_size 2", "accumulation 1", "1 rank ")
    assert_facts(ranks(1).run(change_the_batch, tmp_path, 8, 2)[0][0], *facts)
    assert ranks(1).run(change_the_batch, tmp_path, 8, 2, "linear") == [("", 0.2)]
    assert "1 rank x batch_size" in ranks(2).run(change_the_batch, tmp_path, 4, 3)[1][0]
    assert ranks(2).run(change_the_batch, tmp_path, 4, 3, "linear") == [("", 0.1)] * 2


def resume_with_other_data(folder: Path, changes: bool) -> h.ResumeReport | None:
    """Train an epoch more, on data of which rank 1 may have another number; return the report of the resume."""
    inputs = torch.arange(24.0).reshape(12, 2) / 24
    if changes and rank() == 1:
        inputs[3, 0] += 1
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    task = h.Supervised(nn.Linear(2, 1), nn.functional.mse_loss)
    plugins = saving(folder, h.Every(epochs=1), resume="auto")
    loader, epochs = {"batch_size": 2}, 2 if changes else 1
    trainer = h.Trainer(plugins, device="cpu")
    return trainer.fit(task, data, loader_params=loader, optimizer=sgd(), epochs=epochs).resume


def test_what_one_rank_finds_changed_is_in_the_results_of_all(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(resume_with_other_data, tmp_path, False)
    reports = ranks(2).run(resume_with_other_data, tmp_path, True)

    assert None not in reports
    assert reports[0].reasons == reports[1].reasons
    assert "dataset.tensors was" in reports[0].reasons[0]
