"""Type checkers see the kernel and the packages in the environment that `make demo` and `make test` make."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from playwright._impl._driver import compute_driver_executable

SCRIPT = """\
from heliograph import Checkpoint, EarlyStopping, Plugin, Run, StepEnd, Trainer, on, standard
from heliograph.spi import check_whole_number
from heliograph_ray import RayLauncher
from heliograph_recorder import Recorder


class Counter(Plugin):
    @on(StepEnd)
    def count(self, run: Run, event: StepEnd) -> None:
        self.steps = run.progress.stepz  # attr-defined
        run.log("loss", 1.0)  # attr-defined


trainer = Trainer([Checkpoint("runs/x", keep_last="three")])  # arg-type
recorder = Recorder(5)  # arg-type
launcher = RayLauncher("two")  # arg-type
number = check_whole_number(1, 2)  # arg-type
stopping = EarlyStopping(patient=3)  # call-arg
plugins = standard("runs/x", patiance=3)  # call-arg
trainer.fitt()  # attr-defined
"""
WITHOUT_TORCH = """\
[mypy]
strict = true

[mypy-torch.*,numpy.*]
follow_imports = skip
"""  # reading them takes most of the time, and no mistake depends on their types
PLANTED = {number: line.rpartition("# ")[2] for number, line in enumerate(SCRIPT.splitlines(), 1) if "  # " in line}


def test_mypy_finds_the_mistakes_in_a_script_of_a_user(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(WITHOUT_TORCH)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = {int(line): code for line, code in re.findall(r"^train\.py:(\d+): error: .*\[(.+)\]$", done.stdout, re.M)}
    assert found == PLANTED, done.stdout


def test_pyright_finds_them_too(tmp_path: Path) -> None:
    """Its own command may download: the wheel holds the program, and playwright's driver the node that runs it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    spec = find_spec("pyright")
    assert spec is not None
    assert spec.origin is not None
    node, _ = compute_driver_executable()
    program = Path(spec.origin).parent / "dist" / "index.js"
    command = [node, str(program), "--outputjson", "--pythonpath", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert {each["range"]["start"]["line"] + 1 for each in found} == set(PLANTED), done.stdout
