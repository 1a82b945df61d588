"""Loading the weights in a file into a task or a module, and nothing else of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from ...events import Engine
from ...events.checks import check_path, known_names
from ..distributed.failure import WorkOutcome, on_main, outcome_of, values_of_ranks
from ..engines.options import modules_of
from ..engines.weights import (
    EVALUATED,
    check_fits,
    find_average,
    load_average,
    load_module,
    measured_average,
    plain_name,
    state_of,
)
from .state.frozen import own_weights
from .storage.manifest import MissingManifestError
from .storage.reader import read_manifest
from .weights_files import UNNAMED, WHICH, Of, WeightsFile, Which, find_weights, read_weights, view_of

T = TypeVar("T")
WRAPPERS = re.compile(r"^((module|model|_fsdp_wrapped_module)\.)+")
Pairs = dict[str, tuple[str, nn.Module]]  # by the name in the task: the name in the file, and the module


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What `load_weights` has loaded.

    Attributes:
        path: the file.
        modules: the names of the modules in it that were loaded; empty ones where the file holds one without a name.
        average: the plugin whose averaged weights they are, None for the trained ones.
        metrics: those that the run had when the file was written; empty for a file that is not a checkpoint.
        step: the optimizer steps by then, None for such a file.
        skipped: why newer checkpoints of the folder were not taken.
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
        task: a task, or a module alone: then that module of the file is loaded whose names and shapes it has.
        path: a checkpoint; a `.safetensors` file, or the index of several (`model.safetensors.index.json`); a file of
            `torch.save` with a module's `state_dict`, alone or in a dict, also of one that DDP, DataParallel or
            `torch.compile` wrapped; or a folder of checkpoints.
        average: None loads the weights that its validations were measured on: those that a plugin such as `EMA` has
            averaged, where it validates with them, else the trained ones. The name of such a plugin, `"ema"`, loads
            its average in any case; False loads the trained weights.
        which: in a folder, `last`, the newest intact checkpoint, which is the default; or `best`, by the metric of its
            `Checkpoint(monitor=...)`.
        module: load this module only, where the file holds several.
        run_name: in a folder with checkpoints of several runs, whose.

    Returns:
        The file, its metrics, and which of the weights in it were loaded.

    Raises:
        FileNotFoundError: there is no such file, or no checkpoint in the folder.
        ImportError: it is a `.safetensors` file, and that package is not installed.
        TypeError: the path is none, as `result.best_checkpoint` may be.
        ValueError: it is damaged, of other modules, or without that average; or it is not clear which one is meant.
    """
    check_path("load_weights(task, path)", path, "a file or a folder")
    return load_into(task, find_weights(Path(path), which, Of(run_name)), average=average, module=module)


def load_into(
    task: Any, file: WeightsFile, *, average: str | Literal[False] | None = None, module: str | None = None
) -> LoadedWeights:
    """Load the weights that were read from a file; see `load_weights`."""
    plugin = measured_average({"plugins": file.plugins}) if average is None else average or None
    try:
        file = _with_frozen(task, file)
        pairs = _pairs(task, file, module)
        modules = {of or name: each for name, (of, each) in pairs.items()}
        saved = {of or name: _fitted(each, file.modules[of]) for name, (of, each) in pairs.items()}
        check_fits(modules, saved)
        averages = _averages(file, plugin, modules)
        if plugin is not None:
            find_average(modules, averages, plugin)
        for name, each in modules.items():
            load_module(name, each, saved[name])
        if plugin is not None:
            load_average(modules, averages, plugin)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    names = tuple(of for of, _ in pairs.values())
    return LoadedWeights(file.path, names, plugin, dict(file.metrics), file.step, file.skipped)


def _with_frozen(task: Any, file: WeightsFile) -> WeightsFile:
    """Return the weights with the frozen ones that the file lacks: those of the task, if they are the same."""
    own = modules_of(task)
    alone = next(iter(own.values())) if len(own) == 1 else None
    found = {name: own_weights(name, own.get(name, alone), each) for name, each in file.frozen.items()}
    return replace(file, modules={name: {**each, **found.get(name, {})} for name, each in file.modules.items()})


def load_for_run(plugins: Iterable[Any], engine: Engine, task: Any, weights: Path | str, run_name: str) -> str:
    """Load what `weights=` of `Trainer.test` and the like names; return what was done, for the notes. A collective.

    Args:
        plugins: the trainer's: one that stores, such as `Checkpoint`, says where `best` and `last` are.
        engine: in its group; the modules are not wrapped yet.
        task: whose modules get the weights, for good.
        weights: `best`, `last`, or the path of a file or a folder.
        run_name: the name of the run that evaluates, whose checkpoints are meant where the plugin has written none.

    Raises:
        ValueError: no plugin stores, or several do; see `load_weights`.
    """
    check_path("weights=", weights, "a file or a folder, or 'best' or 'last'")
    read: list[WeightsFile] = []

    def look() -> Path:
        if weights in WHICH:
            folder, training = _where_saved(plugins, str(weights))
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"weights={weights!r} is the {weights} checkpoint in {folder}, and nothing was saved there yet: "
                    f"call fit before, or give the path of a file or a folder, weights='runs/x'."
                )
            of = Of(run_name) if training is None else Of(training=training)
            read.append(find_weights(folder, "best" if weights == "best" else "last", of))
        else:
            path = Path(weights)
            if not path.suffix and not os.path.lexists(path):
                known = known_names(str(weights), WHICH)
                raise FileNotFoundError(f"weights={str(weights)!r} is not a file or folder that is there.{known}")
            read.append(find_weights(path))
        return read[0].path

    path = on_main(engine, look)
    file, _ = share(engine, path, next(iter(read), None), partial(read_weights, path))
    loaded = load_into(task, file)
    skipped = "".join(f"; skipped: {line}" for line in loaded.skipped)
    return f"{EVALUATED} {loaded}, which stay in the task{skipped}"


def _where_saved(plugins: Iterable[Any], weights: str) -> tuple[Path, str | None]:
    """Return the folder of the one plugin that stores, and the id of the training that it has saved, if it has."""
    storing = [each for each in plugins if callable(getattr(each, "where_saved", None))]
    if weights == "best" and len(storing) > 1:
        storing = [each for each in storing if each.monitor is not None] or storing
    if len(storing) != 1:
        found = "none of its plugins stores any" if not storing else f"{len(storing)} of its plugins store some"
        raise ValueError(
            f"weights={weights!r} is the {weights} checkpoint of the trainer, and {found}: register one "
            f"Checkpoint('runs/x'), or give the path of a file or a folder, weights='runs/x'."
        )
    where: tuple[Path, str | None] = storing[0].where_saved()
    return where


def _pairs(task: Any, file: WeightsFile, module: str | None) -> Pairs:
    """Return which module gets which weights of a file.

    Raises:
        ValueError: the names do not match, or it is not clear.
    """
    own, saved = modules_of(task), file.modules
    if isinstance(task, nn.Module) and module not in own:
        (name, alone) = next(iter(own.items()))
        if module is None and saved.keys() == own.keys():
            return {name: (name, alone)}
        if module is None:
            fits = {each: (alone, saved[each]) for each in saved}
            return {name: (_only_fit(fits, "the module that was given"), alone)}
        return {name: (_known(module, saved, "The file holds no module"), alone)}
    if module is not None:
        target = own[_known(module, own, f"{type(task).__name__} has no module")]
        return {module: (UNNAMED if UNNAMED in saved else _known(module, saved, "The file holds no module"), target)}
    if UNNAMED in saved:
        fits = {each: (own[each], saved[UNNAMED]) for each in own}
        name = _only_fit(fits, "the weights in the file")
        return {name: (UNNAMED, own[name])}
    if saved.keys() != own.keys():
        both = sorted(own.keys() & saved.keys())
        choice = f"choose one, module={both[0]!r}, or " if both else ""
        raise ValueError(
            f"The file holds the modules {sorted(saved)}, the task has {sorted(own)}: {choice}use the task that wrote "
            f"it."
        )
    return {name: (name, each) for name, each in own.items()}


def _only_fit(candidates: Mapping[str, tuple[nn.Module, Mapping[str, Any]]], what: str) -> str:
    """Return the name of the one candidate whose module has the names and shapes of its weights."""
    if len(candidates) == 1:
        return next(iter(candidates))
    fitting, reasons = [], []
    for name, (module, weights) in candidates.items():
        try:
            check_fits({name: module}, {name: _fitted(module, weights)})
        except ValueError as error:
            reasons.append(str(error))
        else:
            fitting.append(name)
    if len(fitting) == 1:
        return fitting[0]
    if not candidates:
        raise ValueError("The task has no module that could be loaded.")
    some = f"{len(fitting)} fit {what}: {', '.join(fitting)}" if fitting else f"none fits {what}: {' '.join(reasons)}"
    raise ValueError(f"Of the modules {', '.join(sorted(candidates))}, {some}. Choose one, module={min(candidates)!r}.")


def _known(module: str, names: Iterable[str], what: str) -> str:
    if module not in names:
        raise ValueError(f"{what} {module!r}.{known_names(module, filter(None, names))}")
    return module


def _averages(file: WeightsFile, plugin: str | None, modules: Iterable[str]) -> dict[str, Any]:
    """Return the averaged weights of some modules, in the form of a state."""
    found = file.plugins.get(plugin or "") or {}
    if not found.get("weights"):
        return {"plugins": file.plugins}
    weights = {name: found["weights"][name] for name in modules if name in found["weights"]}
    return {"plugins": {**file.plugins, plugin: {**found, "weights": weights}}}


def _fitted(module: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return weights under the names of a module, tied weights under every name.

    What wraps a module (DDP, DataParallel, a LightningModule) adds to its names. Files in the safetensors format hold
    shared tensors once.
    """
    own = state_of(module)
    if own.keys() != weights.keys():
        names = {_bare(name): name for name in own}
        renamed = {names.get(_bare(name), name): value for name, value in weights.items()}
        weights = renamed if len(renamed) == len(weights) and len(names) == len(own) else weights
    if not any(isinstance(value, Tensor) and name not in weights for name, value in own.items()):
        return weights
    present = {view_of(own[name]): value for name, value in weights.items() if isinstance(own.get(name), Tensor)}
    shared = {
        name: present[view]
        for name, value in own.items()
        if isinstance(value, Tensor) and name not in weights and value.numel() and (view := view_of(value)) in present
    }
    return {**weights, **shared}


def _bare(name: str) -> str:
    """Return the name of a parameter without what wrappers of the whole module add."""
    return WRAPPERS.sub("", plain_name(name))


def share(engine: Engine, path: Path, value: T | None, read: Callable[[], T]) -> tuple[T, bool]:
    """Return on every rank what the main rank has read from a file, and whether it was sent. A collective.

    Ranks that find the very same file in that place read it; where one does not, the main rank sends what it has read.

    Args:
        engine: connects the ranks.
        path: the file.
        value: on the main rank, what is in it.
        read: reads it on the others.

    Raises:
        Exception: a rank cannot read it; on all of them.
    """
    is_sent = False
    if engine.world_size > 1:
        is_sent = len(set(engine.gather_objects(_checksum(path)))) > 1
        if is_sent:
            value = engine.broadcast(value)
        else:
            outcome = WorkOutcome(value) if engine.is_main else outcome_of(read)
            values_of_ranks(engine, WorkOutcome(error=outcome.error))
            value = outcome.value
    assert value is not None
    return value, is_sent


def _checksum(path: Path) -> str | None:
    """Return the digest in the manifest of a checkpoint, None where this rank does not see it."""
    try:
        return read_manifest(path).sha256 if path.is_file() else None
    except MissingManifestError:  # one of Helios, weights alone, or it is lost
        return f"{path.stat().st_size} bytes"
    except (OSError, ValueError):
        return None
