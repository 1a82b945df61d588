"""Steps of schedulers between passes, by a metric of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from inspect import signature
from typing import Any

from .parts import Parts, make_model, make_optimizer
from .recipe import Recipe


def step_schedulers(recipe: Recipe, state: Mapping[str, Any], metric: float) -> dict[str, Any]:
    """Return a state after a step of its schedulers, which get the metric if they take one."""
    model = make_model(recipe)
    optimizer, scheduler = make_optimizer(recipe, model)
    parts = Parts(None, None, model, optimizer, None, scheduler)
    for name, each in parts.optimizers.items():
        each.load_state_dict(deepcopy(state["optimizers"][name]))
    with warnings.catch_warnings():  # the optimizer was stepped in another process, which torch cannot know
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for name, each in parts.schedulers.items():
            each.load_state_dict(deepcopy(state["schedulers"][name]))
            each.step(*([metric] if "metrics" in signature(each.step).parameters else []))
    optimizers = {name: each.state_dict() for name, each in parts.optimizers.items()}
    schedulers = {name: each.state_dict() for name, each in parts.schedulers.items()}
    return {**state, "optimizers": optimizers, "schedulers": schedulers}
