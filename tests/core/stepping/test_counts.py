"""Losses that are sums over tokens, each with its count: a window is as one batch of all its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    BatchStart,
    DDPEngine,
    DeviceEngine,
    Every,
    FSDPEngine,
    GradientAccumulation,
    GradientClipping,
    GradientsReady,
    Lane,
    Log,
    LogSchedule,
    Plugin,
    Run,
    RunResult,
    StepEnd,
    Supervised,
    Task,
    TensorBoard,
    Trainer,
    ValidationSchedule,
    on,
)
from heliograph.core.stepping import counts as module
from heliograph.tests import kit
from heliograph.tests.kit import Batch
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LEFT_OUT = -100
COUNTS = [1, 8, 2, 7, 3, 3, 8, 1, 5, 4]  # of windows of four, the last is of two
SGD = kit.sgd(0.5, momentum=0.9)
UNSTEPPED = "A step was skipped: the counts of all losses of its window are 0."
Form = Literal["pair", "number", "weighed"]


def token_batches(counts: Sequence[int] = COUNTS) -> list[Batch]:
    """Return batches of eight samples, of which so many have a target; the same every time."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for count in counts:
        targets = torch.full((8,), LEFT_OUT)
        targets[:count] = torch.randint(0, 3, (count,), generator=generator)
        made.append((torch.randn(8, 4, generator=generator), targets))
    return made


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Tokens(Task):
    """A task whose loss is a sum over tokens.

    Args:
        form: returns a pair with a tensor or a number, or weighs the mean.
        times: by how much the loss and its count are larger.
    """

    def __init__(self, form: Form = "pair", times: int = 1) -> None:
        self.model, self.form, self.times = model(), form, times

    def training_step(self, run: Run, batch: Batch) -> Any:
        inputs, targets = batch
        total = cross_entropy(self.model(inputs), targets, reduction="sum") * self.times
        count = (targets != LEFT_OUT).sum() * self.times
        if self.form == "pair":
            return total, count
        if self.form == "number":
            return total, count.item()
        run.stepping.weigh(count)
        return total / count

    def validation_step(self, run: Run, batch: Batch) -> Any:
        return self.training_step(run, batch)


class Gradients(Plugin):
    """Keeps the gradients that handlers see, and what they were divided by."""

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []
        self.counts: list[float | None] = []

    @on(GradientsReady, lane=Lane.REPORT)
    def keep(self, run: Run, event: GradientsReady) -> None:
        self.seen.append([each.grad.clone() for group in run.optimizer.param_groups for each in group["params"]])
        self.counts.append(run.stepping.window_count)


def windows(batches: Sequence[Batch], size: int) -> list[Sequence[Batch]]:
    return [batches[at : at + size] for at in range(0, len(batches), size)]


def by_hand(of_steps: Sequence[Sequence[Batch]], clip: float | None = None) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Step with one batch of all tokens for each window; return the gradients of each step, and the weights."""
    trained, gradients = model(), []
    parameters = list(trained.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    for window in of_steps:
        inputs, targets = (torch.cat(part) for part in zip(*window, strict=True))
        cross_entropy(trained(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        gradients.append([each.grad.clone() for each in parameters if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return gradients, [each.detach() for each in parameters]


def off(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest difference."""
    return max(float((one - other).detach().abs().max()) for one, other in zip(some, others, strict=True))


def fit(*plugins: Any, task: Any = None, engine: Any = None, **options: Any) -> tuple[RunResult, list[Tensor]]:
    """Train for an epoch of the token batches; return the result and the weights."""
    mine = task or Tokens()
    options = {"train": token_batches(), "optimizer": SGD, "epochs": 1, **options}
    result = Trainer(plugins, engine=engine or DeviceEngine("cpu")).fit(mine, options.pop("train"), **options)
    return result, [each.detach() for each in mine.model.parameters()]


class Unsized:
    """An iterable without a length."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


# A window is as one batch.


@pytest.mark.parametrize("form", ["pair", "number", "weighed"])
def test_the_gradients_of_1_8_2_and_7_tokens_are_those_of_18(form: Form) -> None:
    seen = Gradients()
    result, _ = fit(GradientAccumulation(4), seen, task=Tokens(form), train=token_batches([1, 8, 2, 7]))
    ((expected,), _) = by_hand([token_batches([1, 8, 2, 7])])

    assert off(seen.seen[0], expected) < 1e-7
    assert seen.counts == [18.0]
    assert result.progress.tokens == 18
    mean, _ = fit(GradientAccumulation(4), mine := Gradients(), task=Supervised(model(), cross_entropy), train=token_batches([1, 8, 2, 7]))  # fmt: skip  # noqa: E501
    assert off(mine.seen[0], expected) > 1e-2, "no mean of means"
    assert mean.progress.tokens == 0
    assert mine.counts == [None]


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("form", ["pair", "weighed"])
def test_clipping_sees_the_gradients_of_one_batch_in_a_last_and_shorter_window_too(
    form: Form, clip: float | None, sized: bool
) -> None:
    batches, seen = token_batches(), Gradients()
    gradients, expected = by_hand(windows(batches, 4), clip)
    clipping = [] if clip is None else [GradientClipping(clip)]
    _, found = fit(
        GradientAccumulation(4), *clipping, seen, task=Tokens(form), train=batches if sized else Unsized(batches)
    )
    assert all(off(*pair) < 5e-7 for pair in zip(seen.seen, gradients, strict=True))
    assert off(found, expected) < 2e-6


def test_a_window_of_one_batch_on_one_rank_is_the_mean_to_the_last_bit() -> None:
    class Means(Tokens):
        def training_step(self, run: Run, batch: Batch) -> Any:
            total, count = super().training_step(run, batch)
            return total / count

    assert off(fit(task=Tokens())[1], fit(task=Means())[1]) == 0.0


def test_a_skipped_batch_has_no_tokens() -> None:
    batches = token_batches(COUNTS[:8])
    trainer = Trainer([GradientAccumulation(4)], device="cpu")

    def leave_out(run: Run, event: BatchStart) -> None:
        if run.progress.batch in (1, 7):
            run.control.skip_batch("left out by test")

    trainer.bus.on(BatchStart, leave_out, lane=Lane.TRANSFORM)
    task = Tokens()
    result = trainer.fit(task, batches, optimizer=SGD, epochs=1)
    _, expected = by_hand([[batches[0], batches[2], batches[3]], batches[4:7]])
    assert off(list(task.model.parameters()), expected) < 2e-6
    assert result.progress.tokens == sum(COUNTS[:8]) - 8 - 1


class Hold(Plugin):
    """Holds the steps of some batches, without a scale."""

    @on(BatchStart)
    def hold(self, run: Run, event: BatchStart) -> None:
        if run.progress.batch in (0, 1, 3):
            run.control.hold_step("the test")


def test_steps_that_another_plugin_holds_make_windows_too() -> None:
    batches = token_batches(COUNTS[:6])
    _, found = fit(Hold(), train=batches)
    assert off(found, by_hand([batches[:3], batches[3:5], batches[5:]])[1]) < 2e-6


def test_what_others_scale_a_loss_by_stays() -> None:
    """A plugin halves every loss; with SGD that is half the learning rate."""
    trainer = Trainer([GradientAccumulation(4)], device="cpu")
    trainer.bus.on(BatchStart, lambda run, event: run.control.scale_loss(0.5, "the test"))
    task = Tokens()
    trainer.fit(task, token_batches(), optimizer=kit.sgd(0.5), epochs=1)
    _, found = fit(GradientAccumulation(4), optimizer=kit.sgd(0.25))
    assert off(list(task.model.parameters()), found) < 1e-6


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_sums_of_any_size_give_the_same_bits_without_an_overflow(precision: Any) -> None:
    """Times 2^20 the sums are far above what fp16 holds; the gradients are in units near the first count."""
    batches, engine = token_batches(COUNTS[::-1]), partial(DeviceEngine, "cpu", precision=precision)
    runs = [
        fit(GradientAccumulation(4), task=Tokens(times=times), train=batches, engine=engine()) for times in (1, 2**20)
    ]
    (once, weights), (again, others) = runs
    assert off(weights, others) == 0.0
    assert once.progress.skipped_steps == again.progress.skipped_steps == 0
    assert again.progress.tokens == sum(COUNTS) * 2**20
    assert off(weights, by_hand(windows(batches, 4))[1]) < (1e-2 if precision == "fp16" else 2e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_window_of_no_tokens_is_not_stepped_and_that_is_said(precision: Any) -> None:
    batches = token_batches([0, 0, 3, 4])
    engine = DeviceEngine("cpu", precision=precision)
    result, found = fit(GradientAccumulation(2), GradientClipping(100.0), train=batches, engine=engine)

    assert (result.progress.steps, result.progress.skipped_steps, result.progress.tokens) == (1, 1, 7)
    assert "loop: skip_step -" in str(result.history)
    assert result.warnings == (UNSTEPPED,)
    assert off(found, by_hand([batches[2:]])[1]) < (2e-3 if precision == "fp16" else 2e-6)


def test_a_batch_without_tokens_changes_nothing_in_its_window() -> None:
    batches = token_batches([0, 3, 0, 4])
    assert off(fit(GradientAccumulation(4), train=batches)[1], by_hand([batches])[1]) < 2e-6


class Pair(Task):
    """Two models, each with a sum over tokens of its own; the second has no loss in the first batch of a window."""

    def __init__(self) -> None:
        self.first, self.second = model(), model()

    def training_step(self, run: Run, batch: Any) -> Any:
        inputs, targets = batch
        count = (targets != LEFT_OUT).sum()
        yield "first", (cross_entropy(self.first(inputs), targets, reduction="sum"), count)
        if run.progress.batch % 4:
            run.stepping.weigh(count)
            yield "second", cross_entropy(self.second(inputs), targets)


def fit_pair(batches: list[Batch], n: int, engine: Any = None) -> tuple[RunResult, Pair]:
    task, trainer = Pair(), Trainer([GradientAccumulation(n)], engine=engine or DeviceEngine("cpu"))
    return trainer.fit(task, batches, optimizer={"first": SGD, "second": SGD}, epochs=1), task


def test_each_of_several_optimizers_is_divided_by_the_counts_of_its_own_losses() -> None:
    batches = token_batches()
    result, task = fit_pair(batches, 4)
    assert off(list(task.first.parameters()), by_hand(windows(batches, 4))[1]) < 2e-6
    assert off(list(task.second.parameters()), by_hand([each[1:] for each in windows(batches, 4)])[1]) < 2e-6
    assert result.progress.tokens == sum(COUNTS), "a batch counts once"


# On a device, whose counts are read once a step.


def test_counts_on_a_device_are_read_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fit(GradientAccumulation(4), LogSchedule(Every(epochs=1)))
    waits: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        former = getattr(Tensor, name)

        def method(self: Tensor, *args: Any) -> Any:
            waits.append(name)
            return former(self, *args)

        return method

    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(Tensor, name, counted(name))
    monkeypatch.setattr(module, "_is_at_hand", lambda tensor: False)
    result, found = fit(GradientAccumulation(4))
    assert waits == ["__float__", *["tolist"] * 3], "once, then every step"

    result, found = fit(GradientAccumulation(4), LogSchedule(Every(epochs=1)))
    assert off(found, expected[1]) == 0.0
    assert result.metrics["train/loss"] == pytest.approx(expected[0].metrics["train/loss"], abs=1e-12)
    assert result.progress.tokens == sum(COUNTS)


@pytest.mark.parametrize("count", [-1.0, math.nan, math.inf])
def test_a_count_on_a_device_that_is_none_is_found_when_its_window_ends(
    monkeypatch: pytest.MonkeyPatch, count: float
) -> None:
    class Wrong(Tokens):
        def training_step(self, run: Run, batch: Batch) -> Any:
            total, right = super().training_step(run, batch)
            run.stepping.weigh(torch.tensor(count) if run.progress.batch == 1 else right)
            return total / right

        def validation_step(self, run: Run, batch: Batch) -> Any:
            return weighed(run, torch.tensor(count), torch.tensor(1.0))

    monkeypatch.setattr(module, "_is_at_hand", lambda tensor: False)
    with pytest.raises(ValueError, match="negative or not finite"):
        fit(GradientAccumulation(4), task=Wrong())
    if count != math.inf:
        with pytest.raises(ValueError, match="'loss' is negative"):
            Trainer(device="cpu").validate(Wrong(), token_batches())


def test_a_sum_of_nothing_is_named() -> None:
    class Nothing(Tokens):
        def validation_step(self, run: Run, batch: Any) -> Any:
            return {"accuracy": (2.0, 0)}

    with pytest.raises(ValueError, match="count of 'accuracy'"):
        Trainer(device="cpu").validate(Nothing("weighed"), token_batches())


# On several ranks.


class Logs(Plugin):
    """Keeps the losses that are logged."""

    def __init__(self) -> None:
        self.values: list[float] = []

    @on(Log, lane=Lane.REPORT)
    def keep(self, run: Run, event: Log) -> None:
        self.values.append(event.metrics["train/loss"])


def mean_loss(trained: nn.Module, batches: Sequence[Batch]) -> float:
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    return float(cross_entropy(trained(inputs), targets).detach())


def fit_together(batches: list[Batch], n: int, form: Form, engine: Any) -> tuple[list[Tensor], int, list[float]]:
    """Train on ranks that take the batches in turn."""
    logs = Logs()
    plugins = [GradientAccumulation(n), GradientClipping(0.3), LogSchedule(Every(steps=1)), logs]
    result, found = fit(*plugins, task=Tokens(form), train=batches, engine=engine(device="cpu"))
    return found, result.progress.tokens, logs.values


@pytest.mark.parametrize("engine", [DDPEngine, FSDPEngine])
@pytest.mark.parametrize("form", ["pair", "weighed"])
@pytest.mark.parametrize("n", [1, 2])
def test_the_tokens_of_all_ranks_count(ranks: Pool, n: int, form: Form, engine: Any) -> None:
    batches = token_batches()
    of_steps = windows(batches, 2 * n)
    _, expected = by_hand(of_steps, clip=0.3)
    for found, tokens, losses in ranks(2).run(fit_together, batches, n, form, engine):
        assert off(found, expected) < 3e-6
        assert tokens == sum(COUNTS)
        assert losses[0] == pytest.approx(mean_loss(model(), of_steps[0]), abs=1e-6)


def fit_with_an_early_end(batches: list[Batch]) -> list[Tensor]:
    """Skip the last batch of a window, whose gradients torch has not averaged then."""
    trainer = Trainer([GradientAccumulation(2), Skips()], engine=DDPEngine(device="cpu"))
    task = Tokens()
    trainer.fit(task, batches, optimizer=SGD, epochs=1)
    return [each.detach() for each in task.model.parameters()]


class Skips(Plugin):
    asks = ("skip_batch",)

    @on(BatchStart)
    def skip(self, run: Run, event: BatchStart) -> None:
        if run.progress.batch == 1:
            run.control.skip_batch("the test")


def test_a_window_of_several_ranks_that_ends_early_is_divided_by_what_it_has(ranks: Pool) -> None:
    batches = token_batches(COUNTS[:8])
    _, expected = by_hand([batches[:2], batches[4:8]])
    for found in ranks(2).run(fit_with_an_early_end, batches):
        assert off(found, expected) < 3e-6


def fit_without_tokens(batches: list[Batch]) -> tuple[int, int, tuple[str, ...]]:
    result, _ = fit(GradientAccumulation(2), train=batches, engine=DDPEngine(device="cpu"))
    return result.progress.steps, result.progress.skipped_steps, result.warnings


def test_all_ranks_leave_out_the_step_of_a_window_without_tokens(ranks: Pool) -> None:
    first, second = ranks(2).run(fit_without_tokens, token_batches([0, 0, 0, 0, 0, 3, 0, 0]))
    assert first == second == (1, 1, (UNSTEPPED,))


def fit_pair_together(batches: list[Batch]) -> tuple[list[Tensor], list[Tensor], int]:
    result, task = fit_pair(batches, 2, DDPEngine(device="cpu"))
    first, second = ([each.detach() for each in part.parameters()] for part in (task.first, task.second))
    return first, second, result.progress.tokens


def test_several_optimizers_are_divided_by_the_counts_of_all_ranks(ranks: Pool) -> None:
    batches = token_batches(COUNTS[:8])
    for first, second, tokens in ranks(2).run(fit_pair_together, batches):
        assert off(first, by_hand(windows(batches, 4))[1]) < 3e-6
        assert off(second, by_hand([batches[2:8]])[1][:0] or second) == 0.0
        assert tokens == sum(COUNTS[:8])


class Collectives:
    """Writes down the collectives of an engine."""

    def __init__(self, engine: Any) -> None:
        self.called: list[str] = []
        for name in ("reduce", "vote", "gather_objects"):
            setattr(engine, name, partial(self._call, name, getattr(engine, name)))

    def _call(self, name: str, collective: Callable[..., Any], *args: Any) -> Any:
        self.called.append(name)
        return collective(*args)


def count_collectives(batches: list[Batch], form: Form | None) -> dict[str, int]:
    engine = DDPEngine(device="cpu")
    task: Any = Supervised(model(), cross_entropy) if form is None else Tokens(form)
    collectives = Collectives(engine)
    fit(GradientAccumulation(2), task=task, train=batches, engine=engine)
    return {name: collectives.called.count(name) for name in ("reduce", "vote", "gather_objects")}


def test_the_ranks_exchange_counts_once_a_step(ranks: Pool) -> None:
    """Four batches on each rank are two steps; one more exchange agrees on the unit."""
    plain, counted = (ranks(2).run(count_collectives, token_batches(COUNTS[:8]), form)[0] for form in (None, "pair"))
    assert counted == {**plain, "reduce": plain["reduce"] + 3}


# What is logged.


@pytest.mark.parametrize("form", ["pair", "number", "weighed"])
def test_logged_losses_are_means_over_tokens(form: Form) -> None:
    batches, logs = token_batches(), Logs()
    result, _ = fit(LogSchedule(Every(epochs=1)), logs, task=Tokens(form), train=batches, optimizer=kit.sgd(1e-12))
    assert logs.values == [pytest.approx(mean_loss(model(), batches), abs=1e-6)]
    assert result.progress.samples == 80


class Named(Tokens):
    """Measures two values over tokens, and one over samples; the test's are weighed."""

    def validation_step(self, run: Run, batch: Batch) -> Any:
        total, count = super().training_step(run, batch)
        return {"loss": (total, count), "validation/twice": (2.0 * float(total), count), "batches": 1.0}

    def test_step(self, run: Run, batch: Batch) -> Any:
        inputs, targets = batch
        run.stepping.weigh((targets != LEFT_OUT).sum())
        loss = cross_entropy(self.model(inputs), targets)
        return {"loss": loss, "number": loss.item()}


def check_evaluations(task: Task, batches: list[Batch], engine: Any) -> list[dict[str, float]]:
    trainer = Trainer(engine=engine)
    return [dict(trainer.validate(task, batches).metrics), dict(trainer.test(task, batches).metrics)]


def test_validations_and_tests_are_means_over_tokens() -> None:
    batches, expected = token_batches(), pytest.approx(mean_loss(model(), token_batches()), abs=1e-6)
    one, other = check_evaluations(Named(), batches, DeviceEngine("cpu"))
    assert one == {"validation/loss": expected, "validation/twice": pytest.approx(2 * expected.expected, abs=2e-6), "validation/batches": 1.0}  # fmt: skip  # noqa: E501
    assert other == {"test/loss": expected, "test/number": expected}
    (pair, _) = check_evaluations(Tokens("weighed"), batches, DeviceEngine("cpu"))
    assert pair == {"validation/loss": expected}


def check_together(task: Task, batches: list[Batch]) -> list[dict[str, float]]:
    return check_evaluations(task, batches, DDPEngine(device="cpu"))


def test_two_ranks_measure_what_one_does(ranks: Pool) -> None:
    alone = check_evaluations(Named(), token_batches(), DeviceEngine("cpu"))
    assert ranks(2).run(check_together, Named(), token_batches()) == [alone, alone]


def test_a_validation_in_a_training_is_over_tokens_too() -> None:
    batches, task = token_batches(), Tokens("weighed")
    result, _ = fit(
        GradientAccumulation(4), ValidationSchedule(Every(epochs=1)), task=task, train=batches, validation=batches
    )
    assert result.metrics["validation/loss"] == pytest.approx(mean_loss(task.model, batches), abs=1e-6)
    assert result.progress.tokens == sum(COUNTS), "a validation adds none"


# Counters, resume, replay.


class Seen(Plugin):
    """Writes down how many tokens there were at each step, and where two filters let a step through."""

    affects_training = False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.every: list[int] = []
        self.at: list[int] = []

    @on(StepEnd)
    def count(self, run: Run, event: StepEnd) -> None:
        self.tokens.append(run.progress.tokens)

    @on(StepEnd, when=Every(tokens=20))
    def pass_every(self, run: Run, event: StepEnd) -> None:
        self.every.append(run.progress.tokens)

    @on(StepEnd, when=At(tokens=[5, 30]))
    def pass_at(self, run: Run, event: StepEnd) -> None:
        self.at.append(run.progress.tokens)


def test_filters_count_tokens() -> None:
    seen = Seen()
    fit(GradientAccumulation(2), seen)
    assert seen.tokens == [9, 18, 24, 33, 42]
    assert (seen.every, seen.at) == ([24, 42], [9, 33])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_is_as_one_that_was_not(tmp_path: Path, precision: Any) -> None:
    def part(folder: str, resume: str | None, **length: Any) -> tuple[RunResult, list[Tensor], Seen]:
        seen = Seen()
        plugins = [*kit.saving(tmp_path / folder, Every(tokens=20), resume=resume), GradientAccumulation(2), seen]
        engine = DeviceEngine("cpu", precision=precision)
        length = length or {"epochs": 2}
        batches = token_batches(COUNTS[::-1])  # in fp16 the first scale fits
        result, found = fit(*plugins, train=batches, engine=engine, **{"epochs": None, **length})
        return result, [each.clone() for each in found], seen

    whole, expected, seen = part("whole", None)
    _, _, before = part("parts", None, steps=4)
    result, found, after = part("parts", "auto")
    assert off(found, expected) == 0.0
    assert kit.counters(result) == kit.counters(whole)
    assert seen.tokens == [9, 18, 24, 33, 42, 51, 60, 66, 75, 84]
    assert (before.tokens, after.tokens) == (seen.tokens[:4], seen.tokens[3:])
    assert (seen.every, after.every) == ([24, 42, 60, 84], [42, 60, 84])
    assert kit.checkpoint_names(tmp_path / "parts") == kit.checkpoint_names(tmp_path / "whole")


def test_a_window_that_is_rolled_back_leaves_no_count() -> None:
    trainer, states = Trainer([GradientAccumulation(2)], device="cpu"), list[Any]()

    def go_back(run: Run, event: BatchEnd) -> None:
        if run.progress.batch == 4 and not states:
            states.append(deepcopy(run.state_dict()))
        elif run.progress.batch == 5 and len(states) == 1:
            states.append(None)
            run.roll_back(states[0])

    trainer.bus.on(BatchEnd, go_back)
    task = Tokens()
    result = trainer.fit(task, token_batches(), optimizer=SGD, epochs=1)
    assert len(states) == 2
    assert result.progress.tokens == sum(COUNTS)
    assert off(list(task.model.parameters()), fit(GradientAccumulation(2))[1]) == 0.0


def part_together(folder: Path, resume: str | None, **length: Any) -> tuple[list[Tensor], dict[str, Any], list[int]]:
    seen = Seen()
    plugins = [*kit.saving(folder, Every(tokens=20), resume=resume), GradientAccumulation(2), seen]
    result, found = fit(*plugins, engine=DDPEngine(device="cpu"), **{"epochs": None, **(length or {"epochs": 2})})
    return [each.clone() for each in found], kit.counters(result), seen.tokens


def test_ranks_that_are_resumed_are_as_those_that_were_not(ranks: Pool, tmp_path: Path) -> None:
    whole, _ = ranks(2).run(part_together, tmp_path / "whole", None)
    ranks(2).run(part_together, tmp_path / "parts", None, steps=4)
    rest, other = ranks(2).run(part_together, tmp_path / "parts", "auto")
    assert whole[2] == [18, 33, 42, 60, 75, 84]
    assert rest[2] == other[2] == whole[2][4:]
    assert off(rest[0], whole[0]) == off(other[0], whole[0]) == 0.0
    assert rest[1] == other[1] == whole[1]


def test_a_checkpoint_from_before_tokens_were_counted_has_none() -> None:
    states: list[Any] = []
    trainer = Trainer(device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: states.append(deepcopy(run.state_dict())))
    kit.fit(trainer)
    assert states[0]["progress"].pop("tokens") == 0
    assert "count_units" not in states[0]


class Speeds(Plugin):
    """Keeps what TensorBoard adds to the logs."""

    def __init__(self) -> None:
        self.ratios: list[float] = []

    @on(Log, lane=Lane.REPORT)
    def keep(self, run: Run, event: Log) -> None:
        if "train/tokens_per_second" in event.metrics:
            self.ratios.append(event.metrics["train/tokens_per_second"] / event.metrics["train/samples_per_second"])


def test_tokens_per_second_are_logged_beside_samples_per_second(tmp_path: Path) -> None:
    speeds = Speeds()
    result, _ = fit(GradientAccumulation(2), LogSchedule(Every(steps=1)), TensorBoard(tmp_path), speeds)
    assert speeds.ratios == [pytest.approx(tokens / 16) for tokens in (9, 6, 9, 9)], "after the first log"
    assert "samples 80, tokens 42," in str(result)
    assert "tokens" not in str(kit.fit())


# A loop of one's own.


@pytest.mark.parametrize("form", ["pair", "weighed"])
def test_a_loop_of_ones_own_gives_sums_too(form: Form) -> None:
    batches, task = token_batches(), Tokens(form)
    trainer = Trainer([GradientAccumulation(4)], device="cpu")
    with trainer.run(task, batches, optimizer=SGD, epochs=1) as run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(task.training_step(run, batch))
    assert off(list(task.model.parameters()), by_hand(windows(batches, 4))[1]) < 2e-6
    assert run.result.progress.tokens == sum(COUNTS)


def test_gradients_of_ones_own_do_not_mix_with_counted_ones() -> None:
    batches, task = token_batches(), Tokens()
    with (
        pytest.raises(RuntimeError, match="micro-batches with counts"),
        Trainer([Hold()], device="cpu").run(task, batches, optimizer=SGD, epochs=1) as run,
    ):
        for _ in run.epochs():
            for batch in run.batches():
                if run.progress.batch == 2:
                    run.step_with_gradients("optimizer")
                run.step(task.training_step(run, batch))


# What is refused.


class Returns(Tokens):
    """Returns something that depends on the loss."""

    def __init__(self, make: Callable[[Run, Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def training_step(self, run: Run, batch: Batch) -> Any:
        total, _ = super().training_step(run, batch)
        return self.make(run, total)


def weighed(run: Run, count: Any, result: Any) -> Any:
    run.stepping.weigh(count)
    return result


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda run, loss: (loss,), TypeError, r"training_step returns a loss or \(loss_sum, count\).*a tuple of 1"),
        (lambda run, loss: (loss, 1, 2), TypeError, "got a tuple of 3"),
        (lambda run, loss: (3.0, 2), TypeError, "the sum has type float"),
        (lambda run, loss: (4, loss), TypeError, "second value, tensor.*, is not an integer"),
        (lambda run, loss: (loss, 0.75), TypeError, r"0.75, .*call run.track\("),
        (lambda run, loss: (loss, np.float64(3)), TypeError, "not an integer.* return loss_sum, mask.sum"),
        (lambda run, loss: (loss, torch.tensor(3.0)), TypeError, r"tensor\(3.\), is not an integer"),
        (lambda run, loss: (loss, {"accuracy": 1}), TypeError, "not an integer"),
        (lambda run, loss: (loss, None), TypeError, "None, is not an"),
        (lambda run, loss: (loss, np.bool_(True)), TypeError, "not an integer"),
        (lambda run, loss: (loss.repeat(2), 2), TypeError, r"the sum has shape \[2\].*use loss.sum\(\)"),
        (lambda run, loss: [loss, 2], TypeError, r"got list: a sum with its count is a tuple, \(loss_sum, count\)"),
        (lambda run, loss: (loss, -1), ValueError, "The count that training_step returns is a finite number, at least"),
        (lambda run, loss: (loss, torch.tensor(-2)), ValueError, "at least 0; got -2"),
        (lambda run, loss: (loss, math.nan), TypeError, "nan, is not an integer"),
        (lambda run, loss: (loss, "7"), TypeError, "'7', is not an integer"),
        (lambda run, loss: (loss, True), TypeError, "True, is not an integer"),
        (lambda run, loss: (loss, torch.tensor([1, 2])), TypeError, r"got torch.int64 of shape \[2\]"),
        (lambda run, loss: (loss, torch.tensor(True)), TypeError, r"tensor\(True\), is not an integer"),
        (lambda run, loss: weighed(run, math.nan, loss), ValueError, "at least 0; got nan"),
        (lambda run, loss: weighed(run, torch.tensor(math.inf), loss), ValueError, "at least 0; got inf"),
        (lambda run, loss: weighed(run, True, loss), TypeError, "got True"),
        (lambda run, loss: weighed(run, torch.ones(2), loss), TypeError, r"got torch.float32 of shape \[2\]"),
        (lambda run, loss: (loss, 0), ValueError, "it is 0 and its sum is not"),
        (
            lambda run, loss: weighed(run, -1, loss),
            ValueError,
            "run.stepping.weigh is.*at least",
        ),
        (lambda run, loss: weighed(run, 0, loss * math.nan), ValueError, "it is 0 and its sum is not"),
        (lambda run, loss: weighed(run, 3, (loss, 3)), RuntimeError, "and run.stepping.weigh.count. was called for it"),
        (lambda run, loss: weighed(run, 3, weighed(run, 3, loss)), RuntimeError, "called twice for one loss"),
        (
            lambda run, loss: loss if run.progress.batch % 2 else (loss, 3),
            RuntimeError,
            "others have none",
        ),
        (
            lambda run, loss: (loss, 3) if run.progress.batch % 2 else loss,
            RuntimeError,
            "others have none",
        ),
    ],
)
def test_what_is_not_a_sum_with_its_count_is_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fit(GradientAccumulation(2), task=Returns(make))


@pytest.mark.parametrize("count", [np.int32(4), torch.tensor([4], dtype=torch.uint8), 4])
def test_a_count_is_an_integer_of_any_type(count: Any) -> None:
    seen = Gradients()
    fit(seen, task=Returns(lambda run, loss: (loss, count)), train=token_batches(COUNTS[:1]))
    assert seen.counts == [4.0]


@pytest.mark.parametrize("phase", ["validate", "test"])
@pytest.mark.parametrize("returned", [(1.0, 0.5), {"f1": (1.0, torch.tensor(0.5))}], ids=["loss", "by name"])
def test_a_metric_in_the_place_of_a_count_is_refused_in_an_evaluation(phase: str, returned: Any) -> None:
    class Wrong(Tokens):
        def validation_step(self, run: Run, batch: Batch) -> Any:
            return returned

    with pytest.raises(TypeError, match=r"'(loss|f1)'.*0.5.*not an integer.*run.track\("):
        getattr(Trainer(device="cpu"), phase)(Wrong(), token_batches())


def test_a_metric_in_the_place_of_a_count_is_refused_of_several_optimizers_and_in_an_own_loop() -> None:
    class Named(Tokens):
        def training_step(self, run: Run, batch: Batch) -> Any:
            yield "model", (super().training_step(run, batch)[0], 0.5)

    with pytest.raises(TypeError, match=r"0\.5, is not an"):
        fit(task=Named(), optimizer={"model": SGD})
    task = Tokens()
    with (
        pytest.raises(TypeError, match=r"0\.5, is not an"),
        Trainer(device="cpu").run(task, token_batches(), optimizer=SGD, epochs=1) as run,
    ):
        for _ in run.epochs():
            for batch in run.batches():
                run.step((task.training_step(run, batch)[0], 0.5))  # type: ignore[arg-type]  # refused


def test_a_task_that_counts_and_a_weight_of_the_batch_are_refused_together() -> None:
    accumulation = GradientAccumulation(2, weight=lambda batch: 1)
    with pytest.raises(RuntimeError, match=r"GradientAccumulation\(weight=...\) calls it"):
        fit(accumulation, task=Tokens())
    with pytest.raises(RuntimeError, match="loss; GradientAccumulation"):
        fit(accumulation, task=Tokens("weighed"))


def test_an_engine_that_steps_within_the_backward_pass_is_refused() -> None:
    engine = DeviceEngine("cpu")
    engine.steps_in_backward = True  # type: ignore[attr-defined]  # as accelerate's with DeepSpeed
    with pytest.raises(ValueError, match="DeviceEngine steps during"):
        fit(engine=engine)


def test_between_windows_a_task_may_begin_or_cease_to_count() -> None:
    batches = token_batches(COUNTS[:8])
    task = Returns(lambda run, loss: loss if run.progress.batch % 4 > 1 else (loss, 2))
    seen = Gradients()
    fit(GradientAccumulation(2), seen, task=task, train=batches)
    assert seen.counts == [4.0, None, 4.0, None]


def test_nothing_is_weighed_between_batches() -> None:
    trainer = Trainer(device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: run.stepping.weigh(3))
    with pytest.raises(RuntimeError, match=r"run.stepping.weigh\(count\) needs a current"):
        kit.fit(trainer)


def test_in_a_validation_a_pair_is_not_weighed() -> None:
    class Twice(Tokens):
        def validation_step(self, run: Run, batch: Batch) -> Any:
            return weighed(run, 3, (1.0, 3))

    with pytest.raises(RuntimeError, match=r"\(sum, count\), and run.stepping.weigh\(count\)"):
        Trainer(device="cpu").validate(Twice(), token_batches())


def test_a_weight_of_a_skipped_batch_is_forgotten() -> None:
    """A handler weighs the first batch, which is skipped; the second is a plain mean."""
    trainer = Trainer(device="cpu")

    def skip(run: Run, event: BatchStart) -> None:
        if not run.progress.batch:
            run.stepping.weigh(1000)
            run.control.skip_batch("the test")

    trainer.bus.on(BatchStart, skip)
    assert kit.fit(trainer).progress.tokens == 0
