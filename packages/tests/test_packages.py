"""Packages use what the kernel offers: public names, and those that are listed here, which are to become fewer."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1]
NAMES = sorted(path.parent.name for path in PACKAGES.glob("*/pyproject.toml"))
DOORS = ("heliograph", "heliograph.events", "heliograph.events.types", "heliograph.plugins", "heliograph.spi")
# Each is a fault in the kernel's design, or a function that belongs into its package: see docs/spi.md.
PRIVATE = """
    builtin_callbacks.checkpoint.repeated.ring_buffer.Row builtin_callbacks.checkpoint.repeated.rows.Rows
    builtin_callbacks.checkpoint.repeated.suspects.HIDDEN_STATE
    builtin_callbacks.checkpoint.repeated.suspects.describe_repeats
    builtin_callbacks.checkpoint.repeated.suspects.listeners_to_epoch_start
    builtin_callbacks.checkpoint.repeated.words.distinguish builtin_callbacks.checkpoint.repeated.words.what_differs
    builtin_callbacks.checkpoint.resume.UNSAVED_FORK builtin_callbacks.checkpoint.resume.share_state
    builtin_callbacks.schedules.Schedule core.checkpoint.conversion core.checkpoint.state.ranks.gather_rank_parts
    core.checkpoint.state.ranks.join_shards core.checkpoint.state.ranks.select_rank_part
    core.checkpoint.state.rates.LISTS core.checkpoint.state.rates.RATES core.checkpoint.state.rates.scale_group
    core.checkpoint.storage core.checkpoint.storage.files.SYSTEM core.checkpoint.storage.files.prepare_folder
    core.checkpoint.storage.files.write_whole core.checkpoint.storage.manifest.SUFFIX
    core.checkpoint.storage.manifest.decode core.checkpoint.storage.manifest.manifest_path
    core.checkpoint.storage.manifest.run_part core.checkpoint.storage.manifest.shards_path
    core.checkpoint.storage.reader
    core.checkpoint.unseen.attributes.package_of core.checkpoint.unseen.program.affects_training
    core.checkpoint.unseen.program.plugin_options core.checkpoint.unseen.values.MISSING
    core.checkpoint.unseen.values.Value core.checkpoint.unseen.values.differing core.checkpoint.unseen.values.encode
    core.checkpoint.unseen.values.equal core.checkpoint.unseen.values.show_both core.context.RunContext
    core.context.part_of core.data.draws.generators.isolated core.data.draws.held_generators.HeldGenerators
    core.data.draws.memory.LEGACY core.data.draws.memory.Memory core.data.draws.memory.PYTHON
    core.data.draws.memory.State core.data.draws.memory.TORCH core.data.draws.memory.of_normal
    core.data.draws.memory.of_python core.data.draws.memory.of_torch core.data.draws.rng
    core.data.draws.users_code.attributes_of core.data.loaders.evaluation_loader
    core.data.loaders.is_dataset core.data.loaders.make_loader core.data.loaders.params_of_one_process
    core.data.order.shares.ALONE core.data.order.shares.Share core.data.order.sizes.length_of
    core.data.sources.contract.Known core.data.sources.contract.Sourced core.data.sources.stateless.Reading
    core.data.sources.stateless.Stateless core.data.sources.stateless.Worth core.data.training_data.TrainingData
    core.distributed.launch.exceptions.Carried core.distributed.launch.exceptions.ProcessFailure
    core.distributed.launch.exceptions.carry core.distributed.launch.exceptions.raise_first
    core.distributed.launch.exceptions.rebuild core.distributed.launch.launcher.KeptRanks
    core.distributed.launch.launcher.RankValues core.distributed.launch.processes.environment
    core.distributed.launch.queue.child_queue core.distributed.launch.queue.open_queue
    core.distributed.ranks.failure.chain core.distributed.ranks.shared_control.SharedControl
    core.distributed.ranks.shared_control.SharedRun core.engines.options.EngineOptions
    core.engines.parallel.processes.ProcessEngine core.engines.weights.check_fits core.engines.weights.load_module
    core.evaluation.EVENTS core.length.epochs_done core.length.part_done core.loop.BACKWARD_END core.loop.BATCH_END
    core.loop.BATCH_START core.loop.FORWARD_END core.loop.GRADIENTS_READY core.loop.SHOULD_STOP core.loop.STEP_END
    core.loop.publish core.metrics.log_rows.LONGEST core.metrics.means.Means core.metrics.means.added
    core.metrics.payload_verbs.PayloadVerbs core.metrics.values.Metrics core.metrics.window_losses.Fetched
    core.rehearsal.objects.KeptObjects core.rehearsal.stage.cannot_be_redirected core.rehearsal.stage.left_out
    core.rehearsal.stage.redirect core.result.check_line core.run_end.close_run core.settings.FitOptions
    core.settings.NEEDS core.settings.Settings core.settings.check_name core.stepping.changes.RefusedChangeError
    core.stepping.changes.check_rate core.stepping.changes.check_switch core.stepping.optimizers.SINGLE
    core.stepping.optimizers.trained_parameters core.system.errors.SEEN core.system.numbered_files.find_numbered
    core.system.numbered_files.make_numbered core.system.signals.SignalHook core.task.Loss events.catalogue
    events.guarantee.verified events.guarantee.weaker plugins.entry.ASKED plugins.environment.OF_RUN
    plugins.filters.plan_filters plugins.first_party.is_first_party plugins.isolation.isolation plugins.marks.Marker
"""


def imported(package: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every absolute import in the sources of a package."""
    for path in sorted((PACKAGES / package / f"heliograph_{package}").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)


@pytest.mark.parametrize("package", NAMES)
def test_packages_import_public_names(package: str) -> None:
    of_kernel = {(module, name) for module, name in imported(package) if module.split(".")[0] == "heliograph"}
    private = {f"{module}.{name}".removeprefix("heliograph.") for module, name in of_kernel if module not in DOORS}
    private |= {name for module, name in of_kernel if module == "heliograph" and name in ("core", "builtin_callbacks")}
    assert private <= set(PRIVATE.split())


def test_the_list_of_private_names_is_no_longer_than_needed() -> None:
    used = {f"{module}.{name}".removeprefix("heliograph.") for each in NAMES for module, name in imported(each)}
    assert set(PRIVATE.split()) <= used


@pytest.mark.parametrize("package", NAMES)
def test_packages_say_which_packages_they_need(package: str) -> None:
    project = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    said = {each.partition("==")[0].replace("-", "_") for each in project["dependencies"]}
    used = {module.split(".")[0] for module, _ in imported(package)}
    assert {each for each in used if each.startswith("heliograph")} <= said | {f"heliograph_{package}"}


@pytest.mark.parametrize("package", NAMES)
def test_packages_use_public_names_of_each_other(package: str) -> None:
    others = {module for module, _ in imported(package) if module.startswith("heliograph_")}
    assert {each for each in others if "." in each and not each.startswith(f"heliograph_{package}.")} == set()
