"""Hyper-parameters that Tune has changed, in a run that goes on from a checkpoint which holds the former ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ....core.checkpoint.state.compatibility import LISTS, RATES
from ....events import CheckpointLoaded, Lane, Run, TrainStart
from ....plugins import Plugin, on

INNER = "_schedulers"  # of a scheduler that is made of several
SIMPLE = (bool, int, float, str, type(None))
Made = dict[str, Any]


class Tune(Plugin):
    """Let the program's hyper-parameters win over those in a checkpoint, where Tune has changed them in between.

    A checkpoint brings its optimizers and schedulers with what they were told when they were made. So each checkpoint
    of a trial also holds how the program had made them. Where this program makes them otherwise, that difference is
    carried over: learning rates in proportion, such that a schedule goes on from where it was; all else as it is here.
    """

    exclusive = ("tune",)

    def __init__(self) -> None:
        self._made: Made = {}
        self._before: Mapping[str, Any] | None = None

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Take down how the program has made the optimizers and schedulers."""
        self._before = None
        self._made = {
            "optimizers": {
                name: [_made_group(each) for each in of.param_groups] for name, of in run.optimizers.items()
            },
            "schedulers": {name: _made_scheduler(each) for name, each in run.schedulers.items()},
        }

    @on(CheckpointLoaded, lane=Lane.TRANSFORM)
    def carry_over(self, run: Run, event: CheckpointLoaded) -> None:
        """Change what was loaded, where the run that saved it had been told otherwise than this one."""
        before, self._before = self._before, None
        if before is None:
            return
        changed: list[str] = []
        for name, optimizer in run.optimizers.items():
            old, new = before["optimizers"].get(name, []), self._made["optimizers"][name]
            if len(old) != len(new):
                continue
            factors = [_factor(then.get("lr"), now.get("lr")) for then, now in zip(old, new, strict=True)]
            for group, then, now, factor in zip(optimizer.param_groups, old, new, factors, strict=True):
                changed += _change_group(group, then, now, factor)
            if name in run.schedulers:
                then, now = before["schedulers"].get(name, {}), self._made["schedulers"][name]
                scheduler = run.schedulers[name]
                scheduler.load_state_dict(_change_state(scheduler.state_dict(), then, now, factors, changed))
        if changed:
            run.note(f"changed by tune since the checkpoint: {', '.join(dict.fromkeys(changed))}")

    def state_dict(self) -> dict[str, Any]:
        """Return how this program has made the optimizers and schedulers."""
        return dict(self._made)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep how the program that wrote the checkpoint had made them."""
        self._before = state or None


def _made_group(group: Mapping[str, Any]) -> Made:
    """Return what a parameter group was told; its learning rate without what a scheduler has made of it."""
    told = {name: value for name, value in group.items() if name not in (*RATES, "params") and _is_plain(value)}
    rate = group.get("initial_lr", group.get("lr"))
    return told if rate is None else {**told, "lr": float(rate)}


def _made_scheduler(scheduler: Any) -> Made:
    """Return what a scheduler was told; nothing of one that has been stepped, which is not as it was made."""
    state = scheduler.state_dict()
    return {name: value for name, value in state.items() if _is_plain(value)} if _is_new(state) else {}


def _is_new(state: Mapping[str, Any]) -> bool:
    return state.get("last_epoch", 0) <= 0 and all(map(_is_new, state.get(INNER, ())))


def _factor(then: float | None, now: float | None) -> float:
    """Return what a learning rate is to be multiplied by; one that was 0 leaves nothing to multiply."""
    return now / then if then and now is not None else 1.0


def _change_group(group: dict[str, Any], then: Made, now: Made, factor: float) -> list[str]:
    """Change a parameter group; return what was changed, in words."""
    told = [name for name in now if name != "lr" and name in then and _differ(then[name], now[name])]
    for name in told:
        group[name] = now[name]
    words = [f"{name} {then[name]} -> {now[name]}" for name in told]
    if factor == 1.0:
        return words
    for name in RATES:
        if name in group:
            group[name] = _scaled(group[name], factor)
    return [f"lr {then['lr']:.6g} -> {now['lr']:.6g}", *words]


def _change_state(state: Mapping[str, Any], then: Made, now: Made, factors: Sequence[float], words: list[str]) -> Made:
    """Return the state of a scheduler, changed, and that of the schedulers within it; add what was changed."""
    changed = dict(state)
    for name in [each for each in state if each in then and each in now]:  # in an order that is the same everywhere
        if name == INNER:
            inner = zip(state[name], then[name], now[name], strict=False)
            changed[name] = [_change_state(*each, factors, words) for each in inner]
        elif name in LISTS:
            changed[name] = [rate * factor for rate, factor in zip(state[name], factors, strict=True)]
        elif _differ(then[name], now[name]):
            changed[name] = now[name]
            words.append(f"{name} {then[name]} -> {now[name]}")
    return changed


def _scaled(rate: Any, factor: float) -> Any:
    return rate.mul_(factor) if isinstance(rate, Tensor) else rate * factor


def _differ(then: Any, now: Any) -> bool:
    """Return whether two values differ; a tuple and a list of the same are the same."""
    return (list(then) if isinstance(then, tuple) else then) != (list(now) if isinstance(now, tuple) else now)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if type(value) in (dict, Counter):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in SIMPLE
