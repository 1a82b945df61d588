"""Checkpoints on disk: written aside, synced, renamed; read safely; named for people, never trusted by name."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..events.checks import known_names
from .state import check_schema
from .task import modules_of

SUFFIX = ".pth"
TEMPORARY = ".tmp"
LONGEST_PART = 90  # bytes: file systems allow 255 for the whole name


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in a folder, when it was written and where its run stood."""

    path: Path
    saved_at: float
    steps: int


def checkpoint_name(run_name: str, epoch: int, step: int, metadata: str = "") -> str:
    """Return `<run_name>_epoch_<epoch>_iter_<step>[_<metadata>].pth`, with every part fit for a file system."""
    tail = f"_{clean(metadata)}" if metadata else ""
    return f"{clean(run_name)}_epoch_{epoch}_iter_{step}{tail}{SUFFIX}"


def clean(part: str) -> str:
    """Return a file-name part without separators, spaces and other marks that a shell or file system minds."""
    kept = re.sub(r"[^\w.+=-]+", "-", part).encode()[:LONGEST_PART].decode(errors="ignore")
    return kept.strip("-.") or "unnamed"


def prepare_folder(folder: Path) -> None:
    """Make a folder and try it, so that a run does not find out hours later that it cannot save.

    Raises:
        ValueError: the path is a file, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}{TEMPORARY}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"Nothing can be saved in {folder}: {error.strerror}. Choose a folder that this user may write."
        ) from error


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint so that its final name never holds anything but the whole of it.

    The temporary file lies in the same folder (a rename must not cross file systems), is synced before the rename, and
    the folder after it. A failure leaves all former checkpoints as they were.

    Raises:
        OSError: the disk is full, the folder read-only and the like; names the file and the free space.
    """
    aside = path.with_name(path.name + TEMPORARY)
    try:
        with aside.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if not isinstance(error, OSError | RuntimeError):  # torch reports a failed write as a RuntimeError
            raise
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        raise OSError(
            f"The checkpoint {path} could not be written ({free / 1e6:.1f} MB are free there): {error}. "
            f"Former checkpoints are untouched."
        ) from error


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(path: Path, *, map_tensors: bool = False) -> dict[str, Any]:
    """Return the state in a checkpoint, read with `weights_only=True`.

    Args:
        path: the file.
        map_tensors: leave the tensors on the disk, for who only wants to know whose state it is.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or no checkpoint of ours.
    """
    if not path.is_file():
        siblings = [each.name for each in path.parent.glob(f"*{SUFFIX}")] if path.parent.is_dir() else []
        raise FileNotFoundError(f"There is no checkpoint {path}.{known_names(path.name, siblings)}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=map_tensors)
    except Exception as error:  # a damaged file fails in many ways; all of them mean the same
        raise ValueError(f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
    try:
        check_schema(state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return state  # type: ignore[no-any-return]  # the schema was checked


def find(folder: Path, run_name: str) -> tuple[list[Found], list[str]]:
    """Return the readable checkpoints of a run, newest first, and a line for each file that was passed over.

    Files are judged by what they hold; the name only says which files to look at.
    """
    found, passed_over = [], []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            state = load(path, map_tensors=True)
        except (ValueError, FileNotFoundError) as error:
            passed_over.append(str(error))
            continue
        if state["run_name"] != run_name:
            passed_over.append(f"{path} is of run {state['run_name']!r}.")
        else:
            found.append(Found(path, state.get("saved_at", 0.0), state["progress"]["steps"]))
    return sorted(found, key=lambda each: (each.saved_at, each.steps, each.path.name), reverse=True), passed_over


def load_weights(task: Any, path: Path | str) -> dict[str, float]:
    """Load the weights of a checkpoint, and nothing else, into the modules of a task.

    Args:
        task: the task whose modules the checkpoint holds.
        path: the checkpoint.

    Returns:
        The metrics that the run had when it was written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or of other modules.
    """
    state = load(Path(path))
    modules = modules_of(task)
    if state["modules"].keys() != modules.keys():
        raise ValueError(
            f"The checkpoint holds the modules {sorted(state['modules'])}, the task has {sorted(modules)}."
        )
    for name, module in modules.items():
        weights: Mapping[str, Tensor] = state["modules"][name]
        module.load_state_dict(weights)
    return dict(state["metrics"])
