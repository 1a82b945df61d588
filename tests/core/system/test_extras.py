"""Packages that may be missing, and which copy of this one runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import heliograph
import pytest
from heliograph import ProgressBar, TensorBoard
from heliograph.core.system import extras
from heliograph.core.system.extras import require

ROOT = Path(heliograph.__file__).parent
IMPORT = "import heliograph; print(heliograph.__file__)"


def test_a_missing_extra_gives_the_exact_command() -> None:
    with pytest.raises(ImportError, match=r"The demo needs nowhere, which .*: pip install 'heliograph\[examples\]'$"):
        require("nowhere.at_all", "The demo", extra="examples")
    assert require("json", "nobody") is sys.modules["json"]


def test_a_missing_requirement_gives_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("tensorboard.")]:  # another test has imported them
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"TensorBoard needs tensorboard, which .*: pip install tensorboard$"):
        TensorBoard("unused")
    with pytest.raises(ImportError, match=r"ProgressBar needs tqdm, which .*: pip install tqdm$"):
        ProgressBar()


def test_the_version_is_that_of_the_copy_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert heliograph.__version__ == own
    monkeypatch.setattr(extras, "ROOT", tmp_path)  # a wheel ships no pyproject.toml
    find = extras.version.__wrapped__
    assert find() == metadata.version("heliograph")
    monkeypatch.setattr(extras, "NAME", "nowhere-at-all")
    assert find() == "unknown"
    assert extras.version() == own  # found once: every save says it


def imported_in(folder: Path, *options: str, named: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Import the package in another process that is started in a folder."""
    environment = {**os.environ, "PYTHONPATH": "" if named is None else str(named)}
    command = [sys.executable, *options, "-c", IMPORT]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """Return the parent folder of a checkout called `heliograph`."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/heliograph").symlink_to(ROOT)
    return tmp_path / "work"


def test_a_checkout_that_hides_the_installed_copy_is_announced(beside: Path, tmp_path: Path) -> None:
    """Python looks first in the current folder, and finds the checkout as the package."""
    installed = tmp_path / "site/heliograph"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    done = imported_in(beside, named=tmp_path / "site")
    assert done.stdout == f"{beside / 'heliograph/__init__.py'}\n"
    assert f"RuntimeWarning: `import heliograph` takes the folder {beside / 'heliograph'}, because" in done.stderr
    assert f"The installed copy in {installed} is not used." in done.stderr


def test_nothing_is_announced_where_one_copy_exists_or_the_folder_was_named(beside: Path, tmp_path: Path) -> None:
    alone = imported_in(beside, "-S")  # without the site-packages
    assert (alone.stdout, alone.stderr) == (f"{beside / 'heliograph/__init__.py'}\n", "")
    named = imported_in(beside, named=beside)
    assert (named.stdout, named.stderr) == (f"{beside / 'heliograph/__init__.py'}\n", "")
