"""`check_plugin` checks a plugin against every rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .lifecycle import (
    allows_a_test,
    closes_after_failure,
    closes_files,
    closes_unopened,
    completes,
    registers,
    runs_twice,
    toggles,
)
from .side_effects import declares_requests, leaves_draws, lets_batches_go, shares_nothing
from .states import migrates, resumes, rolls_back, starts_fresh, state_is_plain
from .subject import MakePlugin, MakeScheduler, Subject

RULES = (
    closes_unopened,
    registers,
    completes,
    closes_files,
    declares_requests,
    starts_fresh,
    runs_twice,
    leaves_draws,
    lets_batches_go,
    shares_nothing,
    closes_after_failure,
    toggles,
    state_is_plain,
    resumes,
    rolls_back,
    migrates,
    allows_a_test,
)


def step_lr(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def check_plugin(
    make_plugin: MakePlugin,
    *,
    make_scheduler: MakeScheduler = step_lr,
    old_states: Mapping[int, Mapping[str, Any]] | None = None,
    draws: bool = False,
) -> None:
    """Check a plugin against every rule for plugins; docs/developers/plugin_rules.md lists them.

    Args:
        make_plugin: returns a new plugin object, with the same options every time. The plugin runs in short trainings
            of a small model: two epochs, with validation, saves and a scheduler.
        make_scheduler: returns the scheduler of these trainings.
        old_states: for a plugin with a `state_version`, a state of each older version.
        draws: whether the plugin draws from the global random generators on purpose, for example to add noise.

    Raises:
        AssertionError: the plugin breaks a rule; the message has the rule, what was found, and how to fix it.
    """
    subject = Subject(make_plugin, make_scheduler, old_states or {}, draws)
    for rule in RULES:
        rule.apply(subject)
