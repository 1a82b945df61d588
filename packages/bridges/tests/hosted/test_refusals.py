"""Plugins that the loop of a host does not support: refused before its training, and at the verb."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from heliograph import (
    BatchTransform,
    Checkpoint,
    EarlyStopping,
    ForwardEnd,
    GradientAccumulation,
    GradientsReady,
    LearningRate,
    NaNGuard,
    PhaseTimes,
    Plugin,
    RNGCapture,
    RollBack,
    Run,
    SaveSchedule,
    StepEnd,
    TrainStart,
    ValidationSchedule,
    on,
)
from heliograph.packages.bridges.tests.hosted.loops import HOST, Loop
from heliograph_bridges.hosted.host import HostLoop

LEAN = HostLoop("lean.Trainer", frozenset(), lacks=frozenset({ForwardEnd, GradientsReady}))


@pytest.mark.parametrize(
    ("make", "host", "text"),
    [
        (lambda: GradientAccumulation(2), HOST, "'gradient_accumulation' requests hold_step.*gradient accumu"),
        (RollBack, HOST, "'roll_back' requests skip_batch.*remove the"),
        (lambda: LearningRate("step"), HOST, "'learning_rate' requests scheduler.*pass the"),
        (lambda: Checkpoint("x"), HOST, "'checkpoint' writes checkpoints.*of plugins"),
        (RNGCapture, HOST, "'rng_capture' controls.*set the seed"),
        (lambda: BatchTransform(lambda batch: batch), HOST, r"'batch_transform' replaces run\.batch.*the dataset"),
        (lambda: NaNGuard("skip"), LEAN, r"'nan_guard' requests skip_step.* lean\.Trainer"),
        (NaNGuard, LEAN, r"'nan_guard' handles GradientsReady.* lean\.Trainer"),
    ],
)
def test_a_plugin_is_refused_with_its_name_the_verb_and_what_to_use(
    make: Callable[[], Any], host: HostLoop, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Loop(make(), host=host).fit()


def test_all_that_are_refused_are_in_one_error_once_each() -> None:
    with pytest.raises(ValueError, match="does not support") as caught:
        Loop(
            RNGCapture(),
            EarlyStopping(),
            PhaseTimes(),
            RollBack(),
            Checkpoint("x", keep_best=1, monitor="validation/loss"),
        ).fit()
    assert [line.split("'")[1] for line in str(caught.value).splitlines()] == [
        "rng_capture",
        "roll_back",
        "checkpoint",
        "early_stopping",
    ]


def test_an_observer_only_looks_on() -> None:
    assert Loop(PhaseTimes(), host=LEAN, does=frozenset({"log"})).fit().progress.steps == 2


def test_what_is_needed_and_nobody_does() -> None:
    with pytest.raises(ValueError, match="'early_stopping' would never act:"):
        Loop(EarlyStopping()).fit()
    with pytest.raises(ValueError, match="never act:"):
        Loop(EarlyStopping(), does=frozenset({"validation"}), validation={}).fit()
    assert Loop(EarlyStopping(), does=frozenset({"validation"})).fit().status == "completed"


def test_validations_without_data() -> None:
    with pytest.raises(ValueError, match="'validation_schedule' would never act:"):
        Loop(ValidationSchedule(steps=1), validation={}).fit()

    class Ask(Plugin):
        asks = ("validation",)

        @on(StepEnd)
        def ask(self, run: Run, event: StepEnd) -> None:
            run.control.request_validation("now")

    with pytest.raises(ValueError, match=r"'ask' requests validations, .*no"):
        Loop(Ask(), validation={}).fit()


@pytest.mark.parametrize("verb", ["veto_save", "next_phase", "skip_step"])
def test_a_verb_that_was_not_declared_is_an_error_where_it_is_asked(verb: str) -> None:
    class Ask(Plugin):
        @on(GradientsReady, optional=True)
        def ask(self, run: Run, event: GradientsReady) -> None:
            getattr(run.control, verb)("now")

    host = HostLoop("narrow.Trainer", frozenset())
    with pytest.raises(RuntimeError, match=rf"control\.{verb} is not supported"):
        Loop(Ask(), host=host).fit()


def test_what_only_our_own_loop_can_do_is_an_error() -> None:
    calls: list[Callable[[Run], Any]] = [
        lambda run: run.state_dict(),
        lambda run: run.resume({}),
        lambda run: run.roll_back({}),
        lambda run: run.data.key_draws(0),
    ]

    def ask(call: Callable[[Run], Any], run: Run, event: TrainStart) -> None:
        with pytest.raises(RuntimeError, match=r"run\.[\w.]+ is not supported"):
            call(run)

    loop = Loop(SaveSchedule(steps=1, at_end=False))
    for call in calls:
        loop.training.bus.on(TrainStart, partial(ask, call))
    assert loop.fit().status == "completed"


def test_the_training_step_is_the_hosts() -> None:
    def ask(run: Run, event: TrainStart) -> None:
        with pytest.raises(RuntimeError, match=r"run\.stepping\.forward is not supported"):
            _ = run.stepping.forward
        with pytest.raises(RuntimeError, match=r"run\.stepping\.forward is not supported"):
            run.stepping.forward = print

    loop = Loop(SaveSchedule(steps=1, at_end=False))
    loop.training.bus.on(TrainStart, ask)
    assert loop.fit().status == "completed"
