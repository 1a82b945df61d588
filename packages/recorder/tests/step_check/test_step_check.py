"""StepCheck: the training stays as it is, and what comes out differently the second time is found and named."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.packages.tests.facts import assert_each, assert_facts
from heliograph.spi import leaves
from heliograph.tests.kit import Losses, adam, fit, random_batches
from heliograph_recorder import Recorder, StepCheck, StepChecked, StepDiffers
from heliograph_testing import check_plugin
from heliograph_testing.chaos import Chaos, Fault
from torch import Tensor, nn

STEPS = 6


class Odd(h.Supervised):
    """Draws from every generator, counts, tracks, requests, and keeps what it made."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, nn.functional.mse_loss)
        self.calls, self.kept = 0, list[float]()
        self.generator = np.random.default_rng(0)
        self.mean = torch.zeros(4)

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        inputs, targets = batch
        self.calls += 1
        self.mean.mul_(0.9).add_(inputs.mean(dim=0), alpha=0.1)
        noise = random.random() + float(np.random.rand()) + float(self.generator.random()) + 0.1 * self.calls
        inputs.add_(0.01)  # in place: the batch of the loader, which a repetition must not change once more
        self.kept.append(float(inputs.sum()))
        run.track("calls", self.calls)
        run.control.request_log("it asks")
        return super().training_step(run, (inputs + 0.1 * noise * self.mean, targets)) + 0.01 * len(self.kept)


class Seen(h.Plugin):
    """Keeps what is logged, and what StepCheck says."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.checks: list[str] = []

    @h.on(h.Log)
    def keep(self, run: h.Run, event: h.Log) -> None:
        self.logs.append({name: value for name, value in event.metrics.items() if "per_second" not in name})

    @h.on(StepChecked, optional=True)
    def note(self, run: h.Run, event: StepChecked) -> None:
        self.checks.append(event.difference)


class Spoil(h.Plugin):
    """Lets one batch hold what is no number."""

    @h.on(h.BatchStart, lane=h.Lane.TRANSFORM)
    def spoil(self, run: h.Run, event: h.BatchStart) -> None:
        if run.progress.batches == 2:
            run.batch = run.batch[0] * torch.nan, run.batch[1]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))


def trained(*plugins: Any, make: Callable[[], Any] | None = None, engine: Any = None, **options: Any) -> Any:
    """Return all that a training leaves: its weights, buffers, losses, logs, generators and counts."""
    task = h.Supervised(model(), nn.functional.mse_loss) if make is None else make()
    losses, seen = Losses(), Seen()
    logs = h.LogSchedule(h.Every(steps=2))
    trainer = h.Trainer([h.RNGCapture(), logs, *plugins, losses, seen], engine=engine or h.DeviceEngine("cpu"))
    options = {"optimizer": adam(), "steps": STEPS, **options}
    result = trainer.fit(task, random_batches(4), **options)
    state = {name: value.clone() for name, value in task.model.state_dict().items()}
    draws = torch.rand(1).item(), random.random(), float(np.random.rand())
    own = {name: value for name, value in vars(task).items() if name in ("calls", "kept", "mean")}
    requests = [str(request) for request in result.history]
    return (state, own, list(map(repr, losses.values)), list(map(repr, seen.logs)), draws, requests), seen, result


def assert_same(one: Any, other: Any) -> None:
    """Assert that two trainings have left the same, down to the last bit."""
    for mine, its in zip(one, other, strict=True):
        if isinstance(mine, dict):
            assert mine.keys() == its.keys()
            for name, value in mine.items():
                assert leaves(value) == leaves(its[name]), name
        else:
            assert mine == its


CASES: dict[str, Any] = {
    "plain": {},
    "odd": {"make": lambda: Odd(model())},
    "accumulates": {"plugins": lambda: [h.GradientAccumulation(2), h.GradientClipping(0.1)]},
    "bf16": {"engine": lambda: h.DeviceEngine("cpu", precision="bf16")},
    "skips": {"plugins": lambda: [Spoil(), h.NaNGuard("skip")]},
}


@pytest.mark.parametrize("name", CASES)
def test_the_training_stays_as_it_is(name: str) -> None:
    case = dict(CASES[name])
    plugins, engine = case.pop("plugins", list), case.pop("engine", lambda: None)
    expected, _, _ = trained(*plugins(), engine=engine(), **case)
    found, seen, result = trained(StepCheck(every=1), *plugins(), engine=engine(), **case)
    assert_same(found, expected)
    assert set(seen.checks) == {""}
    assert any(f"{len(seen.checks)} steps repeated" in line for line in result.notes)
    assert result.warnings == ()


def test_it_follows_the_rules_for_plugins() -> None:
    check_plugin(StepCheck)
    check_plugin(lambda: StepCheck(every=1))


@pytest.mark.parametrize(("every", "checks"), [(1, STEPS - 1), (2, 2), (5, 1)])
def test_it_checks_every_so_many_steps(every: int, checks: int) -> None:
    _, seen, _ = trained(StepCheck(every))
    assert len(seen.checks) == checks


def test_each_check_is_recorded(tmp_path: Path) -> None:
    _, _, result = trained(StepCheck(1), Recorder(tmp_path))
    assert f"step_checked  {STEPS - 1} times" in result.explain()


def test_with_accumulation_the_first_micro_batch_is_repeated() -> None:
    _, seen, _ = trained(StepCheck(2), h.GradientAccumulation(2))
    assert len(seen.checks) == 2


def test_a_run_that_is_too_short_is_said() -> None:
    _, _, result = trained(StepCheck())
    (warning,) = result.warnings
    assert [fact for fact in ("no step", "6 steps", "every 1000") if fact not in warning] == []


def test_a_flipped_bit_of_a_gradient_is_found() -> None:
    chaos = Chaos([Fault("bit-in-gradient", count=4)])
    _, seen, result = trained(StepCheck(1), chaos)
    name = chaos.acts[0].text.partition("the gradient of ")[2].partition(" is ")[0]
    (warning,) = result.warnings
    assert warning.startswith("StepCheck: step 3, repeated")
    assert f"the gradient of {name}; " in warning
    assert "training was computed wrongly" in warning
    assert [bool(text) for text in seen.checks] == [False, False, True, False, False]
    assert (chaos.acts[0].noticed_by, chaos.acts[0].answer) == ("a warning", warning)


def test_it_can_fail_the_run() -> None:
    with pytest.raises(StepDiffers, match=r"^Step 3, repeated, differs"):
        trained(StepCheck(1, action="raise"), Chaos([Fault("bit-in-gradient", count=4)]))


class Undetermined(torch.autograd.Function):
    """The square, wrong by a bit at every second call, backward only."""

    calls = count()

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        context.save_for_backward(values)
        return values * values

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        (values,) = context.saved_tensors
        noisy = torch.tensor(float(next(Undetermined.calls)) * 1e-3)
        slopes: Tensor = gradients[0] * values.cosh().mul(noisy)
        return slopes


def test_what_is_not_deterministic_is_found_named_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(h.Supervised):
        def training_step(self, run: h.Run, batch: Any) -> Tensor:
            loss: Any = Undetermined.apply(super().training_step(run, batch))  # type: ignore[no-untyped-call]
            return cast("Tensor", loss)

    _, seen, result = trained(StepCheck(1), make=lambda: Noisy(model(), nn.functional.mse_loss))
    assert result.warnings[0].startswith("StepCheck: step 1, repeated")
    assert "not deterministic" in result.warnings[0]
    cause = result.warnings[0].partition("; ")[2]
    assert_facts(result.warnings[1], "StepCheck: 5 of 5")
    assert [text.partition("; ")[2] for text in seen.checks] == [cause] * 5
    assert_each([record.message for record in caplog.records], (result.warnings[0], "later steps"))


def test_an_operator_is_named_whose_outputs_differ() -> None:
    library: Any = torch.library.Library("step_check_test", "DEF")  # type: ignore[no-untyped-call]
    library.define("wrong(Tensor x) -> Tensor")
    calls = count()
    library.impl("wrong", lambda x: x + 1e-3 * next(calls), "CPU")
    library.impl("wrong", torch.library.fallthrough_kernel, "Autograd")

    class Wrong(h.Supervised):
        def training_step(self, run: h.Run, batch: Any) -> Tensor:
            inputs, targets = batch
            return super().training_step(run, (torch.ops.step_check_test.wrong(inputs), targets))

    _, _, result = trained(StepCheck(5), make=lambda: Wrong(model(), nn.functional.mse_loss))
    assert "operator 1, step_check_test.wrong.default" in result.warnings[0]


def test_what_a_generator_elsewhere_changes_is_reported_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = np.random.default_rng(0)

    class Draws(h.Supervised):
        def training_step(self, run: h.Run, batch: Any) -> Tensor:
            return super().training_step(run, (batch[0] * float(elsewhere.random()), batch[1]))

    _, seen, result = trained(StepCheck(1), make=lambda: Draws(model(), nn.functional.mse_loss))
    first = result.warnings[0].partition("; ")[2]
    assert_facts(first, "generator", "operator 1, aten.mul.Tensor", " in the first", " in the second")
    numbers = re.findall(r"(\S+) in the ", first)
    assert float(numbers[0]) != float(numbers[1])
    assert_each(result.warnings[1:], ("StepCheck: 5 of 5",))
    assert len(set(seen.checks)) == 5
    assert len(caplog.records) == 1


def test_a_generator_of_the_program_that_the_task_holds_too_is_put_back() -> None:
    def drawing() -> h.Supervised:
        shared = np.random.default_rng(0)

        class Draws(h.Supervised):
            def training_step(self, run: h.Run, batch: Any) -> Tensor:
                return super().training_step(run, (batch[0] * float(shared.random()), batch[1]))

        task = Draws(model(), nn.functional.mse_loss)
        task.generator = shared  # type: ignore[attr-defined]
        return task

    expected, _, _ = trained(make=drawing)
    found, _, result = trained(StepCheck(1), make=drawing)
    assert_same(found, expected)
    assert result.warnings == ()


def test_what_cannot_be_repeated_is_refused() -> None:
    class Named(h.Task):
        def __init__(self) -> None:
            self.one = nn.Linear(4, 2)

        def training_step(self, run: h.Run, batch: Any) -> Iterator[tuple[str, Tensor]]:
            yield "one", self.one(batch[0]).sum()

    with pytest.raises(ValueError, match="yields losses by name"):
        fit(StepCheck(1), task=Named(), train=random_batches(2), optimizer={"one": adam()})
    hooked = model()
    weight: Any = next(hooked.parameters())
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="hooks on its parameters"):
        fit(StepCheck(1), task=h.Supervised(hooked, nn.functional.mse_loss), train=random_batches(2))
    with pytest.raises(ValueError, match=r"^StepCheck\(action=\) is 'warn'"):
        StepCheck(action="stop")  # type: ignore[arg-type]


def test_a_pass_that_changes_weights_is_said() -> None:
    class Renorm(h.Supervised):
        def training_step(self, run: h.Run, batch: Any) -> Tensor:
            with torch.no_grad():
                self.model.get_parameter("0.weight").mul_(0.99)
            return super().training_step(run, batch)

    expected, _, _ = trained(make=lambda: Renorm(model(), nn.functional.mse_loss))
    found, _, result = trained(StepCheck(3), make=lambda: Renorm(model(), nn.functional.mse_loss))
    assert_same(found, expected)
    assert "step 3 from the same state: its passes" in result.warnings[0]


def test_a_loop_of_the_users_own_must_call_forward() -> None:
    task = h.Supervised(model(), nn.functional.mse_loss)
    trainer = h.Trainer([StepCheck(1)], device="cpu")
    with trainer.run(task, random_batches(4), optimizer=adam(), epochs=1) as run:
        for _ in run.epochs():
            for inputs, targets in run.batches():
                run.step(nn.functional.mse_loss(task.model(inputs), targets))
    assert "run.stepping.forward" in run.result.warnings[0]


@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("scope", ["modules", "step"])
def test_compiled_code_is_repeated(scope: Any) -> None:
    def compiled() -> h.Compile:
        return h.Compile(scope=scope, backend="aot_eager", fallback=False)

    expected, _, _ = trained(compiled())
    found, seen, result = trained(StepCheck(2), compiled())
    assert_same(found, expected)
    assert (seen.checks, result.warnings) == (["", ""], ())


def test_a_step_that_weighs_its_batch_is_repeated() -> None:
    class Weighed(h.Supervised):
        def training_step(self, run: h.Run, batch: Any) -> Tensor:
            run.stepping.weigh(len(batch[0]))
            return super().training_step(run, batch)

    seen = Seen()
    task = Weighed(model(), nn.functional.mse_loss)
    fit(StepCheck(every=1), seen, task=task, train=random_batches(3), optimizer=adam(), epochs=1)
    assert len(seen.checks) > 1
    assert not any(seen.checks)
