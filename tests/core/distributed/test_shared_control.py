"""What one rank asks, all ranks do, at the same step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import random_batches
from heliograph.tests.messages import assert_each, assert_facts
from heliograph.tests.ranks_pool import Way, travelling
from torch import nn

STEPS = 6
SEEN: tuple[Any, ...] = (h.SavePoint, h.ValidationEnd, h.Log, h.EpochEnd, h.TrainEnd)
EVENTS: dict[str, Any] = {
    name: getattr(h, name)
    for name in ("EpochStart", "BatchStart", "GradientsReady", "StepEnd", "BatchEnd", "EpochEnd", "Log", "ShouldStop")
}
EVENTS |= {name: getattr(h, name) for name in ("ValidationStart", "ValidationBatchEnd", "ValidationEnd", "SavePoint")}


def made_task() -> h.Supervised:
    torch.manual_seed(0)
    return h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss)


def trainer_of(*plugins: Any, **options: Any) -> h.Trainer:
    return h.Trainer(plugins, engine=h.DDPEngine(device="cpu", timeout=20, **options))


def fit(trainer: h.Trainer, **options: Any) -> h.RunResult:
    task = made_task()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    settings = {"epochs": 2, "validation": random_batches(4, seed=1), "optimizer": optimizer, **options}
    return trainer.fit(task, random_batches(2 * STEPS), **settings)  # every rank reads every second one


class Asker(h.Plugin):
    """On one rank, the second time that it receives an event, asks for something."""

    asks = ("validation", "save", "log", "stop")

    def __init__(self, event: str, verb: str, rank: int) -> None:
        self.event, self.verb, self.rank, self.received = EVENTS[event], verb, rank, 0

    @h.on(*EVENTS.values())
    def ask(self, run: h.Run, event: h.Event) -> None:
        if isinstance(event, self.event) and run.engine.rank == self.rank:
            self.received += 1
            if self.received == 2:
                getattr(run.control, self.verb)("because")


class Seen(h.Plugin):
    """Notes where some events came."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []

    @h.on(*SEEN)
    def note(self, run: h.Run, event: h.Event) -> None:
        self.events.append((type(event).name, run.progress.epoch, run.progress.steps))


def schedules() -> list[h.Plugin]:
    every = h.Every(steps=2)
    return [h.ValidationSchedule(every), h.SaveSchedule(every), h.LogSchedule(every)]


def ask_on_one_rank(event: str, verb: str, rank: int) -> Any:
    seen = Seen()
    result = fit(trainer_of(Asker(event, verb, rank), *schedules(), seen))
    asked = [str(each) for each in result.history if each.verb == verb.removeprefix("request_") and each.by == "asker"]
    return result.status, result.stopped_by, result.progress.state_dict() | {"earlier_seconds": 0}, seen.events, asked


@pytest.mark.sample(6)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("event", EVENTS)
def test_a_stop_of_one_rank_stops_all_at_the_same_step(ranks: Any, event: str, rank: int) -> None:
    first, second = ranks(2).run(ask_on_one_rank, event, "stop", rank)
    assert first[:4] == second[:4]
    assert first[0] == "stopped"
    assert first[1] == "asker"
    own, other = (first, second) if rank == 0 else (second, first)
    assert len(own[4]) == len(other[4]) == 1
    assert f"asker on rank {rank}: stop - because" in other[4][0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("verb", ["request_save", "request_validation", "request_log", "end_epoch"])
def test_any_request_of_one_rank_is_served_on_all(ranks: Any, verb: str, rank: int) -> None:
    first, second = ranks(2).run(ask_on_one_rank, "BatchEnd", verb, rank)
    assert first[:4] == second[:4]
    assert first[0] == "completed"
    expected = {"request_save": "save_point", "request_validation": "validation_end", "request_log": "log"}
    if verb != "end_epoch":
        assert (expected[verb], 0, 2) in first[3]
    else:  # at once, as the schedules of the other rank ask for something, too
        assert ("epoch_end", 1, 2) in first[3]


@pytest.mark.parametrize("event", ["EpochEnd", "ValidationEnd"])
def test_what_one_rank_asks_between_two_epochs_ends_none(ranks: Any, event: str) -> None:
    first, second = ranks(2).run(end_epoch_between_epochs, event)
    assert first == second == ("completed", 3, 3 * STEPS, 3)


def end_epoch_between_epochs(event: str) -> Any:
    class Between(h.Plugin):
        @h.on(EVENTS[event])
        def ask(self, run: h.Run, event: h.Event) -> None:
            if run.engine.rank == 1 and not run.progress.batch:
                run.control.end_epoch("this one")

    result = fit(trainer_of(Between(), h.ValidationSchedule(h.Every(epochs=1))), epochs=3)
    return result.status, result.progress.epoch, result.progress.steps, result.progress.validations


def veto_on_one_rank() -> Any:
    class Stopping(h.Plugin):
        asks = ("stop",)

        @h.on(h.StepEnd, when=h.At(steps=2))
        def ask(self, run: h.Run, event: h.StepEnd) -> None:
            run.control.stop("enough")

    class Vetoing(h.Plugin):
        @h.on(h.ShouldStop)
        def veto(self, run: h.Run, event: h.ShouldStop) -> None:
            if run.engine.rank == 1 and run.progress.steps < 5:
                run.control.veto_stop("too early")

    return fit(trainer_of(Stopping(), Vetoing()), validation=None).progress.steps


def test_a_veto_of_one_rank_holds_for_all(ranks: Any) -> None:
    assert ranks(2).run(veto_on_one_rank) == [5, 5]


def skip_on_one_rank(declared: bool, verb: str) -> Any:
    class Skipping(h.Plugin):
        asks = (verb,) if declared else ()

        @h.on(h.BatchStart, h.GradientsReady)
        def skip(self, run: h.Run, event: h.Event) -> None:
            stage = {"skip_batch": h.BatchStart, "skip_step": h.GradientsReady}[verb]
            if isinstance(event, stage) and run.engine.rank == 1 and run.progress.batch == 2:
                getattr(run.control, verb)("bad")

    task = made_task()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    result = trainer_of(Skipping()).fit(task, random_batches(2 * STEPS), optimizer=optimizer, epochs=1)
    progress = result.progress
    return progress.skipped_batches, progress.skipped_steps, progress.steps, task.model.state_dict()["weight"].tolist()


def skip_always_on_one_rank() -> str:
    class Skipping(h.Plugin):
        asks = ("skip_batch",)

        @h.on(h.BatchStart)
        def skip(self, run: h.Run, event: h.BatchStart) -> None:
            if run.engine.rank == 1:
                run.control.skip_batch("bad")

    with pytest.raises(RuntimeError) as caught:
        fit(trainer_of(Skipping()), validation=None, epochs=None, steps=4, max_skipped_steps=2 * STEPS)
    return str(caught.value)


def test_what_one_rank_skips_again_and_again_is_an_error_on_all(ranks: Any) -> None:
    first, second = ranks(2).run(skip_always_on_one_rank)
    assert "13 batches or steps" in first
    assert "skipped: a plugin" in first
    assert "skipped: skipping, 13" in second


def test_a_batch_that_one_rank_skips_is_skipped_by_all(ranks: Any) -> None:
    first, second = ranks(2).run(skip_on_one_rank, True, "skip_batch")
    assert first == second
    assert first[:3] == (1, 0, STEPS - 1)


def test_gradients_that_one_rank_drops_are_dropped_by_all(ranks: Any) -> None:
    first, second = ranks(2).run(skip_on_one_rank, True, "skip_step")
    assert first == second
    assert first[:3] == (0, 1, STEPS - 1)


@pytest.mark.parametrize("verb", ["skip_batch", "skip_step"])
def test_skipping_that_nobody_declared_is_refused(ranks: Any, verb: str) -> None:
    with pytest.raises(RuntimeError, match=rf"control\.{verb} was called"):
        ranks(2).run(skip_on_one_rank, False, verb)


def clocks(*plugins: h.Plugin) -> Any:
    seconds: list[float] = []
    trainer = trainer_of(*plugins)
    trainer.bus.on(h.BatchEnd, lambda run, event: seconds.append(run.progress.seconds))
    result = fit(trainer, validation=None)
    return seconds, result.progress.seconds


def test_all_ranks_go_by_the_main_ranks_clock(ranks: Any) -> None:
    """At the beginning of an epoch by that of now, and after a step by that of the boundary before."""
    first, second = ranks(2).run(clocks)
    assert first == second
    assert len(set(first[0])) == 2 * (STEPS - 1)
    assert first[0] == sorted(first[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_go_by_one_clock_where_only_one_of_them_waited_for_the_summaries(ranks: Any, rank: int) -> None:
    first, second = ranks(2).run(clocks, Asker("BatchEnd", "request_log", rank))
    assert first == second
    assert first[0] == sorted(first[0])


def signal_on_one_rank(stage: str, signum: int, rank: int, folder: Path) -> Any:
    class Sender(h.Plugin):
        received = 0

        @h.on(*EVENTS.values())
        def send(self, run: h.Run, event: h.Event) -> None:
            if isinstance(event, EVENTS[stage]) and run.engine.rank == rank:
                self.received += 1
                if self.received == 2:
                    os.kill(os.getpid(), signum)

    class Last(h.Plugin):
        @h.on(h.RunClosed)
        def note(self, run: h.Run, event: h.RunClosed) -> None:
            left.append((event.status, run.progress.steps, run.progress.batch))

    left: list[Any] = []
    former = signal.getsignal(signum)
    saves = [h.RNGCapture(), h.Checkpoint(folder)]
    error: BaseException | None = None
    try:
        fit(trainer_of(Sender(), *schedules(), h.Preemption([signal.SIGTERM]), *saves, Last()))
    except (KeyboardInterrupt, SystemExit) as ended:
        error = ended
    assert signal.getsignal(signum) is former
    return type(error).__name__, getattr(error, "code", None), left, sorted(path.name for path in folder.glob("*.pth"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("event", ["BatchEnd", "BatchStart", "ValidationBatchEnd", "ValidationStart", "SavePoint"])
def test_a_ctrl_c_on_one_rank_ends_all_at_the_same_step(ranks: Any, event: str, rank: int, tmp_path: Path) -> None:
    first, second = ranks(2).run(signal_on_one_rank, event, signal.SIGINT, rank, tmp_path)
    assert first == second
    assert first[0] == "KeyboardInterrupt"
    assert first[2][0][0] == "interrupted"


@pytest.mark.sample(3)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("event", ["BatchEnd", "BatchStart", "ValidationBatchEnd", "ValidationStart", "SavePoint"])
def test_a_sigterm_on_one_rank_saves_and_stops_all(ranks: Any, event: str, rank: int, tmp_path: Path) -> None:
    first, second = ranks(2).run(signal_on_one_rank, event, signal.SIGTERM, rank, tmp_path)
    assert first == second
    assert first[:2] == ("SystemExit", 143)
    status, steps, _ = first[2][0]
    assert status == "stopped"
    assert [name for name in first[3] if name.endswith(f"iter_{steps}.pth")]


def roll_back_on_one_rank(rank: int) -> Any:
    class Returning(h.Plugin):
        saved: Any = None
        asked = False

        @h.on(h.BatchEnd)
        def look(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.steps == 5 and run.engine.rank == rank and not self.asked:
                self.asked = True
                run.roll_back(self.saved)

        @h.on(h.SavePoint)
        def keep(self, run: h.Run, event: h.SavePoint) -> None:
            state = run.state_dict()
            if self.saved is None:
                self.saved = run.engine.broadcast(state)

    seen: list[tuple[int, int]] = []
    trainer = trainer_of(Returning(), h.RNGCapture(), h.SaveSchedule(h.At(steps=2)))
    trainer.bus.on(h.CheckpointLoaded, lambda run, event: seen.append((run.progress.steps, run.progress.batch)))
    task = made_task()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    result = trainer.fit(task, random_batches(2 * STEPS), optimizer=optimizer, epochs=1)
    return seen, result.progress.steps, task.model.state_dict()["weight"].tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_return_that_one_rank_asks_for_is_made_by_all(ranks: Any, rank: int) -> None:
    first, second = ranks(2).run(roll_back_on_one_rank, rank)
    assert first == second
    assert first[:2] == ([(2, 2)], STEPS)


def roll_back_one_step_apart(way: Way, first: int) -> Any:
    """Return on one rank to what was saved after step 1, and a step later, on the other, to what was after step 2."""

    class Returning(h.Plugin):
        def __init__(self) -> None:
            self.saved: list[Any] = []
            self.asked = False

        @h.on(h.BatchEnd)
        def look(self, run: h.Run, event: h.BatchEnd) -> None:
            is_first = run.engine.rank == first
            if run.progress.steps == (4 if is_first else 5) and not self.asked:
                self.asked = True
                run.roll_back(self.saved[0 if is_first else 1])

        @h.on(h.SavePoint)
        def keep(self, run: h.Run, event: h.SavePoint) -> None:
            self.saved.append(run.engine.broadcast(run.state_dict()))

    seen: list[tuple[int, int]] = []
    trainer = trainer_of(Returning(), h.RNGCapture(), h.SaveSchedule(h.At(steps=[1, 2])))
    trainer.bus.on(h.CheckpointLoaded, lambda run, event: seen.append((run.progress.steps, run.progress.batch)))
    task = made_task()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    with travelling(way):
        result = trainer.fit(task, random_batches(2 * STEPS), optimizer=optimizer, epochs=1)
    return seen, result.progress.steps, task.model.state_dict()["weight"].tolist()


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["board", "gloo"])
@pytest.mark.parametrize("first", [0, 1])
def test_of_two_returns_that_are_agreed_on_together_the_lowest_ranks_is_made(ranks: Any, first: int, way: Way) -> None:
    mine, other = ranks(2).run(roll_back_one_step_apart, way, first)
    assert mine == other
    saved = 1 if first == 0 else 2
    assert mine[:2] == ([(saved, saved)], STEPS)


def where_plugins_run(scope: str, collective: bool) -> Any:
    class Scoped(h.Plugin):
        ranks: Any = scope

        def __init__(self) -> None:
            self.received = 0

        @h.on(h.EpochEnd)
        def count(self, run: h.Run, event: h.EpochEnd) -> None:
            self.received += 1
            if collective:
                run.engine.barrier()

    plugin = Scoped()
    trainer = trainer_of(plugin)
    fit(trainer, validation=None)
    return plugin.received


@pytest.mark.parametrize(("scope", "expected"), [("all", [2, 2]), ("main", [2, 0]), ("local_main", [2, 0])])
def test_plugins_run_on_the_ranks_that_they_declare(ranks: Any, scope: str, expected: list[int]) -> None:
    assert ranks(2).run(where_plugins_run, scope, scope == "all") == expected


def test_a_collective_in_a_handler_of_one_rank_is_refused(ranks: Any) -> None:
    with pytest.raises(RuntimeError, match="calls barrier on epoch_end,"):
        ranks(2).run(where_plugins_run, "main", True)


def hold_differently() -> Any:
    class Holding(h.Plugin):
        asks = ("skip_batch",)

        @h.on(h.BatchStart)
        def hold(self, run: h.Run, event: h.BatchStart) -> None:
            if run.engine.rank == 1:
                run.control.hold_step("not yet")

    return fit(trainer_of(Holding()), validation=None)


def test_holding_a_step_on_one_rank_only_is_refused(ranks: Any) -> None:
    with pytest.raises(RuntimeError, match="hold the step"):
        ranks(2).run(hold_differently)


def skip_from_one_place(kind: str, verb: str) -> Any:
    """Ask on rank 0 only: a plugin of the main rank, or one that is switched off on the other."""
    stage = {"skip_batch": h.BatchStart, "skip_step": h.GradientsReady}[verb]

    class Skipping(h.Plugin):
        asks = (verb,)
        ranks = "main" if kind == "main" else "all"

        @h.on(stage)
        def skip(self, run: h.Run, event: h.Event) -> None:
            if run.progress.batch == 2 and run.engine.is_main:
                getattr(run.control, verb)("bad")

    trainer = trainer_of(Skipping())
    if kind == "toggled" and trainer.engine.rank == 1:
        trainer.plugins.disable("skipping")
    task = made_task()
    progress = trainer.fit(task, random_batches(2 * STEPS), optimizer=torch.optim.SGD, epochs=1).progress
    return progress.skipped_batches, progress.skipped_steps, progress.steps, task.model.state_dict()["weight"].tolist()


@pytest.mark.parametrize("kind", ["main", "toggled"])
@pytest.mark.parametrize("verb", ["skip_batch", "skip_step"])
def test_what_one_rank_alone_can_ask_is_voted_on_by_all(ranks: Any, verb: str, kind: str) -> None:
    first, second = ranks(2).run(skip_from_one_place, kind, verb)
    assert first == second
    assert first[:3] == ((1, 0, STEPS - 1) if verb == "skip_batch" else (0, 1, STEPS - 1))


def observe_and_exchange() -> Any:
    class Exchanging(h.Plugin):
        policy = "observer"

        @h.on(h.BatchEnd)
        def exchange(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.engine.rank == 1 and run.progress.batch == 2:
                raise KeyError("forgiven, but missing in the exchange")
            run.engine.reduce(1.0)

    return fit(trainer_of(Exchanging()), validation=None)


def test_ranks_that_are_in_different_collectives_are_reported_with_them(ranks: Any) -> None:
    with pytest.raises(RuntimeError, match="rank 0 in reduce;"):
        ranks(2).run(observe_and_exchange)


def count_otherwise(counter: str) -> tuple[str, int]:
    """Return the error of this rank, and the step at which it was raised."""

    class Miscounting(h.Plugin):
        @h.on(h.StepEnd, when=h.At(steps=2))
        def miscount(self, run: h.Run, event: h.StepEnd) -> None:
            if run.engine.rank == 1:
                setattr(run.progress, counter, getattr(run.progress, counter) + 1)

    trainer = trainer_of(Miscounting())
    failed: list[int] = []
    trainer.bus.on(h.RunFailed, lambda run, event: failed.append(run.progress.batch))
    try:
        fit(trainer, validation=None)
    except RuntimeError as error:
        return str(error), failed[0]
    return "", 0


@pytest.mark.parametrize(
    ("counter", "positions"),
    [("skipped_steps", ("2 to 3 steps", "2 to 2 batches")), ("batch", ("2 to 2 steps", "2 to 3 batches"))],
)
def test_ranks_that_are_at_different_positions_are_stopped(
    ranks: Any, counter: str, positions: tuple[str, str]
) -> None:
    """At the boundary after that step, in the same place on every rank: otherwise each would train on."""
    first, second = ranks(2).run(count_otherwise, counter)
    assert first[0] == second[0]
    assert_facts(first[0], "different positions", *positions)
    assert first[1] == second[1] - (counter == "batch") == 3


def yield_other_names() -> Any:
    class Two(h.Task):
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def training_step(self, run: h.Run, batch: Any) -> Any:
            names = ["a", "b"] if run.engine.rank == 0 or run.progress.batch != 2 else ["b", "a"]
            for name in names:
                yield name, getattr(self, name)(batch[0]).square().mean()

    optimizers = {"a": torch.optim.SGD, "b": torch.optim.SGD}
    return trainer_of().fit(Two(), random_batches(2 * STEPS), optimizer=optimizers, epochs=1)


def test_ranks_that_step_other_optimizers_are_stopped(ranks: Any) -> None:
    with pytest.raises(RuntimeError, match="stepped different optimizers"):
        ranks(2).run(yield_other_names)


def validate_twice(rank: int) -> Any:
    class Cutting(h.Plugin):
        done = False

        @h.on(h.ValidationBatchEnd)
        def cut(self, run: h.Run, event: h.ValidationBatchEnd) -> None:
            if run.engine.rank == rank and not self.done:
                self.done = True
                run.control.cut_validation("enough")

    trainer = trainer_of(Cutting())
    with trainer.engine.process():
        cut, whole = (trainer.validate(made_task(), random_batches(8)) for _ in range(2))
    return cut.status, whole.status, whole.progress.evaluated


@pytest.mark.parametrize("rank", [0, 1])
def test_a_validation_that_was_cut_short_leaves_the_next_one_alone(ranks: Any, rank: int) -> None:
    assert ranks(2).run(validate_twice, rank) == [("stopped", "completed", 8)] * 2


class Late(h.Plugin):
    """Notes the steps after which it was called."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    @h.on(h.BatchEnd)
    def note(self, run: h.Run, event: h.BatchEnd) -> None:
        self.steps.append(run.progress.steps)


def condition_on_ranks(kind: str) -> Any:
    if kind == "main":

        class MainLate(Late):
            name, ranks = "main_late", "main"

        late: Late = MainLate()
    else:
        late = Late()
    if kind == "alike":
        late.when(lambda run: run.progress.steps >= 4)
    else:
        late.when(lambda run: run.progress.steps >= 4 and run.engine.rank == 0)
    fit(trainer_of(late), epochs=1, validation=None)
    return late.steps


def test_a_condition_is_asked_on_each_rank_and_must_say_the_same_on_all(ranks: Any) -> None:
    assert ranks(2).run(condition_on_ranks, "alike") == [[4, 5, 6], [4, 5, 6]]
    assert ranks(2).run(condition_on_ranks, "main") == [[4, 5, 6], []]


def test_a_condition_that_differs_between_ranks_is_an_error(ranks: Any) -> None:
    with pytest.raises(RuntimeError, match=r"condition.*some ranks only"):
        ranks(2).run(condition_on_ranks, "different")


class Acts(h.Plugin):
    """At an event of the second step, does on each rank what a function of the control is given for it."""

    asks = ("validation", "save", "log", "stop")

    def __init__(self, event: str, *acts: str) -> None:
        self.event, self.acts = EVENTS[event], acts

    @h.on(*EVENTS.values())
    def act(self, run: h.Run, event: h.Event) -> None:
        control = run.control
        if isinstance(event, self.event) and run.progress.steps == 2:
            for word in self.acts[run.engine.rank].split():
                deeds: dict[str, Callable[[], object]] = {
                    "ask": lambda: control.request_save("wanted"),
                    "require": lambda: control.request_save("needed", required=True),
                    "withdraw": lambda: control.withdraw("save", "unwanted"),
                    "veto": lambda: control.veto_save("bad"),
                    "stop": lambda: control.stop("enough"),
                    "go_on": lambda: control.withdraw("stop", "not enough"),
                }
                deeds[word]()


def act_on_ranks(event: str, *acts: str) -> Any:
    seen = Seen()
    result = fit(trainer_of(Acts(event, *acts), h.ValidationSchedule(h.Every(steps=2), at_end=False), seen), epochs=1)
    saved = [step for name, _, step in seen.events if name == "save_point"]
    return saved, result.progress.steps, [str(each) for each in result.history if each.by == "acts"]


@pytest.mark.parametrize(
    ("event", "acts", "is_saved"),
    [
        ("BatchEnd", ("ask", "withdraw"), False),
        ("BatchEnd", ("withdraw", "ask"), False),
        ("BatchEnd", ("ask withdraw ask", "ask withdraw ask"), True),
        ("BatchEnd", ("ask withdraw", ""), False),
        ("BatchEnd", ("require", "withdraw"), True),
        ("BatchEnd", ("ask", "veto"), False),
        ("BatchEnd", ("veto", "require"), True),
        ("ValidationEnd", ("ask", "withdraw"), False),
        ("ValidationEnd", ("ask", "veto"), False),
    ],
)
def test_what_one_rank_takes_back_no_rank_does(ranks: Any, event: str, acts: tuple[str, str], is_saved: bool) -> None:
    first, second = ranks(2).run(act_on_ranks, event, *acts)
    assert first[:2] == second[:2] == ([2] if is_saved else [], STEPS)


def test_a_save_that_was_agreed_on_is_withdrawn_by_one_rank_after_the_validation(ranks: Any) -> None:
    first, second = ranks(2).run(agreed_and_withdrawn)
    assert first == second == [4, 6]


def agreed_and_withdrawn() -> Any:
    seen = Seen()
    fit(trainer_of(*schedules(), Acts("ValidationEnd", "", "withdraw"), seen), epochs=1)
    return sorted({step for name, _, step in seen.events if name == "save_point"})


def test_a_stop_is_withdrawn_by_one_rank_and_all_remember_who(ranks: Any) -> None:
    first, second = ranks(2).run(act_on_ranks, "ShouldStop", "", "go_on")
    assert first[1] == second[1] == STEPS
    first, second = ranks(2).run(act_on_ranks, "BatchEnd", "stop", "go_on")
    assert first[1] == second[1] == STEPS
    assert_each(first[2], ("step 2", "acts: stop", "enough"), ("step 2", "acts on rank 1: withdraw_stop", "not enough"))
