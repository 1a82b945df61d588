"""GradientAccumulation against loops written by hand, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from heliograph import BatchEnd, BatchStart, EpochEnd, GradientAccumulation, Lane, Run, StepEnd, Trainer, TrainStart
from heliograph.tests import kit
from heliograph.tests.messages import assert_each
from torch import Tensor, nn

Make = Callable[..., Any]
Batches = list[tuple[Tensor, Tensor]]


class Unsized:
    """An iterable of batches without a length."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Lying(Unsized):
    """Says that it is longer than it is."""

    def __len__(self) -> int:
        return len(self.batches) + 1


def by_hand(task: Any, windows: Sequence[Batches], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Step once per window, each micro-batch divided by the window's size."""
    for window in windows:
        for inputs, targets in window:
            (nn.functional.mse_loss(task.model(inputs), targets) / len(window)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in task.model.parameters()]


def windows_of(batches: Batches, n: int) -> list[Batches]:
    return [batches[start : start + n] for start in range(0, len(batches), n)]


def skip(trainer: Trainer, *places: int) -> None:
    def leave_out(run: Run, event: BatchStart) -> None:
        if run.progress.batch in places:
            run.control.skip_batch("left out by the test")

    trainer.bus.on(BatchStart, leave_out, lane=Lane.TRANSFORM)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("sized", [True, False])
def test_windows_and_tail(task: Make, batches: Make, sgd: Any, weights: Any, n: int, sized: bool) -> None:
    data, mine, theirs = batches(5), task(), task()
    trainer = Trainer([GradientAccumulation(n)], device="cpu")
    result = trainer.fit(mine, data if sized else Unsized(data), optimizer=sgd, epochs=2)
    expected = by_hand(theirs, windows_of(data, n) * 2, sgd(list(theirs.model.parameters())))

    assert result.progress.steps == 2 * -(-5 // n)
    assert result.progress.batches == 10
    if sized or n in (1, 5):
        assert all(map(torch.equal, weights(mine), expected))
    else:
        torch.testing.assert_close(weights(mine), expected)


def test_without_the_plugin_every_batch_steps(task: Make, batches: Make, sgd: Any, weights: Any) -> None:
    data, mine, theirs = batches(5), task(), task()
    Trainer(device="cpu").fit(mine, data, optimizer=sgd, epochs=2)
    expected = by_hand(theirs, windows_of(data, 1) * 2, sgd(list(theirs.model.parameters())))

    assert all(map(torch.equal, weights(mine), expected))


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(
    ("left_out", "windows"),
    [
        ((1,), [[0, 2], [3, 4, 5], [6]]),  # in a window's midst
        ((0,), [[1, 2], [3, 4, 5], [6]]),
        ((2,), [[0, 1], [3, 4, 5], [6]]),  # the one that would have stepped
        ((3, 4, 5), [[0, 1, 2], [6]]),  # a whole window
        ((6,), [[0, 1, 2], [3, 4, 5]]),  # the last of the epoch, a window of its own
        ((5, 6), [[0, 1, 2], [3, 4]]),
    ],
)
def test_skipped_batches_leave_their_window_with_its_true_weight(
    task: Make,
    batches: Make,
    sgd: Any,
    weights: Any,
    sized: bool,
    left_out: tuple[int, ...],
    windows: list[list[int]],
) -> None:
    data, mine, theirs = batches(7), task(), task()
    trainer = Trainer([GradientAccumulation(3)], device="cpu")
    skip(trainer, *left_out)
    result = trainer.fit(mine, data if sized else Unsized(data), optimizer=sgd, epochs=2)
    chosen = [[data[place] for place in window] for window in windows]
    expected = by_hand(theirs, chosen * 2, sgd(list(theirs.model.parameters())))

    torch.testing.assert_close(weights(mine), expected)
    assert result.progress.steps == 2 * len(windows)
    assert result.progress.skipped_batches == 2 * len(left_out)
    assert result.progress.batches == 14


@pytest.mark.parametrize("sized", [True, False])
def test_the_last_batch_of_the_epoch_skipped_inside_a_window(
    task: Make, batches: Make, sgd: Any, weights: Any, sized: bool
) -> None:
    data, mine, theirs = batches(5), task(), task()
    trainer = Trainer([GradientAccumulation(3)], device="cpu")
    skip(trainer, 4)
    result = trainer.fit(mine, data if sized else Unsized(data), optimizer=sgd, epochs=2)
    expected = by_hand(theirs, [data[:3], data[3:4]] * 2, sgd(list(theirs.model.parameters())))

    torch.testing.assert_close(weights(mine), expected)
    assert result.progress.steps == 4


def test_a_loader_that_ends_early_still_steps_its_tail(task: Make, batches: Make, sgd: Any, weights: Any) -> None:
    data, mine, theirs = batches(4), task(), task()
    trainer = Trainer([GradientAccumulation(3)], device="cpu")
    result = trainer.fit(mine, Lying(data), optimizer=sgd, epochs=1)
    assert_each(result.warnings, ("train loader", "4 batches", "length says 5"))
    expected = by_hand(theirs, [data[:3], data[3:]], sgd(list(theirs.model.parameters())))

    torch.testing.assert_close(weights(mine), expected)
    assert (result.progress.steps, result.progress.epoch) == (2, 1)


def test_a_schedule_by_epoch(task: Make, batches: Make, sgd: Any, weights: Any) -> None:
    data, mine, theirs = batches(4), task(), task()
    plugin = GradientAccumulation({3: 4, 0: 1, 1: 2})
    trainer = Trainer([plugin], device="cpu")
    steps: list[int] = []
    trainer.bus.on(EpochEnd, lambda run, event: steps.append(run.progress.steps))
    trainer.fit(mine, data, optimizer=sgd, epochs=5)
    windows = [*windows_of(data, 1), *windows_of(data, 2), *windows_of(data, 2), data, data]
    expected = by_hand(theirs, windows, sgd(list(theirs.model.parameters())))

    assert steps == [4, 6, 8, 9, 10]
    assert all(map(torch.equal, weights(mine), expected))
    assert [plugin.number(epoch) for epoch in range(5)] == [1, 2, 2, 4, 4]


def test_loss_is_scaled_and_steps_are_held(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([GradientAccumulation(3)], device="cpu")
    seen: list[tuple[float, bool, int, int]] = []
    trainer.bus.on(
        BatchEnd,
        lambda run, event: seen.append(
            (run.control.loss_scale, run.control.holds_step, run.stepping.window, run.progress.steps)
        ),
    )
    result = trainer.fit(task(), batches(5), optimizer=sgd, epochs=1)

    third = 1 / 3
    assert seen == [
        (third, True, 1, 0),
        (third, True, 2, 0),
        (third, False, 0, 1),
        (0.5, True, 1, 1),
        (0.5, True, 0, 2),  # held, but the epoch's last: windows never cross
    ]
    assert {request.by for request in result.history} == {"gradient_accumulation"}


def test_the_step_limit_counts_optimizer_steps(task: Make, batches: Make, sgd: Any) -> None:
    result = Trainer([GradientAccumulation(3)], device="cpu").fit(task(), batches(5), optimizer=sgd, steps=3)

    assert (result.progress.steps, result.progress.epoch, result.progress.batch) == (3, 1, 3)


def test_a_stop_waits_for_the_end_of_the_window(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([GradientAccumulation(3)], device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: run.control.stop("enough"))
    result = trainer.fit(task(), batches(6), optimizer=sgd, epochs=2)

    assert (result.status, result.progress.batches, result.progress.steps) == ("stopped", 3, 1)


def test_one_step_end_per_window(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([GradientAccumulation(2)], device="cpu")
    places: list[int] = []
    trainer.bus.on(StepEnd, lambda run, event: places.append(run.progress.batch))
    trainer.fit(task(), batches(5), optimizer=sgd, epochs=1)

    assert places == [1, 3, 4]


def test_two_fits_and_a_test_on_one_trainer(task: Make, batches: Make, sgd: Any, weights: Any) -> None:
    trainer = Trainer([GradientAccumulation(3)], device="cpu")
    results = []
    for _ in range(2):
        mine = task()
        trainer.fit(mine, batches(5), optimizer=sgd, epochs=1)
        trainer.test(mine, batches(2))
        results.append(weights(mine))

    assert all(map(torch.equal, *results))


def test_parameters_without_gradients_are_left_alone(batches: Make) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Any:
            return self.used(inputs)

    from heliograph import Supervised

    model = Half()
    before = model.unused.weight.detach().clone()
    result = Trainer([GradientAccumulation(2)], device="cpu").fit(
        Supervised(model, nn.functional.mse_loss),
        Unsized(batches(3)),
        optimizer=kit.sgd(),
        epochs=1,
    )

    assert result.progress.steps == 2
    assert torch.equal(before, model.unused.weight)


@pytest.mark.parametrize("n", [0, -1, 2.0, "4", {0: 0}, {0: 1, 2: -1}, {0: 1, -1: 2}, {0: 1, 2.5: 2}])
def test_numbers_are_checked(n: Any) -> None:
    with pytest.raises(ValueError, match="whole number"):
        GradientAccumulation(n)


@pytest.mark.parametrize("n", [{}, {1: 2}])
def test_a_schedule_begins_at_epoch_0(n: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="begins at epoch 0"):
        GradientAccumulation(n)


def test_two_of_them_are_refused() -> None:
    with pytest.raises(ValueError, match="both claim accumulation"):
        Trainer([GradientAccumulation(2), GradientAccumulation(3).named("other")], device="cpu")


@pytest.mark.parametrize("sized", [True, False])
def test_resumed_after_a_window_s_first_batch_that_was_skipped(
    task: Make, batches: Make, sgd: Any, weights: Any, sized: bool
) -> None:
    saved: dict[str, Any] = {}
    tasks = [task(), task()]
    for mine in tasks:
        trainer = Trainer([GradientAccumulation(3)], device="cpu")
        skip(trainer, 3)
        if saved:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))

        def save(run: Run, event: BatchEnd) -> None:
            if run.progress.batch == 4 and not saved:
                saved.update(deepcopy(run.state_dict()))

        trainer.bus.on(BatchEnd, save)
        trainer.fit(mine, batches(8) if sized else Unsized(batches(8)), optimizer=sgd, epochs=1)

    assert saved["progress"]["batch"] == 4
    assert all(map(torch.equal, weights(tasks[0]), weights(tasks[1])))
