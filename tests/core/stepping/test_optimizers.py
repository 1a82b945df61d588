"""Optimizers with `train()` and `eval()`: other weights are evaluated and saved than those that are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    EMA,
    BatchEnd,
    Checkpoint,
    EarlyStopping,
    Every,
    FSDPEngine,
    GradientAccumulation,
    LoadBest,
    NaNGuard,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SavePoint,
    SaveSchedule,
    Supervised,
    Task,
    TrainEnd,
    Trainer,
    ValidationEnd,
    ValidationSchedule,
    WeightsCheckpoint,
    load_weights,
    on,
)
from heliograph.tests import kit
from heliograph.tests.kit import class_batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule, after Defazio et al., 2024: gradients are taken at other weights than the average."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.5, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "count": 0, "trains": False})

    @torch.no_grad()
    def _move(self, weight: Callable[[float], float], *, trains: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["trains"] != trains else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight(group["beta"]))
            group["trains"] = trains

    def train(self) -> None:
        self._move(lambda beta: 1 - beta, trains=True)

    def eval(self) -> None:
        self._move(lambda beta: 1 - 1 / beta, trains=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["trains"], "stepped in eval mode"
            group["count"] += 1
            share, rate = 1 / group["count"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.clone())
                    parameter.lerp_(z, share).add_(parameter.grad, alpha=rate * (group["beta"] * (1 - share) - 1))
                    z.sub_(parameter.grad, alpha=rate)


class ByAttribute(ScheduleFree):
    """Has its mode in an attribute, which no state holds."""

    is_training = False

    def train(self) -> None:
        if not self.is_training:
            self._set(trains=False)
            super().train()
        self._set(trains=True)
        self.is_training = True

    def eval(self) -> None:
        if self.is_training:
            self._set(trains=True)
            super().eval()
        self._set(trains=True)
        self.is_training = False

    def _set(self, *, trains: bool) -> None:
        for group in self.param_groups:
            group["trains"] = trains


class Pair(Task):
    """Two models, each with an optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def training_step(self, run: Run, batch: Any) -> Any:
        yield "first", cross_entropy(self.first(batch[0]), batch[1])
        yield "second", cross_entropy(self.second(batch[0]), batch[1])

    def validation_step(self, run: Run, batch: Any) -> Tensor:
        return cross_entropy(self.first(batch[0]) + self.second(batch[0]), batch[1])


class Seen(Plugin):
    """Keeps the weights of the model at an event."""

    affects_training = False

    def __init__(self, *events: Any) -> None:
        self.events, self.weights = events, list[list[Tensor]]()

    @on(BatchEnd, ValidationEnd, SavePoint, TrainEnd, optional=True)
    def keep(self, run: Run, event: Any) -> None:
        if isinstance(event, self.events):
            self.weights.append(weights_of(run.task))


BATCHES = class_batches(6)


def weights_of(task: Any) -> list[Tensor]:
    modules = [value for value in vars(task).values() if isinstance(value, nn.Module)]
    return [each.detach().clone() for module in modules for each in module.parameters()]


def loss_of(task: Any) -> float:
    return Trainer(device="cpu").validate(task, BATCHES).metrics["validation/loss"]


def fit(*plugins: Any, task: Any = None, optimizer: Any = ScheduleFree, **options: Any) -> tuple[RunResult, Any]:
    task = task or kit.linear_classifier()
    given = dict.fromkeys(("first", "second"), optimizer) if isinstance(task, Pair) else optimizer
    validates = any(isinstance(plugin, ValidationSchedule) for plugin in plugins)
    options = {"validation": BATCHES if validates else None, "epochs": 3, **options}
    return Trainer([RNGCapture(1), *plugins], device="cpu").fit(task, BATCHES, optimizer=given, **options), task


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("make", [kit.linear_classifier, Pair], ids=["one", "several"])
def test_the_weights_to_evaluate_are_validated_saved_and_left(make: Any, tmp_path: Path) -> None:
    trained, evaluated = Seen(BatchEnd), Seen(ValidationEnd, SavePoint, TrainEnd)
    save = Checkpoint(tmp_path, every=Every(epochs=1), keep_last=None, keep_best=1, monitor="validation/loss")
    result, task = fit(trained, evaluated.named("evaluated"), ValidationSchedule(epochs=1), save, task=make())
    assert equal(evaluated.weights[-1], weights_of(task))
    assert not any(equal(one, other) for one in trained.weights[1:] for other in evaluated.weights)
    assert result.metrics["validation/loss"] == loss_of(task)
    assert result.best_checkpoint is not None
    for path in tmp_path.glob("*.pt"):
        loaded = make()
        metrics = load_weights(loaded, path).metrics
        assert loss_of(loaded) == metrics["validation/loss"]


@pytest.mark.parametrize("optimizer", [ScheduleFree, ByAttribute])
def test_validations_and_saves_change_nothing(optimizer: Any, tmp_path: Path) -> None:
    plain, seen = Seen(BatchEnd), Seen(BatchEnd)
    _, task = fit(plain, optimizer=optimizer)
    saving = Checkpoint(tmp_path, every=Every(steps=2)), ValidationSchedule(Every(steps=1), at_start=True)
    _, other = fit(seen, *saving, optimizer=optimizer)
    assert all(map(equal, plain.weights, seen.weights))
    assert equal(weights_of(task), weights_of(other))


@pytest.mark.sample(8)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("steps", [1, 4, 6, 9])
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [(kit.linear_classifier, ScheduleFree), (Pair, ScheduleFree), (kit.linear_classifier, ByAttribute)],
    ids=["one", "several", "by attribute"],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    make: Any, optimizer: Any, steps: int, background: bool, tmp_path: Path
) -> None:
    def saving() -> list[Any]:
        save = Checkpoint(tmp_path, resume="auto", background=background)
        return [save, SaveSchedule(Every(steps=steps), at_end=False), ValidationSchedule(Every(steps=4))]

    whole, rest = Seen(BatchEnd), Seen(BatchEnd)
    _, expected = fit(whole, ValidationSchedule(Every(steps=4)), task=make(), optimizer=optimizer)
    fit(Seen(BatchEnd), *saving(), task=make(), optimizer=optimizer, steps=steps, epochs=None)
    result, task = fit(rest, *saving(), task=make(), optimizer=optimizer)
    assert result.resume is not None
    assert result.resume.step == steps
    assert result.resume.reasons == (), result.resume.reasons
    assert all(map(equal, rest.weights, whole.weights[steps:]))
    assert len(rest.weights) == len(whole.weights) - steps
    assert equal(weights_of(task), weights_of(expected))


def test_a_training_continues_after_its_end_bit_for_bit(tmp_path: Path) -> None:
    whole, rest = Seen(BatchEnd), Seen(BatchEnd)
    fit(whole, epochs=4)
    for epochs in (2, 4):
        fit(rest, Checkpoint(tmp_path, every=Every(epochs=1), resume="auto"), epochs=epochs)
    assert all(map(equal, rest.weights, whole.weights))
    assert len(rest.weights) == len(whole.weights)


def test_an_own_loop_trains_the_same() -> None:
    _, expected = fit(ValidationSchedule(epochs=1), GradientAccumulation(2))
    task = kit.linear_classifier()
    plugins = [RNGCapture(1), ValidationSchedule(epochs=1), GradientAccumulation(2)]
    run = Trainer(plugins, device="cpu").run(task, BATCHES, validation=BATCHES, optimizer=ScheduleFree, epochs=3)
    with run:
        for _ in run.epochs():
            for inputs, targets in run.batches():
                run.step(cross_entropy(task.model(inputs), targets))
    assert equal(weights_of(task), weights_of(expected))
    assert run.result.metrics["validation/loss"] == loss_of(task)


def test_test_and_predict_after_the_training_use_the_weights_to_evaluate() -> None:
    task = kit.linear_classifier()
    trainer = Trainer([ValidationSchedule(epochs=1)], device="cpu")
    result = trainer.fit(task, BATCHES, validation=BATCHES, optimizer=ScheduleFree, epochs=2)
    assert trainer.test(task, BATCHES).metrics["test/loss"] == result.metrics["validation/loss"]
    outputs = trainer.predict(task, BATCHES).predictions
    expected = cross_entropy(outputs, torch.cat([targets for _, targets in BATCHES])).item()
    assert expected == pytest.approx(result.metrics["validation/loss"])


def test_the_best_weights_are_those_that_were_measured(tmp_path: Path) -> None:
    best: dict[str, Any] = {"keep_best": 1, "monitor": "validation/loss"}
    save = [Checkpoint(tmp_path, every=Every(epochs=1), **best), LoadBest()]
    result, task = fit(ValidationSchedule(epochs=1), *save, optimizer=partial(ScheduleFree, lr=30.0), epochs=6)
    assert result.best_checkpoint is not None
    loaded = kit.linear_classifier()
    assert load_weights(loaded, result.best_checkpoint).metrics["validation/loss"] == loss_of(task) == loss_of(loaded)


def test_weights_alone_are_those_to_evaluate(tmp_path: Path) -> None:
    _, task = fit(WeightsCheckpoint(tmp_path, every=Every(epochs=1)))
    loaded = kit.linear_classifier()
    load_weights(loaded, tmp_path)
    assert equal(weights_of(loaded), weights_of(task))


def test_an_average_is_put_in_beside() -> None:
    ema, trained, plain = EMA(0.5), Seen(BatchEnd), Seen(BatchEnd)
    fit(plain)
    result, task = fit(ema, trained, ValidationSchedule(epochs=1), EarlyStopping())
    assert all(map(equal, plain.weights, trained.weights))
    with ema.applied({"model": task.model}):
        assert result.metrics["validation/loss"] == loss_of(task)


def test_a_validation_that_fails_gives_the_trained_weights_back() -> None:
    class Fails(Supervised):
        def validation_step(self, run: Run, batch: Any) -> Any:
            raise ArithmeticError

    torch.manual_seed(0)
    task, trained = Fails(nn.Linear(4, 2), cross_entropy), Seen(BatchEnd)
    with pytest.raises(ArithmeticError):
        fit(trained, ValidationSchedule(Every(steps=3)), task=task)
    assert equal(weights_of(task), trained.weights[-1])


def test_one_optimizer_is_trained_again() -> None:
    task = kit.linear_classifier()
    optimizer = ScheduleFree(task.model.parameters())
    for _ in range(2):
        result, _ = fit(ValidationSchedule(epochs=1), NaNGuard(), task=task, optimizer=optimizer)
        assert result.metrics["validation/loss"] == loss_of(task)
        assert not optimizer.param_groups[0]["trains"]


def test_an_interrupted_training_leaves_the_weights_to_evaluate() -> None:
    task = kit.linear_classifier()
    optimizer, trainer = ScheduleFree(task.model.parameters()), Trainer(device="cpu")

    def interrupt(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 3:
            raise KeyboardInterrupt

    trainer.bus.on(BatchEnd, interrupt)
    trainer.fit(task, BATCHES, optimizer=optimizer, epochs=1, on_interrupt="return")
    assert not optimizer.param_groups[0]["trains"]


def test_an_engine_that_divides_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\(\) and eval\(\).* FSDPEngine"):
        Trainer(engine=FSDPEngine(device="cpu")).fit(kit.linear_classifier(), BATCHES, optimizer=ScheduleFree, epochs=1)


def test_other_optimizers_have_no_second_weights(tmp_path: Path) -> None:
    states: list[Any] = []
    trainer = Trainer([ValidationSchedule(epochs=1), *kit.saving(tmp_path, Every(epochs=1))], device="cpu")
    trainer.bus.on(SavePoint, lambda run, event: states.append(run.state_dict()))
    trainer.fit(kit.linear_classifier(), BATCHES, validation=BATCHES, optimizer=kit.sgd(), epochs=1)
    assert states
    assert not any("trained" in state for state in states)
