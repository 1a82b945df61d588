"""Export the weights of a module to files that other programs read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from heliograph.core.checkpoint.storage.files import write_whole
from heliograph.core.checkpoint.weights import WeightsFile, view_of
from heliograph.spi import known_names, require, version
from torch import Tensor

SUFFIXES = (".safetensors", ".pth", ".pt")


def export_weights(
    file: WeightsFile,
    out: Path,
    *,
    module: str | None = None,
    average: str | Literal[False] | None = None,
    overwrite: bool = False,
) -> str:
    """Write the weights of one module, as its `state_dict()` has them; return a report of one line.

    Args:
        file: the weights.
        out: a `.safetensors` file, or a `.pth` or `.pt` file for `torch.load`; complete or not written at all.
        module: which one, if the file holds several.
        average: as in `load_weights`.
        overwrite: whether an existing file of that name may be replaced.

    Raises:
        FileExistsError: there is such a file.
        ImportError: the format is `.safetensors`, and that package is not installed.
        OSError: it could not be written; an existing file is unchanged.
        ValueError: the module is ambiguous, there is no such average, or the format cannot hold the weights.
    """
    if out.suffix not in SUFFIXES:
        raise ValueError(f"{out} has an unknown format: the suffix must be {', '.join(SUFFIXES[:2])} or {SUFFIXES[2]}.")
    if out.exists() and (out.resolve() == file.path.resolve() or not overwrite or not out.is_file()):
        raise FileExistsError(
            f"{out} exists and was not replaced: choose another name, or replace another file with --force."
        )
    name, plugin = _chosen(file, module), file.chosen_average(average)
    weights = dict(file.modules[name]) if plugin is None else _averaged(file, name, plugin)
    facts = {"module": name, "average": plugin, "run": file.run_name, "step": file.step}
    described = {key: str(value) for key, value in facts.items() if value not in (None, "")}
    shared = 0
    if out.suffix == ".safetensors":
        shared = _write_safetensors(out, weights, {"format": "pt", "heliograph": version(), **described})
    else:
        _write(out, lambda path: torch.save(_copied(weights), path))
    summary = ", ".join(f"{key} {value}" for key, value in described.items())
    report = f"{out}: {len(weights)} tensors, {out.stat().st_size / 1e6:,.3f} MB ({summary or 'of an unknown run'})"
    if shared:
        report += f"; {shared} names share the tensor of another name, stored once"
    if frozen := file.frozen.get(name):
        report += f"; {len(frozen)} frozen tensors are missing: only trained weights were saved"
    return report


def _chosen(file: WeightsFile, module: str | None) -> str:
    names = sorted(file.modules)
    if module is None and len(names) > 1:
        raise ValueError(f"{file.path} holds the modules {', '.join(names)}: choose one, --module {names[0]}.")
    if module is not None and module not in names:
        raise ValueError(f"{file.path} holds no module {module!r}.{known_names(module, filter(None, names))}")
    return names[0] if module is None else module


def _averaged(file: WeightsFile, module: str, plugin: str) -> dict[str, Any]:
    average: Mapping[str, Tensor] = ((file.plugins.get(plugin) or {}).get("weights") or {}).get(module) or {}
    if not average:
        raise ValueError(f"{file.path} holds no weights of {module!r} averaged by a plugin {plugin!r}.")
    trained = file.modules[module]
    by_view = {view_of(trained[key]): value for key, value in average.items() if key in trained}
    if len(missing := average.keys() - trained.keys()):
        raise ValueError(f"{file.path}: the average of {plugin!r} has other parameters, such as {min(missing)}.")
    return {key: by_view.get(view_of(value), value) for key, value in trained.items()}


# As `safetensors.torch.save_model` does: of names that share a tensor the first is stored, and the metadata name it
# for the others. Returns their number.
def _write_safetensors(out: Path, weights: Mapping[str, Any], metadata: dict[str, str]) -> int:
    safetensors = require("safetensors", f"Writing {out.name}", extra="safetensors")
    library = require("safetensors.torch", f"Writing {out.name}", extra="safetensors")
    copies, firsts = _copied(weights), dict[int, str]()
    for name in sorted(copies):
        value = copies[name]
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
            raise ValueError(f"{name} is not a dense tensor, and safetensors holds only these: export to .pth.")
        firsts.setdefault(id(value), name)
    tensors = {name: copies[name] for name in firsts.values()}
    shared = {name: firsts[id(value)] for name, value in copies.items() if name not in tensors}

    def write(path: Path) -> None:
        try:
            library.save_file(tensors, path, metadata={**metadata, **shared})
        except safetensors.SafetensorError as error:
            raise OSError(f"safetensors: {error}") from error

    _write(out, write)
    return len(shared)


def _copied(weights: Mapping[str, Any]) -> dict[str, Any]:
    # views of one storage become separate, and only as large as they are; tied tensors stay one
    copies: dict[tuple[Any, ...], Tensor] = {}
    for value in weights.values():
        if isinstance(value, Tensor) and value.layout is torch.strided and view_of(value) not in copies:
            copies[view_of(value)] = value.detach().clone(memory_format=torch.contiguous_format)
    return {name: copies.get(view_of(value), value) for name, value in weights.items()}


def _write(out: Path, write: Callable[[Path], None]) -> None:
    try:
        write_whole(out, write)
    except (OSError, RuntimeError) as error:  # torch reports some failed writes as a RuntimeError
        failure = OSError(f"{out} could not be written: {error}. An existing file is unchanged.")
        failure.errno = getattr(error, "errno", None)
        raise failure from error
