"""Rules on the effects of a plugin on the training and on other plugins."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from heliograph import BatchEnd, Lane, Plugin, Run, TrainStart, ValidationBatchEnd, on
from heliograph.core.objects.program import plugin_options
from heliograph.events import Event, Receiver
from heliograph.spi import capture, encode
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .subject import Subject, Value, class_attributes, is_same, list_changes, name_of, rule


class BatchWatch(Plugin):
    """Reports batches, outputs and losses that still exist at the end of the next batch; must be the first plugin."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self._latest: dict[str, list[tuple[str, int, Callable[[], bool]]]] = {}  # text, memory, is_gone; by phase
        self._numbers = Counter[str]()
        self.leaks: list[str] = []

    @on(BatchEnd, ValidationBatchEnd, lane=Lane.TRANSFORM)
    def watch(self, run: Run, event: BatchEnd | ValidationBatchEnd) -> None:
        self.look(run.phase)
        place = f"{run.phase} batch {self._numbers[run.phase]}"
        self._numbers[run.phase] += 1
        latest = self._latest[run.phase] = []
        for name in ("batch", "outputs"):
            for tensor in _tensors(getattr(run, name)):
                storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types
                latest.append((f"run.{name} of {place}", tensor.untyped_storage().data_ptr(), storage.expired))
        for loss in _tensors(run.loss) if isinstance(event, BatchEnd) else ():  # a detached one may be kept
            alive = weakref.ref(loss)
            is_gone = partial(_is_dead, alive)
            latest.append((f"run.loss of {place}", loss.untyped_storage().data_ptr(), is_gone))

    def look(self, *phases: str) -> None:
        gc.collect()
        for text, memory, is_gone in chain.from_iterable(self._latest.get(phase, ()) for phase in phases):
            if not is_gone():
                name = self._holder(memory)
                where = "referenced outside the plugin's attributes" if name is None else f"in the attribute {name}"
                self.leaks.append(f"{text} is still {where}")

    def look_at_all(self) -> None:
        self.look(*self._latest)

    def _holder(self, memory: int) -> str | None:
        for name, value in vars(self._plugin).items():
            if any(tensor.untyped_storage().data_ptr() == memory for tensor in _tensors(value)):
                return str(name)
        return None


def _is_dead(alive: weakref.ref[Tensor]) -> bool:
    return alive() is None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


DECLARED = ("stop", "validation", "save", "log", "skip_batch", "skip_step")


@rule(
    "List all requests in asks = (...) in the class. Without it, the trainer refuses a run that only this plugin would "
    "end, and several ranks do not agree on skipped batches or steps."
)
def declares_requests(subject: Subject) -> None:
    """A plugin declares in `asks` what it requests of the loop."""
    plugin = subject.make()
    trainer = subject.trainer(plugin)
    runs: list[Run] = []

    def keep(run: Run, event: TrainStart) -> None:
        runs.append(run)

    trainer.bus.on(TrainStart, keep)
    subject.fit(trainer)
    name, asks = name_of(trainer, plugin), tuple(getattr(plugin, "asks", ()))
    requested = {request.verb for request in runs[0].control.history if request.by == name}
    missing = [verb for verb in DECLARED if verb in requested and verb not in asks]
    complete = tuple(verb for verb in DECLARED if verb in {*asks, *missing})
    assert not missing, f"It requested {', '.join(missing)}, but asks = {asks!r}: write asks = {complete!r}."


@rule(
    "Draw from a private generator, for example random.Random(seed), or make the plugin an observer (policy = "
    "'observer', draws = True), whose draws RNGCapture isolates. If it draws for the training, for example to add "
    "noise, pass draws=True to check_plugin."
)
def leaves_draws(subject: Subject) -> None:
    """A plugin does not draw from the global random generators of Python, NumPy and torch."""
    plugin = subject.make()
    is_isolated = getattr(plugin, "policy", "critical") == "observer" and getattr(plugin, "draws", True)
    if subject.draws or is_isolated:
        return
    trainer = subject.trainer(plugin)
    name, drawn = name_of(trainer, plugin), dict[str, str]()

    def watch(receiver: Receiver, owner: str) -> Receiver:
        def watched(run: Run, *, event: Event) -> None:
            before = capture()
            receiver(run, event=event)
            for library in _changed(before, capture()):
                drawn.setdefault(library, f"a handler of {type(event).__name__}")

        return watched if owner == name else receiver

    trainer.bus.intercept(watch)
    subject.fit(trainer)
    if hasattr(plugin, "state_dict"):
        before = capture()
        plugin.state_dict()
        drawn |= dict.fromkeys(_changed(before, capture()), "state_dict()")
    changes = ", ".join(f"the generator of {library} changed in {where}" for library, where in drawn.items())
    assert not drawn, f"Random state: {changes}."


@rule("Keep a copy, made by .detach().clone(), or a mean, by run.track, instead of the tensor.")
def lets_batches_go(subject: Subject) -> None:
    """A plugin does not keep a batch, its outputs or its loss, which would keep memory and the graph."""
    plugin = subject.make()
    watch = BatchWatch(plugin)
    subject.fit(subject.trainer(watch, plugin))
    watch.look_at_all()
    assert not watch.leaks, f"After the batch, {watch.leaks[0]}."


@rule("Create lists, dicts and other mutable objects in __init__, not in the class or as default arguments.")
def shares_nothing(subject: Subject) -> None:
    """A run with one plugin object does not change another object of the same class."""
    plugin, unused = subject.make(), subject.make()
    assert plugin is not unused, "make_plugin returned the same object twice: return a new one."
    before = _state_and_attributes(unused)
    subject.fit(subject.trainer(plugin))
    changes = list(list_changes(before, _state_and_attributes(unused)))
    assert not changes, f"A run with one object changed another one: {', '.join(changes)}."


def _state_and_attributes(plugin: Any) -> dict[str, Value]:
    state = {"the state": encode(plugin.state_dict())} if hasattr(plugin, "state_dict") else {}
    return {**class_attributes(plugin), **plugin_options(plugin), **state}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [library for library in before if not is_same(before[library], now[library])]
