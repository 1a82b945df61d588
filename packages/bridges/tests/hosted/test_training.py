"""Plugins in a loop of another framework: events, requests, state, ends."""

from __future__ import annotations

import math

import pytest
import torch
from heliograph import (
    EMA,
    BatchEnd,
    BatchStart,
    EarlyStopping,
    Event,
    LastBoundary,
    LogSchedule,
    NaNGuard,
    Plugin,
    PluginChanged,
    Preemption,
    Run,
    SaveSchedule,
    ShouldStop,
    StepEnd,
    Trainer,
    ValidationEnd,
    ValidationSchedule,
    on,
)
from heliograph.packages.bridges.tests.hosted.loops import HOST, Loop, Trace
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.tests.kit import class_batches, fit
from heliograph_bridges.hosted.host import HostLoop


def test_events_come_in_the_order_of_our_own_loop() -> None:
    trace, own = Trace(), Trace()
    plugins = [LogSchedule(steps=1), ValidationSchedule(steps=2), SaveSchedule(steps=2, at_end=False)]
    Loop(*plugins, trace).fit(epochs=2)
    task_plugins = [LogSchedule(steps=1), ValidationSchedule(steps=2), SaveSchedule(steps=2, at_end=False), own]
    fit(*task_plugins, epochs=2, validation=class_batches(1))
    saved = [name for name in trace.names if name != "checkpoint_saved"]  # our own loop has no Checkpoint here
    assert saved == own.names
    assert trace.names.count("checkpoint_saved") == 2


def test_the_result_says_how_it_went() -> None:
    result = Loop(LogSchedule(steps=1), ValidationSchedule(epochs=1)).fit(epochs=2)
    assert (result.status, result.reason) == ("completed", "2 epochs done")
    assert (result.progress.steps, result.progress.samples, result.progress.validations) == (4, 12, 2)
    assert result.metrics == {"train/loss": 1.0, "validation/loss": 0.5}
    assert result.warnings == ()
    assert result.resume is not None
    assert_each(result.resume.reasons, ("untracked", "data and random generators", "other.Trainer"))


def test_a_stop_and_who_asked_for_it() -> None:
    class Stop(Plugin):
        asks = ("stop",)

        @on(StepEnd)
        def stop(self, run: Run, event: StepEnd) -> None:
            if run.progress.steps == 3:
                run.control.stop("three are enough")

    result = Loop(Stop()).fit(epochs=9)
    assert (result.status, result.stopped_by, result.progress.steps) == ("stopped", "stop", 3)


def test_a_stop_that_is_vetoed_is_postponed_by_a_boundary() -> None:
    class Stop(Plugin):
        asks = ("stop", "veto_stop")

        @on(BatchEnd)
        def stop(self, run: Run, event: BatchEnd) -> None:
            run.control.stop("now")

        @on(ShouldStop)
        def veto(self, run: Run, event: ShouldStop) -> None:
            if run.progress.steps < 2:
                run.control.veto_stop("not yet")

    assert Loop(Stop()).fit(epochs=9).progress.steps == 2


def test_gradients_of_a_loss_that_is_not_a_number_are_dropped() -> None:
    loop = Loop(NaNGuard("skip"))
    before = loop.model.weight.detach().clone()
    result = loop.fit(losses={0: math.nan, 1: math.inf})
    assert torch.equal(loop.model.weight, before)
    assert (result.progress.steps, result.progress.skipped_steps) == (0, 2)


def test_plugins_see_the_model_and_the_optimizer() -> None:
    ema = EMA(0.5)
    loop = Loop(ema)
    loop.fit()
    assert ema.weights["model"]["weight"].shape == loop.model.weight.shape
    assert not torch.equal(ema.weights["model"]["weight"], loop.model.weight)


def test_an_error_of_a_plugin_closes_the_run_and_passes_to_the_host() -> None:
    class Broken(Plugin):
        @on(StepEnd)
        def fail(self, run: Run, event: StepEnd) -> None:
            raise ValueError("on purpose")

    trace = Trace()
    loop = Loop(Broken(), trace)
    with pytest.raises(ValueError, match="on purpose") as caught:
        loop.fit()
    assert trace.names[-2:] == ["run_failed", "run_closed"]
    assert_each(caught.value.__notes__, ("in train", "epoch 0, batch 0", "step 1", "in broken on step_end"))
    assert loop.training.run is None
    assert loop.training.result is not None
    assert loop.training.result.status == "failed"


def test_an_error_of_the_host_is_given_to_fail() -> None:
    trace = Trace()
    loop = Loop(trace)
    with pytest.raises(ZeroDivisionError) as caught:
        loop.fit([(torch.zeros(1, 5), torch.zeros(1, dtype=torch.long))] if 1 / 0 else None)
    loop.training.fail(caught.value)  # nothing has begun
    assert trace.names == []


def test_a_training_whose_end_was_not_seen_is_closed_by_the_next() -> None:
    trace = Trace()
    loop = Loop(trace)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        loop.fit([(torch.zeros(1, 5), torch.zeros(1, dtype=torch.long))])
    assert loop.training.run is not None
    loop.fit()
    assert trace.names[trace.names.index("run_failed") :][:3] == ["run_failed", "run_closed", "train_start"]


def test_state_goes_out_and_comes_in() -> None:
    def plugins() -> list[Plugin]:
        return [EarlyStopping(patience=5), ValidationSchedule(steps=1), SaveSchedule(steps=3, at_end=False)]

    first = Loop(*plugins())
    assert first.fit(epochs=2).progress.steps == 4
    (saved,) = first.saved
    assert saved["plugins"]["early_stopping"]["failed_readings"] == 2
    assert saved["control"]["due"] == []
    second, trace = Loop(*plugins(), plugin := Trace()), plugin
    result = second.fit(epochs=3, saved=saved)
    early = second.training.plugins[EarlyStopping]
    assert early.failed_readings == 2 + result.progress.steps - 3
    assert trace.names[:3] == ["train_start", "checkpoint_loaded", "should_stop"]
    assert result.resume is not None
    assert (result.resume.step, result.resume.epoch, result.resume.batch) == (3, 1, 1)
    assert_facts(result.notes[0], "other.Trainer resumed", "epoch 1, batch 1", "step 3")


def test_a_plugin_that_was_disabled_stays_so_in_a_resumed_training() -> None:
    class Disables(Plugin):
        @on(StepEnd)
        def disable(self, run: Run, event: StepEnd) -> None:
            if run.progress.steps == 2:
                run.plugins.disable("trace")

    first = Loop(Trace(), Disables(), SaveSchedule(steps=3, at_end=False))
    first.fit(epochs=2)
    second = Loop(trace := Trace(), Disables(), SaveSchedule(steps=3, at_end=False))
    changes: list[PluginChanged] = []
    second.training.bus.on(PluginChanged, lambda run, event: changes.append(event))
    second.fit(epochs=3, saved=first.saved[0])
    assert [(change.plugin, change.change, change.by) for change in changes] == [
        ("trace", "disabled", "the loaded state")
    ]
    assert not second.training.plugins.is_enabled("trace")
    assert "step_end" not in trace.names


def test_a_stop_after_the_last_batch_does_not_end_a_longer_training() -> None:
    class Late(Plugin):
        asks = ("stop",)

        @on(LastBoundary)
        def stop(self, run: Run, event: LastBoundary) -> None:
            run.control.stop("too late")

    loop = Loop(Late())
    assert loop.fit().status == "completed"
    state = loop.training.state()
    assert state is not None
    assert "stop" not in state["control"]


@pytest.mark.parametrize("version", [2, 17])
def test_the_state_of_a_newer_version_is_refused(version: int) -> None:
    loop = Loop(SaveSchedule(steps=1, at_end=False))
    loop.fit()
    with pytest.raises(ValueError, match=f"version {version},"):
        loop.fit(saved={**loop.saved[0], "version": version})


def test_a_plugin_is_in_one_training_at_a_time() -> None:
    class Nested(Plugin):
        @on(ValidationEnd)
        def train(self, run: Run, event: ValidationEnd) -> None:
            fit(Trainer([self], device="cpu"))

    with pytest.raises(RuntimeError, match="'run' of another trainer"):
        Loop(Nested(), ValidationSchedule(steps=1)).fit()


def test_a_batch_that_is_replaced_is_an_error() -> None:
    class Zero(Plugin):
        @on(BatchStart)
        def zero(self, run: Run, event: Event) -> None:
            run.batch = ()

    with pytest.raises(RuntimeError, match=r"replaced run\.batch, but other\.Trainer"):
        Loop(Zero()).fit()


def test_preemption_finds_that_the_host_writes_checkpoints() -> None:
    assert Loop(Preemption(), ValidationSchedule(epochs=1)).fit().warnings == ()


def test_a_host_without_an_optimizer() -> None:
    result = Loop(NaNGuard("skip"), optimizer=None).fit()
    assert_each(result.notes, ("other.Trainer", "optimizer", "no parameter groups"))
    assert result.progress.steps == 2


def test_a_host_whose_processes_are_not_torchs() -> None:
    with pytest.raises(ValueError, match=r"3 processes, but torch\.distributed"):
        Loop(Trace(), world_size=3).fit()


def test_hosts_have_their_own_remedies() -> None:
    assert HostLoop("x", frozenset(), remedies={"rng": "y"}).remedy("rng") == "y"
    assert_facts(HOST.remedy("rng"), "set the seed", "the loop")
