"""The capabilities of another framework's loop, and errors for plugins that it cannot serve."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from heliograph import BatchStart, Control, Lane, Plugins, SavePoint
from heliograph.core.distributed.shared_control import SharedControl
from heliograph.events import Event, Request, Verb
from heliograph.plugins import marked_methods

# What can be used in place of what no loop but ours does; a host may know better.
REMEDIES: Mapping[str, str] = {
    "skip_batch": "remove the batch from the data, or train with heliograph.Trainer",
    "skip_step": "train with heliograph.Trainer",
    "hold_step": "set the gradient accumulation of the loop itself",
    "scale_loss": "scale the loss in the training step",
    "veto_stop": "set the limits of the loop itself",
    "veto_save": "set when the loop itself saves",
    "end_epoch": "set the length of the loop's epochs",
    "validation": "set when the loop itself validates",
    "save": "set when the loop itself saves",
    "next_phase": "train once for each phase",
    "roll_back": "resume from an earlier checkpoint of the loop, or train with heliograph.Trainer",
    "scheduler": "pass the scheduler to the loop, which steps it",
    "batches": "transform batches in the dataset or in collate_fn",
    "checkpoints": "use the loop's own checkpoints, which include the states of plugins",
    "rng": "set the seed of the loop itself, whose checkpoints include its generators",
    "length": "set the length of the loop itself in steps",
}

DONE_BY_ALL = frozenset({"stop", "end_epoch", "log", "validation", "save"})
BRIDGES = __name__.partition(".hosted")[0]
OWN: Mapping[type[Event], tuple[Lane, str, str]] = {
    BatchStart: (Lane.TRANSFORM, "batches", "replaces run.batch"),
    SavePoint: (Lane.PERSIST, "checkpoints", "writes checkpoints"),
}
TAKES_BACK = "withdraw_"


@dataclass(frozen=True)
class HostLoop:
    """The capabilities of another framework's loop.

    Attributes:
        name: its name for users, such as `transformers.Trainer`.
        verbs: the verbs of `Control` that plugins may use.
        lacks: the events that it cannot emit.
        remedies: alternatives to a verb or another key of `REMEDIES`, if the host has better ones.
        cannot: common actions that this loop does not support: `end_epoch`, `log`, `validation` or `save`.
    """

    name: str
    verbs: frozenset[Verb]
    lacks: frozenset[type[Event]] = frozenset()
    remedies: Mapping[str, str] = field(default_factory=dict)
    cannot: frozenset[str] = frozenset()

    def remedy(self, word: str) -> str:
        return {**REMEDIES, **self.remedies}[word]


def check_plugins(plugins: Plugins, host: HostLoop, does: Collection[str], *, validates: bool) -> None:
    problems: dict[str, str] = {}
    unserved = ((name, problem) for name, plugin in _enabled(plugins) for problem in _unserved(plugin, host))
    for name, sentence in (*unserved, *_unmet(plugins, host, does, validates=validates)):
        problems.setdefault(name, f"Plugin {name!r} {sentence}")
    if problems:
        raise ValueError("\n".join(problems.values()))


def _unserved(plugin: Any, host: HostLoop) -> Iterator[str]:
    if type(plugin).__module__.startswith(BRIDGES):
        yield (
            f"is a callback of another framework that was converted for Heliograph's loop: pass the original to "
            f"{host.name}, or train with heliograph.Trainer."
        )
    for word, action in _unserved_actions(plugin, host):
        yield f"{action}, which {host.name} does not support. Remove it; instead, {host.remedy(word)}."
    handled = {event.__name__ for event, _, optional in _handlers(plugin) if event in host.lacks and not optional}
    if lacking := sorted(handled):
        yield (
            f"handles {' and '.join(lacking)}, which {host.name} does not emit. Remove it, or train with "
            f"heliograph.Trainer."
        )


def _unserved_actions(plugin: Any, host: HostLoop) -> Iterator[tuple[str, str]]:
    for word in getattr(plugin, "asks", ()):
        if word not in (DONE_BY_ALL - host.cannot) | host.verbs:
            yield word, f"requests {word}"
    if "rng" in getattr(plugin, "exclusive", ()):
        yield "rng", "controls the random generators of the training"
    for event, lane, _ in _handlers(plugin):
        own_lane, word, action = OWN.get(event, (None, "", ""))
        if lane == own_lane:
            yield word, action


def _handlers(plugin: Any) -> Iterator[tuple[type[Event], Lane, bool]]:
    if getattr(plugin, "policy", "critical") == "critical":
        for _, mark in marked_methods(type(plugin)):
            for event in mark.events:
                if event not in getattr(plugin, "ignores", ()):
                    yield event, mark.lane, mark.optional


def _unmet(plugins: Plugins, host: HostLoop, does: Collection[str], *, validates: bool) -> Iterator[tuple[str, str]]:
    asked = {word for _, plugin in _enabled(plugins) for word in getattr(plugin, "asks", ())} | set(does)
    for name, plugin in _enabled(plugins):
        for word in getattr(plugin, "needs", ()):
            if word in ("validation", "validation data") and not validates:
                why = f"there is no validation data: pass it to {host.name}"
            elif word in asked or word == "validation data":
                continue
            else:
                why = f"{host.name} has no schedule for it, and no plugin requests it"
            yield name, f"would never act: it needs a {word}, but {why}."
    if not validates and "validation" in asked - set(does):
        name = plugins.declared("asks")["validation"]
        yield name, f"requests validations, but {host.name} has no validation data."


def _enabled(plugins: Plugins) -> Iterator[tuple[str, Any]]:
    return ((name, plugins[name]) for name in plugins.names() if plugins.is_enabled(name))


class HostedControl(Control):
    """A control that refuses what the loop does not support."""

    host: HostLoop

    def record(self, verb: Verb, reason: str, by: str | None) -> Request:
        host = self.host
        if not (verb in (DONE_BY_ALL - host.cannot) | host.verbs or verb.startswith(TAKES_BACK)):
            remedy = host.remedy(verb) if verb in REMEDIES else "train with heliograph.Trainer"
            raise RuntimeError(f"control.{verb} is not supported in {host.name}. Instead, {remedy}.")
        return super().record(verb, reason, by)


class HostedSharedControl(HostedControl, SharedControl):
    """The same for several processes, which exchange their requests at each step boundary."""
