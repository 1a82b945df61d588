"""`heliograph.spi`: public names for authors of larger plugins, imported when they are first used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import heliograph
import pytest
from heliograph import spi

ROOT = Path(heliograph.__file__).parent
STUB = ast.parse((ROOT / "spi.pyi").read_text(encoding="utf-8"))
NAMES = sorted(
    alias.asname for node in ast.walk(STUB) if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname
)


def test_there_are_at_most_60_names() -> None:
    assert dir(spi) == NAMES
    assert len({*NAMES, "lazy_names"}) <= 60


@pytest.mark.parametrize("name", NAMES)
def test_every_name_can_be_imported(name: str) -> None:
    assert getattr(spi, name) is not None
    assert getattr(spi, name) is getattr(spi, name)


def test_the_page_documents_every_name() -> None:
    page = (ROOT / "docs/developers/spi.md").read_text(encoding="utf-8")
    assert {*NAMES, "lazy_names"} <= set(re.findall(r"`(\w+)`", page))


def test_no_name_is_at_the_front_door_too() -> None:
    assert not {*NAMES, "lazy_names"} & set(dir(heliograph))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(spi, "no_such_name")  # noqa: B009  # type checkers know that it is missing


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, heliograph.spi; print('torch' in sys.modules, 'heliograph.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_lazy_names_reads_the_stub_beside_a_module(tmp_path: Path) -> None:
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from heliograph.spi import lazy_names\n__getattr__, __dir__ = lazy_names(__name__, __file__)\n"
    )
    (package / "__init__.pyi").write_text("from .home import answer as answer\nfrom .home import first as renamed\n")
    (package / "home.py").write_text("answer = 42\nfirst = 1\n")
    code = (
        "import sys, lazily; print('lazily.home' in sys.modules, dir(lazily), lazily.answer, lazily.renamed); "
        "from lazily import *; print(answer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False ['answer', 'renamed'] 42 1\n42\n"
