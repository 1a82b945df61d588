"""Make a run a trial of an Optuna study."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from heliograph import (
    CheckpointLoaded,
    Lane,
    LastBoundary,
    NotRecorded,
    Plugin,
    Run,
    RunClosed,
    RunFailed,
    TrainStart,
    ValidationEnd,
    on,
)
from heliograph.spi import Monitor, clean, ended_for_good, membership, on_main, require

from .storages import is_in_memory

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

AnyTrial: TypeAlias = "Trial | FrozenTrial"

SAME_MOMENT = timedelta(seconds=1)  # some databases round the moment at which a trial began


def live(trial: AnyTrial) -> Trial | None:
    """Return a trial of a study; None for one that is over, of which only the values are there."""
    return cast("Trial", trial) if hasattr(trial, "study") else None


def run_name(base: str, trial: AnyTrial) -> str:
    """Return the name of a trial's run, by which it finds its own checkpoints.

    Raises:
        ValueError: file names would lose the number.
    """
    suffix = f"_trial-{trial.number}"
    if not clean(base + suffix).endswith(suffix):
        raise ValueError(f"name= is too long for file names that end in {suffix}: shorten {base!r}.")
    return base + suffix


def mode_of(trial: AnyTrial) -> Literal["min", "max"]:
    """Return which way is better; one that has ended takes no reports."""
    running = live(trial)
    return "max" if running is not None and running.study.direction.name == "MAXIMIZE" else "min"


def values_of(trial: AnyTrial) -> dict[str, float]:
    """Return the parameters as the storage holds them: of a categorical one, the index of the choice."""
    return {name: float(trial.distributions[name].to_internal_repr(value)) for name, value in trial.params.items()}


def identity(trial: AnyTrial) -> dict[str, Any]:
    """Return what distinguishes a trial from one of the same number in another study."""
    assert trial.datetime_start is not None
    return {"number": trial.number, "began": trial.datetime_start.isoformat(), "parameters": values_of(trial)}


def check_identity(trial: AnyTrial, saved: Mapping[str, Any]) -> None:
    """Raise ValueError where a checkpoint is another trial's."""
    mine = identity(trial)
    apart = abs(datetime.fromisoformat(saved["began"]) - datetime.fromisoformat(mine["began"]))
    if apart > SAME_MOMENT or (saved["number"], saved["parameters"]) != (mine["number"], mine["parameters"]):
        raise ValueError(
            f"The checkpoint is of {_words(saved)}, another one than {_words(mine)}: give fit another name=, "
            f"Checkpoint another folder, or remove what is in it."
        )


def _words(known: Mapping[str, Any]) -> str:
    return f"trial {known['number']} of {known['began']} with {known['parameters']}"


KEY = "heliograph:pruned_at"


class Judge:
    """Reports values and asks the pruner.

    Some pruners write down how far a trial has come, and say something else when they are asked again. So a trial that
    continues after a kill does not ask again about what it continued from, and an answer to stop is in the storage
    before it counts.

    Args:
        trial: of one that is over, nothing is reported.
    """

    def __init__(self, trial: AnyTrial) -> None:
        self._trial: Trial | None = live(trial)
        self._reported: set[int] = set()
        self._pruned_at: int | None = None
        if self._trial is not None:  # read again what it knows of itself: that of a rank may be older
            known = self._trial.storage.get_trial(self._trial._trial_id)
            self._trial._cached_frozen_trial = known
            self._reported, self._pruned_at = set(known.intermediate_values), known.system_attrs.get(KEY)

    def report(self, step: int, value: float) -> bool:
        """Report a value, unless that was done; return whether the pruner is to be asked of it."""
        if self._trial is None:
            return False
        is_newest = step >= max(self._reported, default=step)
        if step not in self._reported:
            self._trial.report(value, step)
            self._reported.add(step)
        return is_newest

    def prunes(self, step: int) -> bool:
        """Return whether the pruner stops the trial at a step that was reported."""
        assert self._trial is not None
        if self._pruned_at is None and self._trial.should_prune():
            self._pruned_at = step
            self._trial.storage.set_trial_system_attr(self._trial._trial_id, KEY, step)
        return self._pruned_at == step


KINDS = ("categorical", "int", "float")
PRUNED, VALIDATION = "heliograph:pruned", "heliograph:validation"


class Optuna(Plugin):
    """Report to an Optuna trial, and stop when it is pruned.

    A metric is reported after each validation. The pruner is asked once per validation. A run that it stops is closed
    as any that is stopped on purpose; then `fit` raises `optuna.TrialPruned`, which the study takes for what it is, and
    the trial's user attributes `heliograph:pruned` and `heliograph:validation` say so. A `TrialPruned` that code of
    yours raises in the run passes unchanged, whatever `ExceptionPassThrough` lists.

    The run's name is the `name=` of `fit` with `_trial-<number>` appended, so that each trial has its own checkpoints,
    and with `Checkpoint(resume="auto")` continues from its own.

    A trial is one training: of a second one in the same objective, nothing is reported for the validations that the
    first has reported, and the pruner is not asked of them.

    On several ranks each is given the same trial; the main one (0) reports, and all of them follow the pruner.
    Parameters are suggested before the ranks are launched.

    Args:
        trial: the one that the objective was called with; or one that is over, such as `study.best_trial`, to continue
            from its checkpoint: nothing is reported of it then.
        metric: what to report, a metric of the validation such as `validation/loss`; the study's direction says which
            way is better. Validations count from 1.

    Raises:
        ImportError: optuna is not installed.
        TypeError: the trial is none.
        ValueError: the metric is none of a validation, or the study has several objectives; at the run's start, nothing
            would measure the metric, the ranks have different trials, or the study is in the memory of one of several;
            when it is read, the metric does not exist (the error lists those that do); at a resume, the checkpoint is
            of another trial.
        optuna.TrialPruned: the pruner stopped the run.
    """

    needs = ("validation",)
    exclusive = ("trial",)
    rehearses = False  # what is reported to a study stays there

    def __init__(self, trial: AnyTrial, metric: str = "validation/loss") -> None:
        optuna = require("optuna", "Optuna", extra="optuna")
        if not isinstance(trial, optuna.trial.Trial | optuna.trial.FrozenTrial):
            raise TypeError(f"Optuna takes the trial that the objective is called with, got {trial!r}.")
        if (running := live(trial)) is not None and len(running.study.directions) > 1:
            raise ValueError(
                f"Study {running.study.study_name!r} has {len(running.study.directions)} objectives: of its trials "
                f"nothing can be reported, and none pruned. Take suggestions from the trial, without this plugin."
            )
        self.monitor = Monitor(metric, mode_of(trial))
        if self.monitor.split != "validation":
            raise ValueError(f"Optuna reports after each validation, so no {metric!r}, but such as 'validation/loss'.")
        self.trial, self._pruned_type = trial, optuna.TrialPruned
        self.pruned_at: int | None = None
        self.is_pruned = False
        self._reason = ""
        self._judge: Judge | None = None  # on the main rank
        self._is_over = False

    def suggest(self, kind: Literal["categorical", "int", "float"], name: str, **options: Any) -> Any:
        """Return the trial's value of a parameter; the first call for a name chooses it.

        Args:
            kind: what it is.
            name: of the parameter, as the study knows it.
            **options: of the trial's own `suggest_categorical`, `suggest_int` or `suggest_float`: `choices=[...]`, or
                `low=`, `high=`, `step=` and `log=`.

        Raises:
            ValueError: there is no such kind.
            RuntimeError: this is one of several ranks, and the parameter was not suggested before they were launched.
        """
        if kind not in KINDS:
            raise ValueError(f"A parameter is one of {', '.join(KINDS)}; got suggest({kind!r}, {name!r}).")
        if name not in self.trial.params and membership().world_size > 1:
            raise RuntimeError(
                f"Each rank would choose {name!r} for itself: call suggest in the objective, before launch. The ranks "
                f"are given the trial, and read there what was chosen."
            )
        return getattr(self.trial, f"suggest_{kind}")(name, **options)

    @on(TrainStart, lane=Lane.TRANSFORM, before="recorder")
    def begin(self, run: Run, event: TrainStart) -> None:
        """Name the run after the trial, and forget the former run."""
        if run.report.is_replay:
            raise NotRecorded("the trial of a study")
        self.monitor.check_measured(run)
        self._check_ranks(run)
        run.name = run_name(run.name, self.trial)
        self.pruned_at, self.is_pruned, self._reason, self._is_over = None, False, "", False
        on_main(run.engine, self._open_judge)

    @on(CheckpointLoaded)
    def repeat_stop_after_resume(self, run: Run, event: CheckpointLoaded) -> None:
        """Stop a resumed run that had been pruned."""
        if self.pruned_at is not None:
            run.control.stop(self._reason)

    @on(ValidationEnd, optional=True)
    def report(self, run: Run, event: ValidationEnd) -> None:
        """Report, and ask the pruner, on the main rank; do on every rank what it says."""
        if not self.monitor.is_for(run, event):
            return
        value, validation = float(self.monitor.read(event.metrics)), run.progress.validations + 1
        if on_main(run.engine, partial(self._prunes, validation, value)) and self.pruned_at is None:
            self.pruned_at = validation
            self._reason = (
                f"trial {self.trial.number} was pruned at validation {validation}, with {self.monitor.name} {value:.6g}"
            )
            run.control.stop(self._reason)

    @on(LastBoundary, lane=Lane.TRANSFORM)
    def end(self, run: Run, event: LastBoundary) -> None:
        """Ask the pruner no more: what is validated now is only reported."""
        self._is_over = True

    @on(RunFailed, lane=Lane.REPORT)
    def let_pass(self, run: Run, event: RunFailed) -> None:
        """Let a pruning that other code raised leave as it is."""
        if isinstance(event.error, self._pruned_type):
            run.hooks.replace_error(event.error)

    @on(RunClosed, lane=Lane.REPORT)
    def report_end(self, run: Run, event: RunClosed) -> None:
        """Write down that the trial was pruned, and have it raised; warn where nothing was reported."""
        if run.optimizer is not None and ended_for_good(run, event.status):
            self.monitor.warn_unread(run, type(self).__name__)
        if run.optimizer is None or event.status != "stopped" or self.pruned_at is None:
            return
        if run.engine.is_main:
            self.trial.set_user_attr(PRUNED, True)
            self.trial.set_user_attr(VALIDATION, self.pruned_at)
        self.is_pruned = True
        run.hooks.raise_when_closed(self._pruned_type(self._reason))

    def check_pruned(self) -> None:
        """Raise `optuna.TrialPruned` if the run was pruned: for a loop of your own, after which nothing else does."""
        if self.is_pruned:
            raise self._pruned_type(self._reason)

    def state_dict(self) -> dict[str, Any]:
        """Return whose state it is, and whether it was pruned."""
        return {"trial": identity(self.trial), "pruned_at": self.pruned_at, "reason": self._reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, where the state is this trial's."""
        check_identity(self.trial, state["trial"])
        self.pruned_at, self._reason = state["pruned_at"], state["reason"]

    def _check_ranks(self, run: Run) -> None:
        if run.engine.world_size == 1:
            return
        trials = run.engine.gather_objects((self.trial.number, values_of(self.trial)))
        if any(each != trials[0] for each in trials):
            listed = "; ".join(f"{number} with {values}" for number, values in trials)
            raise ValueError(f"The ranks have different trials: {listed}. Give launch the one of the objective.")
        if (running := live(self.trial)) is not None and is_in_memory(running.storage):
            raise ValueError(
                "The study is in the memory of the process that launched the ranks, where their reports do not arrive: "
                "give it storage='sqlite:///study.db', a server's database, or a journal."
            )

    def _open_judge(self) -> None:
        self._judge = Judge(self.trial)

    def _prunes(self, validation: int, value: float) -> bool:
        assert self._judge is not None
        return self._judge.report(validation, value) and not self._is_over and self._judge.prunes(validation)
