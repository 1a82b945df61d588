"""Rules on what a plugin does to the training and to other plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph import Plugin, Run, TrainStart, on
from heliograph.core.objects.program import plugin_options
from heliograph.events import Event, Receiver
from heliograph.spi import capture, encode

from .attributes import Value, class_attributes, is_same, list_changes
from .kept_batches import BatchWatch
from .rule import rule
from .subject import Subject, name_of

DECLARED = ("stop", "validation", "save", "log", "skip_batch", "skip_step")


@rule(
    "Write asks = (...) in the class, with all that it may request: else the trainer refuses a run whose only end it "
    "is, and on several ranks nobody votes on the batches or steps that it skips."
)
def declares_requests(subject: Subject) -> None:
    """What a plugin requests of the loop is declared in its `asks`."""
    plugin = subject.make()
    trainer = subject.trainer(plugin)
    runs: list[Run] = []

    class Witness(Plugin):
        @on(TrainStart)
        def keep(self, run: Run, event: TrainStart) -> None:
            runs.append(run)

    trainer.plugins.register(Witness())
    subject.fit(trainer)
    name, asks = name_of(trainer, plugin), tuple(getattr(plugin, "asks", ()))
    requested = {each.verb for each in runs[0].control.history if each.by == name}
    lacking = [verb for verb in DECLARED if verb in requested and verb not in asks]
    wanted = tuple(verb for verb in DECLARED if verb in {*asks, *lacking})
    assert not lacking, f"It requested {', '.join(lacking)}, and has asks = {asks!r}: write asks = {wanted!r}."


@rule(
    "Draw from a generator of its own, such as random.Random(seed), or make it an observer (policy = 'observer', with "
    "draws = True): RNGCapture keeps its draws apart. If it draws for the training, as one that adds noise does, give "
    "check_plugin draws=True."
)
def leaves_draws(subject: Subject) -> None:
    """A plugin draws nothing from the global random generators of Python, NumPy and torch, which the training uses."""
    plugin = subject.make()
    is_apart = getattr(plugin, "policy", "critical") == "observer" and getattr(plugin, "draws", True)
    if subject.draws or is_apart:
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
    found = ", ".join(f"that of {library} changed in {where}" for library, where in drawn.items())
    assert not drawn, f"Of the global generators, {found}."


@rule("Keep what is needed of it, not the tensor itself: a copy made by .detach().clone(), or a mean, with run.track.")
def lets_batches_go(subject: Subject) -> None:
    """A plugin keeps no batch, outputs or loss beyond its batch: they keep memory, and the graph of the gradients."""
    plugin = subject.make()
    watch = BatchWatch(plugin)
    subject.fit(subject.trainer(watch, plugin))
    watch.look()
    assert not watch.kept, f"When the next batch begins or later, {watch.kept[0]}."


@rule("Make its lists, dicts and the like in __init__, not in the class or as a default of an argument.")
def shares_nothing(subject: Subject) -> None:
    """A run with one plugin object leaves another object of the same class as it is."""
    one, other = subject.make(), subject.make()
    assert one is not other, "make_plugin returned the same object twice: let it make a new one."
    before = _held(other)
    subject.fit(subject.trainer(one))
    changes = list(list_changes(before, _held(other)))
    assert not changes, f"During a run with one object, of another {', '.join(changes)}."


def _held(plugin: Any) -> dict[str, Value]:
    state = {"the state": encode(plugin.state_dict())} if hasattr(plugin, "state_dict") else {}
    return {**class_attributes(plugin), **plugin_options(plugin), **state}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [library for library in before if not is_same(before[library], now[library])]
