from __future__ import annotations

import re
from typing import Any

import pytest
from heliograph import Plugin, Trainer, on
from heliograph.events import BatchEnd, Lane, Run
from heliograph.plugins.plugin import MarkOptions
from hypothesis import given, settings
from hypothesis import strategies as st


def plugin(name: str, lane: Lane = Lane.DECIDE, **options: Any) -> Plugin:
    """Return a plugin of that name which receives `BatchEnd` with these options."""
    demands: MarkOptions = {"lane": lane, **options}  # type: ignore[typeddict-item]

    class Ordered(Plugin):
        received: list[str]

        @on(BatchEnd, **demands)
        def receive(self, run: Run, event: BatchEnd) -> None:
            self.received.append(self.name)

    return Ordered().named(name)


def order(*plugins: Plugin) -> list[str]:
    """Return the names in the order in which the handlers are really called."""
    trainer, received = Trainer(plugins, device="cpu"), list[str]()
    for each in plugins:
        each.received = received  # type: ignore[attr-defined]
    trainer.bus.signal(BatchEnd).emit(Any, BatchEnd())  # type: ignore[arg-type]
    assert trainer.plan() == "batch_end\n" + "\n".join(
        f"  {lane_of(name, plugins):<9} {name}" for name in received
    )  # what is printed is what happens
    return received


def lane_of(name: str, plugins: tuple[Plugin, ...]) -> str:
    (handler,) = [type(each).receive for each in plugins if each.name == name]  # type: ignore[attr-defined]
    (mark,) = [value for value in vars(handler).values() if hasattr(value, "lane")]
    return str(mark.lane.name)


def test_the_order_of_the_list_holds_within_a_lane() -> None:
    assert order(plugin("c"), plugin("a"), plugin("b")) == ["c", "a", "b"]


def test_lanes_come_first() -> None:
    lanes = [Lane.REPORT, Lane.PERSIST, Lane.DECIDE, Lane.MEASURE, Lane.TRANSFORM]
    assert order(*(plugin(lane.name.lower(), lane) for lane in lanes)) == [
        "transform",
        "measure",
        "decide",
        "persist",
        "report",
    ]


def test_before_and_after_by_name_or_names() -> None:
    assert order(plugin("a"), plugin("b", before="a")) == ["b", "a"]
    assert order(plugin("a", after="b"), plugin("b")) == ["b", "a"]
    assert order(plugin("a"), plugin("b"), plugin("c", before=("b", "a"))) == ["c", "a", "b"]
    assert order(plugin("a", after=("c", "b")), plugin("b"), plugin("c")) == ["b", "c", "a"]


def test_a_name_within_another_name_is_not_meant() -> None:
    assert order(plugin("log"), plugin("x", before="jsonl_log")) == ["log", "x"]


def test_demands_on_absent_plugins_wait_until_they_come() -> None:
    trainer, received = Trainer(device="cpu"), list[str]()
    for each in (plugin("a", after="z"), plugin("b"), plugin("z")):
        each.received = received  # type: ignore[attr-defined]
        trainer.plugins.register(each)
    trainer.bus.signal(BatchEnd).emit(Any, BatchEnd())  # type: ignore[arg-type]
    assert received == ["b", "z", "a"]
    trainer.plugins.unregister("z")
    received.clear()
    trainer.bus.signal(BatchEnd).emit(Any, BatchEnd())  # type: ignore[arg-type]
    assert received == ["a", "b"]


def test_a_demand_that_the_lanes_fulfil_is_no_contradiction() -> None:
    assert order(plugin("r", Lane.REPORT, after="t"), plugin("t", Lane.TRANSFORM, before="r")) == ["t", "r"]


def test_demands_are_transitive() -> None:
    assert order(plugin("a", after="b"), plugin("b", after="c"), plugin("c")) == ["c", "b", "a"]


def test_a_cycle_is_refused_and_named() -> None:
    sentence = r"BatchEnd.*be ordered.*cycle: (.*)\.$"
    with pytest.raises(ValueError, match=sentence) as caught:
        order(plugin("a", after="b"), plugin("b", after="c"), plugin("c", after="a"), plugin("d"))
    found = re.search(sentence, str(caught.value))
    assert found is not None
    names = found[1].split(" -> ")
    assert names[0] == names[-1]
    assert set(names) == {"a (DECIDE)", "b (DECIDE)", "c (DECIDE)"}


def test_two_that_both_want_to_be_first() -> None:
    with pytest.raises(ValueError, match=r"cycle: [ab] \(DECIDE\).*> [ab]"):
        order(plugin("a", before="b"), plugin("b", before="a"))


def test_a_demand_on_itself_is_a_cycle() -> None:
    with pytest.raises(ValueError, match=r"cycle: a \(DECIDE\) ->"):
        order(plugin("a", before="a"))


def test_a_demand_against_the_lanes_is_refused_and_names_them() -> None:
    with pytest.raises(ValueError, match="form a cycle") as caught:
        order(plugin("early", Lane.TRANSFORM, after="late"), plugin("late", Lane.REPORT))
    assert "early (TRANSFORM)" in str(caught.value)
    assert "late (REPORT)" in str(caught.value)


def test_a_cycle_leaves_nothing_behind() -> None:
    trainer = Trainer([plugin("a", after="b")], device="cpu")
    before = trainer.plan()
    with pytest.raises(ValueError, match="cycle"):
        trainer.plugins.register(plugin("b", after="a"))
    assert trainer.plugins.names() == ["a"]
    assert trainer.plan() == before


@st.composite
def demands(draw: st.DrawFn) -> list[tuple[Lane, list[int], list[int]]]:
    """Draw handlers as (lane, indices before which, indices after which they want to run)."""
    size = draw(st.integers(min_value=0, max_value=6))
    indices = st.lists(st.integers(min_value=0, max_value=max(size - 1, 0)), max_size=2, unique=True)
    return [(draw(st.sampled_from([Lane.DECIDE, Lane.REPORT])), draw(indices), draw(indices)) for _ in range(size)]


def model(handlers: list[tuple[Lane, list[int], list[int]]]) -> list[int] | None:
    """Return the only order that is right: always the earliest in the list that may run; None for a cycle."""
    count = len(handlers)
    edges = {(index, other) for index, (_, before, _) in enumerate(handlers) for other in before}
    edges |= {(other, index) for index, (_, _, after) in enumerate(handlers) for other in after}
    edges |= {(i, j) for i in range(count) for j in range(count) if handlers[i][0] < handlers[j][0]}
    done: list[int] = []
    while len(done) < count:
        rest = [index for index in range(count) if index not in done]
        free = [index for index in rest if not any((other, index) in edges for other in rest)]
        if not free:
            return None
        done.append(free[0])
    return done


@settings(deadline=None)
@given(demands())
def test_the_order_is_the_stable_one_that_meets_every_demand(
    handlers: list[tuple[Lane, list[int], list[int]]],
) -> None:
    plugins = [
        plugin(f"p{index}", lane, before=tuple(f"p{i}" for i in before), after=tuple(f"p{i}" for i in after))
        for index, (lane, before, after) in enumerate(handlers)
    ]
    expected = model(handlers)
    if expected is None:
        with pytest.raises(ValueError, match="form a cycle"):
            Trainer(plugins, device="cpu")
    elif plugins:
        assert order(*plugins) == [f"p{index}" for index in expected]
