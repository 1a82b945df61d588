"""Plugins that break a rule are found, each with the rule, what was found and how to fix it; honest ones pass."""

from __future__ import annotations

import logging
import random
import re
import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import IO, Any

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.house import ROOT
from heliograph_testing import check_plugin
from heliograph_testing.conformance.rules import RULES


def finding(make_plugin: Callable[[], Any], rule: str, **options: Any) -> str:
    """Return what is found in a plugin, which breaks this rule."""
    with pytest.raises(AssertionError) as caught:
        check_plugin(make_plugin, **options)
    (broken,) = [each for each in RULES if f" breaks the rule {each.name}: " in str(caught.value)]
    assert broken.name == rule, caught.value
    title = re.escape(f" breaks the rule {broken.name}: {broken.sentence}\nFound: ")
    match = re.fullmatch(
        f"(?:Plugin '\\w+'|The plugin \\w+){title}(.*)\nTo fix it: {re.escape(broken.fix)}",
        str(caught.value),
        re.DOTALL,
    )
    assert match is not None, caught.value
    return match[1]


class Counting(h.Plugin):
    """A correct plugin."""

    def __init__(self) -> None:
        self.batches = 0

    @h.on(h.TrainStart)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        self.batches = 0

    @h.on(h.BatchEnd)
    def count(self, run: h.Run, event: h.BatchEnd) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]


class Keeper(h.Plugin):
    """A correct plugin that keeps everything in the way that it should, and requests what it declares."""

    asks = ("stop", "skip_step")
    TABLE: Mapping[str, list[int]] = {"never changed": [1]}

    def __init__(self, file: Path) -> None:
        self.path = file
        self.random, self.numpy = random.Random(3), np.random.default_rng(3)
        self.reset()

    def reset(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.file: IO[str] | None = None
        self.random.seed(3)
        self.numpy = np.random.default_rng(3)

    @h.on(h.BatchStart, h.ValidationBatchStart, lane=h.Lane.TRANSFORM)
    def transform(self, run: h.Run, event: h.BatchStart | h.ValidationBatchStart) -> None:
        inputs, targets = run.batch
        run.batch = inputs * self.random.random() * self.numpy.random(), targets

    @h.on(h.GradientsReady)
    def drop(self, run: h.Run, event: h.GradientsReady) -> None:
        if run.progress.batches == 1:
            run.control.skip_step("the second batch")

    @h.on(h.BatchEnd)
    def keep(self, run: h.Run, event: h.BatchEnd) -> None:
        self.inputs.append(run.batch[0].detach().clone())
        self.losses.append(run.loss.detach())
        self.file = self.file or self.path.open("a")
        if run.progress.batches == 4:
            run.control.stop("enough")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


@pytest.mark.parametrize("name", ["counting", "keeper"])
def test_an_honest_plugin_passes(name: str, tmp_path: Path) -> None:
    check_plugin({"counting": Counting, "keeper": lambda: Keeper(tmp_path / "kept.txt")}[name])


class Last(h.Plugin):
    """A correct plugin whose state holds what is not equal to itself."""

    make: Callable[[], Any]

    def __init__(self) -> None:
        self.last = type(self).make()

    def reset(self) -> None:
        self.last = type(self).make()

    @h.on(h.BatchEnd)
    def look(self, run: h.Run, event: h.BatchEnd) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"last": deepcopy(self.last)}

    def load_state_dict(self, state: Any) -> None:
        self.last = deepcopy(state["last"]) if state else type(self).make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: torch.tensor(float("nan")),
        lambda: {"of": [torch.tensor([1.0, float("nan")]), (float("nan"), {"x": torch.full((2,), torch.nan)})]},
        lambda: torch.tensor([torch.nan], dtype=torch.bfloat16),
        lambda: torch.tensor([complex("nan")]),
        lambda: torch.empty(0, 3),
        lambda: np.float32("nan"),
        lambda: np.array(1.5),
        lambda: {"of": [1 + 2j, np.int64(3)]},
    ],
)
def test_a_state_may_hold_nan(make: Callable[[], Any]) -> None:
    check_plugin(type("Last", (Last,), {"make": staticmethod(make)}))


@pytest.mark.parametrize("other", [0.0, torch.tensor([0.0, torch.nan]), torch.tensor([torch.nan], dtype=torch.float64)])
def test_finds_a_lost_nan(other: Any) -> None:
    class Bad(Last):
        make = staticmethod(lambda: torch.tensor([torch.nan]))

        def load_state_dict(self, state: Any) -> None:
            self.last = other if state else torch.tensor([torch.nan])

    assert "loaded another state" in finding(Bad, "resumes")


# Requests


def test_finds_a_stop_that_is_not_declared() -> None:
    """It stops before the run would have failed, which is no swallowed failure."""

    class Bad(h.Plugin):
        @h.on(h.BatchEnd)
        def end(self, run: h.Run, event: h.BatchEnd) -> None:
            run.control.stop("one batch is enough")

    assert_facts(finding(Bad, "declares_requests"), "requested stop", "asks = ()", "write asks = ('stop',)")
    Bad.asks = ("stop",)
    check_plugin(Bad)


def test_finds_each_kind_of_request_that_is_not_declared() -> None:
    class Bad(h.Plugin):
        asks = ("log",)

        @h.on(h.BatchStart)
        def skip(self, run: h.Run, event: h.BatchStart) -> None:
            if run.progress.batch == 1:
                run.control.skip_batch("the second")
                run.control.hold_step("no vote")

        @h.on(h.StepEnd)
        def request(self, run: h.Run, event: h.StepEnd) -> None:
            run.control.request_log("now")
            run.control.request_save("now")

    found = finding(Bad, "declares_requests")
    assert_facts(found, "save, skip_batch", "asks = ('log',)", "('save', 'log', 'skip_batch')")


# State


def test_finds_a_state_that_is_not_plain() -> None:
    class Bad(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"batches": {1, 2}}

    assert "plain types" in finding(Bad, "state_is_plain")


def test_finds_a_state_of_the_former_run() -> None:
    class Bad(Counting):
        def begin(self, run: h.Run, event: h.TrainStart) -> None:
            pass

    found = finding(Bad, "starts_fresh")
    assert_facts(found, "second run", "'batches'", "was 0", "is 6", "batches was 0", "is 6")


@pytest.mark.parametrize("policy", ["critical", "observer"])
def test_an_attribute_of_the_former_run_counts_if_the_training_may_depend_on_it(policy: Any) -> None:
    class Collecting(h.Plugin):
        def __init__(self) -> None:
            self.losses: list[float] = []

        @h.on(h.BatchEnd)
        def collect(self, run: h.Run, event: h.BatchEnd) -> None:
            self.losses.append(run.loss.item())

    Collecting.policy = policy
    if policy == "observer":
        check_plugin(Collecting)
    else:
        assert "losses was []" in finding(Collecting, "starts_fresh")


def test_a_state_of_an_observer_counts_in_any_case() -> None:
    class Bad(Counting):
        policy = "observer"

        def begin(self, run: h.Run, event: h.TrainStart) -> None:
            pass

    assert "0 and is 6" in finding(Bad, "starts_fresh")


def test_an_observer_may_hold_what_is_new_in_every_run() -> None:
    class Numbered(Counting):
        policy = "observer"
        runs = 0

        def begin(self, run: h.Run, event: h.TrainStart) -> None:
            self.batches = 0
            self.runs += 1

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches, "run": self.runs}

        def load_state_dict(self, state: Any) -> None:
            self.batches, self.runs = state["batches"], state["run"]

    check_plugin(Numbered)


def test_finds_a_plugin_that_ends_the_second_run_early() -> None:
    class Bad(h.Plugin):
        asks = ("stop",)
        affects_training = False

        def __init__(self) -> None:
            self.seen = 0

        @h.on(h.BatchEnd)
        def count(self, run: h.Run, event: h.BatchEnd) -> None:
            self.seen += 1
            if self.seen == 10:
                run.control.stop("ten batches")

    found = finding(Bad, "runs_twice")
    assert_facts(found, "status", "completed and stopped")


def test_finds_a_state_that_is_loaded_wrongly() -> None:
    class Bad(Counting):
        def load_state_dict(self, state: Any) -> None:
            self.batches = state["batches"] + 1

    found = finding(Bad, "resumes")
    assert_facts(found, "'bad' loaded another state", "{'batches': 4}", "{'batches': 3}")


def test_finds_a_plugin_that_cannot_load_its_empty_state() -> None:
    class Bad(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches} if self.batches else {}

    assert_facts(finding(Bad, "rolls_back"), "raised ValueError", "Plugin 'bad'")


def test_finds_a_plugin_that_ignores_its_empty_state() -> None:
    class Bad(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches} if self.batches else {}

        def load_state_dict(self, state: Any) -> None:
            if state:
                self.batches = state["batches"]

    assert_facts(finding(Bad, "rolls_back"), "'bad' rolled back", "{}", "[{'batches': 4}]")


class Renamed(Counting):
    """The second version of a correct plugin."""

    state_version = 2

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["count"]

    def migrate_state(self, state: dict[str, Any], version: int) -> dict[str, Any]:
        return {"count": state["batches"]}


def test_states_of_older_versions_are_loaded() -> None:
    check_plugin(Renamed, old_states={1: {"batches": 3}})
    assert_facts(finding(Renamed, "migrates"), "no state of version", "1")
    found = finding(Renamed, "migrates", old_states={1: {"seen": 3}})
    assert re.match("It raised ValueError.*KeyError: 'batches'", found)


# Side effects


@pytest.mark.parametrize(
    ("library", "draw"), [("python", random.random), ("numpy", np.random.random), ("torch", lambda: torch.rand(1))]
)
def test_finds_a_draw_from_a_global_generator(library: str, draw: Callable[[], object]) -> None:
    class Bad(h.Plugin):
        @h.on(h.StepEnd, when=h.Every(steps=2))
        def watch(self, run: h.Run, event: h.StepEnd) -> None:
            draw()

    assert_facts(finding(Bad, "leaves_draws"), "Random state", f"generator of {library}", "StepEnd")
    check_plugin(Bad, draws=True)


def test_finds_a_draw_in_state_dict() -> None:
    class Bad(Counting):
        def state_dict(self) -> dict[str, Any]:
            random.random()
            return super().state_dict()

    assert_facts(finding(Bad, "leaves_draws"), "Random state", "generator of python", "state_dict()")


@pytest.mark.parametrize("draws", [True, False])
def test_an_observer_may_draw_unless_it_says_that_it_never_does(draws: bool) -> None:
    class Watching(h.Plugin):
        policy = "observer"

        @h.on(h.StepEnd)
        def watch(self, run: h.Run, event: h.StepEnd) -> None:
            torch.rand(1)

    Watching.draws = draws
    if draws:
        check_plugin(Watching)
    else:
        finding(Watching, "leaves_draws")


def kept_by(event: type[h.Event], keep: Callable[[h.Run], Any], *, frees: bool = False) -> Callable[[], h.Plugin]:
    """Return a class of plugins that keep something of the latest batch in `kept`, until the run ends if `frees`."""

    class Keeping(h.Plugin):
        policy = "observer"

        def __init__(self) -> None:
            self.kept: Any = None

        @h.on(event)
        def keep(self, run: h.Run, event: Any) -> None:
            self.kept = keep(run)

        def close(self) -> None:
            if frees:
                self.kept = None

    return Keeping


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize(
    ("event", "keep", "what"),
    [
        (h.BatchEnd, lambda run: run.batch, "run.batch of train batch"),
        (h.BatchEnd, lambda run: {"inputs": [run.batch[0][:1]]}, "run.batch of train batch"),
        (h.BatchEnd, lambda run: run.outputs.detach(), "run.outputs of train batch"),
        (h.BatchEnd, lambda run: run.loss, "run.loss of train batch"),
        (h.ValidationBatchEnd, lambda run: run.batch, "run.batch of validation batch"),
    ],
)
def test_finds_what_is_kept_of_a_batch(event: Any, keep: Callable[[h.Run], Any], what: str, frees: bool) -> None:
    found = finding(kept_by(event, keep, frees=frees), "lets_batches_go")
    assert_facts(found, what, "attribute kept")


@pytest.mark.parametrize("keep", [lambda run: run.batch[0].clone(), lambda run: run.loss.detach(), lambda run: 3])
def test_a_copy_of_a_batch_may_be_kept(keep: Callable[[h.Run], Any]) -> None:
    check_plugin(kept_by(h.BatchEnd, keep))


def test_finds_a_batch_that_is_kept_elsewhere() -> None:
    elsewhere: list[Any] = []

    class Bad(h.Plugin):
        @h.on(h.BatchEnd)
        def keep(self, run: h.Run, event: h.BatchEnd) -> None:
            elsewhere.append(run.batch)

    found = finding(Bad, "lets_batches_go")
    assert_facts(found, "run.batch of train batch", "0", "outside the plugin's attributes")


def test_finds_an_object_that_a_class_shares() -> None:
    class Bad(h.Plugin):
        affects_training = False
        seen: list[int] = []  # noqa: RUF012  # the sin

        @h.on(h.BatchEnd)
        def keep(self, run: h.Run, event: h.BatchEnd) -> None:
            self.seen.append(run.progress.batch)

    finding_ = finding(Bad, "shares_nothing")
    assert_facts(finding_, "one object changed another")
    assert ".Bad.seen was a list" in finding_


def test_finds_a_default_that_objects_share() -> None:
    class Bad(h.Plugin):
        affects_training = False

        def __init__(self, seen: list[int] = []) -> None:  # noqa: B006  # the sin
            self.seen = seen

        @h.on(h.BatchEnd)
        def keep(self, run: h.Run, event: h.BatchEnd) -> None:
            self.seen.append(run.progress.batch)

    assert_facts(finding(Bad, "shares_nothing"), "seen was a list")


def test_finds_a_function_that_makes_one_object() -> None:
    plugin = Counting()
    assert_facts(finding(lambda: plugin, "shares_nothing"), "returned the same object", "twice")


# Life


def test_finds_an_object_that_is_no_plugin() -> None:
    assert "is not a plugin" in finding(object, "registers")


@pytest.mark.parametrize(("closes", "rule"), [(False, "closes_files"), (True, "closes_after_failure")])
def test_finds_a_file_that_stays_open(closes: bool, rule: str, tmp_path: Path) -> None:
    """One that is closed at `TrainEnd` stays open after a failure."""
    opened: list[IO[str]] = []

    class Bad(h.Plugin):
        affects_training = False

        @h.on(h.TrainStart)
        def begin(self, run: h.Run, event: h.TrainStart) -> None:
            opened.append((tmp_path / "left.txt").open("w"))

        @h.on(h.TrainEnd)
        def end(self, run: h.Run, event: h.TrainEnd) -> None:
            if closes:
                opened[-1].close()

    found = finding(Bad, rule)
    for each in opened:
        each.close()
    assert_facts(found, "Open after the run", f"{tmp_path}/left.txt")


def test_finds_a_thread_that_outlives_the_run() -> None:
    ends = threading.Event()

    class Bad(h.Plugin):
        affects_training = False

        @h.on(h.TrainStart)
        def begin(self, run: h.Run, event: h.TrainStart) -> None:
            threading.Thread(target=ends.wait, name="a thread of bad", daemon=True).start()

    assert_facts(finding(Bad, "closes_after_failure"), "still running", "thread of bad")
    ends.set()


def test_finds_a_log_handler_that_outlives_the_run() -> None:
    logger, handlers = logging.getLogger("heliograph"), logging.getLogger("heliograph").handlers.copy()

    class Bad(h.Plugin):
        affects_training = False

        @h.on(h.TrainStart)
        def begin(self, run: h.Run, event: h.TrainStart) -> None:
            logger.addHandler(logging.NullHandler())

    found = finding(Bad, "closes_after_failure")
    logger.handlers[:] = handlers
    assert_facts(found, "logger 'heliograph'", "<NullHandler (NOTSET)>")


def test_finds_a_close_that_works_only_once() -> None:
    class Bad(Counting):
        affects_training = False

        def __init__(self) -> None:
            super().__init__()
            self.file: list[int] | None = []

        def close(self) -> None:
            if self.file is None:
                raise OSError("closed already")
            self.file = None

    assert_facts(finding(Bad, "closes_unopened"), "OSError: closed already")


def test_finds_a_close_that_needs_a_run() -> None:
    class Bad(h.Plugin):
        affects_training = False

        @h.on(h.TrainStart)
        def begin(self, run: h.Run, event: h.TrainStart) -> None:
            self.count = 0

        def close(self) -> None:
            self.count += 1

    assert_facts(finding(Bad, "closes_unopened"), "AttributeError", "no attribute 'count'")


# The page


def test_the_page_lists_every_rule() -> None:
    page = (ROOT / "docs/developers/plugin_rules.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(rule.name, rule.sentence) for rule in RULES]
