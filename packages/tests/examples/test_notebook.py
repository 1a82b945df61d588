"""The notebook, run cell by cell in a kernel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from heliograph.packages.tests.examples.running import EXAMPLES, environment

RUN = """
import json, pathlib, sys, nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
pathlib.Path("executed.ipynb").write_text(json.dumps(notebook))
"""


def code_cells(notebook: Path) -> list[Any]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.whole
def test_every_cell_shows_what_it_is_there_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(EXAMPLES / "notebook.ipynb")]
    kept = environment() | {"PYTHONWARNINGS": "default"}  # the kernel's own libraries warn
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    outputs = [cell["outputs"] for cell in code_cells(tmp_path / "executed.ipynb")]
    _, overfitted, trained, drawn, row, predicted = outputs

    assert overfitted[0]["data"]["text/plain"].startswith("<Overfitting: loss: 2.")
    bar, result = trained
    assert "validation/accuracy 0.9" in bar["data"]["text/plain"]
    assert "completed: 5 epochs done" in result["data"]["text/html"]
    assert "image/png" in drawn[0]["data"]
    assert len(row) == 1, "the bar was off"
    assert "'step': 300" in row[0]["data"]["text/plain"]
    (wrong,) = re.findall(r"(\d+) of 297 are", "".join(each.get("text", "") for each in predicted))
    assert 0 < int(wrong) < 30


def test_nothing_is_stored_in_it() -> None:
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code_cells(EXAMPLES / "notebook.ipynb"))
