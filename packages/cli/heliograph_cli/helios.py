"""Convert checkpoints of Helios 1 and 2 to the present schema."""

from __future__ import annotations

import filecmp
import hashlib
import random
import re
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from shutil import copyfile, copystat, rmtree
from typing import Any

import numpy as np
import torch
from heliograph.core.checkpoint.storage.files import write_whole
from heliograph.core.checkpoint.storage.untrusted_files import read_foreign
from heliograph.plugins import discover
from heliograph.spi import MissingManifestError, Store, as_plain, capture, restore
from torch import Tensor

SUFFIX = ".pth"
SCHEMA = 4  # of the converted state
BACKUP = ".backup"
State = dict[str, Any]


def migrate_file(
    path: Path, *, keep_backup: bool = True, dry_run: bool = False, as_data: Collection[str] = ()
) -> list[str]:
    """Convert a checkpoint of Helios to the present schema, and write its manifest.

    The original is kept as `<name>.pth.backup`. The new file replaces it in one step, as every save does, so nothing is
    lost if the process is killed: run it again. A checkpoint that is up to date is not changed.

    Args:
        path: a data file.
        keep_backup: keep the original.
        dry_run: change nothing, only return what would be done.
        as_data: full names of classes whose objects are read as their attributes, if the file is refused because of
            them.

    Returns:
        A report, line by line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or no checkpoint, or another process writes this run's checkpoints.
        OSError: the new file could not be written; the original is unchanged.
    """
    with suppress(MissingManifestError):
        Store(path.parent, path.stem).verify(path)
        return [f"{path}: up to date (schema {SCHEMA})"]
    saved = read_foreign(path, [*RECORDS, *map(re.escape, as_data)], TEXTS)
    try:
        state, changes = convert_from_helios(saved, path)
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # parts are missing or foreign
        raise ValueError(f"{path} is not a checkpoint that can be migrated: {error}") from error
    lines = [f"    {line}" for line in changes]
    if dry_run:
        return [f"{path}: would be migrated to schema {SCHEMA}", *lines]
    with closing(Store(path.parent, state["run_name"], state["training_id"])) as store:
        notes = store.open()
        if store.is_pinned(path):
            raise ValueError(f"{path} is pinned, so it is not replaced: remove the pin, migrate, and pin it again.")
        backup = f", the original is {_back_up(path)}" if keep_backup else ""
        progress = state["progress"]
        sequence = FIRST_SEQUENCE + progress["earlier_batches"] + progress["batch"]
        store.save(path.name, state, sequence=sequence, replace_unknown=True)
    return [f"{path}: migrated to schema {SCHEMA}{backup}", *(f"    {note}" for note in notes), *lines]


def _back_up(path: Path) -> str:
    backup = path.with_name(path.name + BACKUP)
    if (unfinished := path.with_name(f".{backup.name}.tmp")).exists():  # left by a killed process
        rmtree(unfinished)
    if not backup.exists():
        write_whole(backup, lambda hidden: copystat(path, copyfile(path, hidden)))
    elif not filecmp.cmp(path, backup, shallow=False):
        raise ValueError(f"{backup} exists with other content: move it away first.")
    return backup.name


RECORDS = (r"helios(\.\w+)*\.TrainingState",)
TEXTS = r"helios(\.\w+)*\.\w*Keys"  # version 2 keeps its keys as members of enumerations
RESERVED = {"version", "training_state", "model", "rng", "loggers", "datamodule", "log_path", "run_path"}
COUNTERS = ("current_iteration", "global_iteration", "global_epoch", "validation_cycles", "dataset_iter")
FIRST_SEQUENCE = -2 * 10**15  # lower than any sequence of heliograph
NAME = re.compile(r"(?P<run>.+?)_epoch_\d+_iter_\d+")


def convert_from_helios(saved: Any, path: Path) -> tuple[State, list[str]]:
    """Return a state in the present schema, and a sentence for each difference.

    Args:
        saved: the content of the file, as plain types.
        path: the file, whose name holds the name of the run.

    Raises:
        ValueError: Helios did not write it, or the counters are missing or not numbers.
    """
    if not isinstance(saved, Mapping) or "schema" in saved or not {"training_state", "model", "rng"} <= saved.keys():
        raise ValueError("it has no manifest and was not written by Helios.")
    version, match = str(saved.get("version", "before 1.0")), NAME.match(path.name)
    run_name = match["run"] if match else path.name.partition(SUFFIX)[0]
    notes = [f"read the layout of Helios {version}; the run is called {run_name!r}, after the file"]
    state = {
        "schema": SCHEMA,
        "saved_at": path.stat().st_mtime,
        "versions": {"helios": version},
        "world": {"size": 1},
        "run_name": run_name,
        "training_id": hashlib.sha256(f"heliograph training {run_name}".encode()).hexdigest()[:32],
        "progress": _progress(saved["training_state"], notes),
        "control": {"due": [], "end_epoch": False},
        **_parts(saved, notes),
        "task": {},
        "metrics": {},
        "plugins": _plugins(saved, notes),
        "ranks": [{}],
        "data": {
            "seed": None,
            "phase": saved.get("datamodule", {}).get("phase", 0),
            "advances": False,
            "facts": {"hidden": [], "differences": []},
            "source": None,
            "state": {},
        },
    }
    if saved["training_state"].get("early_stop_count"):
        notes.append("left out: the count of early stopping")
    return state, notes


def _progress(counters: Any, notes: list[str]) -> dict[str, int | float]:
    # Helios counts the running epoch as finished, and does not count samples
    if not isinstance(counters, Mapping) or not all(isinstance(counters.get(name), int) for name in COUNTERS):
        raise ValueError(
            f"The training state of Helios needs whole numbers for {', '.join(COUNTERS)}, got {counters!r:.80}."
        )
    steps, batches, epoch, validations, batch = (counters[name] for name in COUNTERS)
    notes += [
        "the samples and seconds before this point are unknown: both are counted from here",
        "the order changes: heliograph shuffles by the seed and the epoch, so samples come in another order",
    ]
    if batch:  # only a run that counts in iterations saves within an epoch; it has counted that epoch
        epoch -= 1
        if epoch > 0 and batch * epoch == batches - batch:  # as long as each previous epoch
            epoch, batch = epoch + 1, 0
            notes.append(f"it was saved after the last batch of an epoch: epoch {epoch} begins")
        else:
            notes.append(f"{batch} batches of the epoch are done: some samples are repeated, others are skipped")
    return {
        **dict.fromkeys(("skipped_steps", "skipped_batches", "samples", "tokens", "evaluated"), 0),
        "epoch": epoch,
        "batch": batch,
        "earlier_batches": batches - batch,
        "steps": steps,
        "validations": validations,
        "earlier_seconds": 0.0,
    }


def _parts(saved: Mapping[str, Any], notes: list[str]) -> State:
    parts = dict(saved["model"])
    if "datamodule" in saved and "user" in parts:  # version 2
        scaler, parts = parts.get("amp_scaler"), dict(parts["user"])
    else:
        scaler = parts.pop("_helios_amp_scaler", None)
    states = {name: dict(value) for name, value in parts.items() if isinstance(value, Mapping)}
    modules = {
        name: state for name, state in states.items() if all(isinstance(item, Tensor) for item in state.values())
    }
    optimizers = {name: state for name, state in states.items() if state.keys() >= {"state", "param_groups"}}
    schedulers = {name: state for name, state in states.items() if "last_epoch" in state}
    left_out = [f"model[{name!r}]" for name in parts if name not in modules | optimizers | schedulers]
    notes.append(f"modules {', '.join(modules) or '(none)'}: the task's attributes must be called the same")
    if len(optimizers) == 1:
        optimizers = dict(zip(["optimizer"], optimizers.values(), strict=True))
    elif optimizers:
        notes.append(f"optimizers {', '.join(optimizers)}: they must be called the same, fit(optimizer={{...}})")
    else:
        notes.append("0 optimizers: the file cannot be resumed, only used by load_weights")
    if len(optimizers) == len(schedulers) == 1:
        schedulers = dict(zip(["optimizer"], schedulers.values(), strict=True))
    elif schedulers:
        notes.append(f"schedulers {', '.join(schedulers)}: their optimizers are unknown, so they start fresh")
        schedulers = {}
    if left_out := [*left_out, *["the gradient scaler"] * bool(scaler)]:
        notes.append(f"left out: {', '.join(left_out)}")
    return {"modules": modules, "optimizers": optimizers, "schedulers": schedulers}


def _plugins(saved: Mapping[str, Any], notes: list[str]) -> State:
    ours, states = {plugin.name for plugin in discover()}, State()
    for name in (name for name in saved if name not in RESERVED):
        if name in ours:
            notes.append(f"state of plugin {name!r} left out: that name is another plugin's here")
            continue
        try:
            states[name], _ = as_plain(saved[name], name)
        except TypeError as error:
            notes.append(f"left out, {str(error).split(':')[0]}")
    if {"torch", "rand", "numpy"} <= saved["rng"].keys():
        states["rng_capture"] = _generators(saved["rng"])
        notes.append("Helios did not save the state of NumPy's legacy generator: it starts fresh")
    else:
        notes.append("the file holds no state of the random generators: they start fresh")
    log = saved.get("log_path") or saved.get("loggers", {}).get("root", {}).get("log_file")
    if isinstance(log, str):
        states["file_log"] = {"file": (PureWindowsPath(log) if "\\" in log else PurePosixPath(log)).name}
    return states


def _generators(saved: Mapping[str, Any]) -> State:
    before = capture()
    try:
        random.setstate(saved["rand"])
        np.random.seed(0)
        torch.set_rng_state(saved["torch"])
        states = capture() | {"cuda": [saved["cuda"]] if "cuda" in saved else []}
    finally:
        restore(before)
    return {"globals": states, "generator": saved["numpy"], "held": []}
