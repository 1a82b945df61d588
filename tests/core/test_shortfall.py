"""What a training compares at its end: what was asked for, and what happened."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    CheckpointLoaded,
    Event,
    Every,
    GradientsReady,
    LogSchedule,
    Plugin,
    Run,
    RunResult,
    SavePoint,
    StepEnd,
    Supervised,
    Task,
    TrainEnd,
    Trainer,
    ValidationEnd,
    ValidationSchedule,
    on,
)
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph.tests.messages import assert_each, assert_facts
from torch import Tensor, nn

BATCHES = class_batches(6)


def fit(*plugins: Any, task: Any = None, **options: Any) -> RunResult:
    """Train 2 epochs of 6 steps."""
    given: Any = {"optimizer": sgd(), "epochs": 2} | options
    return Trainer(plugins, device="cpu").fit(task or linear_classifier(), BATCHES, **given)


class TwoHeads(nn.Module):
    """Has a second head, used from batch `since` on."""

    def __init__(self, since: int | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)
        self.since, self.calls = since, 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Count the call, and use the second head where it is time."""
        self.calls += 1
        outputs: Tensor = self.first(inputs)
        return outputs + self.second(inputs) if self.since is not None and self.calls > self.since else outputs


def two_heads(since: int | None = None) -> Supervised:
    """Return a task whose second head has gradients from a batch on, or never."""
    return Supervised(TwoHeads(since), nn.functional.cross_entropy)


@pytest.mark.parametrize("optimizer", [sgd(), partial(torch.optim.Adam, lr=0.1, fused=True)])
def test_parameters_that_never_had_a_gradient(optimizer: Any) -> None:
    result = fit(task=two_heads(), optimizer=optimizer)
    assert_each(
        result.warnings,
        (
            "2 parameters",
            "second.weight, second.bias",
            "gradient",
            "requires_grad_(False)",
            "allow_unused_parameters=True",
        ),
    )


def test_a_gradient_that_comes_late_is_seen() -> None:
    assert fit(task=two_heads(since=11)).warnings == ()


@pytest.mark.parametrize(("since", "is_warned"), [(150, False), (None, True)])
def test_parameters_without_a_gradient_are_watched_by_hooks_after_a_hundred_steps(
    since: int | None, is_warned: bool
) -> None:
    task = two_heads(since)
    second = task.model.get_submodule("second")
    numbers = list[int]()

    class Count(Plugin):
        @on(StepEnd)
        def count(self, run: Run, event: StepEnd) -> None:
            numbers.append(sum(len(each._post_accumulate_grad_hooks or ()) for each in second.parameters()))

    result = fit(Count(), task=task, epochs=40)
    assert bool(result.warnings) is is_warned
    assert numbers[98] == 0
    assert numbers[99] == 2
    assert numbers[-1] == (0 if since else 2)
    assert not any(each._post_accumulate_grad_hooks for each in second.parameters())


def test_parameters_that_no_optimizer_holds() -> None:
    task = two_heads()
    optimizer = torch.optim.SGD(task.model.get_submodule("first").parameters(), lr=0.1)
    assert_each(
        fit(task=task, optimizer=optimizer).warnings,
        (
            "2 parameters",
            "second.weight, second.bias",
            "no optimizer",
            "requires_grad_(False)",
            "allow_unused_parameters=",
        ),
    )
    assert fit(task=task, optimizer=optimizer, allow_unused_parameters=True).warnings == ()


def test_unused_parameters_may_be_allowed() -> None:
    assert fit(task=two_heads(), allow_unused_parameters=True).warnings == ()


def test_frozen_parameters_need_no_gradient() -> None:
    task = two_heads()
    task.model.second.requires_grad_(False)
    assert fit(task=task).warnings == ()


def test_many_unused_parameters_are_counted() -> None:
    model = nn.ModuleList([nn.Linear(4, 2) for _ in range(4)])

    class First(Task):
        def __init__(self) -> None:
            self.model = model

        def training_step(self, run: Run, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(model[0](batch[0]), batch[1])

    (warning,) = fit(task=First()).warnings
    assert_facts(warning, "6 parameters", "1.weight, 1.bias,", "3.weight", "1 more")


def test_an_optimizer_that_is_never_stepped() -> None:
    class One(Task):
        def __init__(self) -> None:
            self.one, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

        def training_step(self, run: Run, batch: Any) -> Any:
            yield "one", nn.functional.cross_entropy(self.one(batch[0]), batch[1])

    assert_each(fit(task=One(), optimizer={"one": sgd(), "other": sgd()}).warnings, ("'other'", "never stepped"))


def test_a_validation_set_that_was_never_read() -> None:
    result = fit(ValidationSchedule(Every(steps=100), at_end=False), validation=BATCHES)
    assert_each(
        result.warnings,
        ("validation set", "never read", "'validation_schedule'", "ValidationSchedule(steps=10)"),
    )


def test_a_handler_whose_event_never_came() -> None:
    class Exports(Plugin):
        @on(ValidationEnd)
        def export(self, run: Run, event: ValidationEnd) -> None:
            raise AssertionError

    assert_each(
        fit(Exports()).warnings,
        ("'exports'", "export", "never called", "validation=", "ValidationSchedule(epochs=1)"),
    )


class Ready(Event):
    """An event that some plugin may emit."""


def test_a_handler_of_an_event_that_nobody_emits() -> None:
    class Waits(Plugin):
        @on(Ready)
        def act(self, run: Run, event: Ready) -> None: ...

    class Emits(Plugin):
        @on(TrainEnd)
        def act(self, run: Run, event: TrainEnd) -> None:
            run.emit(Ready())

    assert_each(fit(Waits()).warnings, ("'waits'", "act", "never called", "ready"))
    assert fit(Waits(), Emits()).warnings == ()


def test_a_handler_whose_filter_never_let_anything_through() -> None:
    class Often(Plugin):
        @on(StepEnd, when=Every(steps=13))
        def act(self, run: Run, event: StepEnd) -> None: ...

    assert_each(fit(Often()).warnings, ("'often'", "act", "never called", "every 13 steps", "step_end"))
    assert fit(Often(), epochs=3).warnings == ()
    trainer = Trainer([Often()], device="cpu")
    warned = [
        len(trainer.fit(linear_classifier(), BATCHES, optimizer=sgd(), epochs=epochs).warnings) for epochs in (3, 2, 3)
    ]
    assert warned == [0, 1, 0]


def test_a_handler_that_is_optional_need_not_be_called() -> None:
    class Exports(Plugin):
        @on(ValidationEnd, optional=True)
        def export(self, run: Run, event: ValidationEnd) -> None: ...

        @on(CheckpointLoaded)
        def resume(self, run: Run, event: CheckpointLoaded) -> None: ...

    assert fit(Exports()).warnings == ()


def test_a_plugin_that_is_disabled_need_not_be_called() -> None:
    class Exports(Plugin):
        @on(ValidationEnd)
        def export(self, run: Run, event: ValidationEnd) -> None: ...

    trainer = Trainer([Exports()], device="cpu")
    trainer.plugins.disable("exports")
    assert trainer.fit(linear_classifier(), BATCHES, optimizer=sgd(), epochs=1).warnings == ()


@pytest.mark.parametrize(("every", "skipped"), [(2, 6), (3, 4)])
def test_steps_that_were_skipped_and_by_whom(every: int, skipped: int) -> None:
    class Skips(Plugin):
        @on(GradientsReady)
        def skip(self, run: Run, event: GradientsReady) -> None:
            if run.progress.batches % every == 0:
                run.control.skip_step("odd")

    facts = [] if skipped <= 5 else [("6 of 12", "skips (6)")]
    assert_each(fit(Skips()).warnings, *facts)


def test_an_observer_that_was_switched_off() -> None:
    class Fails(Plugin):
        policy = "observer"
        max_errors = 2

        @on(BatchEnd)
        def act(self, run: Run, event: BatchEnd) -> None:
            raise ValueError("no space")

    assert_each(
        fit(Fails()).warnings, ("'fails'", "switched off", "2 errors", "batch_end", "step 2", "ValueError: no space")
    )


def test_an_observer_that_failed_once() -> None:
    class Fails(Plugin):
        policy = "observer"

        @on(TrainEnd)
        def act(self, run: Run, event: TrainEnd) -> None:
            raise ValueError("no space")

    assert_each(fit(Fails()).warnings, ("'fails' failed", "train_end", "step 12", "ValueError: no space"))


def test_an_observer_that_fails_when_it_is_closed() -> None:
    class Fails(Plugin):
        policy = "observer"

        @on(BatchStart)
        def act(self, run: Run, event: BatchStart) -> None: ...

        def close(self) -> None:
            raise ValueError("no space")

    assert_each(fit(Fails()).warnings, ("'fails' failed", "close", "ValueError: no space"))


def test_a_request_that_was_still_due() -> None:
    class Asks(Plugin):
        """Requests another save."""

        @on(TrainEnd, SavePoint)
        def ask(self, run: Run, event: TrainEnd | SavePoint) -> None:
            run.control.request_save("again")

    assert_each(fit(Asks()).warnings, ("save", "pending", "asks", "again"))


def test_all_is_well() -> None:
    result = fit(LogSchedule(Every(steps=5)), ValidationSchedule(Every(epochs=1)), validation=BATCHES)
    assert result.warnings == ()


class Short:
    """Batches of which there are fewer than its length says."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_a_validation_that_ended_early() -> None:
    schedule = ValidationSchedule(Every(epochs=1))
    assert_each(
        fit(schedule, validation=Short(BATCHES[:3])).warnings, ("validation loader", "3 batches", "length says 5")
    )
    named = {"easy": Short(BATCHES[:5]), "hard": Short(BATCHES[:1])}
    assert_each(fit(schedule, validation=named).warnings, ("validation set 'hard'", "1 batches", "length says 5"))


@pytest.mark.parametrize("factor", [1.0, torch.inf, torch.nan])
def test_a_loss_that_is_lost_at_the_end(factor: float) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets) * factor

    result = fit(LogSchedule(Every(steps=1)), task=Supervised(nn.Linear(4, 2), loss))

    expected = [] if factor == 1.0 else [("train/loss is nan", "NaNGuard('raise')")]
    assert_each(result.warnings, *expected)
