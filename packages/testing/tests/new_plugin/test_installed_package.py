"""A new package in an environment of its own: built, installed, tested, found, loaded, toggled, removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import heliograph
import pytest
from heliograph.packages.tests.facts import has_facts
from heliograph_testing.new_plugin.command import write_package

ROOT = Path(heliograph.__file__).parent
BEGIN = """
import json, os, sys, warnings
warnings.simplefilter("error")
import torch
from heliograph import BatchEnd, LogSchedule, Supervised, Trainer

seen = {}

def fit(trainer):
    task = Supervised(torch.nn.Linear(1, 1), lambda outputs, targets: targets.mean() + 0 * outputs.sum())
    batches = [(torch.ones(1, 1), torch.tensor([loss])) for loss in (4.0, 2.0, 2.0)]
    result = trainer.fit(task, batches, optimizer=torch.optim.SGD, epochs=1)
    assert result.warnings == (), result.warnings
    return [row.get("train/smoothed_loss") for row in result.log_history]

"""
IN_USE = """
trainer = Trainer([LogSchedule(steps=1)], device="cpu")
seen["imported"] = "heliograph_loss_report" in sys.modules
plugin = trainer.plugins.load("loss_report", smoothing=0.5)
seen["loaded"] = fit(trainer)
trainer.plugins.disable("loss_report")
seen["disabled"] = fit(trainer)
trainer.plugins.enable(plugin)
with trainer.plugins.disabled(plugin):
    seen["disabled for a while"] = fit(trainer)
seen["enabled"] = fit(trainer)
trainer.plugins.unregister(plugin)
seen["unregistered"] = fit(trainer)
os.environ["HELIOGRAPH_PLUGINS"] = "+loss_report"
seen["added by the environment"] = fit(Trainer([LogSchedule(steps=1)], device="cpu"))
os.environ["HELIOGRAPH_PLUGINS"] = "-loss_report"
with warnings.catch_warnings(action="ignore"):
    seen["switched off"] = Trainer(device="cpu").plugins.load("loss_report")
"""


INSTALLED = "from heliograph.plugins.discovery import discover; print([each.name for each in discover()])"


@dataclass(frozen=True)
class Environment:
    folder: Path

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        ours = ("PYTHON", "PIP_", "COV", "HELIOGRAPH_", "PYTEST")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        done = subprocess.run(
            [str(self.folder / "bin" / "python"), *arguments],
            cwd=cwd or self.folder,
            env={**clean, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(self, program: str) -> Any:
        """Run a program that fills `seen`; a warning fails it."""
        return json.loads(self.run("-c", f"{BEGIN}{program}\nprint(json.dumps(seen))").splitlines()[-1])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A new virtual environment that sees our packages, and imports this copy of heliograph."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (folder / "path").mkdir()
    (folder / "path/heliograph").symlink_to(ROOT)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    # Not a bare path: the .pth files there, such as that of our editable install, must be read as well.
    lines = [
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})",
        f"import sys; sys.path.insert(0, {str(folder / 'path')!r})",
    ]
    (site / "ours.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Environment(folder)


@pytest.mark.whole
def test_a_new_package_from_its_first_test_to_its_removal(environment: Environment, tmp_path: Path) -> None:
    package, _ = write_package("loss_report", tmp_path)
    pip = ("-m", "pip", "--quiet")
    environment.run(*pip, "install", "--no-index", "--no-deps", "--no-build-isolation", str(package))

    assert "6 passed" in environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", cwd=package)

    seen = environment.ask(IN_USE)
    assert seen.pop("added by the environment") == pytest.approx([4.0, 3.8, 3.62])
    assert seen == {
        "imported": False,
        "loaded": [4.0, 3.0, 2.5],
        "disabled": [None] * 3,
        "disabled for a while": [None] * 3,
        "enabled": [4.0, 3.0, 2.5],
        "unregistered": [None] * 3,
        "switched off": None,
    }

    listed = environment.run("-m", "heliograph", "plugins", "--check")
    assert any(
        has_facts(line, "heliograph-loss-report:loss_report", "0.1.0", "available: Log") for line in listed.splitlines()
    )

    environment.run(*pip, "uninstall", "-y", "heliograph-loss-report")
    assert "loss_report" not in environment.run("-c", INSTALLED)
