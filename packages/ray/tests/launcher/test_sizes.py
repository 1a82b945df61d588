"""How many workers Ray is asked for, and the check for room for more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from heliograph_ray.launcher import capacity
from heliograph_ray.launcher.capacity import Sizes


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Return the free resources of machines, by name, for each machine."""
    free: list[dict[str, float]] = []
    state = SimpleNamespace(available_resources_per_node=lambda: dict(enumerate(free)))
    monkeypatch.setattr(capacity, "require", lambda *args, **kwargs: state)
    return free


def test_a_range_is_asked_for_unless_there_is_one_number() -> None:
    assert Sizes(2, 8, {"CPU": 1.0}, None).asked == (2, 8)
    assert Sizes(4, 4, {"CPU": 1.0}, None).asked == 4


def test_one_more_worker_has_to_fit_on_a_machine(machines: list[dict[str, float]]) -> None:
    several = Sizes(1, 8, {"CPU": 2.0, "GPU": 1.0, "memory": 0.0}, 10.0)
    machines += [{"CPU": 1.0, "GPU": 4.0}, {"CPU": 64.0}]
    assert not several.has_room_for_more(2)
    machines.append({"CPU": 3.0, "GPU": 1.0})
    assert several.has_room_for_more(2)
    assert not several.has_room_for_more(8)


def test_workers_that_take_nothing_always_fit() -> None:
    assert Sizes(1, 4, {"CPU": 0.0}, 10.0).has_room_for_more(2)
