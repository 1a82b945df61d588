"""What several tests of rehearsals train, and what they note of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import heliograph as h
import torch
from heliograph.core.data import rng
from heliograph.core.objects.equality import leaves
from torch import Tensor, nn

FACTS: list[Any] = []  # of the module, and so out of reach of what is put back


class Facts(h.Plugin):
    """Notes every batch, its loss and its draws."""

    @h.on(h.BatchEnd)
    def note(self, run: h.Run, event: h.BatchEnd) -> None:
        FACTS.append((leaves(run.batch), leaves(run.loss), leaves(rng.capture())))


class Pair(h.Task):
    """Two models, each with an optimizer.

    Args:
        loss: of outputs and targets.
    """

    def __init__(self, loss: Callable[..., Tensor] = nn.functional.mse_loss) -> None:
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)
        self.loss = loss

    def training_step(self, run: h.Run, batch: Any) -> Iterator[tuple[str, Tensor]]:
        for name, model in (("one", self.one), ("two", self.two)):
            yield name, self.loss(model(batch[0]), batch[1])

    def validation_step(self, run: h.Run, batch: Any) -> Tensor:
        return self.loss(self.one(batch[0]), batch[1])
