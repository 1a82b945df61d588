"""EMA against torch's own averaged model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    EMA,
    BatchEnd,
    Checkpoint,
    Every,
    GradientAccumulation,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    StepEnd,
    Supervised,
    Task,
    Trainer,
    ValidationEnd,
    ValidationSchedule,
    ValidationStart,
    on,
)
from heliograph.tests import kit
from heliograph.tests.kit import Batch
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Make = Callable[..., Any]


def norm_task() -> Supervised:
    torch.manual_seed(0)
    return Supervised(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), nn.functional.mse_loss)


@pytest.mark.parametrize(("every", "n"), [(1, 1), (2, 1), (1, 2)])
def test_equals_torchs_averaged_model(batches: Make, sgd: Any, every: int, n: int) -> None:
    data, task = batches(6), norm_task()
    theirs = norm_task().model
    ema = EMA(0.9, every=every)
    Trainer([ema, GradientAccumulation(n)], device="cpu").fit(task, data, optimizer=sgd, epochs=2)

    averaged = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    optimizer, steps = sgd(list(theirs.parameters())), 0
    for number, (inputs, targets) in enumerate(data * 2, 1):
        (nn.functional.mse_loss(theirs(inputs), targets) / n).backward()  # type: ignore[no-untyped-call]
        if number % n:
            continue
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % every == 0:
            averaged.update_parameters(theirs)
    assert ema.weights["model"].keys() == dict(theirs.named_parameters()).keys()
    for name, value in averaged.module.named_parameters():
        assert torch.equal(ema.weights["model"][name], value), name


def test_validation_sees_the_average_and_training_never_does(batches: Make, sgd: Any) -> None:
    data, task, plain = batches(4), norm_task(), norm_task()
    ema, seen = EMA(0.5), []
    trainer = Trainer([ema, ValidationSchedule(Every(steps=2))], device="cpu")
    for event in (ValidationStart, ValidationEnd):
        trainer.bus.on(event, lambda run, event: seen.append([each.clone() for each in task.model.parameters()]))
    trainer.fit(task, data, validation=data[:1], optimizer=sgd, steps=2)
    during, after = seen
    assert all(map(torch.equal, during, ema.weights["model"].values()))
    assert all(map(torch.equal, after, task.model.parameters()))

    Trainer(device="cpu").fit(plain, data, optimizer=sgd, steps=2)
    assert all(map(torch.equal, task.model.parameters(), plain.model.parameters()))


def test_a_validation_that_fails_gives_the_weights_back(batches: Make, sgd: Any) -> None:
    data, plain = batches(2), norm_task()

    class Failing(Supervised):
        def validation_step(self, run: Any, batch: Any) -> Any:
            raise KeyError("no")

    task = Failing(norm_task().model, nn.functional.mse_loss)
    with pytest.raises(KeyError):
        Trainer([EMA(0.5), ValidationSchedule(Every(steps=2))], device="cpu").fit(
            task, data, validation=data[:1], optimizer=sgd, steps=2
        )
    Trainer(device="cpu").fit(plain, data, optimizer=sgd, steps=2)
    assert all(map(torch.equal, task.model.parameters(), plain.model.parameters()))


def test_load_at_end_leaves_the_average_in_the_model(batches: Make, sgd: Any) -> None:
    task, ema = norm_task(), EMA(0.9, load_at_end=True, validate=False)
    result = Trainer([ema], device="cpu").fit(task, batches(3), optimizer=sgd, epochs=1)
    assert all(map(torch.equal, task.model.parameters(), ema.weights["model"].values()))
    assert any("averaged weights (3 updates)" in line for line in result.notes)


def test_applied_lends_the_average(batches: Make, sgd: Any) -> None:
    task, ema = norm_task(), EMA(0.9)
    with pytest.raises(ValueError, match="no average yet"), ema.applied({"model": task.model}):
        pass
    Trainer([ema], device="cpu").fit(task, batches(3), optimizer=sgd, epochs=1)
    trained = [each.clone() for each in task.model.parameters()]
    with ema.applied({"model": task.model}):
        assert all(map(torch.equal, task.model.parameters(), ema.weights["model"].values()))
    assert all(map(torch.equal, task.model.parameters(), trained))


def test_a_resumed_run_continues_with_the_average(batches: Make, sgd: Any, tmp_path: Path) -> None:
    data = batches(4)

    def plugins(folder: str, resume: str | None = None) -> list[Any]:
        saves = [Checkpoint(tmp_path / folder, keep_last=None, resume=resume), SaveSchedule(Every(steps=3))]
        return [EMA(0.9), RNGCapture(), *saves]

    whole, first, second = plugins("whole"), plugins("parts"), plugins("parts", "auto")
    Trainer(whole, device="cpu").fit(norm_task(), data, optimizer=sgd, epochs=3)
    Trainer(first, device="cpu").fit(norm_task(), data, optimizer=sgd, steps=7)
    result = Trainer(second, device="cpu").fit(norm_task(), data, optimizer=sgd, epochs=3)
    assert result.resume is not None
    assert result.resume.reasons == ()
    for name, value in whole[0].weights["model"].items():
        assert torch.equal(second[0].weights["model"][name], value), name


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="number, more than 0"):
        EMA(decay)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_an_interval_that_is_none_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="steps, at least 1"):
        EMA(every=every)


def test_two_averages_go_together_where_one_of_them_validates(batches: Make, sgd: Any) -> None:
    with pytest.raises(ValueError, match="both claim validation_weights"):
        Trainer([EMA(0.9), EMA(0.5).named("fast")])
    fast = EMA(0.5, validate=False).named("fast")
    Trainer([EMA(0.9), fast], device="cpu").fit(norm_task(), batches(2), optimizer=sgd, epochs=1)
    assert fast.state_dict()["updates"] == {"optimizer": 2}


# Whose average it is.


def trained(batches: Make, sgd: Any) -> tuple[Trainer, Supervised, EMA]:
    ema = EMA(0.5)
    trainer, task = Trainer([ema], device="cpu"), norm_task()
    trainer.fit(task, batches(4), optimizer=sgd, epochs=1)
    return trainer, task, ema


def losses(trainer: Trainer, task: Supervised, data: Any) -> tuple[float, float]:
    """Return the loss of a test by a trainer, and that of the weights as they are."""
    plain = Trainer(device="cpu").test(task, data).metrics["test/loss"]
    return trainer.test(task, data).metrics["test/loss"], plain


def test_a_test_after_the_training_is_of_the_average_again_and_again(batches: Make, sgd: Any) -> None:
    trainer, task, ema = trained(batches, sgd)
    with ema.applied({"model": task.model}):
        average = Trainer(device="cpu").test(task, batches(2)).metrics["test/loss"]
    for _ in range(2):
        by_trainer, plain = losses(trainer, task, batches(2))
        assert by_trainer == average != plain
    assert trainer.validate(task, batches(2)).notes == ()


def zero_in_place(task: Supervised) -> None:
    with torch.no_grad():
        for each in task.model.parameters():
            each.zero_()


def load_the_same(task: Supervised) -> None:
    task.model.load_state_dict({name: value.clone() for name, value in task.model.state_dict().items()})


@pytest.mark.parametrize("change", [zero_in_place, load_the_same])
def test_other_weights_than_those_that_the_training_left_are_tested_as_they_are(
    batches: Make, sgd: Any, change: Callable[[Supervised], None]
) -> None:
    trainer, task, _ = trained(batches, sgd)
    change(task)
    by_trainer, plain = losses(trainer, task, batches(2))
    assert by_trainer == plain
    (note,) = trainer.test(task, batches(2)).notes
    assert_facts(note, "ema", "current weights", "average")


@pytest.mark.parametrize("evaluate", ["test", "validate", "predict"])
@pytest.mark.parametrize("average", [True, False])
def test_weights_that_were_loaded_for_an_evaluation_are_noted_once(
    batches: Make, sgd: Any, tmp_path: Path, evaluate: str, average: bool
) -> None:
    saving = [SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path)]
    trainer = Trainer([EMA(0.5, validate=average), *saving], device="cpu")
    task = kit.linear_classifier()
    kit.fit(trainer, task=task, epochs=2)
    for weights in ("last", tmp_path):
        (note,) = getattr(trainer, evaluate)(task, kit.class_batches(2), weights=weights).notes
        assert ("averaged by 'ema'" in note) == average


@pytest.mark.parametrize("width", [3, 5])
def test_another_model_is_tested_with_its_own_weights(batches: Make, sgd: Any, width: int) -> None:
    trainer, _, _ = trained(batches, sgd)
    other = Supervised(
        nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2)), nn.functional.mse_loss
    )
    by_trainer, plain = losses(trainer, other, batches(2))
    assert by_trainer == plain


def test_an_interrupted_training_leaves_an_average_too(batches: Make, sgd: Any) -> None:
    ema, task = EMA(0.5), norm_task()
    trainer = Trainer([ema], device="cpu")

    def interrupt(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 3:
            raise KeyboardInterrupt

    handle = trainer.bus.on(BatchEnd, interrupt)
    trainer.fit(task, batches(4), optimizer=sgd, epochs=1, on_interrupt="return")
    handle.remove()
    by_trainer, plain = losses(trainer, task, batches(2))
    assert by_trainer != plain


def test_an_average_of_other_shapes_is_not_applied(batches: Make, sgd: Any) -> None:
    _, _, ema = trained(batches, sgd)
    words = r"of ema.*'model'.*0.bias \(\[3\], now"
    with pytest.raises(ValueError, match=words), ema.applied({"model": nn.Linear(4, 2)}):
        pass


def test_parameters_that_pruning_renames_are_a_clear_error(batches: Make, sgd: Any) -> None:
    task = norm_task()

    def cut(run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 2:
            prune.l1_unstructured(task.model.get_submodule("0"), "weight", 0.5)  # type: ignore[no-untyped-call]

    trainer = Trainer([EMA(0.5)], device="cpu")
    trainer.bus.on(BatchEnd, cut)
    words = r"weight_orig \(none, now.*first step"
    with pytest.raises(ValueError, match=words):
        trainer.fit(task, batches(4), optimizer=sgd, epochs=1)


def test_a_model_that_is_pruned_before_is_averaged(batches: Make, sgd: Any) -> None:
    task, ema = norm_task(), EMA(0.5)
    prune.l1_unstructured(task.model.get_submodule("0"), "weight", 0.5)  # type: ignore[no-untyped-call]
    Trainer([ema], device="cpu").fit(task, batches(4), optimizer=sgd, epochs=1)
    assert "0.weight_orig" in ema.weights["model"]


# Several optimizers.


class Pair(Task):
    """Two models; the second steps with every other batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.often, self.rarely = nn.Linear(4, 2), nn.Linear(4, 2)

    def training_step(self, run: Run, batch: Batch) -> Any:
        yield "often", self.often(batch[0]).square().mean()
        if run.progress.batch % 2 == 0:
            yield "rarely", self.rarely(batch[0]).square().mean()


def fit_pair(batches: Make, sgd: Any, *plugins: Any, **options: Any) -> tuple[RunResult, Pair]:
    task, optimizer = Pair(), {"often": sgd, "rarely": sgd}
    options = {"epochs": 1, **options}
    return Trainer(plugins, device="cpu").fit(task, batches(8), optimizer=optimizer, **options), task


class Weights(Plugin):
    """Keeps the weights of a module after each step of its optimizer."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {"often": [], "rarely": []}

    @on(StepEnd)
    def keep(self, run: Run, event: StepEnd) -> None:
        self.seen[run.stepping.optimizer_name].append(run.modules[run.stepping.optimizer_name].weight.detach().clone())


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_steps_of_each_of_several_optimizers_are_counted(batches: Make, sgd: Any, every: int) -> None:
    ema, weights = EMA(0.5, every=every), Weights()
    result, _ = fit_pair(batches, sgd, weights, ema)
    assert result.warnings == ()
    for name, seen in weights.seen.items():
        first, *rest = seen[every - 1 :: every]
        for value in rest:
            first = 0.5 * first + 0.5 * value
        torch.testing.assert_close(ema.weights[name]["weight"], first)


@pytest.mark.parametrize("steps", [2, 3, 5, 6, 7])
def test_the_counts_of_several_optimizers_survive_a_resume(batches: Make, sgd: Any, steps: int, tmp_path: Path) -> None:
    whole, first, rest = (EMA(0.5, every=3) for _ in range(3))
    fit_pair(batches, sgd, whole, epochs=2)
    for ema, options in ((first, {"steps": steps, "epochs": None}), (rest, {"epochs": 2})):
        saves = SaveSchedule(Every(steps=steps)), Checkpoint(tmp_path, resume="auto")
        fit_pair(batches, sgd, ema, *saves, **options)
    for name in ("often", "rarely"):
        assert torch.equal(rest.weights[name]["weight"], whole.weights[name]["weight"])
    assert rest.state_dict()["updates"] == whole.state_dict()["updates"]


def test_weights_that_were_never_averaged_are_warned_of_and_evaluated_as_trained(batches: Make, sgd: Any) -> None:
    ema, plain = EMA(0.5, every=5, load_at_end=True), Weights()
    result, task = fit_pair(batches, sgd, ema, plain)
    (warning,) = result.warnings
    assert "'ema' never averaged" in warning
    assert "every=5" in warning
    assert torch.equal(task.rarely.weight, plain.seen["rarely"][-1])
    assert torch.equal(task.often.weight, plain.seen["often"][4])


@pytest.mark.parametrize("stops", [False, True])
def test_an_average_that_never_began_is_warned_of(batches: Make, sgd: Any, stops: bool) -> None:
    trainer = Trainer([EMA(0.5, every=9)], device="cpu")
    if stops:
        trainer.bus.on(BatchEnd, lambda run, event: run.control.stop("the test"))
    result = trainer.fit(norm_task(), batches(4), optimizer=sgd, epochs=1)
    assert ["never averaged the weights" in warning for warning in result.warnings] == [True]
