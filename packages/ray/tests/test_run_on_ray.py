"""The script that runs the tests on a cluster: one that fails or hangs does not fail others."""

from __future__ import annotations

from pathlib import Path

import heliograph
import pytest
from heliograph.packages.ray.tests.on_ray.run import main
from heliograph.packages.tests.facts import assert_facts

ROOT = Path(heliograph.__file__).parent
HOOKS = "pytest_collection_modifyitems, pytest_runtest_logreport, pytest_runtest_logstart"
TESTS = """
import os, pytest, threading
from pathlib import Path

def note(name):
    with (Path(__file__).parent / "ran").open("a") as file:
        file.write(f"{name} {os.getpid()}\\n")

def test_first():
    note("first")

def test_fails():
    note("fails")
    assert False

@pytest.mark.timeout(1)
def test_hangs():
    note("hangs")
    threading.Event().wait()

def test_last():
    note("last")
"""


def test_the_rest_runs_in_a_new_process_after_a_failure_and_a_hang(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conftest.py").write_text(f"from heliograph.packages.ray.tests.on_ray.conftest import {HOOKS}\n")
    (tmp_path / "test_four.py").write_text(TESTS)
    assert (
        main(["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", "--confcutdir", str(tmp_path)], tmp_path)
        == 1
    )
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert [name for name, _ in ran] == ["first", "fails", "hangs", "last"]
    processes = [process for _, process in ran]
    assert processes[0] == processes[1]
    assert len(set(processes)) == 3
    assert_facts(capfd.readouterr().out.splitlines()[-1], "2 passed", "2 failed", "0 skipped")
