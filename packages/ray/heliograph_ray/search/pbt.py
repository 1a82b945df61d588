"""Population based training: apply the hyper-parameters that Tune changed since the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from heliograph import CheckpointLoaded, Lane, Plugin, Run, TrainStart, on
from heliograph.spi import scale_optimizer

RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # of a parameter group, and of what a scheduler keeps in it
LISTS = ("base_lrs", "max_lrs", "_last_lr")  # of a scheduler
INNER = "_schedulers"  # in the state of a scheduler that is made of several
SIMPLE = (bool, int, float, str, type(None))
Options = dict[str, Any]  # of a parameter group or a scheduler when it was created


class Tune(Plugin):
    """Applies hyper-parameters that Tune has changed since a checkpoint was saved.

    Loading a checkpoint restores the options of its optimizers and schedulers. Each checkpoint of a trial therefore
    also stores the options at their creation. Options with other values in this program are applied after loading:
    learning rates in proportion, so that a schedule continues from its current point; others as they are.
    """

    exclusive = ("tune",)

    def __init__(self) -> None:
        self._created: Options = {}
        self._loaded: Mapping[str, Any] | None = None

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        self._loaded = None
        self._created = {
            "optimizers": {
                name: [_group_options(group) for group in optimizer.param_groups]
                for name, optimizer in run.optimizers.items()
            },
            "schedulers": {name: _scheduler_options(scheduler) for name, scheduler in run.schedulers.items()},
        }

    @on(CheckpointLoaded, lane=Lane.TRANSFORM)
    def apply_changes(self, run: Run, event: CheckpointLoaded) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        changes: list[str] = []
        for name, optimizer in run.optimizers.items():
            old, new = loaded["optimizers"].get(name, []), self._created["optimizers"][name]
            if len(old) != len(new):
                continue
            factors = [_factor(before.get("lr"), now.get("lr")) for before, now in zip(old, new, strict=True)]
            for group, before, now, factor in zip(optimizer.param_groups, old, new, factors, strict=True):
                changes += _change_group(group, before, now, factor)
            scale_optimizer(optimizer, *factors)
            if name in run.schedulers:
                before, now = loaded["schedulers"].get(name, {}), self._created["schedulers"][name]
                scheduler = run.schedulers[name]
                scheduler.load_state_dict(_change_state(scheduler.state_dict(), before, now, factors, changes))
        if changes:
            run.note(f"changed by tune since the checkpoint: {', '.join(dict.fromkeys(changes))}")

    def state_dict(self) -> dict[str, Any]:
        return dict(self._created)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = state or None


def _group_options(group: Mapping[str, Any]) -> Options:
    options = {name: value for name, value in group.items() if name not in (*RATES, "params") and _is_plain(value)}
    rate = group.get("initial_lr", group.get("lr"))
    return options if rate is None else {**options, "lr": float(rate)}


def _scheduler_options(scheduler: Any) -> Options:
    state = scheduler.state_dict()
    return {name: value for name, value in state.items() if _is_plain(value)} if _is_new(state) else {}


def _is_new(state: Mapping[str, Any]) -> bool:
    return state.get("last_epoch", 0) <= 0 and all(map(_is_new, state.get(INNER, ())))


def _factor(before: float | None, now: float | None) -> float:
    return now / before if before and now is not None else 1.0


def _change_group(group: dict[str, Any], before: Options, now: Options, factor: float) -> list[str]:
    changed = [name for name in now if name != "lr" and name in before and _differ(before[name], now[name])]
    for name in changed:
        group[name] = now[name]
    words = [f"{name} {before[name]} -> {now[name]}" for name in changed]
    if factor == 1.0:
        return words
    return [f"lr {before['lr']:.6g} -> {now['lr']:.6g}", *words]


def _change_state(
    state: Mapping[str, Any], before: Options, now: Options, factors: Sequence[float], words: list[str]
) -> dict[str, Any]:
    changed = dict(state)
    for name in [key for key in state if key in before and key in now]:  # the same order on every rank
        if name == INNER:
            inner = zip(state[name], before[name], now[name], strict=False)
            changed[name] = [_change_state(*states, factors, words) for states in inner]
        elif name in LISTS:
            changed[name] = [rate * factor for rate, factor in zip(state[name], factors, strict=True)]
        elif _differ(before[name], now[name]):
            changed[name] = now[name]
            words.append(f"{name} {before[name]} -> {now[name]}")
    return changed


def _differ(before: Any, now: Any) -> bool:
    return (list(before) if isinstance(before, tuple) else before) != (list(now) if isinstance(now, tuple) else now)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if type(value) in (dict, Counter):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in SIMPLE
