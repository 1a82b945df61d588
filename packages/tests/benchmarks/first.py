"""The first table of the bench: ours and the peers, each beside the same hand-written loop in its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from heliograph.packages.tests.benchmarks import agreement, figures, lean, usual
from heliograph.packages.tests.benchmarks.figures import Figure
from heliograph.packages.tests.benchmarks.peers import races
from heliograph.packages.tests.benchmarks.rows import Worker

TITLE = "ours and the peers, each beside the hand-written loop in the same process"
OURS, CONTROL = "Heliograph", "by hand, again"
PEERS = (races.IGNITE, *races.FILES)


class Beside(NamedTuple):
    """A loop in the same process as the hand-written one.

    Args:
        worker: what races them.
        hand: the microseconds of a step by hand.
        ratio: how many times as long a step of this loop is.
        beyond: how many microseconds longer.
    """

    worker: Worker
    hand: Figure
    ratio: Figure
    beyond: Figure


class Setup(NamedTuple):
    """A row of the first table.

    Args:
        name: what is trained.
        control: the hand-written loop once more: what differs is noise.
        ours: heliograph.
        peers: the others, by name.
        bar: of ours, in microseconds a step beyond the hand-written loop; or
        ratio_bar: in multiples of the hand-written loop.
    """

    name: str
    control: Beside
    ours: Beside
    peers: Mapping[str, Beside]
    bar: float | None = None
    ratio_bar: float = 1.0

    @property
    def limit(self) -> float:
        """What ours may not exceed."""
        return self.ratio_bar if self.bar is None else self.bar

    def bar_in_words(self) -> str:
        """Return the bar for a table."""
        return f"{self.ratio_bar:.2f} x" if self.bar is None else f"+{self.bar:g} µs"


def missing_peers() -> list[str]:
    """Return the peers that are not installed."""
    return [peer for peer in races.FILES if peer not in races.installed("lean")]


def raced(worker: Worker, name: str) -> Beside:
    """Return a loop of a race with the hand-written loop."""
    return Beside(worker, figures.step(), figures.step_ratio(name), figures.step_beyond(name))


def saved(worker: Worker, name: str, part: int | None = None) -> Beside:
    """Return a loop of a race that is measured from save to save; `part` where that is a part of what is measured."""
    each = [figures.with_saves(figure) for figure in raced(worker, name)[1:]]
    return Beside(worker, *(each if part is None else [figures.of(part, figure) for figure in each]))


def lean_row(name: str, ours: str, bar: float) -> Setup:
    """Return a row without plugins, over prebuilt batches."""
    worker = lean.race_loops
    peers = {peer: raced(races.race_lean, peer) for peer in races.installed("lean")}
    peers = {races.IGNITE: raced(worker, lean.IGNITE), **peers}
    return Setup(name, raced(worker, lean.CONTROL), raced(worker, ours), peers, bar)


def read_rows(
    source: str, worker: Worker, usual_worker: Worker, bars: tuple[float, float, float, float]
) -> list[Setup]:
    """Return the rows of a source of batches: without plugins, the usual set, `RNGCapture` too, a `Recorder` too."""
    others = () if worker is races.race_list else races.installed("lean")
    peers = {peer: raced(worker, peer) for peer in (races.IGNITE, *others)}
    rows = [Setup(f"no plugins, over {source}", raced(worker, lean.CONTROL), raced(worker, races.OURS), peers, bars[0])]
    sets = {"usual set": usual.OURS, "`RNGCapture`, too": usual.EXACT, "`Recorder`, too": usual.EXACT_RECORDED}
    for (name, ours), bar in zip(sets.items(), bars[1:], strict=True):
        loops = saved(usual_worker, lean.CONTROL), saved(usual_worker, ours)
        rows.append(Setup(f"{name}, over {source}", *loops, {}, bar))
    return rows


def usual_row(name: str, ours: str, bar: float, *, alone: bool = False) -> Setup:
    """Return a row of the usual set; `alone` where ours does more than it, and peers have no such thing."""
    worker = usual.race_usual
    peers = {peer: saved(races.race_usual, peer) for peer in races.installed("usual")}
    peers = {races.IGNITE: saved(worker, usual.IGNITE, 0), **peers}
    return Setup(name, saved(worker, lean.CONTROL, 0), saved(worker, ours, 0), {} if alone else peers, bar)


def ranked(loop: str, step: Callable[..., Figure], beyond: Callable[[str, str], Figure]) -> Beside:
    """Return a loop of two ranks beside DDP by hand."""
    hand = agreement.HAND
    return Beside(agreement.time_ranks, step(hand), step(loop, hand), beyond(loop, hand))


def rank_rows(name: str, ours: str, ratio_bar: float) -> tuple[Setup, Setup]:
    """Return two rows of two gloo ranks: the median step, and the 99th percentile."""
    median, worst = (
        [ranked(loop, step, beyond) for loop in (agreement.CONTROL, ours)]
        for step, beyond in (
            (figures.each_step, figures.each_step_beyond),
            (figures.worst_step, figures.worst_step_beyond),
        )
    )
    return (
        Setup(f"{name}: median", median[0], median[1], {}, ratio_bar=ratio_bar),
        Setup(f"{name}: 99th percentile", worst[0], worst[1], {}, ratio_bar=ratio_bar),
    )


FIRST = (
    *read_rows("a list", races.race_list, usual.race_list, (2.0, 6.0, 8.0, 10.0)),
    lean_row("no plugins, over any iterable", lean.SUPERVISED, 2.0),
    lean_row("no plugins, own task, over any iterable", lean.OWN_TASK, 2.0),
    usual_row("usual set, over any iterable", usual.OURS, 6.0),
    usual_row("`Recorder`, too, over any iterable", usual.RECORDED, 8.0, alone=True),  # the bars of both
    *read_rows("a `DataLoader`", races.race_loader, usual.race_loader, (3.5, 8.0, 15.0, 17.0)),
    *read_rows("2 workers", races.race_workers, usual.race_workers, (10.0, 16.0, 20.0, 22.0)),
    *rank_rows("two gloo ranks", agreement.OURS, 1.15),
    *rank_rows("two gloo ranks, usual set", agreement.USUAL, 1.15),
)
