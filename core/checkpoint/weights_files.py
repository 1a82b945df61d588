"""Files that hold weights: found in a folder of checkpoints, read, and written for programs without heliograph."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...events.checks import known_names
from ..engines.weights import EXTRA_STATE, measured_average
from ..system.extras import kind_of, require, version
from .foreign_files import as_plain, read_with_stand_ins
from .state.compaction import compacted
from .state.frozen import FROZEN
from .state.ranks import join_weights
from .storage import reader
from .storage.files import SYSTEM, Files, megabytes, write_whole
from .storage.folder import Manifests
from .storage.manifest import SUFFIX, Entry, MissingManifestError, SchemaError, best_first
from .storage.untrusted_files import check_content, read_small

Which = Literal["last", "best"]
WHICH: tuple[Which, ...] = ("last", "best")
SAFETENSORS = ".safetensors"
INDEX = ".json"  # of a model in several files, as in model.safetensors.index.json
LARGEST_INDEX = 2**26  # bytes
UNNAMED = ""  # the name of the module in a file that holds one module's weights and nothing else
TRIES = 3  # a run that still trains may remove a checkpoint between the listing and the reading
logger = logging.getLogger("heliograph")
TORCH = (".pth", ".pt")


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The weights in a file.

    Attributes:
        path: the file.
        modules: the state of each module by its name, which is empty where the file holds one module and no name.
        plugins: the states of the plugins, among them averaged weights.
        metrics: those that the run had when the file was written.
        step: the optimizer steps by then, None where that is not known.
        run_name: the run that wrote it, None where that is not known.
        skipped: why newer checkpoints of the folder were not taken.
        frozen: the digests of weights that the file lacks, by module and name: the program has them.
    """

    path: Path
    modules: Mapping[str, Mapping[str, Any]]
    plugins: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    run_name: str | None = None
    skipped: tuple[str, ...] = ()
    frozen: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Of:
    """Whose checkpoints are meant; everybody's where neither is given.

    Attributes:
        run_name: those of this run, by the name that the program gave it or that its files have.
        training: those of the training with this id.
    """

    run_name: str | None = None
    training: str | None = None

    def __contains__(self, entry: Entry) -> bool:
        if self.training is not None:
            return entry.training == self.training
        return self.run_name in (None, entry.family, entry.run_name)


EVERYBODY = Of()


def find_weights(path: Path, which: Which | None = None, of: Of = EVERYBODY) -> WeightsFile:
    """Return the weights in a file, or those of the last or the best checkpoint in a folder.

    The last is the newest intact one; what is skipped for it is logged, and listed in `skipped`. The best is that of
    the newest training, by the metric that its run chose it by; if that is damaged, no other one is taken for it.

    Args:
        path: a file or a folder.
        which: in a folder, which one; the last by default.
        of: in a folder with checkpoints of several runs, whose.

    Raises:
        FileNotFoundError: there is no such file, or no checkpoint in the folder.
        OSError: the system refuses to read it, or what may be a newer checkpoint.
        ValueError: it is damaged, holds no weights, or it is not clear which one is meant.
    """
    if which is not None and which not in WHICH:
        raise ValueError(f"which= is 'last' or 'best', got {which!r}.")
    if not path.is_dir():
        if which is not None or of.run_name is not None:
            reader.check_is_there(path)
            raise ValueError(f"which= and run_name= choose in a folder, and {path} is a file.")
        return read_weights(path)
    for _ in range(TRIES):
        skipped: list[str] = []
        candidates = _candidates(path, which or "last", of, skipped)
        for entry in candidates:
            try:
                found = read_weights(entry.path)
            except FileNotFoundError:  # just removed: list the folder again
                break
            except SchemaError:
                raise
            except ValueError as error:
                skipped.append(str(error))
                logger.warning("skipped: %s", error)
            else:
                return replace(found, skipped=tuple(skipped))
        else:
            raise ValueError(f"No checkpoint that could be taken from {path} is intact: {' '.join(skipped)}")
    raise FileNotFoundError(f"The checkpoints in {path} are removed faster than they can be read: give a file.")


def read_weights(path: Path) -> WeightsFile:
    """Return the weights in a file, verified by the manifest of a checkpoint, else by the checksums in the file.

    Args:
        path: a checkpoint, with or without shards; a `.safetensors` file, or the index of several; or a
            file of `torch.save` with a module's `state_dict`, alone or in a dict.

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
    if path.suffix != SUFFIX or not _has_manifest(path):
        reader.check_is_there(path)
        content = as_plain(read_with_stand_ins(path))
        check_content(content, path)
        if path.suffix != SUFFIX or not isinstance(content, Mapping) or "schema" not in content:
            return WeightsFile(path, _states_in(content, path))
    state = reader.load(path)
    modules = join_weights(state, path)
    facts = state["metrics"], state["progress"]["steps"], state["run_name"]
    return WeightsFile(path, modules, state["plugins"], *facts, frozen=state.get(FROZEN, {}))


def _candidates(folder: Path, which: Which, of: Of, skipped: list[str]) -> list[Entry]:
    """Return the checkpoints to try, in this order: the newest first, or the best alone."""
    newest = _newest_training(folder, of, skipped)
    if which == "last":
        return newest
    judged = [(each, each.judged_by) for each in newest if each.judged_by is not None]
    if not judged:
        raise ValueError(
            f"No checkpoint in {folder} is the best: none was judged by a metric. Let the run choose, as in "
            f"Checkpoint({str(folder)!r}, keep_best=1, monitor='validation/loss'), or take the last one instead."
        )
    metric, mode, _ = judged[0][1]
    values = {each: value for each, (name, way, value) in judged if (name, way) == (metric, mode)}
    ranked = best_first(values, "max" if mode == "max" else "min")
    if not ranked or isnan(values[ranked[0]] or 0.0):
        raise ValueError(f"No checkpoint in {folder} is the best: {metric!r} was not a number at any of them.")
    return ranked[:1]


def _newest_training(folder: Path, of: Of, skipped: list[str]) -> list[Entry]:
    """Return the checkpoints of the newest training in a folder, the newest first."""
    manifests = Manifests(folder)
    found = manifests.look()
    entries = [each.entry for each in found if each.entry is not None]
    own = [each for each in entries if each in of]
    for each in found:
        is_candidate = None in (of.run_name, each.run_name) or each.run_name == of.run_name
        if isinstance(each.problem, OSError | SchemaError) and is_candidate:
            raise each.problem
        if each.problem is not None and not (isinstance(each.problem, MissingManifestError) and _is_foreign(each.path)):
            logger.warning("skipped: %s", each.problem)
            skipped.append(str(each.problem))
    names = sorted({each.family for each in entries})
    if not own:
        whose = "" if of.run_name is None else f" of run {of.run_name!r}"
        known = f"Runs that have some: {', '.join(names) or 'none'}."
        raise FileNotFoundError(f"There is no checkpoint{whose} with a manifest in {folder}. {known}")
    if len(families := {each.family for each in own}) > 1:
        raise ValueError(
            f"{folder} holds checkpoints of several runs, {', '.join(map(repr, sorted(families)))}: choose one, "
            f"run_name={min(families)!r}, or give the path of a file."
        )
    own.sort(key=lambda each: each.order, reverse=True)
    return [each for each in own if each.training == own[0].training]


def _has_manifest(path: Path) -> bool:
    try:
        reader.read_manifest(path)
    except MissingManifestError:
        return False
    except (OSError, ValueError):  # said when the file is read
        return path.exists()
    return True


def _is_foreign(path: Path) -> bool:
    """Return whether a file is not named as a run names its checkpoints."""
    return "_epoch_" not in path.name


def _states_in(content: Any, path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the state of a module that a file holds, alone or in a dict; several by their names.

    Raises:
        ValueError: there is none.
    """
    if _is_state(content):
        return {UNNAMED: content}
    values = content if isinstance(content, Mapping) else {}
    states = {str(name): value for name, value in values.items() if _is_state(value)}
    if not states:
        holds = f" with the keys {', '.join(map(str, list(values)[:10]))}" if values else ""
        raise ValueError(
            f"{path} holds {kind_of(content)}{holds}, and no state_dict of a module: write that, as in "
            f"torch.save(module.state_dict(), path)."
        )
    return states if len(states) > 1 else {UNNAMED: states.popitem()[1]}


def _is_state(content: Any) -> bool:
    """Return whether this is what a module's `state_dict` returns."""
    return (
        isinstance(content, Mapping)
        and any(isinstance(value, Tensor) for value in content.values())
        and all(
            isinstance(key, str) and (isinstance(value, Tensor) or key.endswith(EXTRA_STATE))
            for key, value in content.items()
        )
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a `.safetensors` file; a name that its writer left out for another shares that tensor."""
    safetensors = require("safetensors", f"Reading {path.name}", extra="safetensors")
    reader.check_is_there(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or is not a safetensors file: {error}.") from error
    for name, kept in metadata.items():
        if name not in tensors and kept in tensors:
            tensors[name] = tensors[kept]
    return tensors


def _read_parts(path: Path) -> dict[str, Tensor]:
    """Return the tensors in the files that an index of `save_pretrained` names, which are beside it."""
    reader.check_is_there(path)
    try:
        parts: dict[str, str] = dict(json.loads(read_small(path, LARGEST_INDEX))["weight_map"])
        files = {part: path.with_name(part) for part in parts.values()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of files beside it: its weight_map cannot be read ({error}).") from error
    if any(file.suffix == INDEX for file in files.values()):
        raise ValueError(f"{path} names an index in its weight_map, where files of weights are expected.")
    tensors = {part: read_weights(file).modules.get(UNNAMED, {}) for part, file in files.items()}
    if missing := [f"{part} holds no {name!r}" for name, part in parts.items() if name not in tensors[part]]:
        raise ValueError(f"{path} does not match the files beside it: {missing[0]}.")
    return {name: tensors[part][name] for name, part in parts.items()}


def export_weights(
    file: WeightsFile,
    out: Path,
    *,
    module: str | None = None,
    average: str | Literal[False] | None = None,
    overwrite: bool = False,
    files: Files = SYSTEM,
) -> str:
    """Write the weights of one module, as its `state_dict()` has them; return what was written, in words.

    Args:
        file: the weights.
        out: a `.safetensors` file, or a `.pth` or `.pt` file for `torch.load`; complete or not written at all.
        module: which one, where the file holds several.
        average: as in `load_weights`.
        overwrite: whether a file of that name may be replaced.
        files: the operations on files.

    Raises:
        FileExistsError: there is such a file.
        ImportError: it is to be a `.safetensors` file, and that package is not installed.
        OSError: it could not be written; a former one is as it was.
        ValueError: it is not clear which module is meant, there is no such average, or the format cannot hold it.
    """
    if out.suffix not in (SAFETENSORS, *TORCH):
        raise ValueError(f"{out} would be written in the format of its ending, which is .safetensors, .pth or .pt.")
    if out.exists() and (out.resolve() == file.path.resolve() or not overwrite or not out.is_file()):
        raise FileExistsError(f"{out} exists and was not replaced: give another name, or --force for another file.")
    name = _chosen(file, module)
    plugin = measured_average({"plugins": file.plugins}) if average is None else average or None
    weights = dict(file.modules[name]) if plugin is None else _averaged(file, name, plugin)
    facts = {"module": name, "average": plugin, "run": file.run_name, "step": file.step}
    known = {key: str(value) for key, value in facts.items() if value not in (None, UNNAMED)}
    if out.suffix == SAFETENSORS:
        shared = _write_safetensors(out, weights, {"format": "pt", "heliograph": version(), **known}, files)
    else:
        shared = 0
        _write(out, weights, lambda path: torch.save(compacted(weights)[0], path), files)
    left = file.frozen.get(name, {})
    said = ", ".join(f"{key} {value}" for key, value in known.items())
    ties = f"; {shared} names share the tensor of another name, and the file holds that tensor once" if shared else ""
    lacks = f"; {len(left)} frozen ones are not in it: only what was trained was saved" if left else ""
    return (
        f"{out}: {len(weights)} tensors, {out.stat().st_size / 1e6:,.3f} MB" + f" ({said})" * bool(said) + ties + lacks
    )


def _chosen(file: WeightsFile, module: str | None) -> str:
    names = sorted(file.modules)
    if module is None and len(names) == 1:
        return names[0]
    if module is None:
        raise ValueError(f"{file.path} holds the modules {', '.join(names)}: choose one, --module {names[0]}.")
    if module not in names:
        raise ValueError(f"{file.path} holds no module {module!r}.{known_names(module, filter(None, names))}")
    return module


def _averaged(file: WeightsFile, module: str, plugin: str) -> dict[str, Any]:
    """Return a module's weights with the averaged parameters in the place of the trained ones, tied ones included."""
    average: Mapping[str, Tensor] = ((file.plugins.get(plugin) or {}).get("weights") or {}).get(module) or {}
    if not average:
        raise ValueError(f"{file.path} holds no weights of {module!r} that a plugin {plugin!r} has averaged.")
    trained = file.modules[module]
    by_view = {view_of(trained[key]): value for key, value in average.items() if key in trained}
    if len(missing := average.keys() - trained.keys()):
        raise ValueError(f"{file.path}: the average of {plugin!r} has other parameters, such as {min(missing)}.")
    return {key: by_view.get(view_of(value), value) for key, value in trained.items()}


def view_of(value: Any) -> tuple[Any, ...]:
    """Return what is the same for the names of one shared tensor."""
    if not isinstance(value, Tensor) or not value.numel() or value.layout is not torch.strided:
        return (id(value),)
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _write_safetensors(out: Path, weights: Mapping[str, Any], metadata: dict[str, str], files: Files) -> int:
    """Write weights as `safetensors.torch.save_model` does; return how many names share the tensor of another.

    Of names that share a tensor the first is kept; the metadata say of the others which that is.
    """
    safetensors = require("safetensors", f"Writing {out.name}", extra="safetensors")
    library = require("safetensors.torch", f"Writing {out.name}", extra="safetensors")
    kept: dict[tuple[Any, ...], str] = {}
    tensors, shared = dict[str, Tensor](), dict[str, str]()
    for name in sorted(weights):
        value = weights[name]
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
            raise ValueError(f"{name} is not a dense tensor, and safetensors holds only these: export to .pth.")
        first = kept.setdefault(view_of(value), name)
        if first == name:
            tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)  # views of one storage, too
        else:
            shared[name] = first

    def write(path: Path) -> None:
        try:
            library.save_file(tensors, path, metadata={**metadata, **shared})
        except safetensors.SafetensorError as error:
            raise OSError(f"safetensors: {error}") from error

    _write(out, tensors, write, files)
    return len(shared)


def _write(out: Path, weights: Mapping[str, Any], write: Any, files: Files) -> None:
    try:
        needed, free = compacted(weights)[1], files.free(out.parent)
        if needed > free:
            raise OSError(
                errno.ENOSPC, f"it needs {megabytes(needed, needed=True)}, and {megabytes(free)} are free there"
            )
        write_whole(out, write, files=files)
    except (OSError, RuntimeError) as error:  # torch reports some failed writes as a RuntimeError
        failure = OSError(f"{out} could not be written: {error}. Nothing is left of it, and a former one is as it was.")
        failure.errno = getattr(error, "errno", None)
        raise failure from error
