"""Learning-rate schedulers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from inspect import signature
from typing import Any, Literal, get_args

from ..core.host import ended_for_good
from ..core.metrics.monitor import Monitor
from ..core.stepping.schedulers import WarmupScheduler
from ..events import CheckpointLoaded, EpochEnd, Lane, Log, Run, RunClosed, StepEnd, TrainStart, ValidationEnd
from ..events.checks import known_names
from ..plugins import Plugin, on

Per = Literal["step", "epoch", "plateau"]


class LearningRate(Plugin):
    """Step the schedulers passed to `fit(scheduler=...)`.

    A scheduler is stepped after every optimizer step, after every epoch, or by a metric if it detects plateaus, but
    never if its optimizer was not stepped. The plugin logs `train/learning_rate` of the next step, and `train/momentum`
    (for Adam, the first beta) if the scheduler changes it, as `OneCycleLR` does. With several optimizers, each has its
    own scheduler or none, logged as `train/<name>_learning_rate`.

    The result has a warning if a scheduler was never stepped, or was stepped beyond its length (`T_max`, or
    `total_iters` if it ends at a rate of zero). It also has one if a scheduler created for the planned steps was
    stepped more or less often.

    A scheduler with `step_update(num_updates)` and `step(epoch)`, like those of timm, is passed the number of finished
    optimizer steps or epochs.

    Args:
        per: `step`, `epoch` or `plateau`; or one of them for each scheduler, by the name of its optimizer.
        monitor: the metric for `plateau`, and only for that.

    Raises:
        ValueError: `per` is unknown, or does not fit `monitor`. At the start of a run also if there is no scheduler, if
            `per` names other schedulers, or if a scheduler needs another `per`.
    """

    exclusive = ("scheduler",)
    asks = ("scheduler",)

    def __init__(self, per: Per | Mapping[str, Per], *, monitor: str | None = None) -> None:
        moments = list(per.values()) if isinstance(per, Mapping) else [per]
        if not moments or any(moment not in get_args(Per) for moment in moments):
            raise ValueError(f"LearningRate(per) takes 'step', 'epoch' or 'plateau', or a dict of these; got {per!r}.")
        if (monitor is not None) != ("plateau" in moments):
            raise ValueError("monitor= is required for 'plateau' only: LearningRate('plateau', monitor=...).")
        self.per = dict(per) if isinstance(per, Mapping) else per
        self._steps_before = 0
        self._planned: dict[str, int] = {}  # the steps that schedulers are made for
        self._stepped: set[str] = set()
        self._ever_stepped: set[str] = set()  # in this run
        self._updates: dict[str, int] = {}  # how often `step_update` was called, of schedulers that have it
        self.monitor = None if monitor is None else Monitor(monitor, "min")
        if self.monitor is not None:
            self.needs = ("validation" if self.monitor.split == "validation" else "log",)

    def reset(self) -> None:
        self._steps_before, self._stepped, self._ever_stepped, self._updates = 0, set(), set(), {}

    def describe(self, run: Run) -> str:
        planned = {name: f" of {steps} steps" for name, steps in run.length.scheduler_steps.items()}
        kinds: dict[str, list[str]] = {}
        for name, scheduler in run.schedulers.items():
            kind = f"{type(scheduler).__name__}{planned.get(name, '')}"
            kinds.setdefault(self.per_of(name) or "nothing", []).append(kind)
        parts = [f"{', '.join(names)} after {self._moment(per)}" for per, names in kinds.items()]
        return f"steps {' and '.join(parts) or 'no scheduler'}"

    def per_of(self, name: str) -> Per | None:
        """Return when the scheduler of an optimizer is stepped; None if not specified."""
        return self.per.get(name) if isinstance(self.per, dict) else self.per

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Check that `per` fits the schedulers."""
        if not run.schedulers:
            raise ValueError("LearningRate steps a scheduler, but fit was given none: pass scheduler= to fit.")
        self._planned = dict(run.length.scheduler_steps)
        if isinstance(self.per, dict):
            for name in sorted(self.per.keys() ^ run.schedulers.keys()):
                problem = "names no scheduler" if name in self.per else "does not say when to step the scheduler"
                names = known_names(name, run.schedulers)
                raise ValueError(f"LearningRate({self.per!r}) {problem} {name!r}.{names if name in self.per else ''}")
        for name, scheduler in run.schedulers.items():
            per = self.per_of(name)
            if isinstance(scheduler, WarmupScheduler) and per != "step":
                kind = type(scheduler).__name__
                raise ValueError(f"LearningRate({per!r}) does not fit {kind}: use LearningRate('step').")
            if callable(getattr(scheduler, "step_update", None)):
                check_counted(scheduler, per)
                if per == "step":
                    self._updates[name] = 0
            if ("metrics" in signature(scheduler.step).parameters) != (per == "plateau"):
                kind = type(scheduler).__name__
                raise ValueError(f"LearningRate({per!r}) does not fit {kind}: only a plateau scheduler takes a metric.")
        if self.monitor is not None:
            self.monitor.check_measured(run)

    @on(CheckpointLoaded, optional=True)
    def compare_lengths(self, run: Run, event: CheckpointLoaded) -> None:
        """Report schedulers that were created for another number of steps."""
        before, self._planned = self._planned, dict(run.length.scheduler_steps)
        for name in sorted(
            name for name in self._planned if before.get(name, self._planned[name]) != self._planned[name]
        ):
            scheduler, now = run.schedulers[name], self._planned[name]
            text = f"scheduler {type(scheduler).__name__} was made for {before[name]} steps, the run now plans {now}"
            run.data.report_difference(f"the {text}")
            if isinstance(scheduler, WarmupScheduler):
                run.note(f"the {text}: from step {run.progress.steps} on, the learning rate follows the new length")
            else:
                run.warn(f"The {text}: resume with the previous length, or set it in a handler of CheckpointLoaded.")

    @on(StepEnd)
    def after_step(self, run: Run, event: StepEnd) -> None:
        """Step the scheduler after an optimizer step."""
        if self.per_of(run.stepping.optimizer_name) != "step":
            self._stepped.add(run.stepping.optimizer_name)
        elif run.scheduler is not None:
            if self._updates and run.stepping.optimizer_name in self._updates:
                self._updates[run.stepping.optimizer_name] += 1
                run.scheduler.step_update(self._updates[run.stepping.optimizer_name])
            else:
                run.scheduler.step()
            self._ever_stepped.add(run.stepping.optimizer_name)

    @on(EpochEnd, optional=True)
    def after_epoch(self, run: Run, event: EpochEnd) -> None:
        """Step the schedulers after an epoch if their optimizers were stepped in it."""
        if due := self._due(run, "epoch"):
            with warnings.catch_warnings():
                if run.origin.steps:  # torch does not count the optimizer's steps before the resume
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                for name in due:
                    scheduler = run.schedulers[name]
                    scheduler.step(*([run.progress.epoch] if hasattr(scheduler, "step_update") else []))

    @on(ValidationEnd, Log, optional=True)
    def after_measuring(self, run: Run, event: ValidationEnd | Log) -> None:
        """Step the schedulers with the metric, if it was measured in a training."""
        if self.monitor is None or not self.monitor.is_for(run, event):
            return
        value = self.monitor.read(event.metrics)  # a NaN compares as no improvement
        for name in self._due(run, "plateau"):
            run.schedulers[name].step(value)

    @on(RunClosed)
    def end(self, run: Run, event: RunClosed) -> None:
        """Warn if a scheduler was not stepped as planned."""
        if not ended_for_good(run, event.status) or not run.progress.steps:
            return
        if self.monitor is not None:
            self.monitor.warn_unread(run, type(self).__name__)
        for name, scheduler in run.schedulers.items():
            subject = f"The scheduler {type(scheduler).__name__}" + f" of {name!r}" * (len(run.optimizers) > 1)
            if not (name in self._ever_stepped or run.origin.steps or was_stepped(scheduler)):
                after = {"step": "step of its optimizer", "epoch": "epoch", "plateau": "measurement"}
                rule = f"LearningRate({self.per!r}) steps it after each {after[self.per_of(name) or 'step']}"
                run.warn(f"{subject} was never stepped in {run.progress.steps} steps: {rule}.")
            elif past := past_its_length(scheduler):
                run.warn(f"{subject} was stepped beyond its length, {past}.")
            elif self.per_of(name) == "step" and event.status == "completed" and name in run.length.scheduler_steps:
                planned, taken = run.length.scheduler_steps[name], getattr(scheduler, "last_epoch", run.progress.steps)
                skipped = run.progress.skipped_steps + run.progress.skipped_batches
                if abs(planned - taken) > skipped and run.progress.batches != run.origin.batches:
                    run.warn(
                        f"{subject} was made for the {planned} planned steps of the run, but was stepped {taken} "
                        f"times. If epochs end early or the length of a loader is wrong, pass steps= to fit."
                    )

    def state_dict(self) -> dict[str, Any]:
        planned = {"planned": dict(self._planned)} if self._planned else {}
        updates = {"updates": dict(self._updates)} if self._updates else {}
        return {"steps_before": self._steps_before, "stepped": sorted(self._stepped), **planned, **updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps_before, self._stepped = state["steps_before"], set(state["stepped"])
        self._planned = dict(state.get("planned", {}))
        self._updates |= state.get("updates", {})

    @on(Log, lane=Lane.MEASURE, optional=True)
    def report(self, run: Run, event: Log) -> None:
        """Add the learning rates, and momenta that change, to the log."""
        for name, optimizer in run.optimizers.items():
            group = optimizer.param_groups[0]
            event.metrics[f"train/{run.stepping.label('learning_rate', name)}"] = float(group["lr"])
            if getattr(run.schedulers.get(name), "cycle_momentum", False):  # torch's word for it
                momentum = group["betas"][0] if "betas" in group else group["momentum"]
                event.metrics[f"train/{run.stepping.label('momentum', name)}"] = float(momentum)

    def _moment(self, per: str) -> str:
        return f"each {per}" if per != "plateau" or self.monitor is None else f"each measurement of {self.monitor.name}"

    def _due(self, run: Run, per: Per) -> list[str]:
        """Return the schedulers whose optimizers were stepped since their last step."""
        due = [name for name in run.schedulers if self.per_of(name) == per]
        if len(run.optimizers) == 1:  # stepped whenever there was a step, with or without its event
            due = due if run.progress.steps != self._steps_before else []
        else:
            due = [name for name in due if name in self._stepped]
        if due:
            self._steps_before = run.progress.steps
            self._stepped.difference_update(due)
            self._ever_stepped.update(due)
        return due


def check_counted(scheduler: Any, per: Per | None) -> None:
    """Raise ValueError if a scheduler of timm would have no effect with this `per`."""
    kind = type(scheduler).__name__
    if per == "plateau" or hasattr(scheduler, "lr_scheduler"):  # where timm's plateau scheduler wraps torch's
        raise ValueError(
            f"LearningRate({per!r}) does not fit {kind}, which does not save its patience: for plateaus, use torch's "
            f"ReduceLROnPlateau with LearningRate('plateau', monitor='validation/loss')."
        )
    by_epochs = bool(getattr(scheduler, "t_in_epochs", per == "epoch"))
    if by_epochs != (per == "epoch"):
        unit, suggestion = ("epochs", "epoch") if by_epochs else ("optimizer steps", "step")
        raise ValueError(
            f"LearningRate({per!r}) does not fit {kind}, which counts {unit}: use LearningRate({suggestion!r}), or "
            f"create the scheduler with t_in_epochs={not by_epochs}."
        )


def was_stepped(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", ())
    return bool(getattr(scheduler, "last_epoch", 0)) or any(was_stepped(part) for part in parts)


def past_its_length(scheduler: Any) -> str:
    """Return how a scheduler, or a part of it, was stepped beyond its length, or "".

    `OneCycleLR` raises an error itself; a scheduler that ends above zero, such as `LinearLR`, does no harm.
    """
    for part in getattr(scheduler, "_schedulers", ()):
        if past := past_its_length(part):
            return past
    taken = getattr(scheduler, "last_epoch", 0)
    if taken > (length := getattr(scheduler, "T_max", taken)):
        return f"{taken} times with T_max={length}, so the learning rate rises again. Set it to the length of the run"
    is_off = taken > 0 and max(scheduler.get_last_lr()) < 1e-9 * max(getattr(scheduler, "base_lrs", [0.0]))
    if is_off and taken > (length := getattr(scheduler, "total_iters", taken)):
        return f"{taken} times with total_iters={length}, so the learning rate is 0. Set it to the length of the run"
    return ""
