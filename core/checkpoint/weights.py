"""Weights in files: find and read them, load them into a task, export them for other programs."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...events import Engine
from ...events.checks import check_path, known_names
from ..distributed.outcomes import on_main
from ..engines.options import modules_of, plain_name, state_of
from ..engines.weights import (
    EVALUATED,
    EXTRA_STATE,
    check_fits,
    find_average,
    load_average,
    load_module,
    measured_average,
)
from ..system.extras import kind_of, require
from .compatibility import FROZEN, verified_weights
from .ranks import join_weights
from .schema import State
from .storage import inventory, reader
from .storage.files import read_small
from .storage.inventory import Manifests
from .storage.manifest import SUFFIX, Entry, MissingManifestError, SchemaError, best_first
from .storage.untrusted_files import read_foreign

Which = Literal["last", "best"]
WHICH: tuple[Which, ...] = ("last", "best")
SAFETENSORS = ".safetensors"
INDEX = ".json"  # of a model in several files, as in model.safetensors.index.json
LARGEST_INDEX = 2**26  # bytes
UNNAMED = ""  # the name of the module in a file that holds one module's weights and nothing else
logger = logging.getLogger("heliograph")


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The weights in a file.

    Attributes:
        path: the file.
        modules: the state of each module by its name, which is empty if the file holds one unnamed module.
        plugins: the states of the plugins, among them averaged weights.
        metrics: the metrics of the run when the file was written.
        step: the number of optimizer steps then; None if unknown.
        run_name: the run that wrote it; None if unknown.
        skipped: why newer checkpoints of the folder were skipped.
        frozen: the digests of weights that only the program has, by module and name.
    """

    path: Path
    modules: Mapping[str, Mapping[str, Any]]
    plugins: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    run_name: str | None = None
    skipped: tuple[str, ...] = ()
    frozen: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def chosen_average(self, average: str | Literal[False] | None) -> str | None:
        """Return the plugin whose averaged weights `average` of `load_weights` selects; None for trained weights."""
        return measured_average({"plugins": self.plugins}) if average is None else average or None


def find_weights(
    path: Path, which: Which | None = None, run_name: str | None = None, training: str | None = None
) -> WeightsFile:
    """Return the weights in a file, or in the last or the best checkpoint of a folder.

    The last is the newest intact one; skipped files are logged, and listed in `skipped`. The best belongs to the newest
    training, by the metric of its run; if it is damaged, no other one replaces it.

    Args:
        path: a file or a folder.
        which: which one in a folder; the last by default.
        run_name: the run, by the name that the program gave it or the prefix of its files; any by default.
        training: the id of the training; any by default.

    Raises:
        FileNotFoundError: there is no such file, or no checkpoint in the folder.
        OSError: it, or a file that may be a newer checkpoint, cannot be read.
        ValueError: it is damaged, holds no weights, or the choice is ambiguous.
    """
    if which is not None and which not in WHICH:
        raise ValueError(f"which= is 'last' or 'best', got {which!r}.")
    if not path.is_dir():
        if which is not None or run_name is not None:
            inventory.check_is_there(path)
            raise ValueError(f"which= and run_name= select a checkpoint in a folder, but {path} is a file.")
        return read_weights(path)
    manifests = Manifests(path)
    entries = _newest_training(manifests, run_name, training)
    if which == "best":
        return read_weights(_best(entries, path).path)
    entry, state, skipped = reader.newest(manifests, entries[0].family, entries[0].training)
    if entry is None or state is None:
        raise ValueError(f"No checkpoint in {path} is intact: {' '.join(skipped)}")
    for line in skipped:
        logger.warning("skipped: %s", line)
    return replace(_weights_in(state, entry.path), skipped=tuple(skipped))


def read_weights(path: Path) -> WeightsFile:
    """Return the weights in a file, verified by the manifest of a checkpoint or by the checksums in the file.

    Args:
        path: a checkpoint, with or without shards; a `.safetensors` file, or the index of several; or a file of
            `torch.save` with a module's `state_dict`, alone or in a dict.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: it is a `.safetensors` file, and that package is not installed.
        OSError: it cannot be read.
        ValueError: it is damaged, or holds no weights.
    """
    if path.suffix == SAFETENSORS:
        return WeightsFile(path, {UNNAMED: _read_safetensors(path)})
    if path.suffix == INDEX:
        return WeightsFile(path, {UNNAMED: _read_parts(path)})
    if path.suffix == SUFFIX:
        with suppress(MissingManifestError):  # then torch.save wrote it
            return _weights_in(reader.load(path), path)
    inventory.check_is_there(path)
    content = read_foreign(path)
    if isinstance(content, Mapping) and "schema" in content:
        raise MissingManifestError(path)
    return WeightsFile(path, _states_in(content, path))


def _weights_in(state: State, path: Path) -> WeightsFile:
    facts = state["metrics"], state["progress"]["steps"], state["run_name"]
    return WeightsFile(path, join_weights(state, path), state["plugins"], *facts, frozen=state.get(FROZEN, {}))


def _newest_training(manifests: Manifests, run_name: str | None, training: str | None) -> list[Entry]:
    files, folder = manifests.look(), manifests.folder
    entries = [file.entry for file in files if file.entry is not None]
    matching = [
        entry
        for entry in entries
        if run_name in (None, entry.family, entry.run_name) and training in (None, entry.training)
    ]
    if not matching:
        for file in files:
            if isinstance(file.problem, OSError | SchemaError):  # it may be the one
                raise file.problem
        whose = "" if run_name is None else f" of run {run_name!r}"
        names = {entry.family for entry in entries}
        available = f"Runs with checkpoints: {', '.join(sorted(names)) or 'none'}."
        raise FileNotFoundError(f"There is no checkpoint{whose} with a manifest in {folder}. {available}")
    if len(families := {entry.family for entry in matching}) > 1:
        raise ValueError(
            f"{folder} holds checkpoints of several runs, {', '.join(map(repr, sorted(families)))}: choose one, "
            f"run_name={min(families)!r}, or give the path of a file."
        )
    newest = max(matching, key=lambda entry: entry.order)
    return [entry for entry in matching if entry.training == newest.training]


def _best(entries: list[Entry], folder: Path) -> Entry:
    judged = [(entry, entry.judged_by) for entry in entries if entry.judged_by is not None]
    if not judged:
        raise ValueError(
            f"No checkpoint in {folder} is the best: none is ranked by a metric. Rank them with "
            f"Checkpoint({str(folder)!r}, keep_best=1, monitor='validation/loss'), or use the last one."
        )
    metric, mode, _ = judged[0][1]
    values = {entry: value for entry, (name, way, value) in judged if (name, way) == (metric, mode)}
    ranked = best_first(values, "max" if mode == "max" else "min")
    if not ranked or isnan(values[ranked[0]] or 0.0):
        raise ValueError(f"No checkpoint in {folder} is the best: {metric!r} was NaN at all of them.")
    return ranked[0]


def _states_in(content: Any, path: Path) -> Mapping[str, Mapping[str, Any]]:
    if _is_state(content):
        return {UNNAMED: content}
    values = content if isinstance(content, Mapping) else {}
    states = {str(name): value for name, value in values.items() if _is_state(value)}
    if not states:
        holds = f" with the keys {', '.join(map(str, list(values)[:10]))}" if values else ""
        raise ValueError(
            f"{path} holds {kind_of(content)}{holds}, not the state_dict of a module: save one with "
            f"torch.save(module.state_dict(), path)."
        )
    return states if len(states) > 1 else {UNNAMED: states.popitem()[1]}


def _is_state(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and any(isinstance(value, Tensor) for value in content.values())
        and all(
            isinstance(key, str) and (isinstance(value, Tensor) or key.endswith(EXTRA_STATE))
            for key, value in content.items()
        )
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    # a shared tensor is stored once; the metadata name it for the other names
    safetensors = require("safetensors", f"Reading {path.name}", extra="safetensors")
    inventory.check_is_there(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or is not a safetensors file: {error}.") from error
    for name, shared_with in metadata.items():
        if name not in tensors and shared_with in tensors:
            tensors[name] = tensors[shared_with]
    return tensors


def _read_parts(path: Path) -> dict[str, Tensor]:
    inventory.check_is_there(path)
    try:
        parts: dict[str, str] = dict(json.loads(read_small(path, LARGEST_INDEX))["weight_map"])
        files = {part: path.with_name(part) for part in parts.values()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of weights: its weight_map cannot be read ({error}).") from error
    if any(file.suffix == INDEX for file in files.values()):
        raise ValueError(f"{path} names an index in its weight_map: files of weights are expected.")
    tensors = {part: read_weights(file).modules.get(UNNAMED, {}) for part, file in files.items()}
    if missing := [f"{part} holds no {name!r}" for name, part in parts.items() if name not in tensors[part]]:
        raise ValueError(f"{path} does not match the files in its folder: {missing[0]}.")
    return {name: tensors[part][name] for name, part in parts.items()}


def view_of(value: Any) -> tuple[Any, ...]:
    # equal for all names of one shared tensor
    if not isinstance(value, Tensor) or not value.numel() or value.layout is not torch.strided:
        return (id(value),)
    return value.data_ptr(), value.shape, value.stride(), value.dtype


WRAPPERS = re.compile(r"^((module|model|_fsdp_wrapped_module)\.)+")
Pairs = dict[str, tuple[str, nn.Module]]  # by the name in the task: the name in the file, and the module


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The result of `load_weights`.

    Attributes:
        path: the file.
        modules: the names of the loaded modules in the file; an empty name if the file holds one unnamed module.
        average: the plugin whose averaged weights were loaded; None for the trained weights.
        metrics: the metrics of the run when the file was written; empty for a file that is not a checkpoint.
        step: the number of optimizer steps then; None for a file that is not a checkpoint.
        skipped: why newer checkpoints of the folder were skipped.
    """

    path: Path
    modules: tuple[str, ...]
    average: str | None
    metrics: Mapping[str, float]
    step: int | None
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        step = "" if self.step is None else f", of step {self.step}"
        average = "" if self.average is None else f", averaged by {self.average!r}"
        return f"{self.path}{step}{average}"


def load_weights(
    task: Any,
    path: Path | str,
    *,
    average: str | Literal[False] | None = None,
    which: Which | None = None,
    module: str | None = None,
    run_name: str | None = None,
) -> LoadedWeights:
    """Load weights, and nothing else, into the modules of a task.

    Nothing is loaded unless all of it fits.

    Args:
        task: a task, or a single module: then the module of the file with its names and shapes is loaded.
        path: a checkpoint; a `.safetensors` file, or the index of several (`model.safetensors.index.json`); a file of
            `torch.save` with a module's `state_dict`, alone or in a dict, also if DDP, DataParallel or `torch.compile`
            wrapped the module; or a folder of checkpoints.
        average: None loads the weights that the run validated with: averaged ones if a plugin such as `EMA` validates
            with them, else the trained ones. The name of such a plugin, for example `"ema"`, always loads its average.
            False loads the trained weights.
        which: in a folder, `last`, the newest intact checkpoint, which is the default; or `best`, by the metric of its
            `Checkpoint(monitor=...)`.
        module: load only this module, if the file holds several.
        run_name: the run whose checkpoint is loaded, if a folder has checkpoints of several runs.

    Returns:
        The file, its metrics, and which of its weights were loaded.

    Raises:
        FileNotFoundError: there is no such file, or no checkpoint in the folder.
        ImportError: it is a `.safetensors` file, and that package is not installed.
        TypeError: the path is None, for example because `result.best_checkpoint` is.
        ValueError: it is damaged, has other modules or no such average, or the choice is ambiguous.
    """
    check_path("load_weights(task, path)", path, "a file or a folder")
    return load_into(task, find_weights(Path(path), which, run_name), average=average, module=module)


def load_into(
    task: Any, file: WeightsFile, *, average: str | Literal[False] | None = None, module: str | None = None
) -> LoadedWeights:
    plugin = file.chosen_average(average)
    try:
        file = _with_frozen(task, file)
        pairs = _pairs(task, file, module)
        modules = {source or name: target for name, (source, target) in pairs.items()}
        saved = {source or name: _fitted(target, file.modules[source]) for name, (source, target) in pairs.items()}
        check_fits(modules, saved)
        averages = _averages(file, plugin, modules)
        if plugin is not None:
            find_average(modules, averages, plugin)
        for name, target in modules.items():
            load_module(name, target, saved[name])
        if plugin is not None:
            load_average(modules, averages, plugin)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    names = tuple(source for source, _ in pairs.values())
    return LoadedWeights(file.path, names, plugin, dict(file.metrics), file.step, file.skipped)


def _with_frozen(task: Any, file: WeightsFile) -> WeightsFile:
    modules = modules_of(task)
    alone = next(iter(modules.values())) if len(modules) == 1 else None
    weights = {name: verified_weights(name, modules.get(name, alone), digests) for name, digests in file.frozen.items()}
    return replace(file, modules={name: {**state, **weights.get(name, {})} for name, state in file.modules.items()})


def load_for_run(plugins: Iterable[Any], engine: Engine, task: Any, weights: Path | str, run_name: str) -> str:
    """Load the weights that `weights=` of `Trainer.test` and similar names; return a note. A collective.

    Args:
        plugins: the trainer's plugins; one of them stores checkpoints, such as `Checkpoint`.
        engine: in its group; the modules are not wrapped yet.
        task: its modules get the weights permanently.
        weights: `best`, `last`, or the path of a file or a folder.
        run_name: the name of the run that evaluates; its checkpoints are used if the plugin has written none.

    Raises:
        ValueError: no plugin stores checkpoints, or several do; see `load_weights`.
    """
    check_path("weights=", weights, "a file or a folder, or 'best' or 'last'")
    read: list[WeightsFile] = []

    def look() -> Path:
        if weights in WHICH:
            folder, training = _where_saved(plugins, str(weights))
            whose = {"run_name": run_name} if training is None else {"training": training}
            read.append(find_weights(folder, "best" if weights == "best" else "last", **whose))
        else:
            path = Path(weights)
            if not path.suffix and not os.path.lexists(path):
                suggestion = known_names(str(weights), WHICH)
                raise FileNotFoundError(f"weights={str(weights)!r} is neither a file nor a folder.{suggestion}")
            read.append(find_weights(path))
        return read[0].path

    path = on_main(engine, look)
    file, _ = reader.shared_by_ranks(engine, path, next(iter(read), None), partial(read_weights, path))
    loaded = load_into(task, file)
    skipped = "".join(f"; skipped: {line}" for line in loaded.skipped)
    return f"{EVALUATED} {loaded}, which stay in the task{skipped}"


def _where_saved(plugins: Iterable[Any], weights: str) -> tuple[Path, str | None]:
    storing = [plugin for plugin in plugins if callable(getattr(plugin, "where_saved", None))]
    if weights == "best" and len(storing) > 1:
        storing = [plugin for plugin in storing if plugin.monitor is not None] or storing
    if len(storing) != 1:
        raise ValueError(
            f"weights={weights!r} is the {weights} checkpoint of the trainer, but {len(storing)} of its plugins store "
            f"checkpoints: register one Checkpoint('runs/x'), or give the path of a file or a folder, "
            f"weights='runs/x'."
        )
    where: tuple[Path, str | None] = storing[0].where_saved()
    return where


def _pairs(task: Any, file: WeightsFile, module: str | None) -> Pairs:
    targets, saved = modules_of(task), file.modules
    if isinstance(task, nn.Module) and module not in targets:
        (name, alone) = next(iter(targets.items()))
        if module is not None:
            return {name: (_check_known(module, saved, "The file holds no module"), alone)}
        if saved.keys() != targets.keys():
            fits = {source: (alone, weights) for source, weights in saved.items()}
            return {name: (_only_fit(fits, "the given module"), alone)}
    if module is not None:
        target = targets[_check_known(module, targets, f"{type(task).__name__} has no module")]
        source = UNNAMED if UNNAMED in saved else _check_known(module, saved, "The file holds no module")
        return {module: (source, target)}
    if UNNAMED in saved:
        fits = {name: (target, saved[UNNAMED]) for name, target in targets.items()}
        name = _only_fit(fits, "the weights in the file")
        return {name: (UNNAMED, targets[name])}
    if saved.keys() != targets.keys():
        raise ValueError(
            f"The file holds the modules {sorted(saved)}, the task has {sorted(targets)}: choose one that both have "
            f"with module=, or use the task that wrote the file."
        )
    return {name: (name, target) for name, target in targets.items()}


# Returns the name of the one candidate whose module has the names and shapes of its weights.
def _only_fit(candidates: Mapping[str, tuple[nn.Module, Mapping[str, Any]]], target: str) -> str:
    if len(candidates) == 1:
        return next(iter(candidates))
    fitting, problems = [], []
    for name, (module, weights) in candidates.items():
        try:
            check_fits({name: module}, {name: _fitted(module, weights)})
            fitting.append(name)
        except ValueError as error:
            problems.append(str(error))
    if len(fitting) == 1:
        return fitting[0]
    problem = f"None of the modules {', '.join(sorted(candidates))} fits {target}: {' '.join(problems)}"
    if fitting:
        problem = f"{len(fitting)} modules fit {target}: {', '.join(fitting)}."
    raise ValueError(f"{problem} Choose one with module=.")


def _check_known(module: str, names: Iterable[str], message: str) -> str:
    if module not in names:
        raise ValueError(f"{message} {module!r}.{known_names(module, filter(None, names))}")
    return module


def _averages(file: WeightsFile, plugin: str | None, modules: Iterable[str]) -> dict[str, Any]:
    average = file.plugins.get(plugin or "") or {}
    if not average.get("weights"):
        return {"plugins": file.plugins}
    weights = {name: average["weights"][name] for name in modules if name in average["weights"]}
    return {"plugins": {**file.plugins, plugin: {**average, "weights": weights}}}


def _fitted(module: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    # Returns weights under the names of a module, tied weights under every name. Wrappers of a module (DDP,
    # DataParallel, a LightningModule) add to its names, and safetensors files hold shared tensors once.
    state = state_of(module)
    if state.keys() != weights.keys():
        names = {_bare(name): name for name in state}
        renamed = {names.get(_bare(name), name): value for name, value in weights.items()}
        weights = renamed if len(renamed) == len(weights) and len(names) == len(state) else weights
    if not any(isinstance(value, Tensor) and name not in weights for name, value in state.items()):
        return weights
    present = {view_of(state[name]): value for name, value in weights.items() if isinstance(state.get(name), Tensor)}
    shared = {
        name: present[view]
        for name, value in state.items()
        if isinstance(value, Tensor) and name not in weights and value.numel() and (view := view_of(value)) in present
    }
    return {**weights, **shared}


def _bare(name: str) -> str:
    return WRAPPERS.sub("", plain_name(name))
