"""The allowed numbers of workers, and the checks for room for more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from heliograph_ray.launcher import sizes
from heliograph_ray.launcher.sizes import Sizes


class Machines:
    """The free resources of machines, and a clock.

    Attributes:
        free: by name, for each machine.
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


def test_only_divisors_of_as_ranks_are_allowed() -> None:
    assert Sizes(2, 8, 8, {"CPU": 1.0}, None).allowed == (2, 4, 8)
    assert Sizes(2, 8, 8, {"CPU": 1.0}, None).asked == (2, 8)
    assert Sizes(2, 7, 8, {"CPU": 1.0}, None).asked == (2, 4)
    assert Sizes(3, 7, 8, {"CPU": 1.0}, None).asked == 4
    assert Sizes(2, 4, None, {"CPU": 1.0}, None).allowed == (2, 3, 4)


def test_no_allowed_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="No number of workers from 5 to 7 divides as_ranks=8"):
        Sizes(5, 7, 8, {"CPU": 1.0}, None)


def test_after_a_number_that_is_not_allowed_fewer_workers_are_asked_for() -> None:
    several = Sizes(2, 8, 8, {"CPU": 1.0}, None)
    asked = []
    for size in (7, 3):
        several.update(size)
        asked.append(several.asked)
    assert asked == [(2, 4), 2]


def test_a_larger_number_has_to_fit_on_the_machines(machines: Machines) -> None:
    several = Sizes(1, 8, 8, {"CPU": 2.0, "GPU": 1.0, "memory": 0.0}, 10.0)
    several.update(3)
    machines.free = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 4.0}, {"CPU": 64.0}]
    machines.now = 20.0
    assert several.grow(2) is None  # for one more, and three is not allowed
    machines.free.append({"CPU": 2.0, "GPU": 2.0})
    assert several.grow(2) is None  # the last check was just now
    machines.now = 40.0
    assert several.grow(2) == "there is room for 4 workers"
    assert several.asked == (1, 4)
    assert several.grow(8) is None


def test_workers_that_take_nothing_always_fit(machines: Machines) -> None:
    several = Sizes(1, 4, 4, {"CPU": 0.0}, 10.0)
    machines.now = 20.0
    assert several.grow(2) == "there is room for 4 workers"


def test_ray_checks_for_room_itself_if_any_number_is_allowed(machines: Machines) -> None:
    machines.free, machines.now = [{"CPU": 8.0}], 100.0
    assert Sizes(1, 8, None, {"CPU": 1.0}, 0.0).grow(2) is None


def test_after_a_wrong_check_for_room_the_next_one_is_later(machines: Machines) -> None:
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


def test_a_larger_number_may_be_asked_for_at_any_time(machines: Machines) -> None:
    machines.free = [{"CPU": 3.0}]
    assert Sizes(1, 8, None, {"CPU": 1.0}, 10.0).larger(2) == [3, 4, 5]
    assert Sizes(1, 8, 8, {"CPU": 1.0}, 10.0).larger(2) == [4]
    assert Sizes(2, 2, None, {"CPU": 1.0}, 10.0).larger(2) == []
