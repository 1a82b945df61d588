"""The random states of a sampler, as JSON."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any

import numpy as np
from heliograph.spi import require

States = dict[str, dict[str, Any]]


def states_of(sampler: Any) -> States:
    """Return the state of each random generator of a sampler, by its place within."""
    return {place: _state(generator) for place, generator in _generators(sampler)}


def load_states(sampler: Any, states: States) -> None:
    """Put generators back to where they were; one that the sampler did not have then stays as it is."""
    for place, generator in _generators(sampler):
        if place in states:
            state = states[place]
            key = np.frombuffer(b64decode(state["key"]), dtype="<u4").astype(np.uint32)
            generator.set_state(("MT19937", key, state["position"], state["has_gauss"], state["gauss"]))


def _state(generator: np.random.RandomState) -> dict[str, Any]:
    _, key, position, has_gauss, gauss = generator.get_state(legacy=True)
    text = b64encode(np.asarray(key, dtype="<u4").tobytes()).decode()
    return {"key": text, "position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)}


def _generators(sampler: Any) -> Iterator[tuple[str, np.random.RandomState]]:
    """Yield each generator once, in a sampler, in those that it samples with, and in parts of theirs."""
    samplers = require("optuna.samplers", "A study", extra="optuna")
    pending, seen = [("", sampler)], set[int]()
    while pending:
        place, part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, np.random.RandomState):
            yield place, part
        elif isinstance(part, samplers.BaseSampler) or type(part).__module__.startswith("optuna.samplers."):
            if isinstance(getattr(type(part), "rng", None), property):
                part.rng  # noqa: B018  # one that is made when it is first used is made now
            for name, value in sorted(getattr(part, "__dict__", {}).items(), reverse=True):
                pending.append((f"{place}.{name}".lstrip("."), value))
