"""Tasks that yield several losses, each with an optimizer of its own, as in adversarial training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    Checkpoint,
    DDPEngine,
    DeviceEngine,
    EpochEnd,
    EpochStart,
    Event,
    Every,
    GradientAccumulation,
    GradientClipping,
    GradientsReady,
    Lane,
    LearningRate,
    LogSchedule,
    NaNGuard,
    Plugin,
    RNGCapture,
    RollBack,
    Run,
    RunResult,
    SaveSchedule,
    StepEnd,
    Supervised,
    Task,
    Trainer,
    on,
)
from heliograph.core.task import Losses
from heliograph.tests.kit import EventRecorder, adam, saving, sgd
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

Batch = tuple[Tensor]
NAMES = ("discriminator", "generator")


def data(batches: int = 7) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator),) for _ in range(batches)]


class Gan(Task):
    """A small adversarial task; each part can be asked to leave its loss out, or to spoil it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.leave_out: Callable[[Run, str], bool] = lambda run, name: False
        self.spoil: Callable[[Run, str], float] = lambda run, name: 1.0

    def discriminator_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        judged, drawn = self.discriminator(real), self.discriminator(fake.detach())
        return cross_entropy(judged, torch.ones_like(judged)) + cross_entropy(drawn, torch.zeros_like(drawn))

    def generator_loss(self, fake: Tensor) -> Tensor:
        judged = self.discriminator(fake)
        return cross_entropy(judged, torch.ones_like(judged))

    def training_step(self, run: Run, batch: Batch) -> Losses:
        (real,) = batch
        fake = self.generator(torch.randn(len(real), 2, device=real.device))
        if not self.leave_out(run, "discriminator"):
            yield "discriminator", self.discriminator_loss(real, fake) * self.spoil(run, "discriminator")
        if not self.leave_out(run, "generator"):
            yield "generator", self.generator_loss(fake) * self.spoil(run, "generator")

    def weights(self) -> list[Tensor]:
        parts = (self.generator, self.discriminator)
        return [each.detach().clone() for part in parts for each in part.parameters()]


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(
    *plugins: Any, task: Gan | None = None, engine: DeviceEngine | None = None, **options: Any
) -> tuple[Gan, RunResult]:
    mine, trainer = task or Gan(), Trainer(plugins, engine=engine or DeviceEngine("cpu"))
    torch.manual_seed(1)
    options = {"optimizer": {"discriminator": adam(), "generator": adam()}, "epochs": 3, **options}
    result = trainer.fit(mine, options.pop("train", data()), **options)
    return mine, result


class Seen(Plugin):
    """Writes down, for each event of an optimizer, whose it is and what the run says of it."""

    def __init__(self, *facts: str) -> None:
        self.facts, self.seen = facts, list[Any]()

    @on(GradientsReady, StepEnd, lane=Lane.REPORT)
    def write(self, run: Run, event: Event) -> None:
        self.seen.append((event.name, run.stepping.optimizer_name, *(attrgetter(fact)(run) for fact in self.facts)))


# Equal to a loop written by hand.


class ByHand:
    """Trains as one does without a framework; the discriminator is frozen for the generator's loss."""

    def __init__(
        self,
        *,
        window: int = 1,
        clip: float | None = None,
        per: str = "",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.task, self.window, self.clip, self.per = Gan(), window, clip, per
        self.autocast, self.scaler = autocast, scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.modules = {name: getattr(self.task, name) for name in NAMES}
        self.optimizers = {name: adam()(list(module.parameters())) for name, module in self.modules.items()}
        self.schedulers = {name: halved(optimizer) for name, optimizer in self.optimizers.items()}

    def train(self) -> Gan:
        task, batches, window = self.task, data(), self.window
        torch.manual_seed(1)
        for _ in range(3):
            for index, (real,) in enumerate(batches):
                size = min(window, len(batches) - index + index % window)
                ends = index % window == window - 1 or index == len(batches) - 1
                with self.autocast():
                    fake = task.generator(torch.randn(len(real), 2))
                    loss = task.discriminator_loss(real, fake)
                self.turn("discriminator", loss, size, ends=ends)
                task.discriminator.requires_grad_(False)
                with self.autocast():
                    loss = task.generator_loss(fake)
                self.turn("generator", loss, size, ends=ends)
                task.discriminator.requires_grad_(True)
            if self.per == "epoch":
                for scheduler in self.schedulers.values():
                    scheduler.step()
        return task

    def turn(self, name: str, loss: Tensor, size: int, *, ends: bool) -> None:
        self.scaler.scale(loss / size if size > 1 else loss).backward()  # type: ignore[no-untyped-call]
        if not ends:
            return
        optimizer = self.optimizers[name]
        self.scaler.unscale_(optimizer)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.modules[name].parameters(), self.clip)
        self.scaler.step(optimizer)
        optimizer.zero_grad()
        if self.window == 1 or name == "generator":  # no gradients of this scale are left
            self.scaler.update()
        if self.per == "step":
            self.schedulers[name].step()


def by_hand(**options: Any) -> Gan:
    return ByHand(**options).train()


def assert_equal(one: Gan, other: Gan) -> None:
    assert all(map(torch.equal, one.weights(), other.weights()))


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_it_equals_a_loop_written_by_hand(window: int, clip: float | None) -> None:
    plugins: list[Plugin] = [] if window == 1 else [GradientAccumulation(window)]
    plugins += [] if clip is None else [GradientClipping(clip)]
    assert_equal(train(*plugins)[0], by_hand(window=window, clip=clip))


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("per", ["step", "epoch"])
def test_so_it_does_with_two_schedulers(window: int, per: Any) -> None:
    mine, _ = train(
        GradientAccumulation(window),
        LearningRate(per),
        scheduler={"generator": halved, "discriminator": halved},
    )
    assert_equal(mine, by_hand(window=window, per=per))


@pytest.mark.parametrize("window", [1, 3])
def test_so_it_does_in_bf16(window: int) -> None:
    mine, _ = train(GradientAccumulation(window), engine=DeviceEngine("cpu", precision="bf16"))
    theirs = by_hand(window=window, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert_equal(mine, theirs)
    assert not all(map(torch.equal, mine.weights(), by_hand(window=window).weights()))


@pytest.mark.parametrize("window", [1, 3])
def test_so_it_does_in_fp16(window: int) -> None:
    mine, _ = train(GradientAccumulation(window), engine=DeviceEngine("cpu", precision="fp16"))
    theirs = by_hand(
        window=window,
        autocast=lambda: torch.autocast("cpu", torch.float16),
        scaler=torch.amp.GradScaler("cpu"),
    )
    assert_equal(mine, theirs)


def test_the_hand_written_loops_differ_from_each_other() -> None:
    variants = [by_hand(), by_hand(window=3), by_hand(clip=0.05), by_hand(per="step"), by_hand(per="epoch")]
    for index, one in enumerate(variants):
        for other in variants[index + 1 :]:
            assert not all(map(torch.equal, one.weights(), other.weights()))


# What it emits, counts and measures.

ROUND = [
    "batch_start",
    *("gradients_ready discriminator", "step_end discriminator"),
    *("gradients_ready generator", "step_end generator"),
    "batch_end",
]
HELD = ["batch_start", "batch_end"]
EVENTS = ("gradients_ready", "step_end")


class Trace(Plugin):
    """Writes down the events of batches, and whose they are."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @on(BatchStart, BatchEnd)
    def batch(self, run: Run, event: BatchStart | BatchEnd) -> None:
        assert run.optimizer is run.optimizers["discriminator"]  # the first
        self.names.append(event.name)

    @on(GradientsReady, StepEnd)
    def turn(self, run: Run, event: GradientsReady | StepEnd) -> None:
        assert run.optimizer is run.optimizers[run.stepping.optimizer_name]
        assert run.scheduler is run.schedulers.get(run.stepping.optimizer_name)
        assert run.loss is run.stepping.losses[run.stepping.optimizer_name]
        self.names.append(f"{event.name} {run.stepping.optimizer_name}")


def test_each_optimizer_has_its_events() -> None:
    trace = Trace()
    train(trace, LearningRate("step"), train=data(2), epochs=1, scheduler={"generator": halved})
    assert trace.names == [*ROUND, *ROUND]


def test_windows_end_for_all_of_them_together() -> None:
    trace = Trace()
    train(trace, GradientAccumulation(3), train=data(4), epochs=1)
    assert trace.names == [*HELD, *HELD, *ROUND, *ROUND]


def test_a_round_counts_as_one_step() -> None:
    seen = Seen("stepping.window")
    counts: list[tuple[int, ...]] = []
    trainer = Trainer([GradientAccumulation(2), seen], device="cpu")

    def count(run: Run, event: Event) -> None:
        counts.append((run.progress.steps, run.progress.samples))

    trainer.bus.on(StepEnd, count)
    result = trainer.fit(Gan(), data(3), optimizer=dict.fromkeys(NAMES, adam()), epochs=1)
    assert counts == [(1, 8), (1, 8), (2, 12), (2, 12)]
    assert (result.progress.steps, result.progress.skipped_steps, result.progress.samples) == (2, 0, 12)
    windows = [window for name, _, window in seen.seen if name == "gradients_ready"]
    assert windows == [2, 2, 1, 1]


def test_steps_end_the_run_after_a_whole_round() -> None:
    trace = Trace()
    _, result = train(trace, steps=2, epochs=None)
    assert trace.names == [*ROUND, *ROUND]
    assert result.progress.steps == 2


def test_a_loss_leaves_gradients_in_its_own_parameters_only() -> None:
    task = Gan()

    class Look(Plugin):
        @on(GradientsReady)
        def look(self, run: Run, event: GradientsReady) -> None:
            has = {name: [each.grad is not None for each in getattr(task, name).parameters()] for name in NAMES}
            assert [name for name in NAMES if all(has[name])] == [run.stepping.optimizer_name]
            assert [name for name in NAMES if any(has[name])] == [run.stepping.optimizer_name]

    train(Look(), task=task)


def test_each_has_its_metrics() -> None:
    seen: list[list[float]] = []

    class Keep(Plugin):
        @on(BatchEnd)
        def keep(self, run: Run, event: BatchEnd) -> None:
            losses = [run.stepping.losses[name] for name in NAMES]
            assert run.loss is losses[-1]
            seen.append([loss.item() for loss in losses])

    _, result = train(
        Keep(),
        GradientClipping(1.0),
        LearningRate("epoch"),
        LogSchedule(Every(epochs=1)),
        epochs=1,
        scheduler={"generator": halved},
    )
    measured = {name.removeprefix("train/") for name in result.metrics}
    kinds = ("loss", "gradient_norm", "learning_rate")
    assert measured == {f"{name}_{kind}" for name in NAMES for kind in kinds}
    means = [sum(values) / len(values) for values in zip(*seen, strict=True)]
    assert [result.metrics[f"train/{name}_loss"] for name in NAMES] == pytest.approx(means, rel=1e-6)


def test_losses_are_let_go_of_where_the_epoch_ends() -> None:
    losses: list[Any] = []
    trainer = Trainer(device="cpu")
    trainer.bus.on(EpochEnd, lambda run, event: losses.append((run.loss, dict(run.stepping.losses))))
    trainer.fit(Gan(), data(1), optimizer=dict.fromkeys(NAMES, adam()), epochs=1)
    assert losses == [(None, dict.fromkeys(NAMES))]


def test_a_single_one_by_name() -> None:
    class One(Task):
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = nn.Linear(3, 1)

        def training_step(self, run: Run, batch: Batch) -> Losses:
            yield "model", self.model(batch[0]).square().mean()

    trainer = Trainer([LogSchedule(Every(epochs=1))], device="cpu")
    result = trainer.fit(One(), data(2), optimizer={"model": adam()}, epochs=1)
    assert list(result.metrics) == ["train/model_loss"]
    assert result.progress.steps == 2


# Losses that are not there for every batch.


def test_an_optimizer_without_a_loss_is_not_stepped() -> None:
    task, trace = Gan(), Trace()
    task.leave_out = lambda run, name: name == "generator" and run.progress.batch % 2 == 0
    _, result = train(trace, task=task, train=data(3), epochs=1)
    short = [name for name in ROUND if "generator" not in name]
    assert trace.names == [*short, *ROUND, *short]
    assert result.progress.steps == 3


def test_gradients_that_are_left_are_stepped_with_where_the_window_ends() -> None:
    task, seen = Gan(), Seen("stepping.window")
    task.leave_out = lambda run, name: name == "generator" and run.progress.batch != 0
    norms: list[float] = []

    class Norms(Plugin):
        @on(GradientsReady, lane=Lane.MEASURE)
        def measure(self, run: Run, event: GradientsReady) -> None:
            if run.stepping.optimizer_name == "generator":
                norms.append(float(run.engine.clip_gradients(task.generator.parameters(), None)))

    _, result = train(GradientAccumulation(3), Norms(), seen, task=task, train=data(3), epochs=1)
    assert seen.seen == [
        ("gradients_ready", "discriminator", 3),
        ("step_end", "discriminator", 3),
        ("gradients_ready", "generator", 1),
        ("step_end", "generator", 1),
    ]
    assert result.progress.steps == 1

    plain = Gan()
    torch.manual_seed(1)
    loss = plain.generator_loss(plain.generator(torch.randn(4, 2)))
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation here
    assert norms == [pytest.approx(float(nn.utils.get_total_norm([p.grad for p in plain.generator.parameters()])))]  # type: ignore[misc]


class SkipBatch(Plugin):
    """Skips the batches of the given places."""

    def __init__(self, *places: int) -> None:
        self.places = places

    @on(BatchStart)
    def skip(self, run: Run, event: BatchStart) -> None:
        if run.progress.batch in self.places:
            run.control.skip_batch("asked to")


def test_a_skipped_batch_still_ends_the_windows_that_it_should_have_ended() -> None:
    seen = Seen("stepping.window")
    _, result = train(SkipBatch(2), GradientAccumulation(3), seen, train=data(4), epochs=1)
    assert seen.seen == [(event, name, size) for size in (2, 1) for name in NAMES for event in EVENTS]
    assert (result.progress.steps, result.progress.skipped_batches, result.progress.samples) == (2, 1, 12)


def test_a_window_of_skipped_batches_is_no_step() -> None:
    _, result = train(SkipBatch(0, 1), GradientAccumulation(2), train=data(4), epochs=1)
    assert (result.progress.steps, result.progress.skipped_steps, result.progress.skipped_batches) == (1, 0, 2)


def test_the_tail_of_a_loader_without_a_length_has_its_true_weight() -> None:
    class Unsized:
        def __iter__(self) -> Iterator[Batch]:
            return iter(data())

    mine, _ = train(GradientAccumulation(3), train=Unsized())
    theirs = by_hand(window=3)
    for one, other in zip(mine.weights(), theirs.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# Dropped steps.


@pytest.mark.parametrize("window", [1, 2])
def test_a_loss_that_is_no_number_drops_its_own_step_only(window: int) -> None:
    task, seen = Gan(), Seen()
    task.spoil = lambda run, name: math.nan if (name, run.progress.batch) == ("discriminator", 1) else 1.0
    guard = NaNGuard("skip")
    _, result = train(guard, GradientAccumulation(window), seen, task=task, train=data(4), epochs=1)
    steps = [name for event, name in seen.seen if event == "step_end"]
    assert steps == {1: [*NAMES, "generator", *NAMES, *NAMES], 2: ["generator", *NAMES]}[window]
    assert (result.progress.steps, result.progress.skipped_steps) == (4 // window, 0)
    reasons = [str(each.reason) for each in result.history if each.verb == "skip_step"]
    assert reasons == ["the discriminator_loss is nan"]


def test_a_round_without_any_step_is_a_skipped_one() -> None:
    task = Gan()
    task.spoil = lambda run, name: math.nan if run.progress.batch == 1 else 1.0
    _, result = train(NaNGuard("skip"), task=task, train=data(4), epochs=1)
    assert (result.progress.steps, result.progress.skipped_steps) == (3, 1)


def test_skips_in_a_row_are_those_of_one_optimizer() -> None:
    task = Gan()
    task.spoil = lambda run, name: math.nan if name == "generator" else 1.0
    with pytest.raises(FloatingPointError, match="step 3, 3 windows"):
        train(NaNGuard("skip", max_skips=2), task=task)


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_the_scheduler_of_an_optimizer_that_was_not_stepped_waits(per: Any) -> None:
    task = Gan()
    task.leave_out = lambda run, name: name == "generator" and run.progress.epoch < 2
    made: dict[str, torch.optim.lr_scheduler.LRScheduler] = {}

    def keep(name: str) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
        def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            made[name] = halved(optimizer)
            return made[name]

        return make

    train(LearningRate(per), task=task, scheduler={name: keep(name) for name in NAMES})
    counts = {name: scheduler.last_epoch for name, scheduler in made.items()}
    assert counts == {"step": {"discriminator": 21, "generator": 7}, "epoch": {"discriminator": 3, "generator": 1}}[per]


def test_a_step_that_the_gradient_scaler_skips_steps_no_scheduler() -> None:
    task, seen = Gan(), Seen()
    task.spoil = lambda run, name: math.inf if (name, run.progress.batch) == ("discriminator", 1) else 1.0
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = []

    def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        schedulers.append(halved(optimizer))
        return schedulers[-1]

    _, result = train(
        LearningRate("step"),
        seen,
        task=task,
        engine=DeviceEngine("cpu", precision="fp16"),
        scheduler=dict.fromkeys(NAMES, make),
        train=data(4),
        epochs=1,
    )
    steps = [name for event, name in seen.seen if event == "step_end"]
    assert (steps.count("discriminator"), steps.count("generator")) == (3, 4)
    assert [each.last_epoch for each in schedulers] == [3, 4]
    assert (result.progress.steps, result.progress.skipped_steps) == (4, 0)
    assert all(bool(torch.isfinite(each).all()) for each in task.weights())


# Resumed, and turned back.


class StopAt(Plugin):
    """Stops the run at a step."""

    asks = ("stop",)

    def __init__(self, step: int) -> None:
        self.step = step

    @on(BatchEnd)
    def stop(self, run: Run, event: BatchEnd) -> None:
        if run.progress.steps == self.step:
            run.control.stop("test")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_resumed_equals_uninterrupted(stop: int, precision: Any, tmp_path: Path) -> None:
    def attempt(folder: str, *plugins: Any, resume: Any = None) -> tuple[Gan, list[float]]:
        kept: dict[str, Any] = {}

        def make(optimizer: torch.optim.Optimizer) -> Any:
            kept[str(len(kept))] = scheduler = halved(optimizer)
            return scheduler

        mine, _ = train(
            RNGCapture(),
            GradientAccumulation(2),
            LearningRate("step"),
            NaNGuard("skip"),
            SaveSchedule(Every(steps=1)),
            Checkpoint(tmp_path / folder, resume=resume),
            *plugins,
            engine=DeviceEngine("cpu", precision=precision),
            scheduler=dict.fromkeys(NAMES, make),
            epochs=2,
        )
        return mine, [each.get_last_lr()[0] for each in kept.values()]

    whole, rates = attempt("whole")
    attempt("parts", StopAt(stop))
    resumed, rates_then = attempt("parts", resume="auto")
    assert_equal(resumed, whole)
    assert rates_then == rates
    assert rates[0] < 1e-2


def test_it_goes_back_once_for_all_losses_of_a_batch(tmp_path: Path) -> None:
    def attempt(folder: str, *plugins: Any) -> tuple[Gan, RunResult]:
        task = Gan()
        task.spoil = lambda run, name: math.nan if (run.progress.epoch, run.progress.batch) == (1, 3) else 1.0
        saving = [SaveSchedule(Every(steps=2)), Checkpoint(tmp_path / folder)]
        return train(RNGCapture(), *saving, *plugins, task=task)

    class LeaveOut(Plugin):
        @on(BatchStart)
        def leave_out(self, run: Run, event: BatchStart) -> None:
            if (run.progress.epoch, run.progress.batch) == (1, 3):
                run.control.skip_batch("test")

    back = RollBack()
    mine, result = attempt("back", back)
    theirs, plain = attempt("plain", LeaveOut())
    assert_equal(mine, theirs)
    assert (back.times, back.skipped) == (1, {(1, 3)})
    assert result.progress.steps == plain.progress.steps == 20


def test_what_an_epoch_had_begun_is_dropped_where_it_is_given_up() -> None:
    class GoBack(Plugin):
        """Goes back once."""

        def __init__(self) -> None:
            self.saved: Any = None
            self.done = False

        @on(EpochStart)
        def keep(self, run: Run, event: EpochStart) -> None:
            if self.saved is None:
                self.saved = torch.load(_stored(run.state_dict()), weights_only=True)

        @on(BatchEnd)
        def back(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batch == 2 and not self.done:
                self.done = True
                assert run.stepping.windows == {"discriminator": 2, "generator": 2}
                assert run.stepping.window == 2
                run.roll_back(self.saved)

    back = GoBack()
    mine, result = train(RNGCapture(), GradientAccumulation(3), back)
    assert_equal(mine, train(RNGCapture(), GradientAccumulation(3))[0])
    assert back.done
    assert result.progress.steps == 9


def _stored(state: Any) -> Any:
    from io import BytesIO

    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


# A loop of one's own.


@pytest.mark.parametrize("window", [1, 3])
def test_a_loop_of_ones_own_does_the_same(window: int) -> None:
    fitted, _ = train(GradientAccumulation(window), trace := Trace())
    mine, own = Gan(), Trace()
    trainer = Trainer([GradientAccumulation(window), own], device="cpu")
    torch.manual_seed(1)
    with trainer.run(mine, data(), optimizer=dict.fromkeys(NAMES, adam()), epochs=3) as run:
        for _ in run.epochs():
            for (real,) in run.batches():
                fake = mine.generator(torch.randn(len(real), 2))
                run.step(mine.discriminator_loss(real, fake), "discriminator")
                run.step(mine.generator_loss(fake), "generator")
    assert_equal(mine, fitted)
    assert own.names == trace.names
    assert run.result.progress.steps == (21 if window == 1 else 9)


def test_leaving_it_during_a_window_steps_with_what_there_is() -> None:
    task, seen = Gan(), Seen("stepping.window")
    trainer = Trainer([GradientAccumulation(3), seen], device="cpu")
    with trainer.run(task, data(), optimizer=dict.fromkeys(NAMES, adam()), epochs=1) as run:
        for _ in run.epochs():
            for (real,) in run.batches():
                fake = task.generator(torch.randn(len(real), 2))
                run.step(task.discriminator_loss(real, fake), "discriminator")
                run.step(task.generator_loss(fake), "generator")
                if run.progress.batch == 1:
                    break
    assert seen.seen == [(event, name, 2) for name in NAMES for event in EVENTS]
    assert run.result.progress.steps == 1


def one_step(names: list[str | None], plugins: Sequence[Plugin] = (), **options: Any) -> None:
    task = Gan()
    options = {"optimizer": dict.fromkeys(NAMES, adam()), "epochs": 1, **options}
    with Trainer(plugins, device="cpu").run(task, data(), **options) as run:
        for _ in run.epochs():
            for (real,) in run.batches():
                for name in names:
                    fake = task.generator(torch.randn(len(real), 2))
                    run.step(task.discriminator_loss(real, fake), name)


def test_it_has_to_name_the_optimizer() -> None:
    with pytest.raises(ValueError, match=r"name: .* Known: discriminator,"):
        one_step([None])
    with pytest.raises(ValueError, match=r"optimizer 'discriminater' .* Did"):
        one_step(["discriminater"])
    with pytest.raises(ValueError, match="'discriminator' got a second"):
        one_step(["discriminator", "discriminator"], plugins=[GradientAccumulation(2)])


def test_a_single_optimizer_has_no_name() -> None:
    task = Supervised(nn.Linear(3, 3), nn.functional.mse_loss)
    with (
        pytest.raises(ValueError, match=r"run\.step\(loss, 'model'\)"),
        Trainer(device="cpu").run(task, data(), optimizer=adam(), epochs=1) as run,
    ):
        for _ in run.epochs():
            for (real,) in run.batches():
                run.step(task.model(real).mean(), "model")


# Refused.


class Yields(Gan):
    """Yields whatever it is asked to."""

    def __init__(self, *items: Any) -> None:
        super().__init__()
        self.items = items
        self.closed = False

    def training_step(self, run: Run, batch: Batch) -> Losses:
        loss = self.discriminator_loss(batch[0], batch[0])
        try:
            for item in self.items:
                yield item(loss) if callable(item) else item
        finally:
            self.closed = True


@pytest.mark.parametrize(
    ("items", "kind", "message"),
    [
        ([], ValueError, "yielded no loss"),
        ([lambda loss: loss], TypeError, r"yield \(optimizer name, loss\)"),
        ([None], TypeError, r"\(optimizer name, loss\).*got None"),
        ([lambda loss: (1, loss)], TypeError, r"yield \(optimizer name, loss\)"),
        ([lambda loss: ("discriminator", 0.5)], TypeError, "scalar tensor, got float"),
        ([lambda loss: ("discriminator", loss.reshape(1))], ValueError, r"got shape \[1\]"),
        ([lambda loss: ("Discriminator", loss)], ValueError, r"'discriminator'\? Known: discriminator, g"),
    ],
)
def test_what_is_yielded_is_checked(items: list[Any], kind: type[Exception], message: str) -> None:
    task = Yields(*items)
    with pytest.raises(kind, match=message):
        train(task=task)
    assert task.closed


def test_a_step_that_returns_its_loss_has_one_optimizer() -> None:
    task = Supervised(nn.Linear(3, 3), lambda outputs, targets: outputs.mean())
    with pytest.raises(TypeError, match="training_step must yield"):
        Trainer(device="cpu").fit(task, [(torch.randn(2, 3),) * 2], optimizer={"model": adam()}, epochs=1)


def test_a_step_that_yields_needs_optimizers_by_name() -> None:
    with pytest.raises(ValueError, match="training_step yields losses: pass"):
        train(optimizer=adam())

    class Hides(Gan):
        def training_step(self, run: Run, batch: Batch) -> Losses:
            return super().training_step(run, batch)

    with pytest.raises(TypeError, match="training_step yields losses:"):
        train(task=Hides(), optimizer=adam())


def test_one_that_hides_that_it_yields_is_as_good() -> None:
    class Hides(Gan):
        def training_step(self, run: Run, batch: Batch) -> Losses:
            return super().training_step(run, batch)

    assert_equal(train(task=Hides())[0], train()[0])


class Shared(Gan):
    def __init__(self) -> None:
        super().__init__()
        self.generator = self.discriminator


@pytest.mark.parametrize(
    ("optimizer", "kind", "message"),
    [
        ({}, ValueError, "optimizer={} is empty"),
        ({"generator": adam(), 1: adam()}, ValueError, "a string without '/', got 1"),
        ({"a/b": adam()}, ValueError, "a string without '/', got 'a/b'"),
        ({"generater": adam()}, ValueError, r"Gan has no module 'generater' .* Did you mean 'generator'\?"),
        ({"generator": 1}, TypeError, "The optimizer 'generator': optimizer= takes a torch optimizer, or a function"),
        ({"generator": adam()(list(nn.Linear(1, 1).parameters()))}, ValueError, "optimizer 'generator' has no param"),
    ],
)
def test_optimizers_by_name_are_checked(optimizer: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        train(optimizer=optimizer)


def test_no_two_optimizers_hold_the_same_parameter() -> None:
    with pytest.raises(ValueError, match="'discriminator' and 'generator' share"):
        train(task=Shared())


def test_schedulers_go_by_the_names_of_the_optimizers() -> None:
    with pytest.raises(ValueError, match=r"optimizer 'generater' .* Did"):
        train(LearningRate("step"), scheduler={"generater": halved})
    with pytest.raises(TypeError, match=r"a dict by name for several optimizers, \{\"generator\":"):
        train(LearningRate("step"), scheduler=halved)
    with pytest.raises(TypeError, match="one for a single optimizer"):
        Trainer([LearningRate("step")], device="cpu").fit(
            Supervised(nn.Linear(3, 3), nn.functional.mse_loss),
            data(),
            optimizer=adam(),
            scheduler={"a": halved},
            epochs=1,
        )
    with pytest.raises(ValueError, match="scheduler= to fit"):
        train(LearningRate("step"), scheduler={"generator": None})


def test_an_optimizer_may_hold_any_parameters() -> None:
    task = Gan()
    last = list(task.generator[3].parameters())
    optimizers = {
        "generator": adam()(list(task.generator[0].parameters())),
        "discriminator": adam()([*task.discriminator.parameters(), *last]),
    }
    mine, _ = train(task=task, optimizer=optimizers)
    same = [torch.equal(one, other) for one, other in zip(mine.weights(), Gan().weights(), strict=True)]
    assert same == [False, False, True, True, False, False, False, False]  # no gradient comes to the last by its loss


def test_all_events_of_a_run_are_those_of_one_with_a_single_loss_but_for_the_turns() -> None:
    trainer = Trainer(device="cpu")
    recorder = EventRecorder(trainer.bus)
    trainer.fit(Gan(), data(1), optimizer=dict.fromkeys(NAMES, adam()), epochs=1)
    assert recorder.trace == [
        *("train_start", "epoch_start", "batch_start"),
        *("forward_end", "backward_end", "gradients_ready", "step_end") * 2,
        *("batch_end", "should_stop", "epoch_end", "should_stop", "last_boundary", "train_end", "run_closed"),
    ]


# Several steps of one optimizer per batch, as of the critic of a Wasserstein GAN.


class Critical(Gan):
    """Steps the discriminator three times for each step of the generator, each time with other noise."""

    def training_step(self, run: Run, batch: Batch) -> Losses:
        (real,) = batch
        for _ in range(3):
            yield "discriminator", self.discriminator_loss(real, self.generator(torch.randn(len(real), 2)))
        yield "generator", self.generator_loss(self.generator(torch.randn(len(real), 2)))


def critical_by_hand(precision: str) -> Gan:
    hand = ByHand(
        autocast=lambda: torch.autocast("cpu", torch.float16, enabled=precision == "fp16"),
        scaler=torch.amp.GradScaler("cpu", enabled=precision == "fp16"),
        per="step",
    )
    task = hand.task
    torch.manual_seed(1)
    for _ in range(3):
        for (real,) in data():
            for _ in range(3):
                with hand.autocast():
                    loss = task.discriminator_loss(real, task.generator(torch.randn(len(real), 2)))
                hand.turn("discriminator", loss, 1, ends=True)
            task.discriminator.requires_grad_(False)
            with hand.autocast():
                loss = task.generator_loss(task.generator(torch.randn(len(real), 2)))
            hand.turn("generator", loss, 1, ends=True)
            task.discriminator.requires_grad_(True)
    return task


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_critic_that_steps_several_times_per_batch_equals_a_loop_written_by_hand(precision: Any) -> None:
    engine = DeviceEngine("cpu", precision=precision)
    schedulers = dict.fromkeys(NAMES, halved)
    mine, result = train(LearningRate("step"), task=Critical(), engine=engine, scheduler=schedulers)
    assert_equal(mine, critical_by_hand(precision))
    assert (result.progress.steps, result.progress.samples) == (21, 84)


def test_each_of_its_steps_has_events_a_loss_and_a_schedule() -> None:
    seen, losses = Seen("stepping.window"), list[int]()

    class Count(Plugin):
        @on(BatchEnd)
        def count(self, run: Run, event: BatchEnd) -> None:
            losses.append(len(run.stepping.batch_losses))

    train(seen, Count(), task=Critical(), train=data(2), epochs=1)
    turns = ["discriminator"] * 3 + ["generator"]
    assert seen.seen == [(event, name, 1) for name in turns * 2 for event in EVENTS]
    assert losses == [4, 4]


def test_a_critic_resumed_equals_one_that_was_not_interrupted(tmp_path: Path) -> None:
    def attempt(folder: str, *plugins: Any) -> Gan:
        checkpoint = Checkpoint(tmp_path / folder, resume="auto")
        return train(RNGCapture(), SaveSchedule(Every(steps=1)), checkpoint, *plugins, task=Critical())[0]

    whole = attempt("whole")
    attempt("parts", StopAt(9))
    assert_equal(attempt("parts"), whole)


def test_a_critic_accumulates_no_gradients() -> None:
    with pytest.raises(ValueError, match="'discriminator' got a second"):
        train(GradientAccumulation(2), task=Critical())


# Other moments for each scheduler.


def moments(per: Any, **options: Any) -> dict[str, int]:
    """Return how often the scheduler of each optimizer was stepped, in three epochs of seven batches."""
    made: dict[str, Any] = {}

    def make(name: str, optimizer: torch.optim.Optimizer) -> Any:
        is_judged = isinstance(per, dict) and per.get(name) == "plateau"
        kind = torch.optim.lr_scheduler.ReduceLROnPlateau if is_judged else halved
        made[name] = kind(optimizer)
        return made[name]

    plugins = options.pop("plugins", [])
    train(
        LearningRate(per, monitor=options.pop("monitor", None)),
        *plugins,
        scheduler={name: partial(make, name) for name in NAMES},
        **options,
    )
    return {name: scheduler.last_epoch for name, scheduler in made.items()}


def test_each_scheduler_has_its_own_moment() -> None:
    assert moments({"discriminator": "step", "generator": "epoch"}) == {"discriminator": 21, "generator": 3}
    assert moments({"discriminator": "epoch", "generator": "epoch"}) == {"discriminator": 3, "generator": 3}


def test_one_after_each_epoch_and_the_other_after_each_measurement() -> None:
    per = {"discriminator": "plateau", "generator": "epoch"}
    logs = LogSchedule(Every(steps=3))
    counts = moments(per, monitor="train/discriminator_loss", plugins=[logs])
    assert counts == {"discriminator": 7, "generator": 3}


def test_schedulers_with_their_own_moments_resume(tmp_path: Path) -> None:
    def attempt(folder: str, *plugins: Any) -> tuple[Gan, dict[str, float]]:
        made: dict[str, Any] = {}

        def make(name: str, optimizer: torch.optim.Optimizer) -> Any:
            made[name] = halved(optimizer)
            return made[name]

        checkpoint = Checkpoint(tmp_path / folder, resume="auto")
        rates = LearningRate({"discriminator": "step", "generator": "epoch"})
        schedulers = {name: partial(make, name) for name in NAMES}
        plugins = (RNGCapture(), SaveSchedule(Every(steps=1)), checkpoint, rates, *plugins)
        mine, _ = train(*plugins, scheduler=schedulers)
        return mine, {name: each.get_last_lr()[0] for name, each in made.items()}

    whole, rates = attempt("whole")
    attempt("parts", StopAt(9))
    resumed, again = attempt("parts")
    assert_equal(resumed, whole)
    assert again == rates


def test_the_plan_says_when_each_is_stepped() -> None:
    trainer = Trainer([LearningRate({"discriminator": "step", "generator": "epoch"})], device="cpu")
    options: Any = {"optimizer": dict.fromkeys(NAMES, adam()), "scheduler": dict.fromkeys(NAMES, halved), "epochs": 1}
    assert "learning_rate: steps StepLR after" in " ".join(trainer.plan(Gan(), data(), **options).split())


@pytest.mark.parametrize(
    ("per", "sentence"),
    [
        ({"discriminator": "step"}, "step the scheduler 'generator'"),
        (
            {"discriminator": "step", "generater": "epoch", "generator": "step"},
            "names no scheduler 'generater'.*'generator'",
        ),
    ],
)
def test_each_scheduler_is_named_once(per: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        moments(per)


@pytest.mark.parametrize("per", [{}, {"generator": "batch"}, "batch"])
def test_moments_that_there_are_not(per: Any) -> None:
    with pytest.raises(ValueError, match=r"^LearningRate\(per\) takes 'step', 'epoch'"):
        LearningRate(per)


# On several ranks.


class Noiseless(Gan):
    """Draws nothing: the noise comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, run: Run, batch: Any) -> Losses:
        real, noise = batch
        fake = self.generator(noise)
        yield "discriminator", self.discriminator_loss(real, fake) * self.spoil(run, "discriminator")
        yield "generator", self.generator_loss(fake) * self.spoil(run, "generator")


def with_noise(parts: int) -> list[tuple[Tensor, ...]]:
    """Return seven batches, each in so many parts; the ranks take turns to read one."""
    generator = torch.Generator().manual_seed(0)
    whole = [(torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(7)]
    return [part for batch in whole for part in zip(*(each.chunk(parts) for each in batch), strict=True)]


class NoiselessCritic(Noiseless):
    """Steps the discriminator twice for each step of the generator."""

    def training_step(self, run: Run, batch: Any) -> Losses:
        yield "discriminator", self.discriminator_loss(batch[0], self.generator(batch[1]))
        yield from super().training_step(run, batch)


def train_on_ranks(
    window: int,
    bad: tuple[int, str] | None = None,
    more: Callable[[], list[Plugin]] = list,
    kind: type[Noiseless] = Noiseless,
) -> tuple[list[Tensor], dict[str, float]]:
    engine, task = DDPEngine(device="cpu"), kind()
    task.spoil = lambda run, name: math.nan if (run.progress.batch, bad) == (1, (engine.rank, name)) else 1.0
    trainer = Trainer([NaNGuard("skip"), GradientAccumulation(window), *more()], engine=engine)
    result = trainer.fit(
        task, with_noise(engine.world_size), optimizer=dict.fromkeys(NAMES, sgd(momentum=0.9)), epochs=2
    )
    progress = result.progress
    return task.weights(), {"steps": progress.steps, "skipped": progress.skipped_steps}


@pytest.mark.parametrize("window", [1, 3])
def test_two_ranks_train_what_one_process_does(window: int, ranks: Any) -> None:
    weights, counts = train_on_ranks(window)
    for other, other_counts in (both := ranks(2).run(train_on_ranks, window)):
        assert other_counts == counts
        for one, two in zip(weights, other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, both[0][0], both[1][0]))


def test_a_critic_on_two_ranks_trains_what_it_does_in_one_process(ranks: Any) -> None:
    weights, counts = train_on_ranks(1, kind=NoiselessCritic)
    first, second = ranks(2).run(train_on_ranks, 1, kind=NoiselessCritic)
    assert counts == first[1] == second[1] == {"steps": 14, "skipped": 0}
    for one, two, other in zip(weights, first[0], second[0], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
        assert torch.equal(two, other)
    assert not all(map(torch.equal, first[0], ranks(2).run(train_on_ranks, 1)[0][0]))


def test_what_is_no_number_on_one_rank_is_dropped_on_all(ranks: Any) -> None:
    (weights, counts), (other, other_counts) = ranks(2).run(train_on_ranks, 1, (1, "discriminator"))
    assert counts == other_counts == {"steps": 14, "skipped": 0}
    assert all(map(torch.equal, weights, other))
    assert all(bool(torch.isfinite(each).all()) for each in weights)
    assert not all(map(torch.equal, weights, ranks(2).run(train_on_ranks, 1)[0][0]))


def resume_on_ranks(folder: Path, stop: int) -> list[list[Tensor]]:
    def resumable(name: str, *plugins: Plugin, resume: Any = None) -> list[Tensor]:
        kept = [*saving(folder / name, Every(steps=1), resume=resume), *plugins]
        return train_on_ranks(2, more=lambda: kept)[0]

    return [resumable("whole"), resumable("parts", StopAt(stop)), resumable("parts", resume="auto")]


def test_resumed_on_two_ranks_equals_uninterrupted(ranks: Any, tmp_path: Path) -> None:
    for whole, stopped, resumed in ranks(2).run(resume_on_ranks, tmp_path, 5):
        assert all(map(torch.equal, whole, resumed))
        assert not any(map(torch.equal, whole, stopped))


# On a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("window", [1, 2])
def test_on_a_gpu_the_scaler_skips_the_step_of_one_optimizer(window: int) -> None:
    task, seen = Gan(), Seen()
    task.spoil = lambda run, name: math.inf if (name, run.progress.batch) == ("discriminator", 1) else 1.0
    engine = DeviceEngine("cuda", precision="fp16")
    train(GradientAccumulation(window), seen, task=task, engine=engine, train=data(4), epochs=1)
    steps = [name for event, name in seen.seen if event == "step_end"]
    assert (steps.count("discriminator"), steps.count("generator")) == (4 // window - 1, 4 // window)
    assert all(bool(torch.isfinite(each).all()) for each in task.weights())
