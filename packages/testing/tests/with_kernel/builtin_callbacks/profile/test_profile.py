"""Profile: which steps are traced and what a trace holds, that no profiler is left running, nor another one harmed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.builtin_callbacks.profile.plugin import Profile
from heliograph_testing import check_plugin

EVERY: dict[str, Any] = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0}


def is_profiling() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert not is_profiling(), "a profiler is left running"


def traces(folder: Path) -> list[dict[str, Any]]:
    """Return what the traces in a folder hold, the oldest first; nothing else may lie there but event files."""
    paths = sorted(folder.glob("*.pt.trace.json"), key=lambda path: int(path.name.split(".")[-4]))
    assert set(folder.iterdir()) == {*paths, *folder.glob("events.out.tfevents.*"), *folder.glob("hyper_parameters")}
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def ranges(trace: dict[str, Any]) -> list[str]:
    """Return the named ranges of a trace in the order in which they begin."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def steps(folder: Path) -> list[list[int]]:
    """Return which steps each trace holds."""
    names = [ranges(trace) for trace in traces(folder)]
    return [[int(name.partition("#")[2]) for name in each if name.startswith("ProfilerStep#")] for each in names]


# The schedule.


# What is in a trace.


# However it ends.


# Another profiler.


# What cannot be done.


def test_it_keeps_the_rules_of_plugins(tmp_path: Path) -> None:
    check_plugin(lambda: Profile(tmp_path, **EVERY))
