"""The trace of a run, bit by bit, and the first difference between two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import NoneType

import numpy as np

from ..events import BatchEnd, BatchStart, Bus, EpochEnd, Event, Handle, Lane, Log, Run, RunClosed, ValidationEnd
from .data import rng
from .objects.equality import Leaf, leaves, shortest

RECORDED = (BatchStart, BatchEnd, Log, ValidationEnd, EpochEnd, RunClosed)
AT_THE_END = "at the end of the run"
RUNS = ("the uninterrupted run", "the interrupted one")
WORDS = {"draws": "random state", "modules": "weights", "means": "running means", "data": "loader's position"}
# Keys of a state that depend on the process, a file or the clock. Each rank has its own trace; metrics are facts.
UNSTABLE = "objects schema saved_at versions run_name training_id world ranks log_history".split()  # noqa: SIM905
CLOCKS = ("earlier_seconds", "facts")  # of the progress and the data; the facts of the data are sentences of a report


@dataclass(frozen=True, slots=True)
class Fact:
    """An action or a value of a run.

    Attributes:
        what: for example `batch`, `draws`, `loss`, `metrics`, `modules`, `plugin early_stopping`.
        when: the moment of the run, in words.
        place: finished epochs, batches of the epoch (with the current one) and optimizer steps.
        leaves: the values by path.
    """

    what: str
    when: str
    place: tuple[int, int, int]
    leaves: Mapping[str, Leaf]


END = Fact("end", "of the run", (0, 0, 0), {})


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two runs.

    Attributes:
        what: `batch`, `draws`, `loss`, `metrics`, `modules`, `optimizers`, `schedulers`, `plugin <name>`, `progress` or
            another key of a checkpoint; `order` if only one run has a fact.
        place: finished epochs, batches of the epoch (with the current one) and optimizer steps.
        paths: the values that differ, for example `model.0.weight`.
        text: a sentence.
    """

    what: str
    place: tuple[int, int, int]
    paths: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def between(
        cls,
        expected: Sequence[Fact],
        found: Sequence[Fact],
        *,
        names: tuple[str, str] = RUNS,
        aside: frozenset[tuple[str, str]] = frozenset(),
    ) -> Iterator[Difference]:
        """Yield the differences between two runs, in order; the first difference in the order of facts is the last.

        Args:
            expected: the facts of a run.
            found: the facts of a run that should equal it.
            names: the names of the two runs in messages.
            aside: (what, path) of values that are not compared; an empty path means all of them.
        """
        for first, second in zip_longest(expected, found, fillvalue=END):
            if (first.what, first.when) != (second.what, second.when):
                texts = [
                    f"{name} has {_name(fact)} {fact.when}" for name, fact in zip(names, (first, second), strict=True)
                ]
                yield cls("order", max(first.place, second.place), (), f"the order differs: {', '.join(texts)}")
                return
            paths = [
                path for path in {**first.leaves, **second.leaves} if first.leaves.get(path) != second.leaves.get(path)
            ]
            paths = [path for path in paths if aside.isdisjoint([(first.what, path), (first.what, "")])]
            if paths:
                yield cls(first.what, second.place, tuple(paths), _sentence(first, second, paths, names))


class Tracer:
    """Record the facts of a run. Each fact waits for the device.

    Args:
        add: called with each fact, for example the `append` of a list.
    """

    def __init__(self, add: Callable[[Fact], object]) -> None:
        self._add_fact = add

    def subscribe(self, bus: Bus) -> list[Handle]:
        """Record each batch, the random state and the losses after it, metrics, and the state at each end."""
        return [bus.on(event, self.record, lane=Lane.REPORT) for event in RECORDED]

    def record(self, run: Run, event: Event) -> None:
        """Record the facts of an event."""
        if isinstance(event, BatchStart):
            self._add(run, "batch", leaves(run.batch), begun=1)
        elif isinstance(event, BatchEnd):
            draws = leaves(rng.capture()).items()
            self._add(run, "draws", {path: replace(leaf, sample=None) for path, leaf in draws})
            self.losses(run)
        elif isinstance(event, Log | ValidationEnd):
            self.metrics(run, event)
        elif isinstance(event, EpochEnd):
            self.state(run, f"at the end of epoch {event.epoch}")
        elif isinstance(event, RunClosed) and event.status in ("completed", "stopped"):
            self.state(run, AT_THE_END)

    def losses(self, run: Run) -> None:
        """Record the losses of the finished batch."""
        losses = () if run.control.skips_batch else run.stepping.batch_losses
        self._add(run, "loss", leaves(losses[0] if len(losses) == 1 else losses))

    def metrics(self, run: Run, event: Log | ValidationEnd) -> None:
        """Record the metrics of a log or a validation."""
        place = "at epoch {}, batch {}, step {}".format(*_place(run))
        self._add(run, "metrics", leaves(event.metrics), f"in the {event.name.removesuffix('_end')} {place}")

    def state(self, run: Run, when: str) -> None:
        """Record the state of a run, without values that may differ between equal runs. A collective.

        Plugins that do not affect the training are excluded, and strings of the others, for example file names and
        dates.
        """
        state = {name: value for name, value in run.state_dict().items() if name not in UNSTABLE}
        for name in ("progress", "data"):
            state[name] = {key: value for key, value in state[name].items() if key not in CLOCKS}
        plugins = state.pop("plugins")
        for name, value in state.items():
            self._add(run, name, leaves(value), when)
        for name, value in plugins.items():
            plugin = run.plugins[name]
            if getattr(plugin, "affects_training", True) and getattr(plugin, "policy", "") != "observer":
                numbers = {path: leaf for path, leaf in leaves(value).items() if leaf.kind != "str"}
                self._add(run, f"plugin {name}", numbers, when)

    def _add(self, run: Run, name: str, values: Mapping[str, Leaf], when: str = "", *, begun: int = 0) -> None:
        place = _place(run, begun)
        self._add_fact(Fact(name, when or "in epoch {}, batch {}, step {}".format(*place), place, values))


def _place(run: Run, begun: int = 0) -> tuple[int, int, int]:
    return run.progress.epoch, run.progress.batch + begun, run.progress.steps


def _sentence(first: Fact, second: Fact, paths: Sequence[str], names: tuple[str, str]) -> str:
    name, path = _name(first), paths[0]
    differ = "differ" if name.endswith("s") and not name.endswith("ss") else "differs"
    differ = f"{differ} {first.when}".rstrip()
    if first.what == "draws":
        generators = ", ".join(dict.fromkeys(path.split(".")[0].split("[")[0] for path in paths))
        return f"{name} ({generators}) {differ}"
    values = _values(first.leaves.get(path), second.leaves.get(path), names)
    return f"{name}{path and f' ({path})'} {differ}: {values}"


def _name(fact: Fact) -> str:
    kind, _, plugin = fact.what.partition(" ")
    return f"the state of plugin {plugin!r}" if plugin else f"the {WORDS.get(kind, kind)}"


def _values(first: Leaf | None, second: Leaf | None, names: tuple[str, str]) -> str:
    if not first or not second or first.kind != second.kind or not isinstance(first.sample, np.ndarray | NoneType):
        values = [f"{leaf or 'nothing'}" for leaf in (first, second)]
        if first and second and isinstance(first.sample, float) and isinstance(second.sample, float):
            values = shortest(first.sample, second.sample)
        return ", ".join(f"{value} in {name}" for value, name in zip(values, names, strict=True))
    with np.errstate(invalid="ignore"):
        distances = np.zeros(1) if first.sample is None else np.abs(first.sample - second.sample)
    largest = np.max(distances, initial=0, where=np.isfinite(distances))
    return f"{f'by up to {largest:.3g}' if largest > 0 else 'in some bits'} ({first.kind})"
