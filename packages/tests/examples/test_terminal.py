"""What a terminal shows of a training that Ctrl-C ends, and that is started again."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from heliograph.packages.tests.examples.running import EXAMPLES, environment, final_weights, run_example


def watch(folder: Path, interrupt_at: bytes | None = None) -> str:
    """Run the example in a terminal of 80 columns; press Ctrl-C once a pattern was drawn; return all that was."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, str(EXAMPLES / "terminal.py")]
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        drawn = b""
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # the other end was closed
                break
            drawn += read
            if interrupt_at is not None and re.search(interrupt_at, drawn):
                process.send_signal(signal.SIGINT)
                interrupt_at = None
    os.close(ours)
    assert process.returncode == 0, drawn.decode()
    return drawn.decode()


@pytest.mark.whole
def test_ctrl_c_says_where_it_resumes_and_the_next_start_does(tmp_path: Path) -> None:
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    alone.mkdir()
    stopped.mkdir()
    run_example("terminal.py", alone)
    first, second = watch(stopped, interrupt_at=rb" [3-9]/30 "), watch(stopped)

    (step,) = re.findall(r"interrupted at step[^/]+runs/terminal/\w+_iter_(\d+).pth", first)
    assert re.search(rf"resumed .*step {step} from", second)
    assert re.search(r"verified: \d+ repeated", second)
    assert second.rstrip().endswith("completed: 30 epochs done")
    bars = [line for line in re.split(r"[\r\n]+|\x1b\[A", first + second) if "|" in line]
    assert bars
    assert max(len(line.rstrip()) for line in bars) <= 80
    torch.testing.assert_close(final_weights(stopped), final_weights(alone), rtol=0, atol=0)
