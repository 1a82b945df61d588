"""Studies that can be resumed."""

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
    """Create an Optuna study, or continue the one of that name.

    The states of the sampler's random generators are written, as JSON, into the system attributes of the trial that
    something is suggested for, so that a study that was killed suggests what it would have suggested. For samplers that
    keep nothing besides what is in the storage (TPE, random, grid, brute force, NSGA-II and NSGA-III) that is
    exact; of any other it is not known, and a warning is logged.

    Args:
        name: of the study.
        storage: the URL of a database, such as `sqlite:///study.db`, or a storage of Optuna's, such as
            `JournalStorage(JournalFileBackend("study.log"))`.
        sampler: suggests; TPE by default. What a seed is good for is over with the first trial.
        pruner: says which trials are to stop early; by default the median of the others' values decides.
        direction: whether smaller values are better (`minimize`), or larger ones (`maximize`).

    Returns:
        An `optuna.Study`, whose `optimize(objective, n_trials)` continues where the study was left.

    Raises:
        ImportError: optuna is not installed.
        FileNotFoundError: the folder of the database is not there.
        TypeError: an argument is not of its kind.
        ValueError: the storage is in memory, would fail trials whose process died, or its URL is none; there is no such
            direction; the study is there, and its direction is another.
    """
    optuna = require("optuna", "open_study", extra="optuna")
    _check_kinds(name, storage, sampler, pruner)
    if direction not in (known := ("minimize", "maximize")):
        raise ValueError(f"direction= is {known[0]!r} or {known[1]!r}, got {direction!r}.")
    opened = optuna.storages.RDBStorage(absolute(storage)) if isinstance(storage, str) else storage
    _check(opened, name)
    study = optuna.create_study(study_name=name, storage=opened, direction=direction, load_if_exists=True)
    if (there := [each.name.lower() for each in study.directions]) != [direction]:
        raise ValueError(f"Study {name!r} is there, and its direction is {' and '.join(there)}, not {direction}.")
    from .resumable_study import ResumableStudy
    from .sampler import RememberingSampler, is_exact

    sampler = optuna.samplers.TPESampler() if sampler is None else sampler
    if not is_exact(sampler):
        logger.warning(
            "%s may keep more than random states: when study %r continues after a restart, it may suggest other values",
            type(sampler).__name__,
            name,
        )
    return ResumableStudy(name, study._storage, RememberingSampler(sampler), pruner)


def _check_kinds(name: Any, storage: Any, sampler: Any, pruner: Any) -> None:
    optuna = require("optuna", "open_study", extra="optuna")
    if not isinstance(name, str):
        raise TypeError(f"A study's name is a string, got {name!r}.")
    if not isinstance(storage, str | optuna.storages.BaseStorage):
        raise TypeError(f"storage= is the URL of a database, 'sqlite:///study.db', or a storage, got {storage!r}.")
    if not isinstance(sampler, optuna.samplers.BaseSampler | None):
        raise TypeError(f"sampler= is one of optuna.samplers, such as TPESampler(seed=0), or None; got {sampler!r}.")
    if not isinstance(pruner, optuna.pruners.BasePruner | None):
        raise TypeError(f"pruner= is one of optuna.pruners, such as MedianPruner(), or None; got {pruner!r}.")


def _check(storage: BaseStorage, name: str) -> None:
    """Raise ValueError where no trial could continue after a restart."""
    if is_in_memory(storage):
        raise ValueError(
            f"Study {name!r} would be gone with this process: give storage='sqlite:///study.db', a server's database, "
            f"or a journal. For a study in memory, call optuna.create_study()."
        )
    if getattr(storage, "heartbeat_interval", None) is not None:
        raise ValueError(
            f"A storage with heartbeat_interval= fails the trials whose process died, and study {name!r} would "
            f"continue with them: leave it out."
        )
