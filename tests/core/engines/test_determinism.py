"""Deterministic or fastest algorithms: set for a run, and given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from heliograph import BatchEnd, DeviceEngine, Every, Run, Supervised, Trainer, ValidationBatchEnd, ValidationSchedule
from heliograph.core.engines.numerics import WORKSPACE, Determinism
from heliograph.tests.kit import sgd
from torch import nn

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, "")  # so that it is taken away again, whatever sets it
    monkeypatch.delenv(WORKSPACE)


def settings() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
    )


OFF = (False, False, False, False)
DETERMINISTIC = (True, False, True, False)
FASTEST = (False, False, False, True)


@pytest.fixture
def user_settings() -> Iterator[tuple[bool, ...]]:
    """Yield settings that a user made before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    yield settings()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


def make(**options: Any) -> Trainer:
    return Trainer([ValidationSchedule(Every(epochs=1))], **options)


def fit(trainer: Trainer) -> dict[str, tuple[bool, ...]]:
    """Train and validate; return the settings that held in each."""
    seen: dict[str, tuple[bool, ...]] = {}

    def train(run: Run, event: BatchEnd) -> None:
        seen["train"] = settings()

    def validation(run: Run, event: ValidationBatchEnd) -> None:
        seen["validation"] = settings()

    trainer.bus.on(BatchEnd, train)
    trainer.bus.on(ValidationBatchEnd, validation)
    task, data = Supervised(nn.Linear(2, 2), nn.functional.mse_loss), [(torch.ones(1, 2), torch.ones(1, 2))]
    trainer.fit(task, data, validation=data, optimizer=sgd(), epochs=1)
    trainer.validate(task, data)
    return seen


def test_both_is_an_error() -> None:
    with pytest.raises(ValueError, match="deterministic=True and cudnn_benchmark=True contradict"):
        Trainer(device="cpu", deterministic=True, cudnn_benchmark=True)


@pytest.mark.parametrize(
    ("options", "train", "validation"),
    [
        ({}, OFF, OFF),
        ({"deterministic": True}, DETERMINISTIC, DETERMINISTIC),
        ({"cudnn_benchmark": True}, FASTEST, OFF),
    ],
)
def test_settings_hold_for_a_run_and_are_given_back(
    options: Any, train: tuple[bool, ...], validation: tuple[bool, ...]
) -> None:
    before = settings()
    assert before == OFF
    assert fit(make(device="cpu", **options)) == {"train": train, "validation": validation}
    assert settings() == before


@pytest.mark.parametrize("options", [{"deterministic": True}, {"cudnn_benchmark": True}])
def test_settings_are_given_back_after_a_failure(options: Any) -> None:
    trainer = make(device="cpu", **options)

    def fail(run: Run, event: BatchEnd) -> None:
        raise KeyError("on purpose")

    trainer.bus.on(BatchEnd, fail)
    with pytest.raises(KeyError, match="on purpose"):
        fit(trainer)
    assert settings() == OFF


def test_what_a_user_set_is_left_and_given_back(user_settings: tuple[bool, ...]) -> None:
    assert fit(make(device="cpu")) == {"train": user_settings, "validation": user_settings}
    assert fit(make(device="cpu", deterministic=True))["train"] == DETERMINISTIC
    assert settings() == user_settings


def test_a_process_may_be_held_around_runs() -> None:
    engine = DeviceEngine("cpu", deterministic=True)
    with engine.process():
        fit(make(engine=engine))
        assert settings() == DETERMINISTIC
    assert settings() == OFF


def test_an_operation_without_a_deterministic_form_raises() -> None:
    engine = DeviceEngine("cpu", deterministic=True)
    with engine.process(), pytest.raises(RuntimeError, match="deterministic implementation"):
        torch.ones(3).put_(torch.tensor([0]), torch.ones(1), accumulate=False)


# What cuBLAS reads from the environment.


@pytest.mark.parametrize(("given", "kept"), [(None, ":4096:8"), (":16:8", ":16:8"), (":4096:8", ":4096:8")])
def test_the_workspace_of_cublas_is_set_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: given is not None)
    if given is not None:
        monkeypatch.setenv(WORKSPACE, given)
    Determinism().prepare(CUDA)
    Determinism(deterministic=True).prepare(torch.device("cpu"))
    assert os.environ.get(WORKSPACE) == given
    Determinism(deterministic=True).prepare(CUDA)
    assert os.environ[WORKSPACE] == kept


def test_another_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(ValueError, match=f"work with {WORKSPACE}=':0:0',"):
        Determinism(deterministic=True).prepare(CUDA)


def test_a_gpu_in_use_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=rf"cuBLAS.* Set {WORKSPACE}=:4096:8"):
        Determinism(deterministic=True).prepare(CUDA)
