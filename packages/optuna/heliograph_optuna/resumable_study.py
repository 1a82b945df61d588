"""A study whose trials continue where a killed process left them. Imported where optuna is installed."""

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


def load_learned(study: Study) -> None:
    """Let the study's pruner go by what it has learned, and begin with that where it has to learn nothing."""
    pruner = _learner(study.pruner)
    learned = study._storage.get_study_system_attrs(study._study_id).get(KEY)
    if pruner is not None and learned is not None and learned["pruner"] == type(pruner).__name__:
        setattr(pruner, _attribute(pruner), learned["resource"])
    if isinstance(pruner, HyperbandPruner) and pruner._max_resource != "auto" and not pruner._pruners:
        pruner._try_initialization(study)


def save_learned(study: Study) -> None:
    """Write down what the pruner has learned from trials that are over."""
    pruner = _learner(study.pruner)
    if pruner is None:
        return
    learned = {"pruner": type(pruner).__name__, "resource": getattr(pruner, _attribute(pruner))}
    is_known = study._storage.get_study_system_attrs(study._study_id).get(KEY) == learned
    if isinstance(learned["resource"], int) and not is_known:
        study._storage.set_study_system_attr(study._study_id, KEY, learned)


def _learner(pruner: BasePruner | None) -> HyperbandPruner | SuccessiveHalvingPruner | None:
    while isinstance(pruner, PatientPruner):
        pruner = pruner._wrapped_pruner
    return pruner if isinstance(pruner, HyperbandPruner | SuccessiveHalvingPruner) else None


def _attribute(pruner: BasePruner) -> str:
    return "_max_resource" if isinstance(pruner, HyperbandPruner) else "_min_resource"


logger = logging.getLogger("heliograph")


class Interrupted(BaseException):
    """Carries a Ctrl-C out of an optimization, which would take it for a failure of the trial."""

    def __init__(self, interrupt: KeyboardInterrupt) -> None:
        super().__init__()
        self.interrupt = interrupt


class ResumableStudy(optuna.Study):
    """An `optuna.Study` that may be killed at any moment: the same call continues as if nothing had happened.

    The trial that was running continues first, under its own number and with its own parameters; a run of it with
    `Checkpoint(resume="auto")` continues from its checkpoint. The sampler continues from its random states.
    Ctrl-C, or a SystemExit such as `Preemption` raises, leaves a trial running, too. An exception of the objective's
    makes it a failed one, as in any study.
    """

    _left: tuple[int, ...] = ()  # the ids of trials to continue

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
        """Optimize an objective, as `optuna.Study.optimize` does; what is different is said here.

        One process at a time may do so. Where the study lies in a file, a second one is refused.

        Args:
            func: the objective.
            n_trials: how many trials the study is to have in the end, those of earlier calls among them; None for no
                such limit.
            timeout: seconds from now on, in which trials may begin.
            n_jobs: 1; to train several trials at once, see `heliograph_ray.tune`.
            catch: exceptions that fail a trial, but not the study.
            callbacks: called with the study and each trial that is over.
            gc_after_trial: whether to collect garbage after each trial.
            show_progress_bar: whether to draw one.

        Raises:
            RuntimeError: this process is one of several ranks.
            ValueError: another process optimizes the study; an argument is out of its range.
        """
        if n_jobs != 1:
            raise ValueError(f"A study that can be resumed has one trial at a time: n_jobs is 1, got {n_jobs!r}.")
        if (ranks := membership().world_size) > 1:
            raise RuntimeError(
                f"This process is one of {ranks} ranks, each of which would have a study of its own: optimize in a "
                f"single process, and launch the ranks in the objective."
            )
        with self._alone():
            trials = self.get_trials(deepcopy=False)
            self._left = tuple(each._trial_id for each in trials if each.state == TrialState.RUNNING)
            if n_trials is not None:
                n_trials -= sum(each.state.is_finished() for each in trials)
                if n_trials <= 0:
                    return
            load_learned(self)
            try:
                super().optimize(
                    _keeping_interrupts(func), n_trials, timeout, 1, catch, callbacks, gc_after_trial, show_progress_bar
                )
            except Interrupted as error:
                raise error.interrupt from None

    def ask(self, fixed_distributions: dict[str, BaseDistribution] | None = None) -> Trial:
        """Return a trial that was left running, if there is one, else a new one."""
        save_learned(self)
        if not self._left:
            return super().ask(fixed_distributions)
        trial_id, *rest = self._left
        self._left = tuple(rest)
        trial = Trial(self, trial_id)
        logger.info("trial %d of study %r continues", trial.number, self.study_name)
        return trial

    def copy_before(self, number: int, name: str) -> None:
        """Create a study in the same storage with the trials before one; `open_study(name, ...)` continues from there.

        A sampler of the same class suggests for that trial what was suggested here. This study stays as it is. The runs
        of both have the same names: give `fit` another `name=` there, or `Checkpoint` another folder.

        Args:
            number: of the first trial that is not copied.
            name: of the new study.

        Raises:
            ValueError: there is no such number, or a trial before it is not over.
            optuna.exceptions.DuplicatedStudyError: there is a study of that name.
        """
        trials = self.get_trials()
        what = f"number= of a trial of study {self.study_name!r}"
        number = check_whole_number(what, number, at_least=0, at_most=len(trials))
        kept = [each for each in trials if each.number < number]
        if unfinished := [each.number for each in kept if not each.state.is_finished()]:
            raise ValueError(f"Of the trials before {number}, {unfinished} are not over: optimize the study first.")
        optuna.create_study(study_name=name, storage=self._storage, directions=self.directions).add_trials(kept)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from optimizing the study meanwhile, where it lies in a file."""
        file = file_of(self._storage)
        if file is None:
            yield
            return
        path = file.with_name(f".{clean(f'{file.name}.{self.study_name}')}.lock")
        what = f"Study {self.study_name!r} in {file} is optimized"
        lock = Lock(path, what, "open a study of another name")
        lock.acquire()
        try:
            yield
        finally:
            lock.release()


def _keeping_interrupts(objective: Callable[[Trial], Any]) -> Callable[[Trial], Any]:
    def call(trial: Trial) -> Any:
        try:
            return objective(trial)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(interrupt) from interrupt

    return call
