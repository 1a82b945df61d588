"""GradientAccumulation(weight=...): means over tokens, against one batch of the whole window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    DDPEngine,
    GradientAccumulation,
    GradientClipping,
    Lane,
    Run,
    Supervised,
    Task,
    Trainer,
    TrainStart,
)
from heliograph.tests import kit
from heliograph.tests.kit import Batch
from heliograph.tests.messages import assert_each
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LEFT_OUT = -100


def token_batches(counts: Sequence[int]) -> list[Batch]:
    """Return batches of six samples, of which so many have a target; the same every time."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for count in counts:
        targets = torch.full((6,), LEFT_OUT)
        targets[:count] = torch.randint(0, 3, (count,), generator=generator)
        made.append((torch.randn(6, 4, generator=generator), targets))
    return made


def tokens(batch: Batch) -> Tensor:
    return (batch[1] != LEFT_OUT).sum()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def merged(window: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*window, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def by_hand(windows: Sequence[Sequence[Batch]], clip: float | None = None) -> list[Tensor]:
    """Step with one batch for each window; return the weights."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5, momentum=0.9)
    for window in windows:
        inputs, targets = merged(window)
        cross_entropy(trained(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(trained.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in trained.parameters()]


class Unsized:
    """An iterable without a length."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def trained_on(train: Any, accumulation: GradientAccumulation, *plugins: Any, engine: Any = None) -> list[Tensor]:
    """Return the weights after an epoch."""
    task = Supervised(model(), cross_entropy)
    options: dict[str, Any] = {"device": "cpu"} if engine is None else {"engine": engine}
    Trainer([accumulation, *plugins], **options).fit(task, train, optimizer=kit.sgd(0.5, momentum=0.9), epochs=1)
    return [each.detach() for each in task.model.parameters()]


def difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return max(float((one - other).detach().abs().max()) for one, other in zip(some, others, strict=True))


COUNTS = [1, 6, 6, 6, 2, 5, 1, 3, 4, 1]  # the last window is of two


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_window_is_as_one_batch_the_last_and_shorter_one_too(sized: bool, clip: float | None) -> None:
    batches = token_batches(COUNTS)
    expected = by_hand([batches[at : at + 4] for at in (0, 4, 8)], clip)
    clipping = [] if clip is None else [GradientClipping(clip)]
    train = batches if sized else Unsized(batches)
    found = trained_on(train, GradientAccumulation(4, weight=tokens), *clipping)

    assert difference(found, expected) < 2e-6
    assert difference(trained_on(train, GradientAccumulation(4), *clipping), expected) > 1e-3


def test_a_skipped_batch_has_no_weight() -> None:
    batches = token_batches(COUNTS[:8])
    expected = by_hand([[batches[0], batches[2], batches[3]], batches[4:7]])
    trainer = Trainer([GradientAccumulation(4, weight=tokens)], device="cpu")

    def leave_out(run: Run, event: BatchStart) -> None:
        if run.progress.batch in (1, 7):
            run.control.skip_batch("left out by test")

    trainer.bus.on(BatchStart, leave_out, lane=Lane.TRANSFORM)
    task = Supervised(model(), cross_entropy)
    trainer.fit(task, batches, optimizer=kit.sgd(0.5, momentum=0.9), epochs=1)
    assert difference([each.detach() for each in task.model.parameters()], expected) < 2e-6


def test_weights_of_another_size_give_the_same_bits() -> None:
    """The unit is a power of two near the first weight: nothing depends on it but the exponents of what is added."""
    batches = token_batches(COUNTS)
    once = trained_on(batches, GradientAccumulation(4, weight=tokens))
    again = trained_on(batches, GradientAccumulation(4, weight=lambda batch: 1024.0 * tokens(batch)))
    assert difference(once, again) == 0.0


def test_of_a_schedule_the_epochs_of_one_batch_a_step_are_as_without() -> None:
    batches = token_batches(COUNTS)
    assert difference(trained_on(batches, GradientAccumulation(1, weight=tokens)), by_hand([[b] for b in batches])) == 0


class Pair(Task):
    """Two models; the second has no loss in the first batch of each window."""

    def __init__(self) -> None:
        self.first, self.second = model(), model()

    def training_step(self, run: Run, batch: Any) -> Any:
        yield "first", cross_entropy(self.first(batch[0]), batch[1])
        if run.progress.batch % 4:
            yield "second", cross_entropy(self.second(batch[0]), batch[1])


def test_each_of_several_optimizers_is_weighed_by_the_batches_that_it_had_a_loss_in() -> None:
    batches, task = token_batches(COUNTS), Pair()
    optimizers = {name: kit.sgd(0.5, momentum=0.9) for name in ("first", "second")}
    Trainer([GradientAccumulation(4, weight=tokens)], device="cpu").fit(task, batches, optimizer=optimizers, epochs=1)
    windows = [batches[at : at + 4] for at in (0, 4, 8)]

    assert difference(list(task.first.parameters()), by_hand(windows)) < 2e-6
    assert difference(list(task.second.parameters()), by_hand([each[1:] for each in windows])) < 2e-6


def test_a_resumed_run_is_as_one_that_was_not() -> None:
    batches, states = token_batches(COUNTS), list[Any]()

    def fit(**options: Any) -> list[Tensor]:
        task = Supervised(model(), cross_entropy)
        trainer = Trainer([GradientAccumulation(4, weight=tokens)], device="cpu")
        if states:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(states[0]))
        else:
            trainer.bus.on(BatchEnd, lambda run, event: keep(run))
        trainer.fit(task, batches, optimizer=kit.sgd(0.5, momentum=0.9), epochs=2)
        return [each.detach() for each in task.model.parameters()]

    def keep(run: Run) -> None:
        if run.progress.batches == 8:
            states.append(deepcopy(run.state_dict()))

    whole = fit()
    assert difference(fit(), whole) == 0.0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_finite_number(weight: float) -> None:
    with pytest.raises(ValueError, match="number, at least 0;"):
        trained_on(token_batches(COUNTS), GradientAccumulation(4, weight=lambda batch: weight))


def test_a_weight_is_a_function() -> None:
    with pytest.raises(TypeError, match="weight= takes a function"):
        GradientAccumulation(4, weight=3)  # type: ignore[arg-type]  # that is what is tested


def test_a_window_without_any_weight_is_not_stepped() -> None:
    batches = token_batches([1, 2, 3, 4])
    task = Supervised(model(), cross_entropy)
    trainer = Trainer([GradientAccumulation(2, weight=lambda batch: 0.0 if tokens(batch) < 3 else 1.0)], device="cpu")
    result = trainer.fit(task, batches, optimizer=kit.sgd(0.5), epochs=1)

    assert (result.progress.steps, result.progress.skipped_steps) == (1, 1)
    assert "loop: skip_step -" in str(result.history)
    assert_each(result.warnings, ("step was skipped", "counts", "0"))


def test_toggled_in_a_window_it_says_that_weights_are_lacking() -> None:
    trainer = Trainer([GradientAccumulation(4, weight=tokens)], device="cpu")

    def toggle(run: Run, event: BatchEnd) -> None:
        if run.progress.batch == 1:
            trainer.plugins.disable("gradient_accumulation")
        if run.progress.batch == 2:
            trainer.plugins.enable("gradient_accumulation")

    def hold(run: Run, event: BatchStart) -> None:
        if run.progress.batch < 2:
            run.control.hold_step("the test")

    trainer.bus.on(BatchEnd, toggle)
    trainer.bus.on(BatchStart, hold)
    with pytest.raises(RuntimeError, match="others have none"):
        kit.fit(trainer, task=Supervised(model(), cross_entropy), train=token_batches(COUNTS))


# On ranks.


def trained_together(batches: list[Batch], n: int) -> list[Tensor]:
    """Train on ranks that take the batches in turn."""
    accumulation = GradientAccumulation(n, weight=tokens)
    return trained_on(batches, accumulation, GradientClipping(0.3), engine=DDPEngine(device="cpu"))


@pytest.mark.parametrize("n", [1, 2])
def test_the_weights_of_all_ranks_count(ranks: Pool, n: int) -> None:
    batches = token_batches(COUNTS)
    size = 2 * n
    expected = by_hand([batches[at : at + size] for at in range(0, len(batches), size)], clip=0.3)
    for found in ranks(2).run(trained_together, batches, n):
        assert difference(found, expected) < 3e-6
