"""The state of a callback in our checkpoints: what its `state_dict` and its `on_save_checkpoint` give."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from .hooks import has
from .work import Work


def saved_state(callback: Any, work: Work) -> dict[str, Any]:
    """Return the state of a callback; empty where it has none.

    `on_save_checkpoint` gets a checkpoint with `state_dict`, `epoch`, `global_step` and `callbacks`: what it adds or
    replaces there is saved.
    """
    own = callback.state_dict()
    added = _added(callback, work, own) if has(callback, work.flavour, "on_save_checkpoint") else {}
    if not own and not added:
        return {}
    return {"key": callback.state_key, "callback": _plain(own), "checkpoint": _plain(added)}


def give_back(callback: Any, work: Work, saved: Mapping[str, Any]) -> bool:
    """Give a callback its saved state; return whether it is of a callback with the same `state_key`."""
    if saved["key"] != callback.state_key:
        return False
    own = deepcopy(saved["callback"])
    if has(callback, work.flavour, "on_load_checkpoint"):
        checkpoint = _checkpoint(callback, work, own) | deepcopy(saved["checkpoint"])
        callback.on_load_checkpoint(work.trainer, work.module, checkpoint)
    if own:
        callback.load_state_dict(own)
    return True


def _added(callback: Any, work: Work, own: Any) -> dict[str, Any]:
    checkpoint = _checkpoint(callback, work, own)
    before, weights = dict(checkpoint), dict(checkpoint["state_dict"])
    callback.on_save_checkpoint(work.trainer, work.module, checkpoint)
    added = {name: value for name, value in checkpoint.items() if name not in before or value is not before[name]}
    if not _same(checkpoint["state_dict"], weights):
        added["state_dict"] = checkpoint["state_dict"]
    return added


def _same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[name] is before[name] for name in now)


def _checkpoint(callback: Any, work: Work, own: Any) -> dict[str, Any]:
    return {
        "state_dict": work.module.state_dict(),
        "epoch": work.epoch,
        "global_step": work.run.progress.steps,
        "callbacks": {callback.state_key: own},
    }


def _plain(value: Any) -> Any:
    """Return a state with plain dicts in place of other mappings, such as those that modules give."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value
