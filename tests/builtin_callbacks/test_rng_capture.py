"""RNGCapture: every generator seeded, saved and restored; validation kept away from the training stream."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    Checkpoint,
    DeviceEngine,
    EpochStart,
    Every,
    RNGCapture,
    Run,
    RunResult,
    SavePoint,
    SaveSchedule,
    Supervised,
    TestBatchEnd,
    TrainEnd,
    Trainer,
    TrainStart,
    ValidationBatchEnd,
    ValidationSchedule,
)
from heliograph.builtin_callbacks import rng_capture
from heliograph.tests import kit
from heliograph.tests.messages import assert_each, has_facts
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

Make = Callable[..., Any]
Draw = tuple[float, float, float, float]


def draw(capture: RNGCapture) -> Draw:
    """Draw once from each generator."""
    return random.random(), float(np.random.rand()), float(capture.generator.random()), torch.rand(1).item()


def drawing(trainer: Trainer, capture: RNGCapture) -> list[Draw]:
    draws: list[Draw] = []
    trainer.bus.on(BatchEnd, lambda run, event: draws.append(draw(capture)))
    return draws


def test_everything_is_seeded(task: Make, batches: Make, sgd: Any) -> None:
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    capture = RNGCapture(42)
    trainer = Trainer([capture], device="cpu")
    draws = drawing(trainer, capture)
    trainer.fit(task(), batches(1), optimizer=sgd, epochs=1)

    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)
    expected = random.random(), np.random.rand(), np.random.default_rng(42).random(), torch.rand(1).item()
    assert draws == [expected]


@pytest.fixture
def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is as in a new process that does not seed it."""
    torch.manual_seed(2**63 + 12345)
    monkeypatch.setattr(rng_capture, "_AT_IMPORT", torch.initial_seed())


Fit = Callable[[int | None], tuple[list[Draw], RunResult]]


@pytest.fixture
def fit(task: Make, batches: Make, sgd: Any) -> Fit:
    """Return a function that trains with a seed, and returns what was drawn, and the result."""

    def train(seed: int | None = None) -> tuple[list[Draw], RunResult]:
        capture = RNGCapture(seed)
        trainer = Trainer([capture], device="cpu")
        draws = drawing(trainer, capture)
        return draws, trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)

    return train


@pytest.mark.usefixtures("unseeded")
def test_the_default_seed_where_nobody_seeded(fit: Fit) -> None:
    (first, result), (again, _) = fit(None), fit(None)
    (same, explicit), (other, _) = fit(6691), fit(6692)
    after_another, _ = fit(None)

    assert first == again == same == after_another
    assert all(one != another for one, another in zip(first[0], other[0], strict=True))
    assert_each(result.notes, ("6691", "not seeded", "RNGCapture(n)"))
    assert explicit.notes == ()


@pytest.mark.usefixtures("unseeded")
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**40, 2**64 - 1])
def test_the_default_seed_is_the_user_s(fit: Fit, seed: int) -> None:
    torch.manual_seed(seed)
    draws, result = fit(None)
    again, _ = fit(None)  # what a run leaves is not the user's
    explicit, _ = fit(seed)
    fit(3)
    still, _ = fit(None)

    assert draws == again == explicit == still
    assert_each(result.notes, (f"seeded with {seed}", "torch.manual_seed"))


def test_a_sweep_over_seeds_of_the_user_varies_every_draw(fit: Fit) -> None:
    draws = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        draws.append(fit(None)[0])

    assert draws[0] == draws[2]
    assert all(one != other for one, other in zip(draws[0][0], draws[1][0], strict=True))


@pytest.mark.usefixtures("unseeded")
@pytest.mark.parametrize(
    ("before", "now", "said"), [(5, 6, True), (5, None, True), (None, 6, True), (None, None, False), (5, 5, False)]
)
def test_a_resumed_run_keeps_its_seed(
    before: int | None, now: int | None, said: bool, task: Make, tmp_path: Path
) -> None:
    data = TensorDataset(torch.arange(12.0)[:, None].repeat(1, 4), torch.zeros(12, 2))

    def train(seed: int | None, of_torch: int, epochs: int, folder: str = "a") -> tuple[list[Any], RunResult]:
        torch.manual_seed(of_torch)
        trainer = Trainer(
            [RNGCapture(seed), SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path / folder, resume="auto")],
            device="cpu",
        )
        seen: list[Any] = []
        trainer.bus.on(BatchEnd, lambda run, event: seen.append((run.batch[0][:, 0].tolist(), torch.rand(1).item())))
        params: Any = {"batch_size": 3, "shuffle": True}
        return seen, trainer.fit(task(), data, loader_params=params, optimizer=kit.sgd(), epochs=epochs)

    whole, _ = train(before, 8, 2, "b")
    train(before, 8, 1)
    resumed, result = train(now, 8 if (before, now) == (None, None) else 9, 2)

    assert resumed == whole[4:]
    assert result.resume is not None
    assert result.resume.reasons == ()
    facts = ("seed", 8 if before is None else before, f"not {9 if now is None else now}")
    assert any(has_facts(note, *facts) for note in result.notes) == said
    assert not any("seeded with" in note for note in result.notes)


def draws_of(rank: int, task: Any, batches: Any, saved: dict[str, Any] | None = None) -> tuple[list[Draw], RNGCapture]:
    """Return what a rank draws in two batches; where a state is given, in the two after it."""
    capture, engine = RNGCapture(42), DeviceEngine("cpu")
    engine.rank = rank
    trainer = Trainer([capture], engine=engine)
    if saved is not None:
        trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    draws = drawing(trainer, capture)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    trainer.fit(task, batches(2), optimizer=optimizer, epochs=1 if saved is None else 2)
    return draws, capture


def test_every_rank_draws_by_a_seed_of_its_own(task: Make, batches: Make) -> None:
    first, second, third = (draws_of(rank, task(), batches)[0] for rank in (0, 1, 2))
    torch.manual_seed(42)
    assert first[0][3] == torch.rand(1).item()
    assert draws_of(1, task(), batches)[0] == second
    numbers = [number for draws in (first, second, third) for draw in draws for number in draw]
    assert len(set(numbers)) == len(numbers)


def test_a_rank_takes_no_state_of_another(task: Make, batches: Make, sgd: Any) -> None:
    """One that was not there when the state was saved starts again, and not where it began once."""
    cuts: list[dict[str, Any]] = []
    trainer = Trainer([RNGCapture(42)], device="cpu")
    trainer.bus.on(TrainEnd, lambda run, event: cuts.append(deepcopy(run.state_dict())))
    trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)
    own, _ = draws_of(0, task(), batches, cuts[0])
    new, capture = draws_of(1, task(), batches, cuts[0])
    again, _ = draws_of(1, task(), batches, cuts[0])
    begun, _ = draws_of(1, task(), batches)

    assert new == again
    assert len({number for draws in (own, new, begun) for draw in draws for number in draw}) == 3 * 2 * 4
    assert capture.state_dict()["rank"] == 1


@pytest.mark.parametrize("seed", [-1, 1.5, "7", True, 2**64])
def test_the_seed_is_checked(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"1844.*, or None;"):
        RNGCapture(seed)


@pytest.mark.parametrize("seed", [0, 2**32, 2**40, 2**64 - 1, np.uint64(2**64 - 1), np.int32(3)])
def test_large_seeds(task: Make, batches: Make, sgd: Any, seed: int) -> None:
    assert Trainer([RNGCapture(seed)], device="cpu").fit(task(), batches(1), optimizer=sgd, epochs=1).progress.steps


def test_the_accessor_before_a_run() -> None:
    capture = RNGCapture()
    with pytest.raises(RuntimeError, match="before a run begins"):
        _ = capture.generator
    assert capture.state_dict() == {}


def test_two_of_them_are_refused() -> None:
    with pytest.raises(ValueError, match="both claim rng"):
        Trainer([RNGCapture(), RNGCapture(1).named("other")], device="cpu")


def test_two_fits_and_a_test_draw_the_same(task: Make, batches: Make, sgd: Any, weights: Any, losses: Any) -> None:
    capture = RNGCapture()
    trainer = Trainer([capture], device="cpu")
    draws, seen = drawing(trainer, capture), losses(trainer)
    ends = []
    for _ in range(2):
        mine = task(dropout=0.5)
        trainer.fit(mine, batches(3), optimizer=sgd, epochs=1)
        trainer.test(mine, batches(1))
        ends.append(weights(mine))

    assert draws[:3] == draws[3:]
    assert seen[:3] == seen[3:]
    assert all(map(torch.equal, *ends))


class Drawing(Supervised):
    """Draws from every global generator in evaluation."""

    def validation_step(self, run: Run, batch: Any) -> Any:
        random.random()
        np.random.rand()
        torch.rand(5)
        return super().validation_step(run, batch)


def fit_with(
    batches: Make, task: Make, sgd: Any, capture: RNGCapture, *, validated: bool
) -> tuple[list[Tensor], list[float], list[Draw]]:
    mine = Drawing(task(dropout=0.5).model, nn.functional.mse_loss)
    plugins = [capture] + [ValidationSchedule(Every(steps=1), at_start=True)] * validated
    trainer = Trainer(plugins, device="cpu")
    seen: list[float] = []
    trainer.bus.on(BatchEnd, lambda run, event: seen.append(run.loss.item()))
    draws = drawing(trainer, capture)
    trainer.bus.on(ValidationBatchEnd, lambda run, event: draw(capture) and None)
    options: dict[str, Any] = {"validation": batches(2)} if validated else {}
    inputs = TensorDataset(torch.cat([batch[0] for batch in batches()]), torch.cat([batch[1] for batch in batches()]))
    loader = DataLoader(inputs, batch_size=4, shuffle=True)
    trainer.fit(mine, loader, optimizer=sgd, epochs=3, **options)
    return list(mine.model.parameters()), seen, draws


def test_a_validation_disturbs_nothing(batches: Make, task: Make, sgd: Any) -> None:
    weights, losses, draws = fit_with(batches, task, sgd, RNGCapture(), validated=False)
    with_weights, with_losses, with_draws = fit_with(batches, task, sgd, RNGCapture(), validated=True)

    assert losses == with_losses
    assert draws == with_draws
    assert all(map(torch.equal, weights, with_weights))


def test_without_isolation_it_does(batches: Make, task: Make, sgd: Any) -> None:
    _, losses, draws = fit_with(batches, task, sgd, RNGCapture(), validated=False)
    _, with_losses, with_draws = fit_with(batches, task, sgd, RNGCapture(isolate_validation=False), validated=True)

    assert losses != with_losses
    assert draws != with_draws


def test_a_test_leaves_the_generators_as_they_were(batches: Make, task: Make) -> None:
    trainer = Trainer([RNGCapture()], device="cpu")
    trainer.bus.on(TestBatchEnd, lambda run, event: torch.rand(3).sum().item() and None)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    trainer.test(task(), batches(2))

    assert torch.equal(before, torch.get_rng_state())


def test_a_failed_validation_is_not_put_back_later(batches: Make, task: Make) -> None:
    capture = RNGCapture()
    trainer = Trainer([capture], device="cpu")

    def fail(run: Run, event: ValidationBatchEnd) -> None:
        raise ArithmeticError

    handle = trainer.bus.on(ValidationBatchEnd, fail)
    with pytest.raises(ArithmeticError):
        trainer.validate(task(), batches(1))
    handle.remove()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    trainer.validate(task(), batches(1))

    assert torch.equal(before, torch.get_rng_state())


def loaders(batches: list[Any]) -> dict[str, tuple[Any, list[torch.Generator]]]:
    one, two = torch.Generator().manual_seed(21), torch.Generator().manual_seed(22)
    data = TensorDataset(torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches]))
    sampler = RandomSampler(data, generator=two)
    return {
        "loader": (DataLoader(data, 4, shuffle=True, generator=one), [one]),
        "sampler": (DataLoader(data, 4, sampler=sampler), [two]),
        "both": (DataLoader(data, 4, sampler=sampler, generator=one), [one, two]),
        "none": (DataLoader(data, 4, shuffle=True), []),
    }


@pytest.mark.parametrize("kind", ["loader", "sampler", "both", "none"])
def test_generators_of_a_loader_are_left_alone(task: Make, batches: Make, sgd: Any, kind: str) -> None:
    """Their seeds say which order is meant; nothing needs their states, not even a resume."""
    loader, generators = loaders(batches())[kind]
    states = [generator.get_state() for generator in generators]
    saved: dict[str, Any] = {}

    def fit(*, resumed: bool) -> list[Tensor]:
        trainer = Trainer([RNGCapture(11), SaveSchedule(At(steps=7), at_end=False)], device="cpu")
        inputs: list[Tensor] = []
        trainer.bus.on(BatchEnd, lambda run, event: inputs.append(run.batch[0].clone()))
        if resumed:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        else:
            trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
        trainer.fit(task(), loader, optimizer=sgd, epochs=3)
        return inputs

    whole, resumed = fit(resumed=False), fit(resumed=True)
    assert len(resumed) == 8
    assert all(map(torch.equal, whole[7:], resumed))
    assert not torch.equal(torch.cat(whole[:5]), torch.cat(whole[5:10]))
    assert all(map(torch.equal, states, [generator.get_state() for generator in generators]))


def test_the_state_is_of_the_generators_alone(task: Make, batches: Make, sgd: Any) -> None:
    capture = RNGCapture(3)
    Trainer([capture], device="cpu").fit(task(), batches(1), optimizer=sgd, epochs=1)

    state = capture.state_dict()
    assert state.keys() == {"globals", "generator", "held", "rank"}
    assert state["globals"].keys() == {"python", "numpy", "torch", "cuda"}


@pytest.mark.parametrize("step", [2, 5, 7])
def test_every_generator_is_saved_and_restored(task: Make, batches: Make, sgd: Any, step: int) -> None:
    saved: dict[str, Any] = {}

    def fit(*, resumed: bool) -> list[Draw]:
        capture = RNGCapture()
        trainer = Trainer([capture, SaveSchedule(At(steps=step), at_end=False)], device="cpu")
        draws = drawing(trainer, capture)
        if resumed:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        else:
            trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
        trainer.fit(task(), batches(5), optimizer=sgd, epochs=2)
        return draws

    whole, resumed = fit(resumed=False), fit(resumed=True)
    assert len(resumed) == 10 - step
    assert whole[step:] == resumed


def test_a_normal_draw_in_hand_is_saved_too(task: Make, batches: Make, sgd: Any) -> None:
    """Python and NumPy keep the second number of a pair of normal draws."""
    saved: dict[str, Any] = {}
    pairs: list[tuple[float, float]] = []
    for resumed in (False, True):
        trainer = Trainer([RNGCapture(), SaveSchedule(At(steps=1), at_end=False)], device="cpu")
        trainer.bus.on(BatchEnd, lambda run, event: pairs.append((random.gauss(0, 1), float(np.random.randn()))))
        if resumed:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        else:
            trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
        trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)

    assert len(pairs) == 3
    assert pairs[1] == pairs[2]


def test_a_checkpoint_without_its_state_leaves_the_seed(task: Make, batches: Make, sgd: Any) -> None:
    saved: dict[str, Any] = {}
    first = Trainer(device="cpu")
    first.bus.on(TrainEnd, lambda run, event: saved.update(deepcopy(run.state_dict())))
    first.fit(task(), batches(1), optimizer=sgd, epochs=1)
    capture = RNGCapture(3)
    trainer = Trainer([capture], device="cpu")
    trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    draws = drawing(trainer, capture)
    result = trainer.fit(task(), batches(1), optimizer=sgd, epochs=2)

    assert any("start fresh" not in note for note in result.notes)
    assert draws[0][2] == np.random.default_rng(3).random()


def test_a_state_of_a_run_that_never_began_is_no_state(task: Make, batches: Make, sgd: Any) -> None:
    capture = RNGCapture(3)
    capture.load_state_dict({})
    trainer = Trainer([capture], device="cpu")
    starts: list[int] = []
    trainer.bus.on(EpochStart, lambda run, event: starts.append(event.epoch))

    assert trainer.fit(task(), batches(1), optimizer=sgd, epochs=1).status == "completed"
    assert starts == [0]


def test_generators_that_the_task_holds_are_kept(batches: Make, sgd: Any, task: Make, weights: Any) -> None:
    class Noisy(Supervised):
        def __init__(self) -> None:
            super().__init__(task().model, nn.functional.mse_loss)
            self.noise = torch.Generator().manual_seed(1)
            self.more = np.random.default_rng(2), random.Random(3), np.random.RandomState(4)

        def training_step(self, run: Run, batch: Any) -> Tensor:
            own, other, legacy = self.more
            scale = torch.rand((), generator=self.noise) + own.random() + other.random() + legacy.rand()
            return super().training_step(run, batch) * scale

    saved: dict[str, Any] = {}
    whole, resumed = Noisy(), Noisy()
    for noisy in (whole, resumed):
        trainer = Trainer([RNGCapture(), SaveSchedule(At(steps=3), at_end=False)], device="cpu")
        if noisy is resumed:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        else:
            trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
        trainer.fit(noisy, batches(5), optimizer=sgd, epochs=2)

    assert all(map(torch.equal, weights(whole), weights(resumed)))
