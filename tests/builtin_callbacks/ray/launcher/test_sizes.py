"""Which numbers of workers will do, and when there is room for more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from heliograph.builtin_callbacks.ray.launcher import sizes
from heliograph.builtin_callbacks.ray.launcher.sizes import Sizes


class Machines:
    """What is free, machine by machine, and what the clock says.

    Attributes:
        free: by machine and name.
        now: seconds.
    """

    def __init__(self) -> None:
        self.free: list[dict[str, float]] = []
        self.now = 0.0


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    made = Machines()
    state = SimpleNamespace(available_resources_per_node=lambda: dict(enumerate(made.free)))
    monkeypatch.setattr(sizes, "require", lambda *args, **kwargs: state)
    monkeypatch.setattr(sizes, "monotonic", lambda: made.now)
    return made


def test_only_divisors_will_do() -> None:
    assert Sizes(2, 8, 8, {"CPU": 1.0}, None).allowed == (2, 4, 8)
    assert Sizes(2, 8, 8, {"CPU": 1.0}, None).asked == (2, 8)
    assert Sizes(2, 7, 8, {"CPU": 1.0}, None).asked == (2, 4)
    assert Sizes(3, 7, 8, {"CPU": 1.0}, None).asked == 4
    assert Sizes(2, 4, None, {"CPU": 1.0}, None).allowed == (2, 3, 4)


def test_none_that_will_do_is_an_error() -> None:
    with pytest.raises(ValueError, match="No number of workers from 5 to 7 divides as_ranks=8"):
        Sizes(5, 7, 8, {"CPU": 1.0}, None)


def test_workers_of_a_number_that_will_not_do_are_followed_by_fewer() -> None:
    several = Sizes(2, 8, 8, {"CPU": 1.0}, None)
    asked = []
    for size in (7, 3):
        several.update(size)
        asked.append(several.asked)
    assert asked == [(2, 4), 2]


def test_there_is_room_where_a_larger_number_fits_machine_by_machine(machines: Machines) -> None:
    several = Sizes(1, 8, 8, {"CPU": 2.0, "GPU": 1.0, "memory": 0.0}, 10.0)
    several.update(3)
    machines.free = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 4.0}, {"CPU": 64.0}]
    machines.now = 20.0
    assert several.grow(2) is None  # for one more, which makes three
    machines.free.append({"CPU": 2.0, "GPU": 2.0})
    assert several.grow(2) is None  # it was looked at just now
    machines.now = 40.0
    assert several.grow(2) == "there is room for 4 workers"
    assert several.asked == (1, 4)
    assert several.grow(8) is None


def test_there_is_always_room_for_workers_that_take_nothing(machines: Machines) -> None:
    several = Sizes(1, 4, 4, {"CPU": 0.0}, 10.0)
    machines.now = 20.0
    assert several.grow(2) == "there is room for 4 workers"


def test_ray_looks_for_room_itself_where_any_number_will_do(machines: Machines) -> None:
    machines.free, machines.now = [{"CPU": 8.0}], 100.0
    assert Sizes(1, 8, None, {"CPU": 1.0}, 0.0).grow(2) is None


def test_room_that_was_none_after_all_is_looked_for_more_rarely(machines: Machines) -> None:
    machines.free = [{"CPU": 8.0}]
    several = Sizes(1, 4, 4, {"CPU": 1.0}, 10.0)
    several.update(3)
    machines.now = 11.0
    assert several.grow(2) is None
    machines.now = 20.0
    assert several.grow(2) == "there is room for 4 workers"
    several.update(2)
    machines.now = 31.0
    assert several.grow(2) == "there is room for 4 workers"
