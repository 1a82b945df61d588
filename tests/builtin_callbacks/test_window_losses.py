"""The losses of a window: copied before their backward pass, read before the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import heliograph as h
import pytest
import torch
from heliograph.builtin_callbacks import non_finite_losses
from heliograph.core.metrics.fetched import Fetched
from heliograph.tests.kit import class_batches, fit, sgd
from torch import Tensor, nn


class Watched(Fetched):
    """Writes down when it is made and read, and when the backward pass of its loss begins."""

    seen: list[str]

    def __init__(self, loss: Tensor) -> None:
        super().__init__(loss)
        self.seen.append("fetch")
        loss.register_hook(lambda gradient: self.seen.append("backward"))  # type: ignore[no-untyped-call]

    def read(self) -> Any:
        self.seen.append("read")
        return super().read()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(non_finite_losses, "Fetched", Watched)
    Watched.seen = []
    return Watched.seen


@pytest.mark.parametrize("guard", [h.NaNGuard, lambda: h.NaNGuard("skip"), lambda: h.NaNGuard("stop")])
def test_a_copy_begins_before_the_backward_pass_and_is_read_after_it(guard: Any, seen: list[str]) -> None:
    """On a GPU that is a wait for the forward pass only."""
    fit(guard())
    assert seen == ["fetch", "backward", "read"] * 2


def test_so_does_each_of_an_accumulated_window(seen: list[str]) -> None:
    fit(h.NaNGuard(), h.GradientAccumulation(2), train=class_batches(3))
    assert seen == [*["fetch", "backward"] * 2, "read", "read", "fetch", "backward", "read"]


@pytest.mark.parametrize("window", [1, 2])
def test_each_loss_of_several_optimizers_is_copied_once(window: int, seen: list[str]) -> None:
    class Pair(h.Task):
        def __init__(self) -> None:
            self.one, self.two = nn.Linear(4, 1), nn.Linear(4, 1)

        def training_step(self, run: h.Run, batch: Any) -> Iterator[tuple[str, Tensor]]:
            yield "one", self.one(batch[0]).sum()
            yield "two", self.two(batch[0]).sum()

    optimizers = {"one": sgd(), "two": sgd()}
    fit(h.NaNGuard(), h.GradientAccumulation(window), task=Pair(), train=class_batches(4), optimizer=optimizers)
    held = ["fetch", "backward"] * 2 * (window - 1)
    step = ["fetch", "backward", *["read"] * window]
    assert seen == [*held, *step, *step] * (4 // window)


def test_a_host_without_the_moment_before_the_backward_pass_copies_after_it(seen: list[str]) -> None:
    losses = non_finite_losses.WindowLosses()
    run = SimpleNamespace(
        progress=SimpleNamespace(batch=0), stepping=SimpleNamespace(optimizer_name="optimizer", window=0)
    )
    for number, value in enumerate((1.0, math.inf)):
        run.progress.batch = number
        losses.open_batch(cast("h.Run", run))
        run.loss = torch.tensor(value, requires_grad=True) * 1.0
        run.stepping.window, run.stepping.losses = number + 1, {"optimizer": run.loss}
        run.stepping.windows = {"optimizer": run.stepping.window}
        seen.append("batch")
    assert losses.take_bad(cast("h.Run", run)) == {1: math.inf}
    assert seen == ["batch", "fetch", "batch", "fetch", "read", "read"]


def test_a_loss_is_not_kept_alive() -> None:
    loss = torch.ones(3, requires_grad=True).sum()
    copy = Fetched(loss)
    assert copy._copy.grad_fn is None
    assert copy.read() == 3.0
