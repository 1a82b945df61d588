from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from types import FrameType
from typing import Any

import pytest
from heliograph import Plugin, Trainer, on
from heliograph.events import BatchEnd, EpochEnd, Lane, Run, StepEnd
from heliograph.plugins.marks import Marker, MarkOptions
from heliograph.plugins.order import EventOrder, Handler
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


# Against the former algorithm, which put all handlers of an event in order again whenever one came or went.


def resolved(handlers: Sequence[Handler]) -> list[Handler] | None:
    """Return the order of handlers as the former algorithm did; None for a cycle."""
    listed = sorted(handlers, key=lambda handler: handler.mark.lane)
    graph: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(listed)), ()))
    for index, handler in enumerate(listed):
        for other, neighbour in enumerate(listed):
            if handler.mark.lane > neighbour.mark.lane or neighbour.plugin in handler.mark.names_after:
                graph.add(index, other)
            if neighbour.plugin in handler.mark.names_before:
                graph.add(other, index)
    try:
        graph.prepare()
    except CycleError:
        return None
    ordered: list[Handler] = []
    ready: list[int] = []
    while graph.is_active():
        for index in graph.get_ready():
            heappush(ready, index)
        earliest = heappop(ready)
        ordered.append(listed[earliest])
        graph.done(earliest)
    return ordered


NAMES = st.sampled_from(["p0", "p1", "p2", "p3", "p4", "p5", "p6"])
MARKS: st.SearchStrategy[Marker[Any]] = st.builds(
    Marker,
    st.just((BatchEnd,)),
    st.sampled_from([Lane.TRANSFORM, Lane.DECIDE, Lane.DECIDE, Lane.DECIDE]),
    st.lists(NAMES, max_size=2).map(tuple) | NAMES,
    st.lists(NAMES, max_size=2).map(tuple),
)
COME = st.tuples(NAMES, MARKS)  # a plugin may have several handlers of one event
LEAVE = st.integers(min_value=0, max_value=20)


@settings(deadline=None, max_examples=400)
@given(st.lists(COME | COME | LEAVE, max_size=20))
def test_handlers_that_come_and_go_are_in_the_order_of_the_former_algorithm(
    steps: list[tuple[str, Marker[Any]] | int],
) -> None:
    order, listed = EventOrder("BatchEnd"), list[Handler]()
    places: dict[Handler, tuple[Any, ...]] = {}

    def note(moved: list[Handler]) -> None:
        places.update({handler: (handler.mark.lane, handler.sort_key) for handler in moved})

    for step in steps:
        if isinstance(step, int):
            if step < len(listed):
                gone = listed.pop(step)
                del places[gone]
                note(order.remove(gone))
        else:
            handler = Handler(step[0], print, step[1])
            if resolved([*listed, handler]) is None:
                with pytest.raises(ValueError, match=f"form a cycle: .*{handler.plugin}"):
                    order.add(handler)
            else:
                note(order.add(handler))
                listed.append(handler)
        assert sorted(places, key=places.__getitem__) == resolved(listed)


def test_a_cycle_of_lanes_names_the_handlers_that_it_leads_through() -> None:
    order = EventOrder("BatchEnd")
    for name, lane, before in [("a", Lane.TRANSFORM, ""), ("b", Lane.DECIDE, ""), ("d", Lane.DECIDE, "c")]:
        order.add(Handler(name, print, Marker((BatchEnd,), lane, before)))
    with pytest.raises(ValueError, match=r"cycle: d \(DECIDE\) ->"):
        order.add(Handler("c", print, Marker((BatchEnd,), Lane.TRANSFORM)))
    with pytest.raises(ValueError, match=r"cycle: c \(DECIDE\) ->"):
        order.add(Handler("c", print, Marker((BatchEnd,), Lane.DECIDE, "a")))
    order.add(Handler("c", print, Marker((BatchEnd,), Lane.DECIDE)))  # nothing of the two is left


# What it costs.


class Busy(Plugin):
    """Receives much, and insists on its place."""

    @on(BatchEnd)
    def first(self, run: Run, event: BatchEnd) -> None: ...

    @on(BatchEnd, EpochEnd, lane=Lane.REPORT, after="end")
    def last(self, run: Run, event: BatchEnd | EpochEnd) -> None: ...

    @on(StepEnd, before=("end", "nobody"))
    def early(self, run: Run, event: StepEnd) -> None: ...


class Leaving(Busy):
    """Leaves nobody free to run earlier."""

    @on(StepEnd, before="nobody", after="end")
    def early(self, run: Run, event: StepEnd) -> None: ...


class End(Plugin):
    """Steps after all, reports before all."""

    @on(StepEnd)
    def late(self, run: Run, event: StepEnd) -> None: ...

    @on(BatchEnd, EpochEnd, lane=Lane.REPORT)
    def report(self, run: Run, event: BatchEnd | EpochEnd) -> None: ...


def work(action: Callable[[], object]) -> int:
    """Return how many instructions of Python an action takes."""
    count = 0

    def trace(frame: FrameType, kind: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += kind == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("deed", ["register", "toggle", "unregister"])
def test_what_a_plugin_costs_does_not_grow_with_the_number_of_plugins(deed: str) -> None:
    plugins = Trainer([End()], device="cpu").plugins
    kind = Leaving if deed == "unregister" else Busy

    def act(name: str) -> None:
        if deed == "register":
            plugins.register(kind().named(name))
        elif deed == "toggle":
            plugins.disable(name)
            plugins.enable(name)
        else:
            plugins.unregister(name)

    costs = []
    for number in range(160):
        if deed != "register":
            plugins.register(kind().named(f"busy_{number}"))
        if number in (19, 159):
            costs.append(work(lambda number=number: act(f"busy_{number}")))  # type: ignore[misc]
        elif deed == "register":
            act(f"busy_{number}")
    assert costs[1] < 2 * costs[0]  # of eight times as many; before, it was more than 64 times as much


def test_a_link_is_made_once_for_each_handler() -> None:
    trainer, made = Trainer([End()], device="cpu"), list[str]()

    def wrapper(receiver: Any, owner: str) -> Any:
        made.append(owner)
        return receiver

    trainer.bus.intercept(wrapper)
    made.clear()
    for number in range(50):
        trainer.plugins.register(Busy().named(f"busy_{number}"))
    assert made == [f"busy_{number}" for number in range(50) for _ in range(4)]
