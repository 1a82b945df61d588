"""A recording of a million batches, with their losses and a log every 50 of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import numpy as np
import pytest
from heliograph.builtin_callbacks.recorder.format.lines import ROWS, encode_head
from heliograph.builtin_callbacks.recorder.format.reader import read
from heliograph.builtin_callbacks.recorder.format.records import Batches, Counters, Entry, EventEntry, RequestEntry
from heliograph.builtin_callbacks.recorder.timeline.page import facts as page_facts
from heliograph.events import Request
from heliograph.tests.recordings import attempt, encode, encode_attempt

BATCHES, LOG, MEMORY = 1_000_000, 50, 300 * 2**10  # the last in KiB


def entries(batches: int) -> Iterator[tuple[Entry, int]]:
    """Yield the entries of a long run, with the number of each block."""
    random, counters, logs = np.random.default_rng(0), Counters(), 0
    yield EventEntry("train_start", 0.0, counters), 0
    yield EventEntry("epoch_start", 0.01, counters, {"epoch": 0, "resumed": False, "batches": batches}), 0
    for number, begin in enumerate(range(0, batches, ROWS), 1):
        count = min(ROWS, batches - begin)
        steps = np.arange(begin + 1, begin + count + 1)
        clock = np.maximum.accumulate((steps * 0.5 + random.integers(0, 2, count)).astype(int))
        losses = (2 / np.sqrt(1 + steps / 1000) + random.normal(0, 0.1, count)).astype("f4").astype("f8")
        none, numbers, samples, times = ((steps * 0).tolist(), steps.tolist(), (steps * 32).tolist(), clock.tolist())
        block = Batches(counters, clock[-1] / 100, numbers, none, none, samples, none, times, losses.tolist())
        counters = block.last
        yield block, number
        for step in range(begin, begin + count, LOG):
            reason = f"every {LOG} steps"
            yield RequestEntry(logs, Request("log", "log_schedule", reason, 0, step, step, 1, None, "batch_end")), 0
            metrics = {"train/loss": 2 / (1 + step / 1000) ** 0.5, "train/accuracy": step / batches, "train/lr": 0.1}
            at = Counters(batch=step, steps=step, samples=step * 32, seconds=step * 0.005)
            yield EventEntry("log", step * 0.005, at, {"metrics": metrics, "asked": [logs]}), 0
            logs += 1


@pytest.mark.whole
def test_a_million_batches_need_little_memory(tmp_path: Path) -> None:
    with (tmp_path / "long.recording").open("w") as file:
        file.write(f"{encode_head()}\n{encode_attempt(attempt(losses=True))}\n")
        file.writelines(f"{encode(entry, number)}\n" for entry, number in entries(BATCHES))
    line = [sys.executable, "-m", "heliograph", "watch", str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        with urlopen(urljoin(url, "facts?run=0")) as answer:
            text = answer.read()
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.send_signal(signal.SIGINT)
    facts = json.loads(text)["facts"]
    curves = {curve["metric"]: curve for chart in facts["charts"] for curve in chart["curves"]}
    assert curves["train/loss of each batch"]["total"] == BATCHES
    assert curves["train/loss"]["total"] > BATCHES / LOG
    assert all(sum(len(piece["x"]) for piece in curve["pieces"]) <= 2_000 for curve in curves.values())
    assert len(text) < 250_000
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    assert int(peak[1]) < MEMORY


def test_where_a_loss_of_a_long_recording_was_is_looked_up_as_it_was_recorded(tmp_path: Path) -> None:
    path, batches = tmp_path / "long.recording", 3 * ROWS + 7
    recorded = list(entries(batches))
    lines = [encode_head(), encode_attempt(attempt(losses=True)), *(encode(*each) for each in recorded)]
    path.write_text("".join(f"{line}\n" for line in lines))
    (losses,) = (
        curve["pieces"]
        for chart in page_facts(read(path))["charts"]
        for curve in chart["curves"]
        if curve["metric"] == "train/loss of each batch"
    )
    known = {
        batch.counters.steps: (batch.loss, batch.counters.seconds)
        for block, _ in recorded
        if isinstance(block, Batches)
        for batch in block
    }
    for step, time, value in zip(losses[0]["x"], losses[0]["t"], losses[0]["y"], strict=True):
        assert (value, time) == (float(f"{known[step][0]:.9g}"), pytest.approx(known[step][1]))
