"""Golden runs: planted changes of a program are found, with their step and cause; an unchanged program is equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import heliograph as h
import pytest
import torch
from heliograph.core.program import UsageError
from heliograph.packages.tests.facts import assert_facts
from heliograph_testing import GoldenCheck, GoldenRun, check_golden, record_golden
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import Dataset

Made = tuple[h.Trainer, dict[str, Any]]
STEPS, EVERY = 12, 4  # of 5 batches in an epoch


class Noise:
    """An augmentation."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __repr__(self) -> str:
        return f"Noise({self.scale})"

    def __call__(self, features: Tensor) -> Tensor:
        return features + self.scale * torch.randn(features.shape)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, noise: float, shift: float, changed: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.features = torch.randn(20, 3, generator=generator)
        self.targets = torch.randn(20, 1, generator=generator) + shift
        self.transform = Noise(noise)
        if changed:
            self.features[7] += 1.0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.features[index]), self.targets[index]


class Task(h.Task):
    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], factor: float, draws: int) -> None:
        self.model, self.loss, self.factor, self.draws = model, loss, factor, draws

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        features, targets = batch
        torch.rand(self.draws)
        return self.loss(self.model(features), targets) * self.factor

    def validation_step(self, run: h.Run, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(self.model(batch[0]), batch[1])}


@dataclass
class Program:
    """A program with everything that a test changes."""

    model_seed: int = 1
    seed: int = 1
    width: int = 4
    activation: type[nn.Module] = nn.Tanh
    dropout: float = 0.1
    momentum_of_norm: float = 0.1
    scale_of_weights: float = 1.0
    dtype: torch.dtype = torch.float32
    precision: Literal["fp32", "bf16"] = "fp32"
    frozen: bool = False
    noise: float = 0.1
    shift: float = 0.0
    changed_sample: bool = False
    shuffle: bool = True
    batch_size: int = 4
    loss: Callable[..., Tensor] = nn.functional.mse_loss
    factor: float = 1.0
    draws: int = 0
    gradient_factor: float = 1.0
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    step_size: int = 3
    gamma: float = 0.5
    decay: float = 0.9
    accumulation: int = 1
    norm: float = 0.5
    validate_every: int = 1

    def __call__(self) -> Made:
        torch.manual_seed(self.model_seed)
        first = nn.Linear(3, self.width)
        model = nn.Sequential(
            first,
            nn.BatchNorm1d(self.width, momentum=self.momentum_of_norm),
            self.activation(),
            nn.Dropout(self.dropout),
            nn.Linear(self.width, 1),
        ).to(self.dtype)
        with torch.no_grad():
            first.weight *= self.scale_of_weights
        model[4].requires_grad_(not self.frozen)
        if self.gradient_factor != 1.0:
            first.weight.register_hook(lambda gradient: gradient * self.gradient_factor)  # type: ignore[no-untyped-call]
        options: dict[str, Any] = (
            {"momentum": self.momentum, "nesterov": self.nesterov} if self.optimizer is torch.optim.SGD else {}
        )
        data = Samples(self.noise, self.shift, self.changed_sample)
        data.features, data.targets = data.features.to(self.dtype), data.targets.to(self.dtype)
        plugins = [
            h.RNGCapture(seed=self.seed),
            h.LearningRate("step"),
            h.EMA(self.decay),
            h.GradientClipping(norm=self.norm),
            h.ValidationSchedule(h.Every(epochs=self.validate_every)),
            *([h.GradientAccumulation(self.accumulation)] if self.accumulation > 1 else []),
        ]
        return h.Trainer(plugins, device="cpu", precision=self.precision), {
            "task": Task(model, self.loss, self.factor, self.draws),
            "train": data,
            "validation": [(data.features, data.targets)],
            "loader_params": {"batch_size": self.batch_size, "shuffle": self.shuffle},
            "optimizer": lambda parameters: self.optimizer(
                [parameter for parameter in parameters if parameter.requires_grad],
                lr=self.lr,
                weight_decay=self.weight_decay,
                **options,
            ),
            "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, self.step_size, self.gamma),
            "epochs": 9,
        }


# The changed options; what differs first, at which step; a change of the program that the report names.
PLANTED: list[tuple[dict[str, Any], str, int, str]] = [
    ({"model_seed": 2}, "modules", 0, ""),
    ({"scale_of_weights": 1.01}, "modules", 0, ""),
    ({"width": 5}, "modules", 0, "out_features=5"),
    ({"dtype": torch.float64}, "modules", 0, ""),
    ({"seed": 2}, "plugin rng_capture", 0, "RNGCapture(seed=2)"),
    ({"shuffle": False}, "batch", 0, "SequentialSampler"),
    ({"batch_size": 5}, "batch", 0, "batches of 5"),
    ({"noise": 0.2}, "batch", 0, "Noise(0.2)"),
    ({"shift": 0.1}, "batch", 0, ""),
    ({"precision": "bf16"}, "loss", 0, "bf16"),
    ({"activation": nn.ReLU}, "loss", 0, "ReLU"),
    ({"dropout": 0.2}, "loss", 0, "Dropout(p=0.2"),
    ({"dropout": 0.0}, "loss", 0, "Dropout(p=0.0"),
    ({"loss": nn.functional.l1_loss}, "loss", 0, ""),
    ({"factor": 0.5}, "loss", 0, ""),
    ({"draws": 1}, "loss", 0, ""),
    ({"gradient_factor": 2.0}, "gradients", 0, ""),
    ({"norm": 0.4}, "gradients", 0, "norm=0.4"),
    ({"frozen": True}, "gradients", 0, "SGD of 4 parameters"),
    ({"accumulation": 2}, "order", 0, "GradientAccumulation"),
    ({"lr": 0.2}, "learning_rate", 0, "lr of optimizer was 0.1 and is 0.2"),
    ({"optimizer": torch.optim.Adam}, "modules", 1, "Adam of 6 parameters"),
    ({"weight_decay": 0.01}, "modules", 1, "weight_decay of optimizer was 0.0 and is 0.01"),
    ({"momentum": 0.8}, "modules", 2, "momentum of optimizer was 0.9 and is 0.8"),
    ({"nesterov": True}, "modules", 1, "nesterov of optimizer was False and is True"),
    ({"step_size": 4}, "learning_rate", 3, "step_size of the scheduler of optimizer was 3 and is 4"),
    ({"gamma": 0.4}, "learning_rate", 3, "gamma of the scheduler of optimizer was 0.5 and is 0.4"),
    ({"decay": 0.8}, "plugin ema", 4, "EMA(decay=0.8)"),
    ({"momentum_of_norm": 0.2}, "modules", 4, "momentum=0.2"),
    ({"validate_every": 2}, "plugin validation_schedule", 0, "epochs=2"),
    ({"changed_sample": True}, "batch", 3, ""),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "golden.json"
    record_golden(Program(), path, steps=STEPS, every=EVERY)
    return path


def test_an_unchanged_program_is_equal(golden: Path) -> None:
    check = check_golden(Program(), golden)
    assert check == GoldenCheck(STEPS)
    assert check.is_equal
    assert_facts(check, str(STEPS))


@pytest.mark.parametrize(
    ("options", "what", "step", "change"),
    PLANTED,
    ids=[", ".join(row[0]) + str(number) for number, row in enumerate(PLANTED)],
)
def test_a_change_is_named_with_its_step_and_cause(
    golden: Path, options: dict[str, Any], what: str, step: int, change: str
) -> None:
    check = check_golden(replace(Program(), **options), golden)
    assert check.difference is not None
    assert (check.difference.what, check.difference.place[2]) == (what, step)
    assert check.cause
    assert change in "\n".join(check.changes)


def test_later_differences_are_listed(golden: Path) -> None:
    check = check_golden(replace(Program(), step_size=4), golden)
    assert {"weights", "loss", "gradients", "plugin ema"} <= set(check.later)


@pytest.fixture(scope="module")
def with_operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("operators") / "golden.json"
    record_golden(Program(), path, steps=2, operators=True)
    return path


@pytest.mark.parametrize(
    ("options", "what", "step", "operators"),
    [
        ({"activation": nn.ReLU}, "operator", 0, ["aten.tanh.default", "aten.relu.default"]),
        ({"factor": 0.5}, "operator", 0, ["aten.mul.Tensor"]),
        ({"gradient_factor": 2.0}, "operator", 0, ["aten.mul.Tensor, float32 of shape [4, 3] in this run"]),
        ({"norm": 0.4}, "operator", 0, ["aten.mul.Tensor"]),
        ({"weight_decay": 0.01}, "operator", 1, ["aten.add.Tensor, float32 of shape [4, 3] in this run"]),
        ({"lr": 0.2}, "learning_rate", 0, []),
    ],
)
def test_the_first_operator_that_differs_is_named_on_request(
    with_operators: Path, options: dict[str, Any], what: str, step: int, operators: list[str]
) -> None:
    check = check_golden(replace(Program(), **options), with_operators)
    assert check.difference is not None
    assert (check.difference.what, check.difference.place[2]) == (what, step)
    assert_facts(check.difference, *operators)


def test_operators_are_equal_in_an_unchanged_program_and_ignored_with_a_tolerance(with_operators: Path) -> None:
    assert check_golden(Program(), with_operators).is_equal
    assert check_golden(replace(Program(), factor=1.0 + 1e-6), with_operators, rtol=1e-3).is_equal
    golden = GoldenRun.load(with_operators)
    golden.save(again := with_operators.with_name("again.json"))
    assert again.read_text() == with_operators.read_text()


def test_an_error_while_operators_are_recorded_ends_the_recording(tmp_path: Path) -> None:
    def fail(outputs: Tensor, targets: Tensor) -> Tensor:
        raise OSError("no loss")

    with pytest.raises(OSError, match="no loss"):
        record_golden(replace(Program(), loss=fail), tmp_path / "golden.json", operators=True)
    assert _get_current_dispatch_mode() is None


def test_a_tolerance_accepts_small_differences(golden: Path) -> None:
    program = replace(Program(), factor=1.0 + 1e-6)
    assert not check_golden(program, golden).is_equal
    assert check_golden(program, golden, rtol=1e-3).is_equal
    check = check_golden(replace(Program(), factor=1.1), golden, rtol=1e-3)
    assert check.difference is not None
    assert check.difference.what == "loss"


def test_the_file_is_small_and_describes_itself(golden: Path) -> None:
    content = json.loads(golden.read_text(encoding="utf-8"))
    assert (content["schema"], content["steps"], content["every"]) == (3, STEPS, EVERY)
    assert torch.__version__ in content["settings"]["versions"]
    assert content["settings"]["lr of optimizer"] == "0.1"
    assert golden.stat().st_size < 14_000
    loaded = GoldenRun.load(golden)
    again = golden.with_name("again.json")
    loaded.save(again)
    assert (loaded.steps, again.read_text()) == (STEPS, golden.read_text())


def test_a_training_that_ends_early_is_recorded_to_its_end(tmp_path: Path) -> None:
    def short() -> Made:
        trainer, options = Program()()
        return trainer, {**options, "epochs": 1}

    golden = record_golden(short, tmp_path / "golden.json")
    assert golden.recorded_steps == 5
    assert check_golden(short, tmp_path / "golden.json").steps == 5


def test_what_draws_without_a_seed_cannot_be_recorded(tmp_path: Path) -> None:
    def unseeded() -> Made:
        return replace(Program(), noise=float(torch.Generator().seed() % 1000))()

    with pytest.raises(UsageError, match="not deterministic") as error:
        record_golden(unseeded, tmp_path / "golden.json")
    assert_facts(error.value, "batch")
    assert not (tmp_path / "golden.json").exists()


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (None, ("golden.json", "cannot be read", "record it")),
        ("not JSON", ("golden.json", "not a golden run")),
        ("[]", ("golden.json", "not a golden run")),
        ('{"schema": 1}', ("schema 1", "record it again")),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path: Path, content: str | None, facts: tuple[str, ...]) -> None:
    path = tmp_path / "golden.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as error:
        check_golden(Program(), path)
    assert_facts(error.value, *facts)


@pytest.mark.parametrize("options", [{"steps": 0}, {"every": 0}, {"steps": 1.5}])
def test_wrong_numbers_are_errors(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        record_golden(Program(), tmp_path / "golden.json", **options)


def test_the_random_state_of_the_caller_is_unchanged(golden: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    check_golden(Program(), golden)
    assert torch.equal(torch.get_rng_state(), before)
