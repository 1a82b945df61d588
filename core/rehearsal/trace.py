"""The trace of a run: what happened in it, down to the last bit, and where two runs differ first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...events import BatchEnd, BatchStart, Bus, EpochEnd, Event, Handle, Lane, Log, Run, RunClosed, ValidationEnd
from ..data.draws import rng
from ..objects.equality import digest, tensor_bytes

RECORDED = (BatchStart, BatchEnd, Log, ValidationEnd, EpochEnd, RunClosed)
AT_THE_END = "at the end of the run"
SAMPLE = 4096  # numbers of a tensor
SCALARS = (bool, int, float, complex, str, bytes, NoneType, np.generic)
NAMED = (type, FunctionType, BuiltinFunctionType, ModuleType)
RUNS = ("the uninterrupted run", "the interrupted one")
WORDS = {"draws": "random state", "modules": "weights", "means": "running means", "data": "loader's position"}
# Parts of a state that name a process, a file or the time. Each rank has its own trace; metrics are facts.
OF_THE_PROCESS = "objects schema saved_at versions run_name training_id world ranks log_history".split()  # noqa: SIM905
CLOCKS = ("earlier_seconds", "facts")  # of the progress and of the data, whose facts are sentences of a report


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value: a scalar, a tensor or an array. Two are equal if kind and digest are.

    Attributes:
        kind: type, dtype and shape, in words.
        digest: of all bits.
        sample: for messages: the number or text, or numbers of a tensor (some, if it is large); None if there are none.
    """

    kind: str
    digest: str
    sample: Any = field(compare=False)

    def __str__(self) -> str:
        shown = self.kind if isinstance(self.sample, np.ndarray | NoneType) else repr(self.sample)
        return shown if len(shown) <= 60 else f"{shown[:60]}..."


def leaves(value: Any) -> dict[str, Leaf]:
    """Return every value in a nested one by its path: `model.0.weight`, `[1].label`."""
    return {path.lstrip("."): leaf for path, leaf in _walk(value, "", ())}


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a run did or had.

    Attributes:
        what: such as `batch`, `draws`, `loss`, `metrics`, `modules`, `plugin early_stopping`.
        when: at which moment of the run, in words.
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
            another part of a checkpoint by its name there; `order` if one run did what the other did not.
        place: finished epochs, batches of the epoch (with the current one) and optimizer steps.
        paths: which values of it, such as `model.0.weight`.
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
        """Yield the differences between two runs, the first one first; none follows one of the order.

        Args:
            expected: the facts of a run.
            found: the facts of a run that should equal it.
            names: what to call the two runs.
            aside: (what, path) of values that are not compared; an empty path is all of them.
        """
        for one, other in zip_longest(expected, found, fillvalue=END):
            if (one.what, one.when) != (other.what, other.when):
                texts = [
                    f"{name} has {_name(fact)} {fact.when}" for name, fact in zip(names, (one, other), strict=True)
                ]
                yield cls("order", max(one.place, other.place), (), f"what happens differs: {', '.join(texts)}")
                return
            paths = [path for path in {**one.leaves, **other.leaves} if one.leaves.get(path) != other.leaves.get(path)]
            paths = [path for path in paths if aside.isdisjoint([(one.what, path), (one.what, "")])]
            if paths:
                yield cls(one.what, other.place, tuple(paths), _sentence(one, other, paths, names))


class Tracer:
    """Records the facts of a run. Each waits for the device.

    Args:
        add: called with each fact, such as the `append` of a list.
    """

    def __init__(self, add: Callable[[Fact], object]) -> None:
        self._add_fact = add

    def subscribe(self, bus: Bus) -> list[Handle]:
        """Record each batch, the random state and the losses after it, metrics, and the state at each end."""
        return [bus.on(event, self.record, lane=Lane.REPORT) for event in RECORDED]

    def record(self, run: Run, event: Event) -> None:
        """Record what there is to record at an event."""
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
        """Record the losses of the batch that has ended."""
        losses = () if run.control.skips_batch else run.stepping.batch_losses
        self._add(run, "loss", leaves(losses[0] if len(losses) == 1 else losses))

    def metrics(self, run: Run, event: Log | ValidationEnd) -> None:
        """Record the metrics of a log or a validation."""
        place = "at epoch {}, batch {}, step {}".format(*_place(run))
        self._add(run, "metrics", leaves(event.metrics), f"in the {event.name.removesuffix('_end')} {place}")

    def state(self, run: Run, when: str) -> None:
        """Record the state of a run, without what may differ between two equal runs. On several ranks a collective.

        Plugins that the training does not depend on are left out, and so are the strings of the others: files, dates.
        """
        state = {name: value for name, value in run.state_dict().items() if name not in OF_THE_PROCESS}
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

    def _add(self, run: Run, what: str, values: Mapping[str, Leaf], when: str = "", *, begun: int = 0) -> None:
        place = _place(run, begun)
        self._add_fact(Fact(what, when or "in epoch {}, batch {}, step {}".format(*place), place, values))


def _place(run: Run, begun: int = 0) -> tuple[int, int, int]:
    return run.progress.epoch, run.progress.batch + begun, run.progress.steps


def _sentence(one: Fact, other: Fact, paths: Sequence[str], names: tuple[str, str]) -> str:
    name, path = _name(one), paths[0]
    differ = "differ" if name.endswith("s") and not name.endswith("ss") else "differs"
    if one.what == "draws":
        generators = ", ".join(dict.fromkeys(path.split(".")[0].split("[")[0] for path in paths))
        return f"{name} ({generators}) {differ} {one.when}"
    values = _values(one.leaves.get(path), other.leaves.get(path), names)
    return f"{name}{path and f' ({path})'} {differ} {one.when}: {values}"


def _name(fact: Fact) -> str:
    kind, _, plugin = fact.what.partition(" ")
    return f"the state of plugin {plugin!r}" if plugin else f"the {WORDS.get(kind, kind)}"


def _values(one: Leaf | None, other: Leaf | None, names: tuple[str, str]) -> str:
    if not one or not other or one.kind != other.kind or not isinstance(one.sample, np.ndarray | NoneType):
        return ", ".join(f"{leaf or 'nothing'} in {name}" for leaf, name in zip((one, other), names, strict=True))
    with np.errstate(invalid="ignore"):
        distances = np.zeros(1) if one.sample is None else np.abs(one.sample - other.sample)
    largest = np.max(distances, initial=0, where=np.isfinite(distances))
    return f"{f'by up to {largest:.3g}' if largest > 0 else 'in some bits'} ({one.kind})"


def _walk(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, Tensor):
        yield path, _tensor_leaf(value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        numbers = _numbers(value.reshape(-1)) if value.dtype.kind in "biuf" else None
        yield path, Leaf(f"{value.dtype} of shape {list(value.shape)}", digest(value.tobytes()), numbers)
    elif isinstance(value, SCALARS):
        yield path, Leaf(type(value).__name__, digest(repr(value).encode()), value)
    elif isinstance(value, NAMED):
        name = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else value.__name__
        yield path, Leaf("name", name, name)
    elif id(value) not in above:  # what contains itself is walked once
        for key, part in _parts(value):
            yield from _walk(part, f"{path}{key}", (*above, id(value)))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a container, or what pickle would save of another object, with the last item of each path."""
    if isinstance(value, Mapping):
        yield from ((f".{key}" if isinstance(key, str) else f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | np.ndarray | set | frozenset):
        parts = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        yield from ((f"[{index}]", part) for index, part in enumerate(parts))
    else:
        try:
            reduced = value.__reduce_ex__(4)
        except TypeError:  # pickle refuses it: only its type counts
            reduced = type(value).__qualname__
        if isinstance(reduced, str):
            yield "", reduced
            return
        function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        yield from (("()", [function, *arguments]), ("", state), ("[]", [*(items or ()), *(pairs or ())]))


def _tensor_leaf(value: Tensor) -> Leaf:
    dense = value.detach().cpu()
    dense = (dense if dense.layout is torch.strided else dense.to_dense()).flatten()
    numbers = torch.view_as_real(dense.resolve_conj()).flatten() if dense.is_complex() else dense
    kind = f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    return Leaf(kind, digest(tensor_bytes(dense)), _numbers(numbers))


def _numbers(flat: Any) -> Any:
    """Return one number as such, and some of several as a new array."""
    sample = flat[:: 1 + len(flat) // SAMPLE]
    is_tensor = isinstance(sample, Tensor)
    numbers = sample.to(torch.float64, copy=True).numpy() if is_tensor else sample.astype(np.float64)
    return numbers.item() if len(numbers) == 1 else numbers
