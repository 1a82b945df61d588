"""Plugins that are called only while a condition holds: `plugin.when(...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph import Between, Every, Plugin, Run, Trainer, on
from heliograph.tests import kit
from heliograph.tests.messages import assert_each, assert_facts
from torch import nn

WATCHED: tuple[Any, ...] = (
    h.TrainStart, h.EpochStart, h.BatchStart, h.GradientsReady, h.StepEnd, h.BatchEnd, h.ValidationStart,
    h.ValidationBatchEnd, h.ValidationEnd, h.EpochEnd, h.LastBoundary, h.TrainEnd, h.RunClosed,
)  # fmt: skip
ENDS = [("train_start", 0, 0), ("run_closed", 3, 6)]


class Watch(Plugin):
    """Notes which events came, with the epoch and the step."""

    affects_training = False

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    @on(*WATCHED, optional=True)
    def note(self, run: Run, event: h.Event) -> None:
        self.seen.append((event.name, run.progress.epoch, run.progress.steps))

    def names(self) -> set[str]:
        return {name for name, _, _ in self.seen}


def validating() -> Plugin:
    return h.ValidationSchedule(Every(epochs=1), at_end=False)


def watch(watcher: Watch, *plugins: Plugin, **options: Any) -> h.RunResult:
    """Train for three epochs of two batches, with a validation of two named sets after each."""
    sets = {"seen": kit.class_batches(1), "unseen": kit.class_batches(2)}
    options = {"epochs": 3, "validation": sets, **options}
    return kit.fit(validating(), *plugins, watcher, **options)


def test_from_an_epoch_on() -> None:
    """At the end of an epoch that is counted already, and in the boundary after it."""
    watcher = Watch().when(lambda run: run.progress.epoch >= 2)
    watch(watcher)
    epoch = [("epoch_start", 2, 4)]
    for step in (4, 5):
        epoch += [("batch_start", 2, step), ("gradients_ready", 2, step)]
        epoch += [("step_end", 2, step + 1), ("batch_end", 2, step + 1)]

    def validated(epoch: int, step: int) -> list[tuple[str, int, int]]:
        names = ["validation_start", *["validation_batch_end"] * 3, "validation_end"]
        return [(name, epoch, step) for name in names]

    last = [("last_boundary", 3, 6), ("train_end", 3, 6)]
    expected = [("epoch_end", 2, 4), *validated(2, 4), *epoch, ("epoch_end", 3, 6), *validated(3, 6), *last]
    assert watcher.seen == [ENDS[0], *expected, ENDS[1]]


def test_between_two_counts_it_is_asked_where_a_window_begins() -> None:
    """The step that makes the third is begun with two."""
    watcher = Watch().when(Between(steps=(1, 2)))
    watch(watcher)
    steps = [(name, step) for name, _, step in watcher.seen if name in ("batch_start", "gradients_ready", "step_end")]
    assert steps == [
        ("batch_start", 1), ("gradients_ready", 1), ("step_end", 2),
        ("batch_start", 2), ("gradients_ready", 2), ("step_end", 3),
    ]  # fmt: skip


def test_no_window_is_split() -> None:
    """Windows of three micro-batches; the condition changes after the first batch of each."""
    watcher = Watch().when(lambda run: run.progress.batch in (0, 4, 5))
    watch(watcher, h.GradientAccumulation(3), train=kit.class_batches(6), epochs=1)
    hot = [name for name, _, _ in watcher.seen if name in ("batch_start", "gradients_ready", "step_end")]
    assert hot == ["batch_start"] * 3 + ["gradients_ready", "step_end"]


@pytest.mark.parametrize("event", [h.BatchStart, h.ForwardEnd, h.BackwardEnd])
def test_no_window_is_split_whichever_event_comes_first(event: type[Any]) -> None:
    calls: list[tuple[str, int]] = []

    class Steps(Plugin):
        @on(event)
        def begin(self, run: Run, event: Any) -> None:
            calls.append(("first", run.progress.batch))

        @on(h.StepEnd)
        def note(self, run: Run, event: h.StepEnd) -> None:
            calls.append(("step", run.progress.batch))

    plugin = Steps().when(lambda run: run.progress.batch not in (1, 2))
    kit.fit(h.GradientAccumulation(2), plugin, train=kit.class_batches(6))
    assert calls == [
        ("first", 0), ("first", 1), ("step", 1), ("first", 4), ("first", 5), ("step", 5)
    ]  # fmt: skip


def test_the_first_handler_of_a_window_decides_whichever_it_is() -> None:
    class Steps(Plugin):
        def __init__(self) -> None:
            self.steps: list[int] = []

        @on(h.StepEnd)
        def note(self, run: Run, event: h.StepEnd) -> None:
            self.steps.append(run.progress.steps)

    plugin = Steps().when(lambda run: run.progress.steps in (2, 3))
    watch(Watch(), plugin)
    assert plugin.steps == [2, 3]


def test_no_validation_is_split() -> None:
    """Asked when it starts, though the condition changes within it."""
    watcher = Watch().when(lambda run: run.phase == "validation" and run.progress.evaluated == run.progress.epoch - 1)
    watch(watcher)
    evaluations = [(name, epoch) for name, epoch, _ in watcher.seen if name.startswith("validation")]
    assert evaluations == [("validation_start", 1), *[("validation_batch_end", 1)] * 3, ("validation_end", 1)]


def test_a_validation_on_its_own_is_asked_again_each_time() -> None:
    wanted = [True, False, True]
    watcher = Watch().when(lambda run: wanted.pop(0))
    trainer = Trainer([watcher], device="cpu")
    counts = []
    for _ in range(3):
        trainer.validate(kit.linear_classifier(), kit.class_batches(1))
        counts.append([name for name, _, _ in watcher.seen].count("validation_end"))
    assert (counts, wanted) == ([1, 1, 2], [])


def test_in_some_phases() -> None:
    watcher = Watch().when(phases=("validation",))
    watch(watcher)
    assert watcher.names() == {
        "train_start", "validation_start", "validation_batch_end", "validation_end", "run_closed",
    }  # fmt: skip
    watcher = Watch().when(phases=("train",))
    watch(watcher)
    assert not {"validation_start", "validation_batch_end", "validation_end"} & watcher.names()
    assert "step_end" in watcher.names()


def test_for_the_batches_of_some_sets() -> None:
    watcher = Watch().when(phases=("validation",), sets=("unseen",))
    watch(watcher, epochs=1)
    assert [name for name, _, _ in watcher.seen] == [
        "train_start", "validation_start", "validation_batch_end", "validation_batch_end", "validation_end",
        "run_closed",
    ]  # fmt: skip


def test_several_conditions_must_all_hold() -> None:
    watcher = Watch().when(Between(epochs=(1, 2))).when(lambda run: run.progress.steps > 3).when(phases=("train",))
    watch(watcher)
    ended = [(epoch, step) for name, epoch, step in watcher.seen if name == "batch_end"]
    assert ended == [(1, 4), (2, 5), (2, 6)]
    assert "validation_end" not in watcher.names()


def test_phases_and_sets_of_several_calls_are_those_in_common() -> None:
    condition = Watch().when(phases=("train", "validation")).when(phases=("validation", "test")).condition
    assert condition is not None
    assert condition.phases == ("validation",)
    with pytest.raises(ValueError, match=r"^when\(phases=\('test',\)\) excludes"):
        Watch().when(phases=("train",)).when(phases=("test",))


def test_a_handlers_own_filter_is_asked_only_while_the_condition_holds() -> None:
    class Thirds(Plugin):
        def __init__(self) -> None:
            self.batches: list[int] = []

        @on(h.BatchEnd, when=Every(emissions=2))
        def note(self, run: Run, event: h.BatchEnd) -> None:
            self.batches.append(run.progress.batches)

    plugin = Thirds().when(lambda run: run.progress.batches >= 3)
    watch(Watch(), plugin)
    assert plugin.batches == [4, 6]


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (((), {}), TypeError, r"^when\(\) takes.*phases= or sets="),
        (((3,), {}), TypeError, "got 3"),
        (((lambda: True,), {}), TypeError, r"^when\(\).*got .*<lambda>\(\)\.$"),
        (((Every(steps=2),), {}), TypeError, r"Every\(steps=\.\.\.\) passes single events"),
        (((Between(emissions=(1, 2)),), {}), TypeError, "passes single events"),
        (((), {"phases": "validation"}), TypeError, r"takes a tuple, \('validation',\)"),
        (((), {"sets": "unseen"}), TypeError, r"takes a tuple, \('unseen',\)"),
        (((), {"phases": ("valid",)}), ValueError, r"Unknown phase 'valid'.*validation"),
    ],
)
def test_what_is_no_condition(arguments: Any, error: type[Exception], sentence: str) -> None:
    positional, named = arguments
    with pytest.raises(error, match=sentence):
        Watch().when(*positional, **named)


def test_a_condition_that_comes_after_the_registration_is_an_error() -> None:
    watcher = Watch()
    trainer = Trainer([watcher], device="cpu")
    watcher.when(phases=("train",))
    with pytest.raises(RuntimeError, match="plugin 'watch' was changed"):
        kit.fit(trainer)


def test_the_plan_says_so() -> None:
    def late(run: Run) -> bool:
        return run.progress.epoch > 3

    conditional = h.GradientClipping(norm=1.0).when(late).when(Between(steps=(2, 5)), phases=("train",))
    trainer = Trainer([conditional, Watch().when(sets=("a", "b"))], device="cpu")
    plan = " ".join(trainer.plan(kit.linear_classifier(), kit.class_batches(2), optimizer=kit.sgd(), epochs=1).split())
    assert "only while late (line" in plan
    assert_facts(plan, "test_conditions.py", "2 to 5 steps", "in train")
    assert "'a' and 'b'" in plan
    assert_facts(trainer.plan(), "DECIDE", "gradient_clipping", "condition")


def test_a_plan_that_never_came_true_is_a_warning_and_any_other_condition_a_note() -> None:
    """Who gives counts expects them to come; a function may be for what should never happen."""
    planned, other = Watch().when(Between(epochs=(7, 9))), Watch().named("rescue").when(lambda run: False)
    result = watch(planned, other)
    assert_each(result.warnings, ("'watch'", "never on", "7 to 9 epochs"))
    (note,) = [note for note in result.notes if "rescue" in note]
    assert_facts(note, "'rescue'", "never on", "<lambda> (line ")
    assert planned.seen == other.seen == ENDS


def test_a_set_that_never_came_is_a_warning() -> None:
    result = watch(Watch().when(sets=("unsen",)))
    (warning,) = result.warnings
    assert_facts(warning, "'watch'", "'unsen'", "no evaluation")
    assert "'unseen'" in warning


def test_who_was_on_in_a_former_training_is_judged_anew() -> None:
    watcher = Watch().when(Between(steps=(1, 2)))
    trainer = Trainer([watcher], device="cpu")
    assert kit.fit(trainer).warnings == ()
    result = kit.fit(trainer, steps=1, train=kit.class_batches(1))
    assert result.warnings == ()  # batch_end sees the first step
    watcher = Watch().when(Between(steps=(3, 4)))
    trainer = Trainer([watcher], device="cpu")
    assert kit.fit(trainer, steps=4).warnings == ()
    assert_each(kit.fit(trainer, steps=2).warnings, ("'watch'", "never on", "3 to 4 steps"))


def test_an_error_in_a_condition_names_its_plugin_and_an_observers_is_forgiven() -> None:
    def broken(run: Run) -> bool:
        raise ZeroDivisionError("no rate")

    with pytest.raises(ZeroDivisionError) as caught:
        watch(Watch().when(broken))
    assert any("watch" in note for note in caught.value.__notes__)

    class Spectator(Watch):
        policy = "observer"

    spectator = Spectator().when(broken)
    result = watch(spectator)
    assert len(result.plugin_errors["spectator"]) == 3


def test_the_conditions_of_observers_run_apart() -> None:
    """What they draw changes no loss."""

    class Spectator(Watch):
        policy = "observer"

    def losses(*plugins: Plugin) -> list[float]:
        kept = kit.Losses()
        kit.fit(h.RNGCapture(), kept, *plugins, task=dropping(), epochs=2)
        return kept.values

    def dropping() -> h.Supervised:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
        return h.Supervised(model, nn.functional.cross_entropy)

    assert losses() == losses(Spectator().when(lambda run: bool(torch.rand(1) > 0.5)))


class Kept(kit.Losses):
    """Keeps every loss, which changes none."""

    affects_training = False


class Noise(Plugin):
    """Adds to the first weight, a little more each time."""

    def __init__(self) -> None:
        self.times = 0

    @on(h.StepEnd)
    def add(self, run: Run, event: h.StepEnd) -> None:
        self.times += 1
        run.task.model.weight.data[0, 0] += self.times

    def state_dict(self) -> dict[str, Any]:
        return {"times": self.times}

    def load_state_dict(self, state: Any) -> None:
        self.times = state["times"]


def noisy() -> Plugin:
    return Noise().when(Between(steps=(3, 6))).when(lambda run: run.progress.epoch != 2)


@pytest.mark.parametrize("kill", [2, 4, 6])
def test_a_resumed_run_asks_the_condition_again(kill: int, tmp_path: Path) -> None:
    def train(folder: Path, **options: Any) -> tuple[list[float], h.ResumeReport | None]:
        losses = Kept()
        plugins = [*kit.saving(folder, Every(steps=2), resume="auto"), noisy(), losses]
        result = kit.fit(*plugins, train=kit.class_batches(3), **options)
        return losses.values, result.resume

    whole, _ = train(tmp_path / "whole", steps=9)
    before, _ = train(tmp_path / "parts", steps=kill)
    after, report = train(tmp_path / "parts", steps=9)
    assert before + after == whole
    assert report is not None
    assert report.reasons == ()


def test_a_plugin_without_a_condition_is_called_directly_and_one_with_always_where_it_must() -> None:
    plain, conditional = Watch(), Watch().named("late").when(phases=("validation",))
    bus = Trainer([plain, conditional], device="cpu").bus
    direct, gated = bus.signal(h.BatchEnd).chain
    assert direct == plain.note
    assert gated != conditional.note
    assert bus.signal(h.TrainStart).chain == (plain.note, conditional.note)


def test_switched_off_and_on_a_plugin_keeps_its_condition() -> None:
    watcher = Watch().when(phases=("validation",))
    trainer = Trainer([validating(), watcher], device="cpu")
    trainer.plugins.disable(watcher)
    kit.fit(trainer, validation=kit.class_batches(1))
    assert watcher.seen == []
    trainer.plugins.enable(watcher)
    kit.fit(trainer, validation=kit.class_batches(1))
    assert watcher.names() == {
        "train_start",
        "validation_start",
        "validation_batch_end",
        "validation_end",
        "run_closed",
    }


def test_a_conditional_schedule_validates_at_the_end_of_the_epochs_that_it_is_for() -> None:
    schedule = validating().when(lambda run: run.progress.epoch >= 2)
    result = kit.fit(schedule, validation=kit.class_batches(1), epochs=4)
    assert [each.epoch for each in result.history] == [2, 3, 4]
