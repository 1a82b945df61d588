"""Weights for others: one module's weights of a checkpoint, in a file that needs no heliograph."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...events.checks import known_names
from ..engines.weights import measured_average
from ..system.extras import require, version
from .storage.contents import compacted
from .storage.files import SYSTEM, Files, megabytes, write_whole
from .weights_files import SAFETENSORS, UNNAMED, WeightsFile

TORCH = (".pth", ".pt")


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
    by_view = {_view(trained[key]): value for key, value in average.items() if key in trained}
    if len(missing := average.keys() - trained.keys()):
        raise ValueError(f"{file.path}: the average of {plugin!r} has other parameters, such as {min(missing)}.")
    return {key: by_view.get(_view(value), value) for key, value in trained.items()}


def _view(value: Any) -> tuple[Any, ...]:
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
        first = kept.setdefault(_view(value), name)
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
