"""Type checkers see the kernel and the packages in the environment that `make demo` and `make test` make."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """\
from heliograph import Checkpoint, Plugin, Run, StepEnd, Trainer, on
from heliograph.spi import check_whole_number
from heliograph_ray import RayLauncher
from heliograph_recorder import Recorder


class Counter(Plugin):
    @on(StepEnd)
    def count(self, run: Run, event: StepEnd) -> None:
        self.steps = run.progress.stepz  # attr-defined


trainer = Trainer([Checkpoint("runs/x", keep_last="three")])  # arg-type
recorder = Recorder(5)  # arg-type
launcher = RayLauncher("two")  # arg-type
number = check_whole_number(1, 2)  # arg-type
trainer.fitt()  # attr-defined
"""


def test_mypy_finds_the_mistakes_in_a_script_of_a_user(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = {int(line): code for line, code in re.findall(r"^train\.py:(\d+): error: .*\[(.+)\]$", done.stdout, re.M)}
    planted = {number: line.rpartition("# ")[2] for number, line in enumerate(SCRIPT.splitlines(), 1) if "  # " in line}
    assert found == planted, done.stdout
