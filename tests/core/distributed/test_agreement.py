"""When ranks act on requests of some or all of them: a model of docs/explanation/ranks.md, and its cases."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import random_batches
from heliograph.tests.messages import assert_each, assert_facts
from heliograph.tests.ranks_pool import Pool, Way, travelling
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

STEPS = 8  # of an epoch
VERBS = ("log", "validation", "save")
SERVED = {h.Log: "log", h.ValidationEnd: "validation", h.SavePoint: "save", h.EpochEnd: "epoch_end"}
WAYS = ("board", "gloo")
Asked = Mapping[int, Mapping[int, tuple[str, ...]]]  # by step, by rank
Happened = list[tuple[int, str]]  # at which step, what


class Script(h.Plugin):
    """Asks on each rank for what a script says of the step that is done; notes what happens."""

    asks = ("log", "validation", "save", "stop")
    affects_training = False  # else a resume restores what has happened

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


class Kill(h.Plugin):
    """Fails on one rank at a step."""

    def __init__(self, rank: int, step: int | None) -> None:
        self.rank, self.step = rank, step

    @h.on(h.GradientsReady)
    def strike(self, run: h.Run, event: h.GradientsReady) -> None:
        if run.engine.rank == self.rank and run.progress.steps == self.step:
            raise ArithmeticError("killed")


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


def follow_script(way: Way, asked: Asked, event: str = "BatchEnd") -> tuple[str, int, Happened, list[str]]:
    script = Script(asked, getattr(h, event))
    with travelling(way):
        result, _ = train([script])
    lines = [str(each) for each in result.history if each.by == "script"]
    return result.status, result.progress.steps, script.happened, lines


def expect(asked: Asked, ranks: int) -> tuple[str, int, Happened]:
    """Return what the definition says: alike at once, what only some ask for at the next boundary."""
    wanted: list[set[str]] = [set() for _ in range(ranks)]
    happened: Happened = []
    is_open = False
    for step in range(1, STEPS + 1):
        for rank in range(ranks):
            wanted[rank] |= set(asked.get(step, {}).get(rank, ()))
        if not (is_open or all(wanted) or step == STEPS):
            is_open = any(map(bool, wanted))
            continue
        agreed = set().union(*wanted)
        is_open, wanted = False, [set() for _ in range(ranks)]
        happened += [(step, verb) for verb in VERBS if verb in agreed]
        if "end_epoch" in agreed or step == STEPS:
            happened.append((step, "epoch_end"))
        if "stop" in agreed or happened[-1:] == [(step, "epoch_end")]:
            return "stopped" if "stop" in agreed else "completed", step, happened
    raise AssertionError("the last step ends the epoch")


def scripts(ranks: int) -> st.SearchStrategy[dict[int, dict[int, tuple[str, ...]]]]:
    """Return scripts: at some steps, on some ranks, one or two requests; all of them ask the same now and then."""
    verb = st.sampled_from((*VERBS, *VERBS, *VERBS, "end_epoch", "stop"))
    several = st.lists(verb, min_size=1, max_size=2).map(tuple)
    alike = several.map(lambda verbs: dict.fromkeys(range(ranks), verbs))
    local = st.dictionaries(st.integers(0, ranks - 1), several, min_size=1, max_size=ranks)
    return st.dictionaries(st.integers(1, STEPS), st.one_of(alike, local, local), max_size=4)


LAW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [2, 3])
def test_any_script_happens_as_it_is_defined(ranks: Pool, way: Way, count: int) -> None:
    @LAW
    @given(scripts(count))
    def law(asked: Asked) -> None:
        outcomes = ranks(count).run(follow_script, way, asked)
        assert [each[:3] for each in outcomes] == [expect(asked, count)] * count

    law()


def follow_and_resume(
    way: Way, scripts: Mapping[str, Asked], folder: Path, rank: int, step: int | None
) -> tuple[str, Happened, list[Any]]:
    """Follow scripts, each of an event, from the newest checkpoint on; a rank may fail at a step."""
    followed = [Script(asked, getattr(h, event)) for event, asked in scripts.items()]
    for each in followed:
        each.name = f"script_{each.event.name}"
    try:
        with travelling(way):
            saves = [h.SaveSchedule(h.Every(steps=2))] if "SavePoint" in scripts else []
            plugins = [h.RNGCapture(), *followed, *saves, h.Checkpoint(folder, resume="auto"), Kill(rank, step)]
            result, weights = train(plugins)
    except (ArithmeticError, h.RankFailed) as error:
        return type(error).__name__, followed[0].happened, []
    return result.status, followed[0].happened, weights


def check_kill(pool: Pool, way: Way, scripts: Mapping[str, Asked], folder: Path, rank: int, step: int) -> None:
    """Assert that a run that is killed on a rank in a step, and resumed, is the uninterrupted one."""
    run = pool(2).run
    expected = run(follow_and_resume, way, scripts, folder / "whole", 0, None)
    first = run(follow_and_resume, way, scripts, folder / "killed", rank, step)
    if first[0][0] == expected[0][0]:  # it ended before it was to be killed
        return
    assert {each[0] for each in first} == {"ArithmeticError", "RankFailed"}
    second = run(follow_and_resume, way, scripts, folder / "killed", 0, None)
    for mine, again, all_of_it in zip(first, second, expected, strict=True):
        status, happened, weights = all_of_it
        saves = [index for index, each in enumerate(mine[1]) if each[1] == "save"]
        done = mine[1][: saves[-1] + 1] if saves else []
        assert (again[0], done + again[1], again[2]) == (status, happened, weights)


@pytest.mark.whole
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("events", [("BatchEnd",), ("BatchEnd", "SavePoint", "ShouldStop")])
def test_a_script_that_is_killed_and_resumed_happens_as_if_it_had_not_been(
    ranks: Pool, tmp_path: Path, events: tuple[str, ...], way: Way
) -> None:
    numbers = iter(range(1_000))

    @LAW
    @given(st.fixed_dictionaries(dict.fromkeys(events, scripts(2))), st.integers(0, 1), st.integers(1, STEPS - 1))
    def law(asked: Mapping[str, Asked], rank: int, step: int) -> None:
        check_kill(ranks, way, asked, tmp_path / str(next(numbers)), rank, step)

    law()


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("event", ["SavePoint", "ShouldStop"])
@pytest.mark.parametrize("verb", ["log", "validation", "save"])
@pytest.mark.parametrize("asker", [0, 1])
def test_what_one_rank_asks_while_or_after_the_state_is_saved_is_in_it(
    ranks: Pool, tmp_path: Path, event: str, verb: str, asker: int, way: Way
) -> None:
    scripts = {"BatchEnd": {3: {0: ("save",), 1: ("save",)}}, event: {3: {asker: (verb,)}}}
    check_kill(ranks, way, scripts, tmp_path, 1 - asker, 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_asks_happens_one_step_later_on_all(ranks: Pool, rank: int, way: Way) -> None:
    asked = {3: {rank: ("log",)}, 5: {rank: ("stop",)}}
    outcomes = ranks(2).run(follow_script, way, asked)
    assert [each[:3] for each in outcomes] == [("stopped", 6, [(4, "log")])] * 2
    assert_each(outcomes[1 - rank][3], ("step 3", f"on rank {rank}: log"), ("step 5", f"on rank {rank}: stop"))
    assert_each(outcomes[rank][3], ("step 3", "script: log"), ("step 5", "script: stop"))


@pytest.mark.parametrize("way", WAYS)
def test_what_all_ranks_ask_alike_happens_at_once(ranks: Pool, way: Way) -> None:
    asked = {3: {0: ("log",), 1: ("log",)}, 5: {0: ("stop",), 1: ("stop",)}}
    outcomes = ranks(2).run(follow_script, way, asked)
    assert [outcome[:3] for outcome in outcomes] == [("stopped", 5, [(3, "log")])] * 2
    for outcome in outcomes:
        assert_each(outcome[3], ("step 3", "script: log"), ("step 5", "script: stop"))


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("asked", "happened"),
    [
        ({3: {0: ("log",), 1: ("save",)}}, [(3, "log"), (3, "save")]),  # both ask, if not for the same
        ({3: {0: ("log",)}, 4: {1: ("save",)}}, [(4, "log"), (4, "save")]),
        ({3: {0: ("log",)}, 4: {0: ("log",), 1: ("log",)}}, [(4, "log")]),
        ({3: {0: ("log",)}, 5: {0: ("log",)}, 6: {1: ("log",)}}, [(4, "log"), (6, "log")]),
        ({step: {0: ("log",)} for step in range(2, 7)}, [(3, "log"), (5, "log"), (7, "log")]),
        ({step: {step % 2: ("log",)} for step in range(2, 7)}, [(3, "log"), (5, "log"), (7, "log")]),
        ({STEPS: {1: ("log",)}}, [(STEPS, "log")]),  # nothing stays open at the end
        ({STEPS - 1: {1: ("log",)}}, [(STEPS, "log")]),
        ({3: {0: ("save",)}, 4: {1: ("withdraw",)}}, []),  # what it takes back, any rank has asked before
        ({3: {0: ("withdraw",)}, 4: {0: ("save",), 1: ("save",)}}, [(4, "save")]),  # asked again by who took it back
        ({3: {0: ("veto_save",)}, 4: {0: ("save",), 1: ("save",)}}, []),
        ({3: {0: ("veto_save", "save"), 1: ("save",)}, 5: {0: ("save",), 1: ("save",)}}, [(5, "save")]),
    ],
)
def test_mixed_requests(ranks: Pool, asked: Asked, happened: Happened) -> None:
    outcomes = ranks(2).run(follow_script, "board", asked)
    assert [each[:3] for each in outcomes] == [("completed", STEPS, [*happened, (STEPS, "epoch_end")])] * 2


def withdraw_in_the_last_word(asker: int, withdrawer: int, when: int, required: bool) -> tuple[Happened, list[str]]:
    """Ask for a save after the third step on a rank; take it back on a rank in the last word after a step."""

    class Plugin(h.Plugin):
        @h.on(h.BatchEnd)
        def ask(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.steps == 3 and run.engine.rank == asker:
                run.control.request_save("asked", required=required)

        @h.on(h.ShouldStop)
        def take_back(self, run: h.Run, event: h.ShouldStop) -> None:
            if run.progress.steps == when and run.engine.rank == withdrawer:
                run.control.withdraw("save", "taken back")

    script = Script({})
    result, _ = train([script, Plugin()])
    return script.happened, [each.verb for each in result.history if each.by == "plugin"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("asker", [0, 1])
@pytest.mark.parametrize("withdrawer", [0, 1])
def test_what_is_open_is_taken_back_in_the_last_word(ranks: Pool, asker: int, withdrawer: int) -> None:
    outcomes = ranks(2).run(withdraw_in_the_last_word, asker, withdrawer, 3, False)
    assert [each[0] for each in outcomes] == [[(STEPS, "epoch_end")]] * 2
    assert "withdraw_save" in outcomes[0][1]
    assert "withdraw_save" in outcomes[1][1]
    outcomes = ranks(2).run(withdraw_in_the_last_word, asker, withdrawer, 3, True)
    assert [each[0] for each in outcomes] == [[(4, "save"), (STEPS, "epoch_end")]] * 2
    outcomes = ranks(2).run(withdraw_in_the_last_word, asker, withdrawer, 4, False)  # served by then
    assert [each[0] for each in outcomes] == [[(4, "save"), (STEPS, "epoch_end")]] * 2


def stop_twice(rank: int) -> tuple[str, str | None, int]:
    """Stop on a rank as Preemption does, and again in the last word; try to take that back a step later."""

    class First(h.Plugin):
        @h.on(h.BatchEnd)
        def ask(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.steps == 3 and run.engine.rank == rank:
                run.control.stop("the machine is taken away", required=True)

        @h.on(h.ShouldStop)
        def take_back(self, run: h.Run, event: h.ShouldStop) -> None:
            if run.progress.steps == 4:
                run.control.withdraw("stop", "too early")

    result, _ = train([First(), Script({3: {rank: ("stop",)}}, h.ShouldStop)])
    return result.status, result.stopped_by, result.progress.steps


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_that_is_asked_for_again_while_it_is_open_is_that_of_the_first(ranks: Pool, rank: int) -> None:
    assert ranks(2).run(stop_twice, rank) == [("stopped", "first", 4)] * 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("askers", "stops_at"), [((0, 1), 3), ((0,), 4), ((1,), 4)])
def test_a_stop_in_the_last_word_is_agreed_on_in_the_same_way(
    ranks: Pool, askers: tuple[int, ...], stops_at: int, way: Way
) -> None:
    asked = {3: dict.fromkeys(askers, ("stop",))}
    for status, steps, happened, _ in ranks(2).run(follow_script, way, asked, "ShouldStop"):
        assert (status, steps, happened) == ("stopped", stops_at, [])


def stop_with_a_veto(asker: int, vetoer: int, until: int) -> tuple[str, int, int]:
    """Stop in the third step on one rank, and veto on one rank for some steps; return also how often it judged."""

    class Vetoer(h.Plugin):
        judged = 0

        @h.on(h.ShouldStop)
        def judge(self, run: h.Run, event: h.ShouldStop) -> None:
            self.judged += 1
            run.engine.reduce(1.0)  # a handler may exchange, whoever waits at the boundary
            if run.engine.rank == vetoer and run.progress.steps < until:
                run.control.veto_stop("too early")

    vetoes = Vetoer()
    result, _ = train([Script({3: {asker: ("stop",)}}), vetoes])
    return result.status, result.progress.steps, vetoes.judged


@pytest.mark.sample(4)
@pytest.mark.parametrize("until", [3, 4, 5, 7])
@pytest.mark.parametrize("asker", [0, 1])
@pytest.mark.parametrize("vetoer", [0, 1])
def test_a_veto_of_one_rank_postpones_the_stop_of_one_rank(ranks: Pool, asker: int, vetoer: int, until: int) -> None:
    steps = max(4, until)
    assert ranks(2).run(stop_with_a_veto, asker, vetoer, until) == [("stopped", steps, steps + 2)] * 2


def stop_with_a_veto_and_resume(folder: Path, asker: int, kill_at: int) -> tuple[str, int, str | None]:
    """Stop in the third step on one rank, veto until step 6 on the other, kill, and resume."""

    class Vetoer(h.Plugin):
        @h.on(h.ShouldStop)
        def judge(self, run: h.Run, event: h.ShouldStop) -> None:
            if run.engine.rank != asker and run.control.should_stop and run.progress.steps < 6:
                run.control.veto_stop("too early")

    for step in (kill_at, None):
        saves = h.RNGCapture(), h.Checkpoint(folder, every=h.Every(steps=1), resume="auto")
        try:
            result, _ = train([Script({3: {asker: ("stop",)}}), Vetoer(), *saves, Kill(0, step)])
        except (ArithmeticError, h.RankFailed):
            continue
    return result.status, result.progress.steps, result.stopped_by


@pytest.mark.parametrize("kill_at", [3, 4, 5])
@pytest.mark.parametrize("asker", [0, 1])
def test_a_vetoed_stop_of_one_rank_is_restored_on_all(ranks: Pool, tmp_path: Path, asker: int, kill_at: int) -> None:
    outcomes = ranks(2).run(stop_with_a_veto_and_resume, tmp_path, asker, kill_at)
    assert outcomes == [("stopped", 6, "script")] * 2


def exchange_if(way: Way, name: str, asked: Asked, event: str) -> tuple[list[tuple[int, bool]], Happened]:
    """Read a property of the control in the last word, and exchange something where it is true."""

    class Judge(h.Plugin):
        seen: list[tuple[int, bool]]

        @h.on(h.ShouldStop)
        def judge(self, run: h.Run, event: h.ShouldStop) -> None:
            self.seen.append((run.progress.steps, getattr(run.control, name)))
            if self.seen[-1][1]:
                assert run.engine.reduce(float(run.engine.rank), "max") == run.engine.vote([1.0])[0] == 1.0

    script, judge = Script(asked, getattr(h, event)), Judge()
    judge.seen = []
    with travelling(way):
        train([script, judge])
    return judge.seen, script.happened


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "verb", "holds_after"),
    [("should_stop", "stop", {4}), ("should_end_epoch", "end_epoch", {4}), ("should_save", "save", set())],
)
def test_what_the_last_word_reads_is_the_same_on_all_ranks_so_it_may_exchange(
    ranks: Pool, name: str, verb: str, holds_after: set[int], rank: int, way: Way
) -> None:
    """A save has been served by then."""
    first, second = ranks(2).run(exchange_if, way, name, {3: {rank: (verb,)}}, "BatchEnd")
    assert first == second
    assert {step for step, holds in first[0] if holds} == holds_after
    assert first[1][:1] == {"stop": [], "end_epoch": [(4, "epoch_end")], "save": [(4, "save")]}[verb]


def exchange_on_one_rank(way: Way, how: str) -> tuple[str, str]:
    """Exchange in the last word of the third step, on one rank only; return the error of this rank."""

    class Judge(h.Plugin):
        ranks = "main" if how == "of the main rank" else "all"

        @h.on(h.ShouldStop)
        def judge(self, run: h.Run, event: h.ShouldStop) -> None:
            if run.progress.steps == 3 and (how == "of the main rank" or run.control.should_stop):
                run.engine.reduce(1.0)

    plugins: list[h.Plugin] = [Judge()]
    if how == "after its own request":
        plugins.insert(0, Script({3: {0: ("stop",)}}, h.ShouldStop))
    with travelling(way), pytest.raises(RuntimeError) as caught:
        train(plugins)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_an_exchange_in_the_last_word_of_one_rank_is_an_error_on_all(ranks: Pool, way: Way) -> None:
    first, second = ranks(2).run(exchange_on_one_rank, way, "of the main rank")
    assert_facts(first[1], "judge", "reduce", "should_stop", "some ranks only")
    assert second[0] == "RankFailed"
    assert "calls reduce on should_stop" in second[1]


@pytest.mark.parametrize("way", WAYS)
def test_an_exchange_in_the_last_word_that_only_one_rank_has_asked_for_is_an_error_on_all(
    ranks: Pool, way: Way
) -> None:
    outcomes = ranks(2).run(exchange_on_one_rank, way, "after its own request")
    assert sorted(kind for kind, _ in outcomes) == ["RankFailed", "RuntimeError"]  # whoever notices it first
    for _, text in outcomes:
        assert "different collectives: rank 0" in text


def interrupt(way: Way, rank: int, times: int) -> tuple[str, int]:
    """Send a Ctrl-C in the third step."""

    class Sender(h.Plugin):
        steps = 0

        @h.on(h.BatchEnd)
        def send(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.engine.rank == rank and run.progress.steps == 3:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)

        @h.on(h.RunClosed)
        def note(self, run: h.Run, event: h.RunClosed) -> None:
            self.steps = run.progress.steps

    sender = Sender()
    with travelling(way), pytest.raises(KeyboardInterrupt) as caught:
        train([sender])
    return str(caught.value), sender.steps


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_ctrl_c_ends_all_one_step_later_and_a_second_one_its_rank_at_once(ranks: Pool, rank: int, way: Way) -> None:
    assert ranks(2).run(interrupt, way, rank, 1) == [(f"on rank {rank}", 4)] * 2
    outcomes = ranks(2).run(interrupt, way, rank, 2)
    assert outcomes[rank] == ("", 3)
    assert f"rank {rank} failed with KeyboardInterrupt" in outcomes[1 - rank][0]


class Unsized:
    """A loader that does not say how long it is."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def train_without_a_length(asked: Asked) -> Happened:
    """Train in a loop of one's own, which reads no batch ahead: nobody knows which boundary is the last of an epoch."""
    script = Script(asked)
    torch.manual_seed(0)
    task = h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
    run = h.Trainer([script, h.GradientAccumulation(3)], engine=h.DDPEngine(device="cpu", timeout=60)).run(
        task, Unsized(random_batches(STEPS)), optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1), epochs=2
    )
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(run.stepping.forward(run, batch))
    return script.happened


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("verb", "happened"),
    [
        ("log", [(3, "epoch_end"), (3, "log"), (6, "epoch_end")]),
        ("end_epoch", [(3, "epoch_end"), (6, "epoch_end")]),
        ("stop", [(3, "epoch_end")]),
    ],
)
def test_what_is_open_when_the_data_end_is_agreed_on_at_the_end_of_the_epoch(
    ranks: Pool, verb: str, happened: Happened, rank: int
) -> None:
    """It was asked for after the second of three steps; the third is taken with the two batches that are left."""
    assert ranks(2).run(train_without_a_length, {2: {rank: (verb,)}}) == [happened] * 2


def leave_a_loop(leavers: tuple[int, ...]) -> tuple[str, int, int]:
    """Leave the loop over the batches in the third batch of the first epoch, on some ranks."""
    torch.manual_seed(0)
    task = h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
    engine = h.DDPEngine(device="cpu", timeout=60)
    run = h.Trainer(engine=engine).run(
        task,
        random_batches(STEPS * 2),
        optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1),
        epochs=2,
    )
    with run:
        for epoch in run.epochs():
            for index, batch in enumerate(run.batches()):
                run.step(run.stepping.forward(run, batch))
                if epoch == 0 and index == 2 and engine.rank in leavers:
                    break
    return run.result.status, run.result.progress.epoch, run.result.progress.steps


def test_a_loop_of_ones_own_is_left_on_all_ranks_or_that_is_an_error(ranks: Pool) -> None:
    assert ranks(2).run(leave_a_loop, (0, 1)) == [("completed", 2, 3 + STEPS)] * 2
    with pytest.raises(RuntimeError, match=r"batches.*some ranks only"):
        ranks(2).run(leave_a_loop, (1,))
