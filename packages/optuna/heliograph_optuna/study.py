"""`open_study` creates or continues a study."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from heliograph.spi import require

from .storages import absolute, is_in_memory

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

    from .resumable_study import ResumableStudy

logger = logging.getLogger("heliograph")


def open_study(
    name: str,
    *,
    storage: str | BaseStorage,
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
    direction: Literal["minimize", "maximize"] = "minimize",
) -> ResumableStudy:
    """Create an Optuna study, or continue the study with this name.

    The states of the sampler's random generators are stored as JSON in the system attributes of each trial, so that a
    killed study suggests the same values as an uninterrupted one. This is exact for samplers without other state (TPE,
    random, grid, brute force, NSGA-II and NSGA-III). For other samplers a warning is logged.

    Args:
        name: the name of the study.
        storage: the URL of a database, for example `sqlite:///study.db`, or a storage of Optuna, for example
            `JournalStorage(JournalFileBackend("study.log"))`.
        sampler: suggests the parameters; TPE by default. Its seed determines only a new study.
        pruner: decides which trials stop early; by default a `MedianPruner`.
        direction: whether smaller (`minimize`) or larger values (`maximize`) are better.

    Returns:
        An `optuna.Study` whose `optimize(objective, n_trials)` continues the study.

    Raises:
        ImportError: optuna is not installed.
        FileNotFoundError: the folder of the database does not exist.
        TypeError: an argument has the wrong type.
        ValueError: the storage is in memory, fails trials of killed processes, or has an invalid URL; the direction is
            unknown, or differs from that of the existing study.
    """
    optuna = require("optuna", "open_study", extra="optuna")
    _check_kinds(name, storage, sampler, pruner)
    if direction not in ("minimize", "maximize"):
        raise ValueError(f"direction= must be 'minimize' or 'maximize', got {direction!r}.")
    opened = optuna.storages.RDBStorage(absolute(storage)) if isinstance(storage, str) else storage
    _check(opened, name)
    study = optuna.create_study(study_name=name, storage=opened, direction=direction, load_if_exists=True)
    if (directions := [existing.name.lower() for existing in study.directions]) != [direction]:
        raise ValueError(f"Study {name!r} exists with direction {' and '.join(directions)}, got {direction}.")
    from .resumable_study import ResumableStudy
    from .sampler import RememberingSampler, is_exact

    sampler = optuna.samplers.TPESampler() if sampler is None else sampler
    if not is_exact(sampler):
        logger.warning(
            "%s may have more state than random generators: study %r may suggest other values after a restart",
            type(sampler).__name__,
            name,
        )
    return ResumableStudy(name, study._storage, RememberingSampler(sampler), pruner)


def _check_kinds(name: Any, storage: Any, sampler: Any, pruner: Any) -> None:
    optuna = require("optuna", "open_study", extra="optuna")
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}.")
    if not isinstance(storage, str | optuna.storages.BaseStorage):
        raise TypeError(f"storage= must be the URL of a database, 'sqlite:///study.db', or a storage, got {storage!r}.")
    if not isinstance(sampler, optuna.samplers.BaseSampler | None):
        raise TypeError(f"sampler= must be an optuna sampler, such as TPESampler(seed=0), or None, got {sampler!r}.")
    if not isinstance(pruner, optuna.pruners.BasePruner | None):
        raise TypeError(f"pruner= must be an optuna pruner, such as MedianPruner(), or None, got {pruner!r}.")


def _check(storage: BaseStorage, name: str) -> None:
    if is_in_memory(storage):
        raise ValueError(
            f"Study {name!r} is in memory and cannot be resumed: use storage='sqlite:///study.db', the database of a "
            f"server, or a journal. For a study in memory, call optuna.create_study()."
        )
    if getattr(storage, "heartbeat_interval", None) is not None:
        raise ValueError(
            f"A storage with heartbeat_interval= fails the trials of killed processes, but study {name!r} would "
            f"continue them: remove heartbeat_interval=."
        )
