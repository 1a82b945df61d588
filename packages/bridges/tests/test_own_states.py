"""What the objects that a plugin calls keep over a resume."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from heliograph import Run
from heliograph.packages.tests.facts import assert_each
from heliograph_bridges.own_states import OwnStates, Unsaved
from torch import nn


class Counter:
    """Has a state, an option, and a number of its state among its attributes."""

    def __init__(self, limit: int = 3) -> None:
        self.limit, self.count, self._hidden, self.items = limit, 0, 1, [1]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Forgetful:
    """Has no state."""

    def __init__(self) -> None:
        self.seen = 0


class Asked:
    """Stands for a run: notes what is asked of it."""

    def __init__(self) -> None:
        self.stops, self.untracked = list[str](), dict[str, str]()
        self.control = SimpleNamespace(stop=self.stops.append)
        self.data = SimpleNamespace(report_untracked=self.untracked.__setitem__)


def resume(states: OwnStates, *, affects_training: bool = True) -> Asked:
    asked = Asked()
    states.resume(cast("Run", asked), affects_training=affects_training)
    return asked


def test_names_and_options() -> None:
    states = OwnStates([Counter(), Counter(5), Forgetful(), print], "")
    assert states.names == ["Counter", "Counter_2", "Forgetful", "print"]
    assert states.options == {"Counter.limit": 3, "Counter_2.limit": 5, "Forgetful.seen": 0}


def test_states_are_saved_loaded_and_reset() -> None:
    first, second = Counter(), Counter()
    states = OwnStates([first, second], "")
    first.count, second.count = 4, 5
    saved = states.state_dict(None)
    first.count = second.count = 9
    states.load_state_dict(saved)
    assert (first.count, second.count) == (4, 5)
    states.reset()
    assert (first.count, second.count) == (0, 0)
    alone = Counter()
    OwnStates([alone], "").load_state_dict(saved)
    assert alone.count == 4


def test_a_stop_is_asked_for_again_with_the_same_options_only() -> None:
    states = OwnStates([Counter()], "")
    states.stop_reason = "enough"
    saved = states.state_dict(None)
    same, other = OwnStates([Counter()], ""), OwnStates([Counter(8)], "")
    for each, stops in ((same, ["enough"]), (other, [])):
        each.load_state_dict(saved)
        assert resume(each).stops == stops
        assert each.state_dict(None)["stop"] == "".join(stops)
    same.reset()
    assert resume(same).stops == []


@pytest.mark.parametrize("affects_training", [True, False])
def test_what_no_state_holds_is_listed_if_it_matters(affects_training: bool) -> None:
    forgetful = Forgetful()
    states = OwnStates([forgetful, Counter()], "give it one")
    assert states.state_dict(None)["lost"] == []
    forgetful.seen = 1
    saved = states.state_dict(None)
    again = OwnStates([Forgetful(), Counter()], "give it one")
    again.load_state_dict(saved)
    untracked = resume(again, affects_training=affects_training).untracked
    expected = [("Forgetful.seen", "starts fresh", "give it one")] if affects_training else []
    assert_each(untracked.items(), *expected)


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
