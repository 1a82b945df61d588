"""What an object changes that no state holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heliograph.core.system.errors import NotRecorded
from heliograph_bridges.absent import Absent
from heliograph_bridges.own_states import Unsaved
from torch import nn


class Holder:
    """Holds this and that."""

    def __init__(self, model: nn.Module) -> None:
        self.count, self.weights, self.model, self.own = 0, [torch.zeros(2)], model, nn.Linear(2, 1)


def test_nothing_has_changed() -> None:
    assert Unsaved(Holder(nn.Linear(2, 1))).changed(()) == []
    assert Unsaved(print).changed(()) == []


@pytest.mark.parametrize("name", ["count", "weights", "own"])
def test_what_has_changed_is_named_and_stays_so(name: str) -> None:
    holder = Holder(nn.Linear(2, 1))
    unsaved = Unsaved(holder)
    if name == "own":
        nn.init.ones_(holder.own.weight)
    elif name == "weights":
        holder.weights[0] += 1
    else:
        holder.count = 1
    assert unsaved.changed(()) == [name]
    holder.count = 0
    assert unsaved.changed(()) == [name]


def test_what_the_run_trains_is_left_out() -> None:
    model = nn.Linear(2, 1)
    unsaved = Unsaved(Holder(model))
    nn.init.ones_(model.weight)
    assert unsaved.changed([model]) == []


@pytest.mark.parametrize("use", [lambda each: each.x, lambda each: each[0], list, len, lambda each: each()])
def test_what_is_not_recorded_says_so_when_it_is_used(use: Any) -> None:
    with pytest.raises(NotRecorded, match="the model"):
        use(Absent("the model"))
