"""The plugin that makes a run a trial of an Optuna study."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from heliograph import Lane, NotRecorded, Plugin, Run, on
from heliograph import events as ev
from heliograph.spi import Monitor, clean, ended_for_good, membership, on_main, require

from .storages import is_in_memory

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

AnyTrial: TypeAlias = "Trial | FrozenTrial"

SAME_MOMENT = timedelta(seconds=1)  # some databases round the start of a trial


def live(trial: AnyTrial) -> Trial | None:
    # None for a trial that has ended: only its values are available.
    return cast("Trial", trial) if hasattr(trial, "study") else None


def run_name(base: str, trial: AnyTrial) -> str:
    suffix = f"_trial-{trial.number}"
    if not clean(base + suffix).endswith(suffix):
        raise ValueError(f"name={base!r} is too long for file names with {suffix}: shorten it.")
    return base + suffix


def mode_of(trial: AnyTrial) -> Literal["min", "max"]:
    running = live(trial)
    return "max" if running is not None and running.study.direction.name == "MAXIMIZE" else "min"


def values_of(trial: AnyTrial) -> dict[str, float]:
    # The index of the choice for a categorical parameter.
    return {name: float(trial.distributions[name].to_internal_repr(value)) for name, value in trial.params.items()}


def identity(trial: AnyTrial) -> dict[str, Any]:
    # Distinguishes a trial from one with the same number in another study.
    assert trial.datetime_start is not None
    return {"number": trial.number, "began": trial.datetime_start.isoformat(), "parameters": values_of(trial)}


def check_identity(trial: AnyTrial, saved: Mapping[str, Any]) -> None:
    current = identity(trial)
    distance = abs(datetime.fromisoformat(saved["began"]) - datetime.fromisoformat(current["began"]))
    if distance > SAME_MOMENT or (saved["number"], saved["parameters"]) != (current["number"], current["parameters"]):
        raise ValueError(
            f"The checkpoint belongs to {_describe(saved)}, not to {_describe(current)}: use another name= in fit or "
            f"another folder in Checkpoint, or remove its files."
        )


def _describe(trial: Mapping[str, Any]) -> str:
    return f"trial {trial['number']} of {trial['began']} with {trial['parameters']}"


KEY = "heliograph:pruned_at"


class PruningJudge:
    """Reports values to a trial and asks its pruner, once per validation.

    Some pruners record the progress of a trial and answer differently the second time. So a trial that continues after
    a kill does not ask again about earlier validations, and a decision to prune is stored before it takes effect.
    """

    def __init__(self, trial: AnyTrial) -> None:
        self._trial: Trial | None = live(trial)
        self._reported: set[int] = set()
        self._pruned_at: int | None = None
        if self._trial is not None:  # refresh the trial: a rank may have an old copy
            stored = self._trial.storage.get_trial(self._trial._trial_id)
            self._trial._cached_frozen_trial = stored
            self._reported, self._pruned_at = set(stored.intermediate_values), stored.system_attrs.get(KEY)

    def report(self, step: int, value: float) -> bool:
        # Returns whether to ask the pruner: not for a validation before the last reported one.
        if self._trial is None:
            return False
        is_newest = step >= max(self._reported, default=step)
        if step not in self._reported:
            self._trial.report(value, step)
            self._reported.add(step)
        return is_newest

    def prunes(self, step: int) -> bool:
        assert self._trial is not None
        if self._pruned_at is None and self._trial.should_prune():
            self._pruned_at = step
            self._trial.storage.set_trial_system_attr(self._trial._trial_id, KEY, step)
        return self._pruned_at == step


KINDS = ("categorical", "int", "float")
PRUNED, VALIDATION = "heliograph:pruned", "heliograph:validation"


class Optuna(Plugin):
    """Report to an Optuna trial, and stop the run if the trial is pruned.

    The metric is reported after each validation, and the pruner decides once per validation. A pruned run ends like
    every run that is stopped on purpose. Then `fit` raises `optuna.TrialPruned`, which the study expects, and the user
    attributes `heliograph:pruned` and `heliograph:validation` of the trial record it. A `TrialPruned` of your own code
    passes unchanged, regardless of `ExceptionPassThrough`.

    The name of the run is the `name=` of `fit` with the suffix `_trial-<number>`, so that each trial has its own
    checkpoints and continues from them with `Checkpoint(resume="auto")`.

    A trial is one training. A second training in the same objective does not report validations that the first one has
    reported, and does not ask the pruner about them.

    On several ranks, each rank gets the same trial; rank 0 reports, and all ranks follow the pruner. Suggest parameters
    before the ranks are launched.

    Args:
        trial: the trial of the objective; or a finished one, for example `study.best_trial`, to continue from its
            checkpoint without reports.
        metric: the validation metric to report, for example `validation/loss`; the direction of the study tells which
            values are better. Validations are numbered from 1.

    Raises:
        ImportError: optuna is not installed.
        TypeError: `trial` is not a trial.
        ValueError: the metric is not of a validation, or the study has several objectives. At the start of the run:
            nothing measures the metric, the ranks have different trials, or the study is in the memory of another
            process. Later: the metric does not exist; at a resume, the checkpoint belongs to another trial.
        optuna.TrialPruned: the pruner stopped the run.
    """

    needs = ("validation",)
    exclusive = ("trial",)
    rehearses = False  # reports cannot be undone

    def __init__(self, trial: AnyTrial, metric: str = "validation/loss") -> None:
        optuna = require("optuna", "Optuna", extra="optuna")
        if not isinstance(trial, optuna.trial.Trial | optuna.trial.FrozenTrial):
            raise TypeError(f"trial must be the trial of the objective, got {trial!r}.")
        if (running := live(trial)) is not None and len(running.study.directions) > 1:
            raise ValueError(
                f"Study {running.study.study_name!r} has {len(running.study.directions)} objectives, so its trials "
                f"cannot report or be pruned: use the trial without this plugin."
            )
        self.monitor = Monitor(metric, mode_of(trial))
        if self.monitor.split != "validation":
            raise ValueError(f"metric must be a validation metric, for example 'validation/loss', got {metric!r}.")
        self._trial = trial  # private: each save reads all public attributes, here the whole study
        self._pruned_type = optuna.TrialPruned
        self.pruned_at: int | None = None
        self.is_pruned = False
        self._reason = ""
        self._judge: PruningJudge | None = None  # on the main rank
        self._is_over = False

    def suggest(self, kind: Literal["categorical", "int", "float"], name: str, **options: Any) -> Any:
        """Return the trial's value of a parameter; the first call for a name chooses it.

        Args:
            kind: the kind of the parameter.
            name: its name in the study.
            **options: the options of `suggest_categorical`, `suggest_int` or `suggest_float`: `choices=[...]`, or
                `low=`, `high=`, `step=` and `log=`.

        Raises:
            ValueError: the kind is unknown.
            RuntimeError: on several ranks, the parameter was not suggested before the launch.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got suggest({kind!r}, {name!r}).")
        if name not in self._trial.params and membership().world_size > 1:
            raise RuntimeError(
                f"Each rank would choose its own {name!r}: call suggest in the objective, before launch. The ranks "
                f"then read the value from the trial."
            )
        return getattr(self._trial, f"suggest_{kind}")(name, **options)

    @on(ev.TrainStart, lane=Lane.TRANSFORM, before="recorder")
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        if run.report.is_replay:
            raise NotRecorded("the trial of a study")
        self.monitor.check_measured(run)
        self._check_ranks(run)
        run.name = run_name(run.name, self._trial)
        self.pruned_at, self.is_pruned, self._reason, self._is_over = None, False, "", False
        on_main(run.engine, self._open_judge)

    @on(ev.CheckpointLoaded)
    def repeat_stop_after_resume(self, run: Run, event: ev.CheckpointLoaded) -> None:
        if self.pruned_at is not None:
            run.control.stop(self._reason)

    @on(ev.ValidationEnd, optional=True)
    def report(self, run: Run, event: ev.ValidationEnd) -> None:
        """Report the metric on the main rank, and stop all ranks if the pruner decides so."""
        if not self.monitor.is_for(run, event):
            return
        value, validation = float(self.monitor.read(event.metrics)), run.progress.validations + 1
        if on_main(run.engine, partial(self._prunes, validation, value)) and self.pruned_at is None:
            self.pruned_at = validation
            self._reason = (
                f"trial {self._trial.number} was pruned at validation {validation}, "
                f"with {self.monitor.name} {value:.6g}"
            )
            run.control.stop(self._reason)

    @on(ev.LastBoundary, lane=Lane.TRANSFORM)
    def end(self, run: Run, event: ev.LastBoundary) -> None:
        self._is_over = True

    @on(ev.RunFailed, lane=Lane.REPORT)
    def let_pass(self, run: Run, event: ev.RunFailed) -> None:
        if isinstance(event.error, self._pruned_type):
            run.hooks.replace_error(event.error)

    @on(ev.RunClosed, lane=Lane.REPORT)
    def report_end(self, run: Run, event: ev.RunClosed) -> None:
        if run.optimizer is not None and ended_for_good(run, event.status):
            self.monitor.warn_unread(run, type(self).__name__)
        if run.optimizer is None or event.status != "stopped" or self.pruned_at is None:
            return
        if run.engine.is_main:
            self._trial.set_user_attr(PRUNED, True)
            self._trial.set_user_attr(VALIDATION, self.pruned_at)
        self.is_pruned = True
        run.hooks.raise_when_closed(self._pruned_type(self._reason))

    def check_pruned(self) -> None:
        """Raise `optuna.TrialPruned` if the run was pruned; call it at the end of your own loop."""
        if self.is_pruned:
            raise self._pruned_type(self._reason)

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the trial, and whether it was pruned."""
        return {"trial": identity(self._trial), "pruned_at": self.pruned_at, "reason": self._reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of this trial; a state of another trial is an error."""
        check_identity(self._trial, state["trial"])
        self.pruned_at, self._reason = state["pruned_at"], state["reason"]

    def _check_ranks(self, run: Run) -> None:
        if run.engine.world_size == 1:
            return
        trials = run.engine.gather_objects((self._trial.number, values_of(self._trial)))
        if any(trial != trials[0] for trial in trials):
            listed = "; ".join(f"{number} with {values}" for number, values in trials)
            raise ValueError(f"The ranks have different trials: {listed}. Pass the trial of the objective to launch.")
        if (running := live(self._trial)) is not None and is_in_memory(running.storage):
            raise ValueError(
                "The study is in the memory of the launching process, which the ranks cannot access: use "
                "storage='sqlite:///study.db', the database of a server, or a journal."
            )

    def _open_judge(self) -> None:
        self._judge = PruningJudge(self._trial)

    def _prunes(self, validation: int, value: float) -> bool:
        assert self._judge is not None
        return self._judge.report(validation, value) and not self._is_over and self._judge.prunes(validation)
