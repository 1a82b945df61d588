"""The wheels: what is in them, the kernel installed alone, and the kernel with every package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import heliograph
import pytest
from heliograph.plugins.first_party import DISTRIBUTIONS, PACKAGES

ROOT = Path(heliograph.__file__).parent
README = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
RECORDED = """
import torch
from heliograph import Supervised, Trainer
from heliograph_recorder import Recorder
task = Supervised(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss)
batches = [(torch.randn(8, 3), torch.randn(8, 1))] * 4
result = Trainer([Recorder("run")]).fit(task, batches, optimizer=torch.optim.SGD, epochs=1)
assert "completed" in result.explain(), result.explain()
"""
REFUSED = """
for refused in (
    "h.Trainer(engine='accelerate')",
    "from heliograph import Recorder",
    "h.Trainer().plugins.load('recorder', folder='x')",
    "result.explain()",
):
    try:
        exec(refused)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def build(folder: Path) -> list[Path]:
    """Build a wheel of every distribution in a copy of the tracked files, without the remains of earlier builds."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "source" / name)
    sources = [".", *(f"./packages/{package}" for package in PACKAGES)]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder / "wheels"), *sources], cwd=folder / "source", check=True)
    return sorted((folder / "wheels").glob("*.whl"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build(tmp_path_factory.mktemp("wheels"))


class Environment:
    """A virtual environment with some of the wheels, and the other libraries of this one."""

    def __init__(self, folder: Path, wheels: list[Path]) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if "heliograph" not in entry.name:
                (site / entry.name).symlink_to(entry)
        if wheels:
            pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install"]
            subprocess.run([*pip, "--quiet", "--no-index", "--no-deps", *map(str, wheels)], check=True)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        ours = ("PYTHON", "PIP_", "COV", "HELIOGRAPH_", "PYTEST")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        command = [str(self.folder / "bin/python"), *arguments]
        return subprocess.run(command, cwd=self.folder, env=clean, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def kernel(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    alone = [wheel for wheel in wheels if wheel.name.startswith("heliograph-")]
    return Environment(tmp_path_factory.mktemp("kernel"), alone)


@pytest.fixture(scope="module")
def everything(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("everything"), wheels)


def test_every_distribution_has_a_wheel_with_its_types_and_data(wheels: list[Path]) -> None:
    assert {wheel.name.split("-")[0].replace("_", "-") for wheel in wheels} == DISTRIBUTIONS
    files = {name for wheel in wheels for name in ZipFile(wheel).namelist()}
    assert {f"heliograph_{package}/py.typed" for package in PACKAGES} <= files
    assert {"heliograph/plugins/hints.toml", "heliograph/plugins/packages.toml"} <= files
    assert {"heliograph/spi.pyi", "heliograph_recorder/__init__.pyi"} <= files
    assert {"heliograph_recorder/timeline/page.html"} <= files
    assert not [name for name in files if "/tests/" in name or name.startswith(("tests/", "heliograph/packages/"))]


def test_the_kernel_alone_trains_and_says_what_to_install(kernel: Environment) -> None:
    done = kernel.run("-W", "error", "-c", f"{README[0]}{REFUSED}")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    missing = "It is in heliograph-recorder: pip install ./packages/recorder"
    engine, name, plugin, result = done.stdout.splitlines()[-4:]
    assert engine.endswith("It is in heliograph-bridges: pip install ./packages/bridges")
    assert name == f"ImportError: heliograph has no 'Recorder'. {missing}"
    assert plugin.endswith(f"No installed plugin is named 'recorder'. {missing}")
    assert result == f"ImportError: No installed package explains runs. {missing}"

    command = kernel.run("-m", "heliograph", "explain", "runs/digits")
    assert (command.returncode, command.stderr) == (2, f"heliograph has no command 'explain'. {missing}\n")
    listed = kernel.run("-c", "from heliograph.plugins import discover; print(*(plugin.name for plugin in discover()))")
    assert "checkpoint" in listed.stdout.split()
    assert "recorder" not in listed.stdout.split()


def test_with_all_wheels_every_command_can_be_imported(everything: Environment) -> None:
    help_text = everything.run("-m", "heliograph", "--help").stdout
    assert {"explain", "fit", "rules", "verify-resume"} <= {line.split()[0] for line in help_text.splitlines() if line}
    assert "cannot be imported" not in help_text
    assert everything.run("-m", "heliograph", "plugins", "--check").returncode == 0


def test_with_all_wheels_a_run_is_recorded_and_drawn(everything: Environment) -> None:
    assert everything.run("-c", RECORDED).stderr == ""
    timeline = everything.run("-m", "heliograph", "timeline", "run", "--output", "page.html")
    assert timeline.returncode == 0, timeline.stderr
    assert (everything.folder / "page.html").stat().st_size > 10_000
