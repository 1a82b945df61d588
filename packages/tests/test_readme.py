"""The commands of the README, run in a new environment: clone, install, and the demo."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from heliograph.packages.tests.test_docs import PAGES, ROOT, SHELL, commands, fences
from heliograph.packages.tests.test_wheels import Environment

README = PAGES[0]


def test_the_commands_of_the_readme_install_and_run(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment", [])
    bin_folder = environment.folder / "bin"
    (bin_folder / "pip").write_text(f'#!/bin/sh\nexec {bin_folder}/python -m pip "$@"\n', encoding="utf-8")
    (bin_folder / "pip").chmod(0o755)
    # The libraries that pip would download are linked already. The last one switches the isolation of builds off.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    searched = {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV", "MAKE"))}

    (script,) = [body for language, body, _ in fences(README) if language in SHELL]
    assert "<URL>" in script
    script = script.replace("<URL>", f"file://{ROOT}")
    shell = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=inherited | offline | searched,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shell.returncode == 0, shell.stderr

    # The demo, with fewer epochs: the tests of the recorder run all of it with --whole.
    assert commands(README)[-2:] == ["python -m heliograph demo", "make demo"]
    make = ["make", "--no-print-directory", "--dry-run", "demo", "READY=", f"BIN={bin_folder}"]
    clone, outside = tmp_path / "heliograph", {"MAKEFLAGS": "", "MAKELEVEL": "0", "MFLAGS": ""}  # of `make test`
    dry = subprocess.run(make, cwd=clone, env=os.environ | outside, capture_output=True, text=True, check=True)
    (command,) = dry.stdout.splitlines()
    assert command == f"{bin_folder}/python -m heliograph demo"
    demo = subprocess.run(
        [*command.split(), "--epochs", "4"],
        cwd=clone,
        env=inherited | searched,
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stderr
    assert "everything equals the uninterrupted" in demo.stdout
