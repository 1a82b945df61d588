"""ProgressBar: which bars, where they stand, when they close; plain lines."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import heliograph.builtin_callbacks.progress_bar.plugin as module
import pytest
from heliograph import Every, LogSchedule, ProgressBar, Trainer
from heliograph.tests.kit import Clock
from heliograph_recorder import Recorder, replay
from tqdm import tqdm

Make = Callable[..., Any]
BARS: list[Any] = []


class RecordingBar(tqdm):  # type: ignore[type-arg]
    """Remembers how it was made and where it ended."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.postfixes: list[str] = []
        self.end: int | None = None
        super().__init__(**options)
        BARS.append(self)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self.postfixes.append(s)
        super().set_postfix_str(s, refresh=refresh)

    def close(self) -> None:
        self.end = int(self.n)
        super().close()


@pytest.fixture(autouse=True)
def _no_bars_left() -> Iterator[None]:
    BARS.clear()
    yield
    assert list(getattr(tqdm, "_instances", ())) == []
    assert list(getattr(RecordingBar, "_instances", ())) == []
    BARS.clear()


def bar(**options: Any) -> ProgressBar:
    plugin = ProgressBar(plain=False, file=io.StringIO(), interval=0.0, show_plan=False, **options)
    record(plugin)
    return plugin


def record(plugin: ProgressBar) -> None:
    """Let a plugin draw with `RecordingBar`."""
    display: Any = plugin._display
    display._tqdm = RecordingBar


def written(plugin: ProgressBar) -> list[str]:
    """Return the lines that stay when the bars are gone."""
    file: Any = plugin._display._file
    return [line.rpartition("\r")[2] for line in file.getvalue().splitlines()]


def made() -> list[tuple[Any, Any, Any, Any]]:
    """Return (description, initial, total, end) of every bar in the order in which they were made."""
    return [(each.options.get("desc"), each.options.get("initial", 0), each.total, each.end) for each in BARS]


# Plain lines.


def plain(file: io.StringIO, **options: Any) -> ProgressBar:
    return ProgressBar(plain=True, file=file, **{"show_plan": False} | options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the plugin."""
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


@pytest.mark.parametrize("drawn", [True, False])
def test_it_follows_a_replay(task: Make, batches: Make, sgd: Any, tmp_path: Path, drawn: bool) -> None:
    trainer = Trainer([Recorder(tmp_path), LogSchedule(Every(steps=2))], device="cpu")
    result = trainer.fit(task(), batches(3), optimizer=sgd, epochs=2)
    trainer.test(task(), batches(1))
    plugin = bar() if drawn else plain(io.StringIO())
    replayed = replay(tmp_path, [plugin])

    assert "progress would have requested nothing" in str(replayed)
    assert not replayed.failed
    assert not replayed.unheld
    lines = written(plugin)
    assert "run  completed at step 6" in lines
    assert any(f"train/loss {result.metrics['train/loss']:.4g}" in line for line in lines)
    assert any(line.startswith("run  test  batches 1  00:00  ") for line in lines)


# Warnings.


# Where it writes.
