"""Changes of a run that are requested: its learning rate, plugins that are enabled and disabled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.events.control import CHANGES
from heliograph.tests import kit
from heliograph.tests.messages import assert_each, assert_facts
from torch import nn
from torch.optim import lr_scheduler as schedulers

BATCHES = kit.random_batches(8)


class Ask(h.Plugin):
    """Calls functions of the run, each after a batch that is given by its number."""

    affects_training = False

    def __init__(self, *asked: tuple[int, Callable[[h.Run], object]]) -> None:
        self.asked = asked

    @h.on(h.BatchEnd)
    def ask(self, run: h.Run, event: h.BatchEnd) -> None:
        for batch, act in self.asked:
            if run.progress.batches == batch:
                act(run)


class Rates(h.Plugin):
    """Keeps the rates with which each step was made, and what became of changes."""

    affects_training = False

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.served: list[tuple[h.ChangeServed, int]] = []

    @h.on(h.GradientsReady)
    def keep(self, run: h.Run, event: h.GradientsReady) -> None:
        self.rates.append([float(group["lr"]) for each in run.optimizers.values() for group in each.param_groups])

    @h.on(h.ChangeServed)
    def note(self, run: h.Run, event: h.ChangeServed) -> None:
        self.served.append((event, run.progress.steps))


def rate(value: float, optimizer: str = "") -> Callable[[h.Run], object]:
    return lambda run: run.control.set_learning_rate(value, "a person asks", optimizer=optimizer, by="ann@node")


def task() -> h.Supervised:
    torch.manual_seed(0)
    return h.Supervised(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), nn.functional.mse_loss)


def groups(model: Any, *rates: float) -> torch.optim.SGD:
    parts = [{"params": part.parameters(), "lr": each} for part, each in zip(model, rates, strict=True)]
    return torch.optim.SGD(parts, lr=rates[0], momentum=0.9)


def fit(*plugins: h.Plugin, scheduler: Any = None, rates: tuple[float, ...] = (0.1, 0.01), **options: Any) -> Rates:
    seen, given = Rates(), task()
    stepped = [h.LearningRate("step")] if scheduler is not None else []
    options = {"epochs": 1, **options}
    trainer = h.Trainer([*stepped, *plugins, seen], device="cpu")
    trainer.fit(given, BATCHES, optimizer=groups(given.model, *rates), scheduler=scheduler, **options)
    return seen


def test_the_first_group_gets_the_rate_and_the_others_keep_their_ratio() -> None:
    seen = fit(Ask((3, rate(0.03))))
    assert seen.rates == [[0.1, 0.01]] * 3 + [[0.03, pytest.approx(0.003)]] * 5
    assert seen.served == [(h.ChangeServed("set_learning_rate", "", 0.03, "ann@node", "a person asks"), 3)]


@pytest.mark.parametrize("asked", [(0.2, 0.3), (0.3, 0.2, 0.3), (0.3, 0.3), (0.1, 0.2, 0.1, 0.3)])
def test_of_several_changes_at_one_boundary_all_are_made_and_the_last_stays(asked: tuple[float, ...]) -> None:
    seen = fit(Ask(*((2, rate(each)) for each in asked)))
    assert [each[0] for each in seen.rates[2:]] == [0.3] * 6
    made = [each.value for each, _ in seen.served]
    assert made == [each for number, each in enumerate(asked) if each not in asked[number + 1 :]]


MAKERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda each: schedulers.StepLR(each, 2, 0.5),
    "multi_step": lambda each: schedulers.MultiStepLR(each, [1, 5], 0.1),
    "exponential": lambda each: schedulers.ExponentialLR(each, 0.9),
    "cosine": lambda each: schedulers.CosineAnnealingLR(each, 20, eta_min=0.001),
    "restarts": lambda each: schedulers.CosineAnnealingWarmRestarts(each, 5, eta_min=0.001),
    "linear": lambda each: schedulers.LinearLR(each, 0.1, total_iters=6),
    "constant": lambda each: schedulers.ConstantLR(each, 0.5, total_iters=6),
    "polynomial": lambda each: schedulers.PolynomialLR(each, 20),
    "lambda": lambda each: schedulers.LambdaLR(each, lambda step: 1 / (1 + step)),
    "multiplicative": lambda each: schedulers.MultiplicativeLR(each, lambda _: 0.9),
    "cyclic": lambda each: schedulers.CyclicLR(each, [0.1, 0.01], [1.0, 0.1], step_size_up=3),
    "one_cycle": lambda each: schedulers.OneCycleLR(each, [1.0, 0.1], total_steps=20),
    "sequential": lambda each: schedulers.SequentialLR(
        each, [schedulers.LinearLR(each, 0.1, total_iters=5), schedulers.CosineAnnealingLR(each, 9)], [5]
    ),
    "chained": lambda each: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(each, 0.5, total_iters=4), schedulers.ExponentialLR(each, 0.9)]
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_schedule_continues_from_the_new_rate(name: str) -> None:
    """Whatever a scheduler of torch would have made of the rates, it makes so many times that."""
    plain = fit(scheduler=MAKERS[name])
    changed = fit(Ask((3, rate(0.05))), scheduler=MAKERS[name])
    factor = 0.05 / plain.rates[3][0]
    assert changed.rates[:3] == plain.rates[:3]
    assert changed.rates[3][0] == 0.05
    for before, now in zip(plain.rates[3:], changed.rates[3:], strict=True):
        assert now == pytest.approx([factor * each for each in before])


def test_a_warm_up_continues_from_the_new_rate() -> None:
    plain = fit(scheduler=h.warmup_cosine(3))
    changed = fit(Ask((4, rate(0.02))), scheduler=h.warmup_cosine(3))
    factor = 0.02 / plain.rates[4][0]
    assert [each[0] for each in changed.rates[4:]] == pytest.approx([factor * each[0] for each in plain.rates[4:]])


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    given, tensor = task(), torch.tensor(0.1)
    optimizer = torch.optim.Adam(given.model.parameters(), lr=tensor, capturable=False, foreach=False)
    h.Trainer([Ask((3, rate(0.05)))], device="cpu").fit(given, BATCHES, optimizer=optimizer, epochs=1)
    assert optimizer.param_groups[0]["lr"] is tensor
    assert tensor.item() == pytest.approx(0.05)


class Own:
    """A scheduler of another package."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("act", "scheduler", "why"),
    [
        (rate(0.5), Own, "scheduler Own is not"),
        (
            rate(0.5),
            lambda each: schedulers.LambdaLR(each, lambda step: float(step != 3)),
            "learning rate is 0",
        ),
        (rate(0.5, "other"), None, r"no optimizer 'other'.*Known: optimizer"),
        (lambda run: run.control.enable_plugin("oter", "so"), None, r"no plugin 'oter'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(act: Any, scheduler: Any, why: str) -> None:
    make = (lambda each: Own(each)) if scheduler is Own else scheduler
    plain = fit(scheduler=make)
    seen = Rates()
    given = task()
    plugins = [*([h.LearningRate("step")] if make else []), Ask((3, act)), seen]
    result = h.Trainer(plugins, device="cpu").fit(
        given, BATCHES, optimizer=groups(given.model, 0.1, 0.01), scheduler=make, epochs=1
    )
    assert seen.rates == plain.rates
    ((served, step),) = seen.served
    assert step == 3
    assert_each(
        [each for each in result.warnings if "refused" in each],
        (served.by, result.history[0].what, served.reason, "refused", served.refusal),
    )
    assert re.search(why, served.refusal)


def two_optimizers(*plugins: h.Plugin, rates: tuple[float, float]) -> Rates:
    class Two(h.Task):
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

        def training_step(self, run: h.Run, batch: Any) -> Any:
            for name, model in (("first", self.first), ("second", self.second)):
                yield name, nn.functional.mse_loss(model(batch[0]), batch[1])

    given, seen = Two(), Rates()
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=each)
        for name, model, each in zip(("first", "second"), (given.first, given.second), rates, strict=True)
    }
    h.Trainer([*plugins, seen], device="cpu").fit(given, BATCHES, optimizer=optimizers, epochs=1)
    return seen


def test_of_several_optimizers_the_named_one_is_changed_or_all_that_have_the_same_rate() -> None:
    assert two_optimizers(Ask((4, rate(0.5, "second"))), rates=(0.1, 0.2)).rates[-1] == [0.1, 0.5]
    assert two_optimizers(Ask((4, rate(0.5))), rates=(0.1, 0.1)).rates[-1] == [0.5, 0.5]
    seen = two_optimizers(Ask((4, rate(0.5))), rates=(0.1, 0.2))
    assert seen.rates[-1] == [0.1, 0.2]
    assert_facts(seen.served[0][0].refusal, "different learning rates", "first has 0.1", "second has 0.2")


@pytest.mark.parametrize("given", [0, -1.0, float("nan"), float("inf"), "0.1", None, True])
def test_a_rate_is_a_positive_number(given: Any) -> None:
    with pytest.raises(ValueError, match=r"control\.set_learning_rate\(rate\)"):
        h.Control(h.Progress()).set_learning_rate(given, "so")


def test_a_plugin_is_disabled_and_enabled_at_the_boundary() -> None:
    losses = kit.Losses()
    changes: list[tuple[str, str, str]] = []

    class Watch(h.Plugin):
        @h.on(h.PluginChanged)
        def note(self, run: h.Run, event: h.PluginChanged) -> None:
            changes.append((event.plugin, event.change, event.by))

    ask = Ask(
        (2, lambda run: run.control.disable_plugin("losses", "too many", by="ann@node")),
        (5, lambda run: run.control.enable_plugin("losses", "now", by="bob@node")),
    )
    fit(ask, losses, Watch())
    assert len(losses.values) == 2 + 3
    assert changes == [("losses", "disabled", "ann@node"), ("losses", "enabled", "bob@node")]


def test_what_the_environment_keeps_off_is_not_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOGRAPH_PLUGINS", "-losses")
    with pytest.warns(RuntimeWarning, match="HELIOGRAPH_PLUGINS"):
        seen = fit(Ask((2, lambda run: run.control.enable_plugin("losses", "now"))), kit.Losses())
    assert_facts(seen.served[0][0].refusal, "environment", "'losses'")


def state(folder: Path, *plugins: h.Plugin, make: Any, epochs: float, resume: Any = None) -> dict[str, Any]:
    """Train, and return what the run ended with."""
    given = task()
    optimizer, noise = groups(given.model, 0.1, 0.01), Noise()
    checkpoint = h.Checkpoint(folder, every=h.Every(steps=1), keep_last=None, resume=resume)
    plugged = [h.LearningRate("step"), h.RNGCapture(), noise, *plugins, checkpoint]
    result = h.Trainer(plugged, device="cpu").fit(given, BATCHES, optimizer=optimizer, scheduler=make, epochs=epochs)
    assert [each for each in result.warnings if "learning rate" in each] == []
    weights = {name: value.clone() for name, value in given.model.state_dict().items()}
    momenta = [each["momentum_buffer"].clone() for each in optimizer.state.values()]
    return {"weights": weights, "momenta": momenta, "rates": [each["lr"] for each in optimizer.param_groups]}


class Noise(h.Plugin):
    """Adds noise to gradients: whether it is enabled can be seen in the weights."""

    @h.on(h.GradientsReady)
    def add(self, run: h.Run, event: h.GradientsReady) -> None:
        for each in run.optimizer.param_groups[0]["params"]:
            each.grad.add_(torch.randn_like(each) / 10)


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)
    return all(map(equal, first, second)) if isinstance(first, list) else bool(first == second)


def changes() -> Ask:
    return Ask(
        (3, rate(0.05)),
        (3, lambda run: run.control.disable_plugin("noise", "enough")),
        (9, lambda run: run.control.enable_plugin("noise", "again")),
    )


@pytest.mark.parametrize("at", [1, 2, 3, 4, 8, 9, 10])
@pytest.mark.parametrize("name", ["cosine", "sequential", "one_cycle"])
def test_a_resumed_run_continues_with_what_was_changed(name: str, at: int, tmp_path: Path) -> None:
    whole = state(tmp_path / "whole", changes(), make=MAKERS[name], epochs=1.5)
    state(tmp_path / "first", changes(), make=MAKERS[name], epochs=1.5)
    (found,) = (tmp_path / "first").glob(f"*_iter_{at}.pth")
    resumed = state(tmp_path / "second", changes(), make=MAKERS[name], epochs=1.5, resume=found)
    assert equal(resumed, whole)


class AtStart(h.Plugin):
    """Disables a plugin before the first step."""

    affects_training = False

    @h.on(h.TrainStart)
    def disable(self, run: h.Run, event: h.TrainStart) -> None:
        run.plugins.disable(Noise)


def within_a_context(run: h.Run) -> None:
    with run.plugins.disabled("noise"):
        assert not run.plugins.is_enabled("noise")


TOGGLES: dict[str, tuple[h.Plugin, ...]] = {
    "disabled": (Ask((3, lambda run: run.plugins.disable("noise"))),),
    "disabled and enabled": (
        Ask((3, lambda run: run.plugins.disable(Noise)), (9, lambda run: run.plugins.enable("noise"))),
    ),
    "at the start": (AtStart(),),
    "at the start, then enabled": (AtStart(), Ask((5, lambda run: run.plugins.enable("noise")))),
    "in a context": (Ask((3, within_a_context)),),
    "once": (Ask((3, lambda run: run.plugins.disable("noise")), (3, lambda run: run.plugins.disable("noise"))),),
}


@pytest.mark.parametrize("at", [2, 3, 6, 10])
@pytest.mark.parametrize("way", TOGGLES)
def test_a_resumed_run_has_the_plugins_that_a_handler_toggled(way: str, at: int, tmp_path: Path) -> None:
    whole = state(tmp_path / "whole", *TOGGLES[way], make=MAKERS["cosine"], epochs=1.5)
    (checkpoint,) = (tmp_path / "whole").glob(f"*_iter_{at}.pth")
    resumed = state(tmp_path / "second", *TOGGLES[way], make=MAKERS["cosine"], epochs=1.5, resume=checkpoint)
    assert equal(resumed, whole)


def test_what_a_program_toggles_before_it_resumes_holds_unless_the_run_toggled_it(tmp_path: Path) -> None:
    def train(*plugins: h.Plugin, off: str, epochs: int) -> tuple[bool, bool]:
        saves = h.Checkpoint(tmp_path, every=h.Every(epochs=1), resume="auto")
        trainer = h.Trainer([Noise(), h.EMA(0.9), *plugins, saves], device="cpu")
        trainer.plugins.disable(off)
        given = task()
        trainer.fit(given, BATCHES, optimizer=groups(given.model, 0.1, 0.01), epochs=epochs)
        return trainer.plugins.is_enabled("noise"), trainer.plugins.is_enabled("ema")

    assert train(Ask((3, lambda run: run.plugins.enable("noise"))), off="noise", epochs=1) == (True, True)
    assert train(off="ema", epochs=2) == (True, False)
    assert train(off="noise", epochs=3) == (True, True)


def test_a_plugin_that_errors_have_disabled_is_tried_again_by_a_resumed_run(tmp_path: Path) -> None:
    class Fails(h.Plugin):
        policy = "observer"
        max_errors = 1

        @h.on(h.BatchEnd)
        def fail(self, run: h.Run, event: h.BatchEnd) -> None:
            raise ValueError("on purpose")

    given = task()
    saves = h.Checkpoint(tmp_path, every=h.Every(epochs=1))
    trainer = h.Trainer([Fails(), saves], device="cpu")
    result = trainer.fit(given, BATCHES, optimizer=groups(given.model, 0.1, 0.01), epochs=1)
    assert result.last_checkpoint is not None
    assert "switches" not in torch.load(result.last_checkpoint, weights_only=True)["control"]


def test_a_change_that_is_due_is_in_the_state_with_its_asker() -> None:
    control = h.Control(h.Progress())
    control.set_learning_rate(0.5, "why", by="ann")
    control.disable_plugin("ema", "because", by="bob")
    control.request_save("now")
    saved = control.state_dict()
    assert saved["due"] == ["save"]
    assert saved["requests"] == [
        ["set_learning_rate", "", 0.5, "ann", "why"],
        ["disable_plugin", "ema", None, "bob", "because"],
        ["save", "", None, "the caller", "now"],
    ]
    other = h.Control(h.Progress())
    other.load_state_dict(saved, at_save_point=True)
    assert (other.pending, other.pop_changes()) == (False, [])
    other.release()
    made = other.pop_changes()
    assert [each.what for each in made] == ["set_learning_rate 0.5", "disable_plugin ema"]
    assert [(each.by, each.reason) for each in made] == [("ann", "why"), ("bob", "because")]


def test_a_return_undoes_what_was_switched_after_the_state(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    class Back(h.Plugin):
        saved: Any = None

        @h.on(h.BatchEnd)
        def act(self, run: h.Run, event: h.BatchEnd) -> None:
            if run.progress.batches == 2 and self.saved is None:
                self.saved = run.state_dict()
            elif run.progress.batches == 5 and not seen:
                seen.append((run.progress.batches, run.plugins.is_enabled("losses")))
                run.roll_back(self.saved)

        @h.on(h.CheckpointLoaded)
        def look(self, run: h.Run, event: h.CheckpointLoaded) -> None:
            seen.append((run.progress.batches, run.plugins.is_enabled("losses")))

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    done: list[bool] = []

    def once(run: h.Run) -> None:
        if not done:
            done.append(True)
            run.control.disable_plugin("losses", "so")

    fit(Ask((3, once)), kit.Losses(), Back())
    assert seen == [(5, False), (2, True)]


def test_a_request_says_what_it_is_for() -> None:
    control = h.Control(h.Progress())
    control.set_learning_rate(3e-4, "why", optimizer="generator", by="ann")
    assert_facts(control.history[0], "epoch 0", "batch 0", "step 0", "ann", "set_learning_rate generator 0.0003", "why")
    assert set(CHANGES) == {"set_learning_rate", "enable_plugin", "disable_plugin"}
