"""Recordings for tests: written entry by entry, or by a short training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import heliograph as h
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, linear_classifier
from heliograph_recorder.format.lines import attempt_items, encode_head, format_line, items_of
from heliograph_recorder.format.records import AttemptRecord, Entry
from torch import nn

PLAIN = AttemptRecord(
    name="a1",
    phase="train",
    began="2026-01-01T00:00:00+00:00",
    run="run",
    world_size=1,
    max_epochs=1,
    max_steps=None,
    validation_sets=("",),
    optimizers=("optimizer",),
    hyper_parameters={},
    versions={"heliograph": "0", "torch": "0", "python": "0"},
    losses=False,
    plan={},
    entries=(),
)


def attempt(*entries: Entry, **about: Any) -> AttemptRecord:
    """Return an attempt with these entries; `about` names other fields."""
    return replace(PLAIN, entries=entries, **about)


def encode(entry: Entry) -> str:
    """Return an entry's line."""
    return format_line(*items_of(entry))


def encode_attempt(attempt: AttemptRecord) -> str:
    """Return the line that begins an attempt."""
    return format_line(*attempt_items(attempt))


def lines(attempts: Iterable[AttemptRecord]) -> list[str]:
    """Return the lines of a recording."""
    written = [encode_head()]
    for each in attempts:
        written += [encode_attempt(each), *map(encode, each.entries)]
    return written


def write(path: Path, *attempts: AttemptRecord) -> Path:
    """Write a recording, and return its path."""
    path.write_text("".join(f"{line}\n" for line in lines(attempts)))
    return path


def fit(plugins: Sequence[Any], *, batches: int = 8, epochs: int = 2, **options: Any) -> tuple[h.RunResult, nn.Module]:
    """Train a small model; return the result and the model."""
    task = linear_classifier()
    options = {"validation": class_batches(3), "epochs": epochs, **options}
    return kit.fit(*plugins, task=task, train=class_batches(batches), **options), task.model
