"""Profile: which steps are traced and what a trace holds, that no profiler is left running, nor another one harmed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    Every,
    GradientAccumulation,
    HandlerTimes,
    Lane,
    LogSchedule,
    Plugin,
    Run,
    RunResult,
    TensorBoard,
    Trainer,
    ValidationSchedule,
    on,
)
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph_testing import check_plugin
from heliograph_trackers import Profile
from heliograph_trackers import profile as tracing

Make = Callable[..., Any]
EVERY: dict[str, Any] = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0}
ONCE: dict[str, Any] = {**EVERY, "repeat": 1}


def is_profiling() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert not is_profiling(), "a profiler is left running"


@pytest.fixture
def fit(task: Make, batches: Make, sgd: Any) -> Callable[..., RunResult]:
    """Return a function that trains with some plugins, an epoch of so many batches."""

    def run(*plugins: Any, count: int = 8, **options: Any) -> RunResult:
        options = {"epochs": 1, "optimizer": sgd, **options}
        return Trainer(plugins, device="cpu").fit(task(), batches(count), **options)

    return run


def traces(folder: Path) -> list[dict[str, Any]]:
    """Return what the traces in a folder hold, the oldest first; nothing else may lie there but event files."""
    paths = sorted(folder.glob("*.pt.trace.json"), key=lambda path: int(path.name.split(".")[-4]))
    assert set(folder.iterdir()) == {*paths, *folder.glob("events.out.tfevents.*"), *folder.glob("hyper_parameters")}
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def ranges(trace: dict[str, Any]) -> list[str]:
    """Return the named ranges of a trace in the order in which they begin."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def steps(folder: Path) -> list[list[int]]:
    """Return which steps each trace holds."""
    names = [ranges(trace) for trace in traces(folder)]
    return [[int(name.partition("#")[2]) for name in each if name.startswith("ProfilerStep#")] for each in names]


def operators(trace: dict[str, Any]) -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]


# The schedule.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"wait": 2, "warmup": 1, "active": 2}, [[3, 4]]),
        ({"wait": 1, "warmup": 0, "active": 2, "repeat": 2}, [[1, 2], [4, 5]]),
        ({"wait": 0, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 1}, [[2, 3], [5, 6]]),
        ({"wait": 0, "warmup": 0, "active": 1, "repeat": 3}, [[0], [1], [2]]),
        ({"wait": 2, "warmup": 1, "active": 1, "repeat": 0}, [[3], [7]]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_the_active_steps_are_traced_and_no_others(
    fit: Make, tmp_path: Path, options: dict[str, Any], expected: list[list[int]]
) -> None:
    result = fit(Profile(tmp_path, **options))

    assert steps(tmp_path) == expected
    assert result.plugin_errors == {}
    assert_each(result.notes, ("torch.profiler", str(tmp_path), "ui.perfetto.dev"))


def test_steps_continue_from_epoch_to_epoch(fit: Make, tmp_path: Path) -> None:
    fit(Profile(tmp_path, wait=1, warmup=0, active=3), count=2, epochs=3)

    assert steps(tmp_path) == [[1, 2, 3]]


def test_a_step_is_a_micro_batch(fit: Make, tmp_path: Path) -> None:
    fit(GradientAccumulation(4), Profile(tmp_path, wait=4, warmup=0, active=4), count=8)
    (trace,) = traces(tmp_path)

    assert steps(tmp_path) == [[4, 5, 6, 7]]
    assert operators(trace).count("aten::mse_loss") == 4
    assert len([name for name in ranges(trace) if name.startswith("Optimizer.step#")]) == 1


def test_a_trace_holds_its_own_steps_only(fit: Make, tmp_path: Path) -> None:
    """The warm-up is traced too, and thrown away."""
    fit(Profile(tmp_path, wait=1, warmup=3, active=2), count=8)
    (trace,) = traces(tmp_path)

    assert operators(trace).count("aten::mse_loss") == 2


def test_the_profiler_runs_in_the_cycles_only(fit: Make, tmp_path: Path) -> None:
    seen: list[tuple[bool, int]] = []

    class Look(Plugin):
        @on(BatchStart)
        def look(self, run: Run, event: BatchStart) -> None:
            seen.append((is_profiling(), len(run.bus._interceptors)))

    fit(Profile(tmp_path, wait=2, warmup=1, active=2), Look(), count=7)

    assert seen == [(False, 0), (False, 0), (True, 0), (True, 1), (True, 1), (False, 0), (False, 0)]


def test_a_resumed_run_counts_from_its_own_beginning(fit: Make, task: Make, batches: Make, tmp_path: Path) -> None:
    profile = Profile(tmp_path, wait=1, warmup=0, active=1)
    for _ in range(2):
        fit(profile, count=3)

    assert steps(tmp_path) == [[1], [1]]


# What is in a trace.


def test_handlers_are_ranges_named_after_their_plugin_and_event(fit: Make, batches: Make, tmp_path: Path) -> None:
    profile = Profile(tmp_path, wait=1, warmup=0, active=2)
    fit(LogSchedule(Every(steps=1)), ValidationSchedule(Every(steps=1)), profile, validation=batches(1), count=4)
    (trace,) = traces(tmp_path)
    names = ranges(trace)

    assert names.count("log_schedule.batch_end") == 2
    assert names.count("validation_schedule.batch_end") == 2
    assert not [name for name in names if name.startswith("profile.")]
    assert names.index("ProfilerStep#1") < names.index("log_schedule.batch_end") < names.index("ProfilerStep#2")


def test_ranges_are_named_also_where_another_plugin_measures(fit: Make, tmp_path: Path) -> None:
    profile = Profile(tmp_path, wait=1, warmup=0, active=2).named("tracer")
    result = fit(LogSchedule(Every(steps=1)), HandlerTimes(), profile, count=4)
    (trace,) = traces(tmp_path)

    assert ranges(trace).count("log_schedule.batch_end") == 2
    assert not [name for name in ranges(trace) if name.startswith("tracer.")]
    assert result.plugin_seconds["log_schedule"] > 0


def test_handlers_can_be_left_out(fit: Make, tmp_path: Path) -> None:
    fit(LogSchedule(Every(steps=1)), Profile(tmp_path, wait=0, warmup=0, active=2, handlers=False), count=3)
    (trace,) = traces(tmp_path)

    assert [name for name in ranges(trace) if not name.startswith("Optimizer.")] == ["ProfilerStep#0", "ProfilerStep#1"]


@pytest.mark.parametrize("option", ["record_shapes", "profile_memory", "with_stack"])
def test_what_is_kept_besides(fit: Make, tmp_path: Path, option: str) -> None:
    kept: dict[str, Any] = {option: True}
    fit(Profile(tmp_path / "with", **ONCE, **kept), count=1)
    fit(Profile(tmp_path / "without", **ONCE), count=1)
    (with_it,), (without,) = traces(tmp_path / "with"), traces(tmp_path / "without")

    assert with_it[option] == 1
    assert option not in without
    words = {"record_shapes": "Input Dims", "profile_memory": "[memory]", "with_stack": "python_function"}[option]
    assert words in json.dumps(with_it["traceEvents"])
    assert words not in json.dumps(without["traceEvents"])


def test_the_traces_lie_where_tensorboard_looks_for_them(fit: Make, tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    fit(board, LogSchedule(Every(steps=1)), Profile(tmp_path, wait=0, warmup=0, active=1))

    assert steps(tmp_path) == [[0]]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


# However it ends.


class Fail(Plugin):
    """Fails the run in its fourth batch."""

    @on(BatchEnd, lane=Lane.PERSIST, when=Every(batches=4))
    def fail(self, run: Run, event: BatchEnd) -> None:
        raise ArithmeticError("on purpose")


def test_a_run_that_ends_during_the_active_steps_writes_what_there_is(fit: Make, tmp_path: Path) -> None:
    fit(Profile(tmp_path, wait=1, warmup=0, active=10), count=3)
    (trace,) = traces(tmp_path)

    assert steps(tmp_path) == [[1, 2, 3]]
    assert operators(trace).count("aten::mse_loss") == 2


def test_a_run_that_fails_during_the_active_steps_writes_what_there_is(fit: Make, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        fit(Profile(tmp_path, wait=1, warmup=0, active=10), Fail())
    (trace,) = traces(tmp_path)

    assert steps(tmp_path) == [[1, 2, 3]]
    assert "fail.batch_end" in ranges(trace)


def test_a_run_that_ends_where_a_trace_has_just_begun_writes_none_of_it(fit: Make, tmp_path: Path) -> None:
    fit(Profile(tmp_path, **EVERY), count=3)

    assert steps(tmp_path) == [[0], [1], [2]]


def test_a_run_that_fails_during_the_warm_up_writes_nothing(fit: Make, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        fit(Profile(tmp_path / "new", wait=1, warmup=10, active=1), Fail())

    assert not (tmp_path / "new").exists()


def test_a_run_that_ends_too_early_says_so(fit: Make, tmp_path: Path) -> None:
    result = fit(Profile(tmp_path, wait=7, warmup=2, active=1), count=8)

    assert_each(result.notes, ("no trace", "step 8", "step 9"))
    assert traces(tmp_path) == []


def test_an_evaluation_is_not_traced_and_says_nothing(task: Make, batches: Make, tmp_path: Path) -> None:
    result = Trainer([Profile(tmp_path, **EVERY)], device="cpu").test(task(), batches(2))

    assert result.notes == ()
    assert traces(tmp_path) == []


class Switch(Plugin):
    """Switches the profile off and on at some batches."""

    def __init__(self, at: dict[int, str]) -> None:
        self.at = at

    @on(BatchEnd, lane=Lane.TRANSFORM)
    def switch(self, run: Run, event: BatchEnd) -> None:
        if change := self.at.get(run.progress.batches):
            getattr(run.plugins, change)("profile")


def test_switched_off_during_the_active_steps_it_writes_and_on_again_it_continues(fit: Make, tmp_path: Path) -> None:
    """It counts the steps that it receives."""
    result = fit(Profile(tmp_path, wait=1, warmup=0, active=5), Switch({3: "disable", 5: "enable"}), count=12)

    assert steps(tmp_path) == [[1, 2, 3], [4, 5]]
    assert result.plugin_errors == {}


def test_unregistered_during_the_active_steps_it_writes(fit: Make, tmp_path: Path) -> None:
    fit(Profile(tmp_path, wait=1, warmup=0, active=5), Switch({3: "unregister"}))

    assert steps(tmp_path) == [[1, 2, 3]]


# Another profiler.


def test_a_profiler_that_runs_already_is_left_alone(fit: Make, tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as other:
        result = fit(Profile(tmp_path, **EVERY), count=4, epochs=2)
        assert is_profiling()
    (error,) = result.plugin_errors["profile"]  # once, not at every step

    assert_facts(error, "epoch_start at step 0", "RuntimeError", "another profiler")
    assert result.status == "completed"
    assert [event.name for event in other.events()].count("aten::mse_loss") == 8
    assert traces(tmp_path) == []


def test_a_profiler_during_the_active_steps_loses_the_trace_and_not_the_run(fit: Make, tmp_path: Path) -> None:
    """Torch lets the second one take over without a word; to write the first one's trace would then crash it."""

    class Another(Plugin):
        @on(BatchStart, when=Every(batches=2))
        def profile(self, run: Run, event: BatchStart) -> None:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                torch.ones(1)

    result = fit(Profile(tmp_path / "new", wait=1, warmup=0, active=3), Another())
    (error,) = result.plugin_errors["profile"]

    assert_facts(error, "batch_end at step 4", "RuntimeError", "lost its trace", "another profiler")
    assert not (tmp_path / "new").exists()


# What cannot be done.


def test_a_trace_that_cannot_be_written_is_an_error_that_is_forgiven(fit: Make, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    result = fit(Profile(tmp_path / "taken", **EVERY), count=4)
    (error,) = result.plugin_errors["profile"]

    assert_facts(error, "batch_end at step 1", "FileExistsError")


@pytest.mark.parametrize("written", ["", '{"traceEvents": [{"na'], ids=["nothing", "half"])
def test_half_a_trace_is_none(fit: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    """Torch says nothing where the disk is full."""

    def export(profiler: Any, path: str) -> None:
        if written:
            Path(path).write_text(written)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    result = fit(Profile(tmp_path, **EVERY), count=4)
    (error,) = result.plugin_errors["profile"]

    assert "OSError: torch.profiler" in error
    assert traces(tmp_path) == []
    assert not any("traces of torch.profiler" in note for note in result.notes)


def test_what_torch_cannot_trace_here_is_refused(fit: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {torch.profiler.ProfilerActivity.CPU})
    result = fit(Profile(tmp_path, **EVERY, activities=("cpu", "cuda")), count=2)
    (error,) = result.plugin_errors["profile"]

    assert_facts(error, "ValueError", "cannot trace cuda", "only cpu")
    assert tracing.kinds(None) == [torch.profiler.ProfilerActivity.CPU]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"wait": -1}, ValueError, "wait.*least 0; got -1"),
        ({"warmup": 1.5}, ValueError, "warmup.*least 0; got 1.5"),
        ({"active": 0}, ValueError, "active.*least 1; got 0"),
        ({"repeat": True}, ValueError, "repeat.*least 0; got True"),
        ({"skip_first": "2"}, ValueError, "skip_first.*least 0; got '2'"),
        ({"with_stack": 1}, TypeError, "with_stack is .*got 1"),
        ({"handlers": None}, TypeError, "handlers is .*got None"),
        ({"activities": "cpu"}, TypeError, r"activities .*tuple.* got 'cpu'"),
        ({"activities": ()}, ValueError, r"activities .*cuda, got \(\)"),
        ({"activities": ["gpu"]}, ValueError, r"activities .*cuda, got \('gpu',\)"),
        ({"folder": 3}, TypeError, "folder .*path, got 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Profile(**{"folder": "x", **options})


def test_only_one_may_claim_the_profiler(fit: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both claim profiler"):
        fit(Profile(tmp_path), Profile(tmp_path).named("second"))


def test_it_keeps_the_rules_of_plugins(tmp_path: Path) -> None:
    check_plugin(lambda: Profile(tmp_path, **EVERY))
