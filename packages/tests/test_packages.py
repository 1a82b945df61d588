"""Packages import public names of the kernel, and the private ones in a list that only gets shorter."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import heliograph
import pytest
from heliograph.packages.tests.facts import assert_facts
from heliograph.plugins.first_party import PACKAGES as FIRST_PARTY
from heliograph.plugins.providers import ENTRY_POINTS, NEEDS
from heliograph.plugins.providers import NAMES as PROVIDED

PACKAGES = Path(__file__).parents[1]
ROOT = PACKAGES.parent
NAMES = sorted(path.parent.name for path in PACKAGES.glob("*/pyproject.toml"))
DOORS = ("heliograph", "heliograph.events", "heliograph.plugins", "heliograph.spi")
# Each is a fault in the design of the kernel. Remove a name from the list when nothing needs it; never add one.
PRIVATE = """
    builtin_callbacks.checkpoint.folder.reasons_to_keep builtin_callbacks.checkpoint.resume.UNSAVED_FORK
    builtin_callbacks.checkpoint.resume.share_state builtin_callbacks.trackers.AXES
    core.checkpoint.ranks.gather_rank_parts core.checkpoint.ranks.join_shards core.checkpoint.ranks.select_rank_part
    core.checkpoint.storage.files.prepare_folder core.checkpoint.storage.files.write_whole
    core.checkpoint.storage.untrusted_files.read_foreign core.checkpoint.weights.WeightsFile
    core.checkpoint.weights.find_weights core.checkpoint.weights.view_of core.context.RunContext
    core.context.RunVerbs core.data.generators.isolated core.data.generators.states core.data.keyed.KeyedGenerators
    core.data.loaders.evaluation_loader core.data.loaders.is_dataset core.data.loaders.make_loader
    core.data.loaders.params_of_one_process core.data.sizes.Share core.data.source.FactsDataset
    core.data.source.Reading core.data.source.Source core.data.source.Sourced core.data.training_data.TrainingData
    core.distributed.failure.Carried core.distributed.failure.ProcessFailure core.distributed.launcher.KeptRanks
    core.distributed.launcher.child_queue core.distributed.launcher.environment
    core.distributed.shared_control.SharedControl core.engines.options.EngineOptions core.engines.weights.check_fits
    core.engines.weights.load_module core.loop.publish core.metrics.means.Means core.metrics.fetched.Fetched
    core.objects.program.plugin_options core.objects.program.show_both core.rehearsal.objects.KeptObjects
    core.run_end.close_run core.settings.FitOptions core.settings.Settings core.settings.check_name
    core.stepping.changes.refuse_change core.system.numbered_files.file_path core.system.numbered_files.find_numbered
    core.system.numbered_files.is_text core.system.numbered_files.make_numbered core.system.numbered_files.name_other
    core.system.signals.SignalHook
"""


def project(folder: Path) -> dict[str, Any]:
    """Return the `project` table of a distribution."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def imported(package: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every absolute import in the sources of a package."""
    for path in sorted((PACKAGES / package / f"heliograph_{package}").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)


def private_names(package: str) -> set[str]:
    """Return the private names of the kernel that a package imports, without `heliograph.`."""
    of_kernel = {(module, name) for module, name in imported(package) if module.split(".")[0] == "heliograph"}
    return {f"{module}.{name}".removeprefix("heliograph.") for module, name in of_kernel if module not in DOORS}


def test_the_table_of_first_party_packages_is_complete() -> None:
    assert sorted(FIRST_PARTY) == NAMES


def test_the_list_of_private_names_holds_what_packages_use() -> None:
    assert set().union(*map(private_names, NAMES)) - {""} == set(PRIVATE.split())


def test_the_list_of_private_names_only_gets_shorter() -> None:
    assert len(PRIVATE.split()) <= 54


@pytest.mark.parametrize("package", NAMES)
def test_packages_declare_the_packages_that_they_import(package: str) -> None:
    declared = {each.partition("==")[0].replace("-", "_") for each in project(PACKAGES / package)["dependencies"]}
    used = {module.split(".")[0] for module, _ in imported(package)}
    assert {each for each in used if each.startswith("heliograph")} <= declared | {f"heliograph_{package}"}


@pytest.mark.parametrize("package", NAMES)
def test_what_to_install_first_is_what_a_package_depends_on(package: str) -> None:
    names = [each.partition("==")[0] for each in project(PACKAGES / package)["dependencies"]]
    assert tuple(name.removeprefix("heliograph-") for name in names if name.startswith("heliograph-")) == NEEDS.get(
        package, ()
    )


@pytest.mark.parametrize("package", NAMES)
def test_packages_import_public_names_of_each_other(package: str) -> None:
    others = {module for module, _ in imported(package) if module.startswith("heliograph_")}
    assert {each for each in others if "." in each and not each.startswith(f"heliograph_{package}.")} == set()


@pytest.mark.parametrize("package", NAMES)
def test_all_distributions_have_one_version(package: str) -> None:
    version = project(ROOT)["version"]
    assert project(PACKAGES / package)["version"] == version
    first_party = [each for each in project(PACKAGES / package)["dependencies"] if each.startswith("heliograph")]
    assert all(each.endswith(f"=={version}") for each in first_party)
    assert distribution(f"heliograph-{package}").version == version


@pytest.mark.parametrize("package", NAMES)
def test_no_module_has_the_name_of_a_public_function(package: str) -> None:
    """Importing the module would put it in the function's place."""
    module = importlib.import_module(f"heliograph_{package}")
    submodules = {path.stem for path in Path(module.__file__ or "").parent.iterdir()}
    assert not submodules & set(getattr(module, "__all__", ()))


@pytest.mark.parametrize("package", NAMES)
def test_the_readme_has_an_example_and_says_how_to_install(package: str) -> None:
    readme = (PACKAGES / package / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^pip install \. .*\./packages/{package}\b", readme, re.MULTILINE)
    assert re.search(r"^```(python|bash|toml|yaml)$", readme, re.MULTILINE)


@pytest.mark.parametrize("group", ENTRY_POINTS)
def test_the_table_of_entry_points_is_complete(group: str) -> None:
    points = {
        name: package
        for package in NAMES
        for name in project(PACKAGES / package).get("entry-points", {}).get(group, {})
    }
    assert points == ENTRY_POINTS[group]


@pytest.mark.parametrize("package", NAMES)
def test_the_table_of_names_is_complete(package: str) -> None:
    names = {name for name, provider in PROVIDED.items() if provider == package} - {"ray"}
    module = importlib.import_module(f"heliograph_{package}")
    public = {name for name in dir(module) if name[0] != "_" and not isinstance(getattr(module, name), ModuleType)}
    assert public - names == set()


@pytest.mark.parametrize("name", sorted(PROVIDED))
def test_a_name_of_a_package_says_where_it_is(name: str) -> None:
    module = f"heliograph_{PROVIDED[name]}"
    with pytest.raises(AttributeError, match=f"heliograph has no '{name}'.*{module}"):
        getattr(heliograph, name)
    assert name == "ray" or hasattr(importlib.import_module(module), name)


MISSING = """
import importlib.abc, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("heliograph_"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hide())
sys.path_importer_cache.clear()
import importlib.util
importlib.util.find_spec = lambda name, package=None: None
"""


def test_an_import_of_a_missing_package_says_what_to_install() -> None:
    code = f"{MISSING}\nfrom heliograph import Recorder"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert_facts(
        done.stderr.splitlines()[-1],
        "ImportError: ",
        "'Recorder'",
        "heliograph-recorder",
        "pip install ./packages/recorder",
    )
