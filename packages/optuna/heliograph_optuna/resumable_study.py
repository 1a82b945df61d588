"""A study that continues the trials of a killed process. Requires optuna."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from heliograph.spi import Lock, check_whole_number, clean, membership
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, HyperbandPruner, PatientPruner, SuccessiveHalvingPruner
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from .storages import file_of

KEY = "heliograph:pruner"


def restore_pruner(study: Study) -> None:
    # Hyperband and successive halving derive their resources from the first trials.
    pruner = _stateful_pruner(study.pruner)
    learned = study._storage.get_study_system_attrs(study._study_id).get(KEY)
    if pruner is not None and learned is not None and learned["pruner"] == type(pruner).__name__:
        setattr(pruner, _attribute(pruner), learned["resource"])
    if isinstance(pruner, HyperbandPruner) and pruner._max_resource != "auto" and not pruner._pruners:
        pruner._try_initialization(study)


def save_pruner(study: Study) -> None:
    pruner = _stateful_pruner(study.pruner)
    if pruner is None:
        return
    learned = {"pruner": type(pruner).__name__, "resource": getattr(pruner, _attribute(pruner))}
    is_saved = study._storage.get_study_system_attrs(study._study_id).get(KEY) == learned
    if isinstance(learned["resource"], int) and not is_saved:
        study._storage.set_study_system_attr(study._study_id, KEY, learned)


def _stateful_pruner(pruner: BasePruner | None) -> HyperbandPruner | SuccessiveHalvingPruner | None:
    while isinstance(pruner, PatientPruner):
        pruner = pruner._wrapped_pruner
    return pruner if isinstance(pruner, HyperbandPruner | SuccessiveHalvingPruner) else None


def _attribute(pruner: BasePruner) -> str:
    return "_max_resource" if isinstance(pruner, HyperbandPruner) else "_min_resource"


logger = logging.getLogger("heliograph")


class Interrupted(BaseException):
    """Carries a KeyboardInterrupt out of an optimization, which would fail the trial."""

    def __init__(self, interrupt: KeyboardInterrupt) -> None:
        super().__init__()
        self.interrupt = interrupt


class ResumableStudy(optuna.Study):
    """An `optuna.Study` that may be killed at any time: the same call continues it.

    The running trial continues first, with its number and parameters; its run continues from its checkpoint with
    `Checkpoint(resume="auto")`. The sampler continues from its random states. Ctrl-C and a SystemExit, for example of
    `Preemption`, also leave the trial running. Another exception of the objective fails it, as in every study.
    """

    _unfinished: tuple[int, ...] = ()  # ids of trials to continue

    def optimize(
        self,
        func: Callable[[Trial], Any],
        n_trials: int | None = None,
        timeout: float | None = None,
        n_jobs: int = 1,
        catch: Iterable[type[Exception]] | type[Exception] = (),
        callbacks: Iterable[Callable[[optuna.Study, FrozenTrial], None]] | None = None,
        gc_after_trial: bool = False,
        show_progress_bar: bool = False,
    ) -> None:
        """Optimize an objective like `optuna.Study.optimize`, with the differences below.

        Only one process may optimize a study. If the study is in a file, a second process is refused.

        Args:
            func: the objective.
            n_trials: the total number of trials, including those of earlier calls; None is unlimited.
            timeout: the seconds in which trials may start.
            n_jobs: must be 1; to train several trials at once, see `heliograph_ray.tune`.
            catch: exceptions that fail a trial, but not the study.
            callbacks: called with the study and each finished trial.
            gc_after_trial: whether to collect garbage after each trial.
            show_progress_bar: whether to show a progress bar.

        Raises:
            RuntimeError: this process is one of several ranks.
            ValueError: another process optimizes the study; an argument is out of range.
        """
        if n_jobs != 1:
            raise ValueError(f"A resumable study runs one trial at a time: n_jobs must be 1, got {n_jobs!r}.")
        if (ranks := membership().world_size) > 1:
            raise RuntimeError(
                f"This process is one of {ranks} ranks, and each rank would run its own study: optimize in a single "
                f"process, and launch the ranks in the objective."
            )
        with self._locked():
            trials = self.get_trials(deepcopy=False)
            self._unfinished = tuple(trial._trial_id for trial in trials if trial.state == TrialState.RUNNING)
            if n_trials is not None:
                n_trials -= sum(trial.state.is_finished() for trial in trials)
                if n_trials <= 0:
                    return
            restore_pruner(self)
            try:
                super().optimize(
                    _pass_interrupts(func), n_trials, timeout, 1, catch, callbacks, gc_after_trial, show_progress_bar
                )
            except Interrupted as error:
                raise error.interrupt from None

    def ask(self, fixed_distributions: dict[str, BaseDistribution] | None = None) -> Trial:
        """Return an unfinished trial, if there is one, else a new one."""
        save_pruner(self)
        if not self._unfinished:
            return super().ask(fixed_distributions)
        trial_id, *remaining = self._unfinished
        self._unfinished = tuple(remaining)
        trial = Trial(self, trial_id)
        logger.info("trial %d of study %r continues", trial.number, self.study_name)
        return trial

    def copy_before(self, number: int, name: str) -> None:
        """Copy the trials before a number to a new study in the same storage.

        `open_study(name, ...)` continues the new study. A sampler of the same class suggests the same values for the
        first new trial. The runs of both studies have the same names: use another `name=` in `fit`, or another folder
        in `Checkpoint`.

        Args:
            number: the first trial that is not copied.
            name: the name of the new study.

        Raises:
            ValueError: the number does not exist, or an earlier trial is not finished.
            optuna.exceptions.DuplicatedStudyError: the study exists.
        """
        trials = self.get_trials()
        title = f"number= of a trial of study {self.study_name!r}"
        number = check_whole_number(title, number, at_least=0, at_most=len(trials))
        copied = [trial for trial in trials if trial.number < number]
        if unfinished := [trial.number for trial in copied if not trial.state.is_finished()]:
            raise ValueError(f"Trials {unfinished} before {number} are not finished: optimize the study first.")
        optuna.create_study(study_name=name, storage=self._storage, directions=self.directions).add_trials(copied)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = file_of(self._storage)
        if file is None:
            yield
            return
        path = file.with_name(f".{clean(f'{file.name}.{self.study_name}')}.lock")
        lock = Lock(path, f"Study {self.study_name!r} in {file} is optimized", "open a study of another name")
        lock.acquire()
        try:
            yield
        finally:
            lock.release()


def _pass_interrupts(objective: Callable[[Trial], Any]) -> Callable[[Trial], Any]:
    def call(trial: Trial) -> Any:
        try:
            return objective(trial)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(interrupt) from interrupt

    return call
