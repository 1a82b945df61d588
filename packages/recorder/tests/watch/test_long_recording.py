"""A recording of a million batches, with their losses and a log every 50 of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest
from heliograph.packages.recorder.tests.long_recordings import LOG, entries, write_long
from heliograph_recorder.format.lines import ROWS
from heliograph_recorder.format.reader import read
from heliograph_recorder.format.records import Batches
from heliograph_recorder.timeline.page import facts as page_facts

BATCHES, MEMORY = 1_000_000, 300 * 2**10  # the last in KiB


@pytest.mark.whole
def test_a_million_batches_need_little_memory(tmp_path: Path) -> None:
    write_long(tmp_path / "long.recording", BATCHES)
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
    write_long(path, batches)
    (losses,) = (
        curve["pieces"]
        for chart in page_facts(read(path))["charts"]
        for curve in chart["curves"]
        if curve["metric"] == "train/loss of each batch"
    )
    known = {
        batch.counters.steps: (batch.loss, batch.counters.seconds)
        for block in entries(batches)
        if isinstance(block, Batches)
        for batch in block
    }
    for step, time, value in zip(losses[0]["x"], losses[0]["t"], losses[0]["y"], strict=True):
        assert (value, time) == (float(f"{known[step][0]:.9g}"), pytest.approx(known[step][1]))
