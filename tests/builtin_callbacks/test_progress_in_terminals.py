"""The bars as they look: in a terminal of some columns, and in a notebook."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import pytest
from heliograph import (
    BatchStart,
    Every,
    Lane,
    LogSchedule,
    ProgressBar,
    Run,
    RunClosed,
    Trainer,
    ValidationSchedule,
    accuracy,
)
from heliograph.tests import kit
from heliograph.tests.messages import assert_each, assert_facts

SENTENCE = "Nothing was saved: no checkpoint plugin is registered. Add Checkpoint(folder), or leave the schedule out."


def train(plugin: ProgressBar, **options: Any) -> None:
    """Train with metrics, a validation after every epoch, and a warning."""
    trainer = Trainer([plugin, LogSchedule(Every(steps=1)), ValidationSchedule(Every(epochs=1))], device="cpu")
    trainer.bus.on(RunClosed, lambda run, event: run.warn(SENTENCE), lane=Lane.PERSIST)
    task = kit.linear_classifier(metrics={"accuracy": accuracy})
    batches = kit.class_batches(4)
    trainer.fit(task, batches, validation=batches[:2], optimizer=kit.sgd(), name="digits", **options)


@contextmanager
def terminal(columns: int) -> Iterator[tuple[TextIO, Callable[[], list[str]]]]:
    """Yield a terminal, and what returns everything that was drawn in it, a line for each."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(ours, False)
    drawn: list[bytes] = []

    class Screen(io.TextIOWrapper):
        def flush(self) -> None:
            super().flush()
            while True:  # or the terminal is full
                try:
                    drawn.append(os.read(ours, 65536))
                except BlockingIOError:
                    return

    with Screen(os.fdopen(theirs, "wb", buffering=0), encoding="utf-8", write_through=True) as file:
        yield file, lambda: [line for line in re.split(r"[\r\n]+|\x1b\[A", b"".join(drawn).decode()) if line.strip()]
        file.flush()
    os.close(ours)


@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 8}])
def test_in_80_columns_bars_have_room_and_no_metric_is_cut(options: dict[str, Any]) -> None:
    with terminal(80) as (file, drawn):
        train(ProgressBar(file=file, interval=0.0, show_plan=False), **options)
        file.flush()
        lines = drawn()
    bars = [line for line in lines if "|" in line]

    assert {len(line.rstrip()) > 80 for line in lines} == {False}
    assert {len(line.split("|")[1]) >= 10 for line in bars} == {True}
    assert {line.rstrip()[-1] for line in bars} == {"]"}
    shown = {name for line in lines for name in re.findall(r"\w+ \w+=[\d.e-]+(?: \w+=[\d.e-]+)*", line)}
    assert any(re.fullmatch(r"validation loss=[\d.]+ accuracy=[\d.]+", each) for each in shown)
    assert any(re.fullmatch(r"train loss=[\d.]+", each) for each in shown)


def test_the_end_of_a_run_in_80_columns() -> None:
    with terminal(80) as (file, drawn):
        train(ProgressBar(file=file, show_plan=False), epochs=2)
        file.flush()
        lines = drawn()[-5:]

    assert re.fullmatch(r"digits  epochs 2/2  steps 8  00:00  [\d.]+ steps/s  train/loss [\d.]+", lines[0].strip())
    assert re.fullmatch(r"  train/accuracy [\d.]+  validation/loss [\d.]+  validation/accuracy [\d.]+", lines[1])
    assert lines[-3:] == [
        "digits  completed: 2 epochs done",
        "WARNING: Nothing was saved: no checkpoint plugin is registered. Add",
        "  Checkpoint(folder), or leave the schedule out.",
    ]


def test_a_long_name_leaves_room_for_the_bar() -> None:
    with terminal(80) as (file, drawn):
        trainer = Trainer([ProgressBar(file=file, interval=0.0, show_plan=False)], device="cpu")
        trainer.fit(kit.linear_classifier(), kit.class_batches(3), optimizer=kit.sgd(), steps=3, name="n" * 100)
        file.flush()
        lines = drawn()

    assert lines[0].startswith("n" * 19 + "… |")


# In a notebook.


class Outputs:
    """The outputs of a cell, as a notebook that is saved holds them: the last of each."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.all: list[str] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert (raw, display_id) == (True, True)
        number = len(self.texts)
        self.texts.append("")

        def update(data: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.texts[number] = data["text/plain"]
            self.all.append(data["text/plain"])

        update(data, raw=True)
        return types.SimpleNamespace(update=update)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Outputs:
    """Pretend to be in a notebook, and return the outputs of its cell."""
    outputs = Outputs()
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=outputs.display))
    return outputs


@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 8}])
def test_a_saved_notebook_holds_one_text_and_no_bar(outputs: Outputs, options: dict[str, Any]) -> None:
    train(ProgressBar(interval=0.0, show_plan=False), **options)

    (left,) = outputs.texts
    assert left.splitlines()[0].startswith("digits  epochs 2")
    assert left.splitlines()[-2:] == [
        "WARNING: Nothing was saved: no checkpoint plugin is registered. Add",
        "  Checkpoint(folder), or leave the schedule out.",
    ]
    assert "|" not in left
    during = [text for text in outputs.all if "|" in text]
    assert {len(line) > 80 for text in during for line in text.splitlines()} == {False}
    assert any(re.search(r"^validation \|", text, re.MULTILINE) for text in during)


def test_each_run_in_a_notebook_has_its_output(outputs: Outputs) -> None:
    trainer = Trainer([ProgressBar(show_plan=False)], device="cpu")
    for _ in range(2):
        trainer.fit(kit.linear_classifier(), kit.class_batches(2), optimizer=kit.sgd(), epochs=1)
    trainer.test(kit.linear_classifier(), kit.class_batches(2))

    assert_each([text.splitlines()[-1] for text in outputs.texts], *[("completed", "1 epoch")] * 2, ["completed"])
    assert_facts(outputs.texts[2], "run", "test", "batches 2")


def test_a_bar_in_a_notebook_that_is_disabled_leaves_no_bar(outputs: Outputs) -> None:
    trainer = Trainer([ProgressBar(show_plan=False)], device="cpu")

    def disable(run: Run, event: BatchStart) -> None:
        if run.progress.batch == 1:
            trainer.plugins.disable(ProgressBar)

    trainer.bus.on(BatchStart, disable)
    trainer.fit(kit.linear_classifier(), kit.class_batches(3), optimizer=kit.sgd(), epochs=1)

    assert outputs.texts == [""]
    assert "|" in outputs.all[0]
