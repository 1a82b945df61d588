"""Short scripted trainings, and whether a replay of each makes the same requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph.events import CATALOGUE, Request
from heliograph.tests.kit import sgd
from heliograph_recorder import Recorder
from heliograph_recorder.format.reader import read
from heliograph_recorder.replays.replay import replay
from heliograph_recorder.replays.report import Replayed
from heliograph_rules import RuleController
from torch import Tensor, nn

Facts = tuple[str, str, str, int, int, int, int, str]
Spec = tuple[str, Mapping[str, Any]]


class Killed(BaseException):
    """Simulates SIGKILL: the folder is restored as it was then."""


@dataclass(frozen=True)
class Action:
    """What the acting plugin does on the nth event of a kind: `verb`, to `plugin` if it is a toggle."""

    event: type[h.Event]
    nth: int
    verb: str
    plugin: str = ""


@dataclass(frozen=True)
class End:
    """How an attempt ends: killed, or failed, after all other handlers of the nth event of a kind."""

    kind: str
    event: type[h.Event]
    nth: int


@dataclass(frozen=True)
class Scenario:
    """A training.

    Attributes:
        sizes: the sizes of an epoch's batches.
        sized: whether its loader has a length.
        epochs: the number of epochs.
        steps: at most so many optimizer steps.
        losses: the losses of the batches, repeated.
        sets: how many batches each validation set has, by name.
        metrics: the metrics of the validations, repeated.
        plugins: the class names of the plugins, with their options.
        actions: what the acting plugin does.
        ends: how the first attempts end; the last one runs to its end.
        first: whether the recorder is the first plugin, or the last.
        losses_recorded: whether it records them.
        listens: whether a listener collects the events.
    """

    sizes: tuple[int, ...] = (1, 1, 1, 1)
    sized: bool = True
    epochs: int = 2
    steps: int | None = None
    losses: tuple[float, ...] = (1.0,)
    sets: Mapping[str, int] | None = None
    metrics: tuple[float, ...] = (1.0,)
    plugins: tuple[Spec, ...] = ()
    actions: tuple[Action, ...] = ()
    ends: tuple[End, ...] = ()
    first: bool = True
    losses_recorded: bool = True
    listens: bool = False

    def make_plugins(self) -> list[Any]:
        """Return new objects of the plugins."""
        return [plugin_class(kind)(**_make_options(options)) for kind, options in self.plugins]


def plugin_class(name: str) -> Any:
    """Return the class of a plugin, of the kernel or of the package of rules."""
    return RuleController if name == "RuleController" else getattr(h, name)


def _make_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plugin's options; a filter is given as its class and counter, which a failed test can print."""
    if "when" not in options:
        return dict(options)
    kind, counter = options["when"]
    return {**options, "when": getattr(h, kind)(**counter)}


@dataclass(frozen=True)
class LiveAttempt:
    """The requests and events of an attempt, and how it ended."""

    requests: tuple[Request, ...]
    killed: bool
    error: BaseException | None
    events: list[tuple[Any, ...]]


class ScriptedTask(h.Task):
    """Returns the losses and metrics of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self._scenario = scenario

    def training_step(self, run: h.Run, batch: Tensor) -> Tensor:
        scenario, progress = self._scenario, run.progress
        number = progress.epoch * len(scenario.sizes) + progress.batch
        return self.model.weight.sum() * 0 + scenario.losses[number % len(scenario.losses)]

    def validation_step(self, run: h.Run, batch: Tensor) -> dict[str, float]:
        return {"loss": self._scenario.metrics[run.progress.validations % len(self._scenario.metrics)]}


class Unsized:
    """A loader without a length."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)


class ActingPlugin(h.Plugin):
    """Does what its actions say."""

    def __init__(self, actions: Sequence[Action], plugins: Callable[[], h.Plugins]) -> None:
        self._actions, self._plugins = actions, plugins
        events = {action.event for action in actions}
        self.ignores = tuple(event for event in ACTED_ON if event not in events)
        self._counts: dict[type[h.Event], int] = {}

    @h.on(h.TrainStart, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        self._counts = {}

    def act(self, run: h.Run, event: h.Event) -> None:
        kind = type(event)
        number = self._counts[kind] = self._counts.get(kind, 0) + 1
        for action in self._actions:
            if (action.event, action.nth) == (kind, number):
                self._do(run, action)

    def _do(self, run: h.Run, action: Action) -> None:
        match action.verb:
            case "disable" | "enable":
                getattr(self._plugins(), action.verb)(action.plugin)
            case "raise":
                raise RuntimeError("an error of the acting plugin")
            case "scale_loss":
                run.control.scale_loss(0.5, "acting")
            case verb:
                getattr(run.control, verb)("acting")


ACTED_ON = (
    h.BatchStart,
    h.GradientsReady,
    h.StepEnd,
    h.BatchEnd,
    h.Log,
    h.ValidationBatchEnd,
    h.ValidationEnd,
    h.SavePoint,
    h.CheckpointSaved,
    h.ShouldStop,
    h.EpochStart,
    h.EpochEnd,
    h.TrainEnd,
)
for _event in ACTED_ON:  # a handler for each, so that each can be ignored

    def _handle(self: ActingPlugin, run: h.Run, event: h.Event) -> None:
        self.act(run, event)

    setattr(ActingPlugin, f"on_{_event.name}", h.on(_event)(_handle))


def train(scenario: Scenario, folder: Path) -> list[LiveAttempt]:
    """Train; return what happened in each attempt."""
    attempts: list[LiveAttempt] = []
    for end in (*scenario.ends, None):
        attempts.append(_attempt(scenario, folder, end))
        if attempts[-1].error is None:
            break
    return attempts


def _attempt(scenario: Scenario, folder: Path, end: End | None) -> LiveAttempt:
    own = folder / "run"
    recorder = Recorder(own, losses=scenario.losses_recorded)
    trainer: h.Trainer
    acting = ActingPlugin(scenario.actions, lambda: trainer.plugins)
    listener = Listener()
    others = [*scenario.make_plugins(), acting, h.Checkpoint(own, keep_last=None, resume="auto")]
    others += [listener] if scenario.listens else []
    trainer = h.Trainer([recorder, *others] if scenario.first else [*others, recorder], device="cpu")
    runs: list[h.Run] = []
    trainer.bus.on(h.TrainStart, lambda run, event: runs.append(run), lane=h.Lane.TRANSFORM)
    requests: list[Request] = []
    if end is not None:
        trainer.bus.on(end.event, _make_ending(end, folder, requests), lane=h.Lane.REPORT)
    error: BaseException | None = None
    try:
        _fit(trainer, scenario)
    except Killed as killed:
        error = killed
        shutil.rmtree(own)
        shutil.move(folder / "kept", own)
    except (RuntimeError, FloatingPointError, ValueError) as failed:
        if not runs:  # the scenario is impossible
            raise
        error = failed
    is_killed = isinstance(error, Killed)
    return LiveAttempt(tuple(requests if is_killed else runs[0].control.history), is_killed, error, listener.events)


def _make_ending(end: End, folder: Path, requests: list[Request]) -> Callable[..., None]:
    count = 0

    def end_it(run: h.Run, event: h.Event) -> None:
        nonlocal count
        count += 1
        if count != end.nth:
            return
        if end.kind == "fail":
            raise RuntimeError("the end of the scenario")
        requests.extend(replace(request) for request in run.control.history)
        shutil.copytree(folder / "run", folder / "kept")
        raise Killed

    return end_it


def _fit(trainer: h.Trainer, scenario: Scenario) -> None:
    batches = [torch.zeros(size, 1) for size in scenario.sizes]
    options: dict[str, Any] = {"epochs": scenario.epochs, "steps": scenario.steps}
    if scenario.sets is not None:
        sets = {name: [torch.zeros(1, 1)] * count for name, count in scenario.sets.items()}
        options["validation"] = sets[""] if list(sets) == [""] else sets
    trainer.fit(
        ScriptedTask(scenario),
        batches if scenario.sized else Unsized(batches),
        optimizer=sgd(),
        **options,
    )


def facts(requests: Sequence[Request], plugin: str) -> list[Facts]:
    """Return what the tests compare of a plugin's requests."""
    return [
        (each.verb, each.by, each.reason, each.epoch, each.batch, each.step, each.times, each.event)
        for each in requests
        if each.by == plugin
    ]


class Replays:
    """The replays of all recordings in a folder: a run that does not resume has a file of its own.

    Args:
        folder: where the scenario was trained.
    """

    def __init__(self, folder: Path) -> None:
        self.recordings = [read(path) for path in sorted((folder / "run").glob("*.recording"))]
        attempts = [
            (attempt.began, file, number)
            for file, recording in enumerate(self.recordings)
            for number, attempt in enumerate(recording.attempts, 1)
        ]
        self.attempts = [(file, number) for _, file, number in sorted(attempts)]

    def check(
        self, attempts: Sequence[LiveAttempt], plugins: Callable[[], Sequence[Any]], names: Sequence[str]
    ) -> None:
        """Assert that replayed plugins make the requests that they made in the run, as far as these are recorded."""
        replays = [replay(recording, plugins()) for recording in self.recordings]
        assert len(attempts) == len(self.attempts)
        for (file, number), attempt in zip(self.attempts, attempts, strict=True):
            if attempt.killed:  # its last batches are not recorded, so later attempts begin with another state, too
                return
            for name in names:
                _check(attempt, replays[file], number, name)

    def events(self) -> list[tuple[Any, ...]]:
        """Return the events of the replays."""
        events = []
        for recording in self.recordings:
            listener = Listener()
            replay(recording, [listener])
            events += listener.events
        return events


def _check(attempt: LiveAttempt, replayed: Replayed, number: int, plugin: str) -> None:
    live_facts = facts(attempt.requests, plugin)
    own = facts([each.request for each in replayed.asked if each.attempt == number], plugin)
    if attempt.error is not None:
        return  # the last batch of a failed run is not replayed, so the last requests and their counts differ
    assert own == live_facts, f"attempt {number}: {plugin}"


class Listener(h.Plugin):
    """Collects every event with its fields and the state of the run."""

    affects_training = False

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def listen(self, run: h.Run, event: h.Event) -> None:
        progress, control = run.progress, run.control
        counters = {name: value for name, value in progress.state_dict().items() if name != "earlier_seconds"}
        loss = None if run.loss is None else str(float(run.loss.detach()))
        due = (control.should_log, control.should_validate, control.should_save, control.should_stop)
        is_over = isinstance(event, h.RunFailed | h.RunClosed)  # where nothing is reset
        is_late = isinstance(event, h.ResumeVerified)  # replayed after the batch, in whose last handlers it was emitted
        self.events.append(
            (
                event.name,
                {each.name: str(getattr(event, each.name)) for each in fields(event) if each.name != "weights"},
                counters,
                None if isinstance(event, UNTIMED) else progress.seconds,
                run.origin.steps,
                run.stepping.window,
                run.data.is_last_batch if run.length.batches_per_epoch else None,  # else not always known
                run.length.batches_per_epoch,
                run.phase,
                loss,
                due if not is_over else None,
                (control.should_end_epoch, control.is_rolling_back),
                (control.skips_batch, control.drops_step) if not is_over and not is_late else None,
                {name: str(value) for name, value in run.metrics.items()},
            )
        )


# Where the recorder is called among the last, and during a batch, where events of plugins may come.
UNTIMED = (h.RunClosed, h.BatchStart, h.GradientsReady, h.StepEnd)
LISTENED: list[type[h.Event]] = [
    kind for kind in CATALOGUE if kind not in (h.Replay, h.PluginChanged, h.PluginFailed, h.CheckpointPruned)
]
for _kind in LISTENED:

    def _listen(self: Listener, run: h.Run, event: h.Event) -> None:
        self.listen(run, event)

    setattr(Listener, f"on_{_kind.name}", h.on(_kind, lane=h.Lane.REPORT)(_listen))
