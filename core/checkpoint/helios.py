"""Conversion of checkpoints of Helios 1 and 2."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from torch import Tensor

from ...plugins.discovery import discover
from ..data.draws.rng import pack_numpy, pack_python, pack_torch
from .state.schema import SCHEMA, as_plain, brief
from .storage.manifest import SUFFIX

RECORDS = (r"helios(\.\w+)*\.TrainingState",)
TEXTS = r"helios(\.\w+)*\.\w*Keys"  # version 2 keeps its keys as members of enumerations
RESERVED = ("version", "training_state", "model", "rng", "loggers", "datamodule", "log_path", "run_path")
COUNTERS = ("current_iteration", "global_iteration", "global_epoch", "validation_cycles", "dataset_iter")
BEFORE_OURS = -2 * 10**15  # their sequences are lower than all of heliograph's
NAME = re.compile(r"(?P<run>.+?)_epoch_\d+_iter_\d+")


def is_ancestor(saved: Any) -> bool:
    """Return whether the content of a file is a checkpoint of Helios."""
    return isinstance(saved, Mapping) and "schema" not in saved and {"training_state", "model", "rng"} <= saved.keys()


def convert(saved: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a state in the present schema, and a sentence for each thing that differs.

    Args:
        saved: the content of the file, as plain types.
        path: the file; only its name has the name of the run.

    Raises:
        ValueError: the counters are missing, or are not numbers.
    """
    run_name, version = _run_name(path), str(saved.get("version", "before 1.0"))
    progress, notes = _progress(saved["training_state"])
    user, scaler = _split(saved)
    parts, more = _parts(user)
    plugins, others = _plugins(saved)
    aside = {
        "version": version,
        "training_state": saved["training_state"],
        "model": {name: value for name, value in user.items() if name not in parts["taken"]},
        "amp_scaler": scaler,
        "loggers": _loggers(saved),
        "datamodule": saved.get("datamodule", {}),
    }
    state = {
        "schema": SCHEMA,
        "saved_at": path.stat().st_mtime,
        "versions": {"helios": version},
        "world": {"size": 1},
        "run_name": run_name,
        "training_id": hashlib.sha256(f"heliograph training {run_name}".encode()).hexdigest()[:32],
        "progress": progress,
        "control": {"due": [], "end_epoch": False},
        "modules": parts["modules"],
        "optimizers": parts["optimizers"],
        "optimizer_kinds": {},
        "schedulers": parts["schedulers"],
        "scheduler_kinds": {},
        "task": {},
        "metrics": {},
        "means": {},
        "plugins": plugins,
        "ranks": [{}],
        "helios": aside,
    }
    begin = f"read the layout of Helios {version}; the run is called {run_name!r}, after the file"
    left_out = _left_out(state)
    state["data"] = _position(aside.get("datamodule", {}))
    return state, [begin, *notes, *_order_notes(progress), *more, *others, *left_out, *_kept_notes(aside)]


def sequence_of(converted: Mapping[str, Any]) -> int:
    """Return the sequence of a converted state: by its batches, since the times of a copied file change."""
    progress = converted["progress"]
    return BEFORE_OURS + int(progress["earlier_batches"] + progress["batch"])


def _run_name(path: Path) -> str:
    name = path.name.partition(SUFFIX)[0]  # what follows marks a backup
    match = NAME.match(name)
    return match["run"] if match else name


def _progress(counters: Any) -> tuple[dict[str, int | float], list[str]]:
    """Return the progress; Helios counts the running epoch as finished, and does not count samples."""
    if not isinstance(counters, Mapping) or not all(isinstance(counters.get(name), int) for name in COUNTERS):
        raise ValueError(
            f"The training state of Helios needs whole numbers for {', '.join(COUNTERS)}, got {brief(counters)}."
        )
    steps, batches, epoch, validations, batch = (counters[name] for name in COUNTERS)
    notes = ["the samples and seconds before this point are unknown: both are counted from here"]
    if batch:  # only a run that counts in iterations saves within an epoch, and it has counted that epoch already
        epoch -= 1
        if epoch > 0 and batch * epoch == batches - batch:  # as long as each epoch before it
            epoch, batch = epoch + 1, 0
            notes.append(f"it was saved after the last batch of an epoch: epoch {epoch} begins")
    return {
        "epoch": epoch,
        "batch": batch,
        "earlier_batches": batches - batch,
        "steps": steps,
        "skipped_steps": 0,
        "skipped_batches": 0,
        "samples": 0,
        "tokens": 0,
        "validations": validations,
        "evaluated": 0,
        "earlier_seconds": 0.0,
    }, notes


def _order_notes(progress: Mapping[str, int | float]) -> list[str]:
    """Return notes that the order of the batches is not that of Helios."""
    notes = [
        "the order changes: epochs are shuffled by the seed and the epoch now, so they come in another order than they "
        "would have"
    ]
    if batch := progress["batch"]:
        notes.append(
            f"the order changes: the epoch was left after {batch} batches of another order, so in the rest of it some "
            f"samples come again and others not at all"
        )
    return notes


def _position(datamodule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the data, of which only the training phase is known."""
    phase = datamodule.get("phase", 0)
    return {
        "seed": None,
        "phase": phase,
        "advances": False,
        "facts": {"untracked": {}, "differences": []},
        "source": None,
        "state": {},
    }


def _split(saved: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return what the user's model saved, and the state of the gradient scaler, None if there was none."""
    model = dict(saved["model"])
    if "datamodule" in saved and "user" in model:  # version 2
        return dict(model["user"]), model.get("amp_scaler")
    scaler = model.pop("_helios_amp_scaler", None)
    return model, scaler


def _parts(user: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Sort what a model saved into modules, optimizers and schedulers, by their content."""
    states = {name: value for name, value in user.items() if isinstance(value, Mapping)}
    modules = {
        name: dict(state) for name, state in states.items() if all(isinstance(each, Tensor) for each in state.values())
    }
    optimizers = [name for name, state in states.items() if state.keys() >= {"state", "param_groups"}]
    schedulers = [name for name, state in states.items() if "last_epoch" in state]
    notes = [f"modules {', '.join(modules) or '(none)'}: the task's attributes must be called the same"]
    own: dict[str, Any] = {"optimizer": {"state": {}, "param_groups": []}}
    own_schedulers: dict[str, Any] = {}
    taken = [*modules, *optimizers]
    if len(optimizers) == 1:
        own = {"optimizer": states[optimizers[0]]}
    elif optimizers:
        own = {name: states[name] for name in optimizers}
        notes.append(f"optimizers {', '.join(optimizers)}: they must be called the same, fit(optimizer={{...}})")
    else:
        notes.append("0 optimizers: the file serves load_weights only, it cannot be resumed")
    if len(optimizers) == len(schedulers) == 1:
        own_schedulers = {"optimizer": states[schedulers[0]]}
        taken += schedulers
    elif schedulers:
        notes.append(f"schedulers {', '.join(schedulers)}: whose each is, is not known, so they start fresh")
    return {"taken": taken, "modules": modules, "optimizers": own, "schedulers": own_schedulers}, notes


def _plugins(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the states by plugin; names that are another plugin's in heliograph are left out."""
    ours = {each.name for each in discover()}
    theirs = {name: value for name, value in saved.items() if name not in RESERVED}
    states: dict[str, Any] = {name: value for name, value in theirs.items() if name not in ours}
    notes = [f"state of plugin {name!r} left out: that name is another plugin's here" for name in theirs.keys() & ours]
    if {"torch", "rand", "numpy"} <= saved["rng"].keys():
        states["rng_capture"] = _generators(saved["rng"])
        notes.append("the state of NumPy's legacy generator was never kept: it starts fresh")
    else:
        notes.append("there is no state of the random generators: they start fresh")
    log = _loggers(saved).get("root", {}).get("log_file")
    if isinstance(log, str):
        states["file_log"] = {"file": (PureWindowsPath(log) if "\\" in log else PurePosixPath(log)).name}
    return states, notes


def _generators(rng: Mapping[str, Any]) -> dict[str, Any]:
    """Return the random generators as RNGCapture saves them."""
    return {
        "globals": {
            "python": pack_python(rng["rand"]),
            "numpy": pack_numpy(np.random.RandomState(0).get_state(legacy=False)),
            "torch": pack_torch(rng["torch"]),
            "cuda": [rng["cuda"]] if "cuda" in rng else [],
        },
        "generator": rng["numpy"],
        "held": [],
    }


def _loggers(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paths of the logs in the form of version 2."""
    loggers = dict(saved.get("loggers", {}))
    if "log_path" in saved:
        loggers["root"] = {"log_file": saved["log_path"]}
    if "run_path" in saved:
        loggers["tensorboard"] = {"run_path": saved["run_path"]}
    return loggers


def _left_out(state: dict[str, Any]) -> list[str]:
    """Remove what could not be loaded safely again; return a sentence for each."""
    notes = []
    for group in (state["plugins"], state["helios"], state["helios"]["model"]):
        for name in list(group):
            try:
                group[name], _ = as_plain(group[name], name)
            except TypeError as error:
                del group[name]
                notes.append(f"left out, {str(error).split(':')[0]}")
    return notes


def _kept_notes(aside: Mapping[str, Any]) -> list[str]:
    """Return a note on what is kept without effect."""
    names = {
        "the gradient scaler": aside.get("amp_scaler"),
        "the places of its logs": aside.get("loggers"),
        "the count of early stopping": aside.get("training_state", {}).get("early_stop_count"),
    }
    kept = [name for name, value in names.items() if value] + [f"model[{name!r}]" for name in aside.get("model", {})]
    return [f"kept under 'helios', without effect: {', '.join(kept)}"] if kept else []
