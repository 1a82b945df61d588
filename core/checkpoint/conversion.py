"""Convert checkpoints on disk: files of Helios 1 and 2 to the present schema, and shards to one file."""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from torch import Tensor

from ...plugins.discovery import discover
from ..data.draws.rng import pack_numpy, pack_python, pack_torch
from .state.ranks import join_shards
from .state.schema import SCHEMA, as_plain, brief
from .storage import reader
from .storage.manifest import SUFFIX, Entry, MissingManifestError
from .storage.reader import State
from .storage.store import Store
from .storage.untrusted_files import check_content, read_with_stand_ins, records_as_dicts

BACKUP = ".backup"


@dataclass(frozen=True, slots=True)
class Upgraded:
    """A checkpoint of Helios, converted to the present schema.

    Attributes:
        origin: the version of Helios.
        state: the state.
        changes: the changes, one sentence each.
        sequence: its number in the order of writing.
    """

    origin: str
    state: State
    changes: list[str]
    sequence: int


def files_in(path: Path) -> list[Path]:
    return sorted(file for file in path.glob(f"*{SUFFIX}") if not file.is_dir()) if path.is_dir() else [path]


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
        reader.check(path)
        return [f"{path}: up to date (schema {SCHEMA})"]
    upgraded = read_any(path, as_data)
    if dry_run:
        return [f"{path}: would be migrated to schema {SCHEMA}", *_indent(upgraded.changes)]
    store = Store(path.parent, upgraded.state["run_name"], upgraded.state["training_id"])
    notes = store.open()
    try:
        if store.is_pinned(path):
            raise ValueError(f"{path} is pinned, so it is not replaced: remove the pin, migrate, and pin it again.")
        backup = back_up(path)
        store.save(path.name, upgraded.state, sequence=upgraded.sequence, replace_unknown=True)
    finally:
        store.close()
    if not keep_backup:
        backup.unlink()
    backup_note = f", the original is {backup.name}" if keep_backup else ""
    return [f"{path}: migrated to schema {SCHEMA}{backup_note}", *_indent([*notes, *upgraded.changes])]


def read_any(path: Path, as_data: Collection[str] = ()) -> Upgraded:
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    saved = read_with_stand_ins(path, [*RECORDS, *map(re.escape, as_data)], TEXTS)
    try:
        saved = records_as_dicts(saved)
        check_content(saved, path)
        if not is_of_helios(saved):
            raise ValueError("it has no manifest and was not written by Helios.")
        state, notes = convert_from_helios(saved, path)
        return Upgraded(f"Helios {state['versions']['helios']}", state, notes, helios_sequence(state))
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # parts are missing or foreign
        raise ValueError(f"{path} is not a checkpoint that can be migrated: {error}") from error


def back_up(path: Path) -> Path:
    backup = path.with_name(path.name + BACKUP)
    if backup.exists():
        if not filecmp.cmp(path, backup, shallow=False):
            raise ValueError(f"{backup} exists with other content: move it away first.")
        return backup
    try:
        os.link(path, backup)  # a save never writes into an existing file
    except OSError:  # a file system without links
        copy = backup.with_name(f".{backup.name}.tmp")
        shutil.copy2(path, copy)
        with copy.open("r+b") as file:  # Windows syncs only a file that may be written
            os.fsync(file.fileno())
        copy.replace(backup)
    return backup


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def consolidate(path: Path | str, out: Path | str | None = None) -> Entry:
    """Convert a checkpoint with shards to one file, as other engines write it.

    Args:
        path: the data file of a checkpoint with shards.
        out: where to write; by default the checkpoint and its shards are replaced.

    Returns:
        The entry of the new checkpoint.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, has no shards or is pinned; or another process writes this run's checkpoints there.
        OSError: it could not be written; the original is unchanged.
    """
    path = Path(path)
    out = path if out is None else Path(out)
    state, entry = reader.load(path), reader.read_manifest(path)
    if "shards" not in state:
        raise ValueError(f"{path} has no shards: it is an ordinary checkpoint already.")
    with closing(Store(out.parent, entry.family)) as store:
        store.open()
        store.write_as(entry.training, entry.run_name)
        if store.is_pinned(out):
            raise ValueError(
                f"{out} is pinned, so it is not replaced: remove the pin, or write to another file, --out FILE."
            )
        return store.save(
            out.name,
            join_shards(state, path),
            judged_by=entry.judged_by,
            sequence=entry.sequence,
            replace_unknown=out == path,
        )


RECORDS = (r"helios(\.\w+)*\.TrainingState",)
TEXTS = r"helios(\.\w+)*\.\w*Keys"  # version 2 keeps its keys as members of enumerations
RESERVED = ("version", "training_state", "model", "rng", "loggers", "datamodule", "log_path", "run_path")
COUNTERS = ("current_iteration", "global_iteration", "global_epoch", "validation_cycles", "dataset_iter")
FIRST_SEQUENCE = -2 * 10**15  # lower than any sequence of heliograph
NAME = re.compile(r"(?P<run>.+?)_epoch_\d+_iter_\d+")


def is_of_helios(saved: Any) -> bool:
    return isinstance(saved, Mapping) and "schema" not in saved and {"training_state", "model", "rng"} <= saved.keys()


def convert_from_helios(saved: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a state in the present schema, and a sentence for each difference.

    Args:
        saved: the content of the file, as plain types.
        path: the file, whose name holds the name of the run.

    Raises:
        ValueError: the counters are missing, or are not numbers.
    """
    run_name, version = _run_name(path), str(saved.get("version", "before 1.0"))
    progress, notes = _progress(saved["training_state"])
    user, scaler = _split(saved)
    parts, part_notes = _parts(user)
    plugins, plugin_notes = _plugins(saved)
    unused = {
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
        "helios": unused,
    }
    begin = f"read the layout of Helios {version}; the run is called {run_name!r}, after the file"
    left_out = _left_out(state)
    state["data"] = _position(unused.get("datamodule", {}))
    return state, [
        begin,
        *notes,
        *_order_notes(progress),
        *part_notes,
        *plugin_notes,
        *left_out,
        *_unused_notes(unused),
    ]


def helios_sequence(converted: Mapping[str, Any]) -> int:
    progress = converted["progress"]
    return FIRST_SEQUENCE + int(progress["earlier_batches"] + progress["batch"])


def _run_name(path: Path) -> str:
    name = path.name.partition(SUFFIX)[0]  # a backup has another suffix
    match = NAME.match(name)
    return match["run"] if match else name


def _progress(counters: Any) -> tuple[dict[str, int | float], list[str]]:
    # Helios counts the running epoch as finished, and does not count samples
    if not isinstance(counters, Mapping) or not all(isinstance(counters.get(name), int) for name in COUNTERS):
        raise ValueError(
            f"The training state of Helios needs whole numbers for {', '.join(COUNTERS)}, got {brief(counters)}."
        )
    steps, batches, epoch, validations, batch = (counters[name] for name in COUNTERS)
    notes = ["the samples and seconds before this point are unknown: both are counted from here"]
    if batch:  # only a run that counts in iterations saves within an epoch; it has counted that epoch
        epoch -= 1
        if epoch > 0 and batch * epoch == batches - batch:  # as long as each previous epoch
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
    notes = [
        "the order changes: heliograph shuffles by the seed and the epoch, so the samples of an epoch come in another "
        "order"
    ]
    if batch := progress["batch"]:
        notes.append(
            f"the order changes: the current epoch had {batch} batches in another order, so some of its samples are "
            f"repeated and others are skipped"
        )
    return notes


def _position(datamodule: Mapping[str, Any]) -> dict[str, Any]:
    phase = datamodule.get("phase", 0)
    return {
        "seed": None,
        "phase": phase,
        "advances": False,
        "facts": {"hidden": [], "differences": []},
        "source": None,
        "state": {},
    }


def _split(saved: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    model = dict(saved["model"])
    if "datamodule" in saved and "user" in model:  # version 2
        return dict(model["user"]), model.get("amp_scaler")
    scaler = model.pop("_helios_amp_scaler", None)
    return model, scaler


def _parts(user: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    states = {name: value for name, value in user.items() if isinstance(value, Mapping)}
    modules = {
        name: dict(state)
        for name, state in states.items()
        if all(isinstance(value, Tensor) for value in state.values())
    }
    optimizers = [name for name, state in states.items() if state.keys() >= {"state", "param_groups"}]
    schedulers = [name for name, state in states.items() if "last_epoch" in state]
    notes = [f"modules {', '.join(modules) or '(none)'}: the task's attributes must be called the same"]
    parts: dict[str, Any] = {"optimizer": {"state": {}, "param_groups": []}}
    scheduler_states: dict[str, Any] = {}
    taken = [*modules, *optimizers]
    if len(optimizers) == 1:
        parts = {"optimizer": states[optimizers[0]]}
    elif optimizers:
        parts = {name: states[name] for name in optimizers}
        notes.append(f"optimizers {', '.join(optimizers)}: they must be called the same, fit(optimizer={{...}})")
    else:
        notes.append("0 optimizers: the file cannot be resumed, only used by load_weights")
    if len(optimizers) == len(schedulers) == 1:
        scheduler_states = {"optimizer": states[schedulers[0]]}
        taken += schedulers
    elif schedulers:
        notes.append(f"schedulers {', '.join(schedulers)}: their optimizers are unknown, so they start fresh")
    return {"taken": taken, "modules": modules, "optimizers": parts, "schedulers": scheduler_states}, notes


def _plugins(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    ours = {plugin.name for plugin in discover()}
    theirs = {name: value for name, value in saved.items() if name not in RESERVED}
    states: dict[str, Any] = {name: value for name, value in theirs.items() if name not in ours}
    notes = [f"state of plugin {name!r} left out: that name is another plugin's here" for name in theirs.keys() & ours]
    if {"torch", "rand", "numpy"} <= saved["rng"].keys():
        states["rng_capture"] = _generators(saved["rng"])
        notes.append("Helios did not save the state of NumPy's legacy generator: it starts fresh")
    else:
        notes.append("the file holds no state of the random generators: they start fresh")
    log = _loggers(saved).get("root", {}).get("log_file")
    if isinstance(log, str):
        states["file_log"] = {"file": (PureWindowsPath(log) if "\\" in log else PurePosixPath(log)).name}
    return states, notes


def _generators(rng: Mapping[str, Any]) -> dict[str, Any]:
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
    loggers = dict(saved.get("loggers", {}))
    if "log_path" in saved:
        loggers["root"] = {"log_file": saved["log_path"]}
    if "run_path" in saved:
        loggers["tensorboard"] = {"run_path": saved["run_path"]}
    return loggers


def _left_out(state: dict[str, Any]) -> list[str]:
    notes = []
    for group in (state["plugins"], state["helios"], state["helios"]["model"]):
        for name in list(group):
            try:
                group[name], _ = as_plain(group[name], name)
            except TypeError as error:
                del group[name]
                notes.append(f"left out, {str(error).split(':')[0]}")
    return notes


def _unused_notes(unused: Mapping[str, Any]) -> list[str]:
    names = {
        "the gradient scaler": unused.get("amp_scaler"),
        "the paths of its logs": unused.get("loggers"),
        "the count of early stopping": unused.get("training_state", {}).get("early_stop_count"),
    }
    unused_parts = [name for name, value in names.items() if value] + [
        f"model[{name!r}]" for name in unused.get("model", {})
    ]
    return [f"kept under 'helios', without effect: {', '.join(unused_parts)}"] if unused_parts else []
