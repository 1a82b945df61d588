"""What an object without a state changes in a training."""

from __future__ import annotations

from heliograph.bridges.unsaved import Unsaved
from torch import nn


class Holder:
    def __init__(self, module: nn.Module) -> None:
        self.count, self.name, self.module = 0, "first", module


def test_only_attributes_that_no_checkpoint_holds_are_named() -> None:
    module = nn.Linear(2, 1)
    holder = Holder(module)
    unsaved = Unsaved(holder)
    assert unsaved.changed([module]) == []
    holder.count = 1
    nn.init.zeros_(module.weight)
    assert unsaved.changed([module]) == ["count"]
    holder.name = "second"
    assert unsaved.changed([module]) == ["count"]  # not looked for again
