"""Trainings that follow a script, cheap enough for hundreds: what they asked, and what a replay of them asks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph.builtin_callbacks.recorder.format.reader import read
from heliograph.builtin_callbacks.recorder.replay.replay import replay
from heliograph.builtin_callbacks.recorder.replay.report import Replayed
from torch import Tensor, nn

Asked = tuple[str, str, str, int, int, int, int, str]
Spec = tuple[str, Mapping[str, Any]]


class Killed(BaseException):
    """Stands for SIGKILL: what the folder held then is put back."""


@dataclass(frozen=True)
class Act:
    """What the meddler does: `verb`, to `plugin` where it is a toggle, when it hears an event for the nth time."""

    event: type[h.Event]
    nth: int
    verb: str
    plugin: str = ""


@dataclass(frozen=True)
class End:
    """How an attempt is made to end: killed, or failed, behind all who hear an event for the nth time."""

    kind: str
    event: type[h.Event]
    nth: int


@dataclass(frozen=True)
class Story:
    """A training.

    Attributes:
        sizes: the sizes of an epoch's batches.
        sized: whether its loader tells its length.
        epochs: how many.
        steps: at most so many optimizer steps.
        losses: of the batches, in turn.
        sets: how many batches each validation set has, by name.
        metrics: of the validations, in turn.
        plugins: what decides, by class name, with its options.
        acts: what the meddler does.
        ends: how the first attempts end; the last one is let be.
        first: whether the recorder is the first plugin, or the last.
        losses_recorded: whether it records them.
        listens: whether a listener writes down what it hears.
    """

    sizes: tuple[int, ...] = (1, 1, 1, 1)
    sized: bool = True
    epochs: int = 2
    steps: int | None = None
    losses: tuple[float, ...] = (1.0,)
    sets: Mapping[str, int] | None = None
    metrics: tuple[float, ...] = (1.0,)
    plugins: tuple[Spec, ...] = ()
    acts: tuple[Act, ...] = ()
    ends: tuple[End, ...] = ()
    first: bool = True
    losses_recorded: bool = True
    listens: bool = False

    def deciding(self) -> list[Any]:
        """Return new objects of the deciding plugins."""
        return [getattr(h, kind)(**_made(options)) for kind, options in self.plugins]


def _made(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plugin's options; a filter is told as its class and its counter, so that a failure shows it."""
    if "when" not in options:
        return dict(options)
    kind, counter = options["when"]
    return {**options, "when": getattr(h, kind)(**counter)}


@dataclass(frozen=True)
class Lived:
    """An attempt: what was asked in it, and whether it was killed."""

    requests: tuple[h.Request, ...]
    killed: bool
    error: BaseException | None
    heard: list[tuple[Any, ...]]


class Scripted(h.Task):
    """Has the losses and metrics of a story; trains next to nothing."""

    def __init__(self, story: Story) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self._story = story

    def training_step(self, run: h.Run, batch: Tensor) -> Tensor:
        story, place = self._story, run.progress
        number = place.epoch * len(story.sizes) + place.batch
        return self.model.weight.sum() * 0 + story.losses[number % len(story.losses)]

    def validation_step(self, run: h.Run, batch: Tensor) -> dict[str, float]:
        return {"loss": self._story.metrics[run.progress.validations % len(self._story.metrics)]}


class Unsized:
    """A loader that does not tell its length."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)


class Meddler(h.Plugin):
    """Does what its acts say."""

    def __init__(self, acts: Sequence[Act], plugins: Callable[[], h.Plugins]) -> None:
        self._acts, self._plugins = acts, plugins
        heard = {act.event for act in acts}
        self.ignores = tuple(event for event in MEDDLED if event not in heard)
        self._heard: dict[type[h.Event], int] = {}

    @h.on(h.TrainStart, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        self._heard = {}

    def meddle(self, run: h.Run, event: h.Event) -> None:
        kind = type(event)
        number = self._heard[kind] = self._heard.get(kind, 0) + 1
        for act in self._acts:
            if (act.event, act.nth) == (kind, number):
                self._do(run, act)

    def _do(self, run: h.Run, act: Act) -> None:
        match act.verb:
            case "disable" | "enable":
                getattr(self._plugins(), act.verb)(act.plugin)
            case "raise":
                raise RuntimeError("as the meddler was told")
            case "scale_loss":
                run.control.scale_loss(0.5, "meddling")
            case verb:
                getattr(run.control, verb)("meddling")


MEDDLED = (
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
for _event in MEDDLED:  # a handler for each, so that each can be ignored

    def _hear(self: Meddler, run: h.Run, event: h.Event) -> None:
        self.meddle(run, event)

    setattr(Meddler, f"hear_{_event.name}", h.on(_event)(_hear))


def live(story: Story, folder: Path) -> list[Lived]:
    """Train as a story tells; return what was asked in each attempt."""
    lived = []
    for end in (*story.ends, None):
        lived.append(_attempt(story, folder, end))
        if lived[-1].error is None:
            break
    return lived


def _attempt(story: Story, folder: Path, end: End | None) -> Lived:
    own = folder / "run"
    recorder = h.Recorder(own, losses=story.losses_recorded)
    trainer: h.Trainer
    meddler = Meddler(story.acts, lambda: trainer.plugins)
    listener = Listener()
    others = [*story.deciding(), meddler, h.Checkpoint(own, keep_last=None, resume="auto")]
    others += [listener] if story.listens else []
    trainer = h.Trainer([recorder, *others] if story.first else [*others, recorder], device="cpu")
    runs: list[h.Run] = []
    trainer.bus.on(h.TrainStart, lambda run, event: runs.append(run), lane=h.Lane.TRANSFORM)
    asked: list[h.Request] = []
    if end is not None:
        trainer.bus.on(end.event, _ending(end, folder, asked), lane=h.Lane.REPORT)
    error: BaseException | None = None
    try:
        _fit(trainer, story)
    except Killed as killed:
        error = killed
        shutil.rmtree(own)
        shutil.move(folder / "kept", own)
    except (RuntimeError, FloatingPointError, ValueError) as failed:
        if not runs:  # the story makes no sense
            raise
        error = failed
    is_killed = isinstance(error, Killed)
    return Lived(tuple(asked if is_killed else runs[0].control.history), is_killed, error, listener.heard)


def _ending(end: End, folder: Path, asked: list[h.Request]) -> Callable[..., None]:
    heard = 0

    def end_it(run: h.Run, event: h.Event) -> None:
        nonlocal heard
        heard += 1
        if heard != end.nth:
            return
        if end.kind == "fail":
            raise RuntimeError("as the story tells")
        asked.extend(replace(request) for request in run.control.history)
        shutil.copytree(folder / "run", folder / "kept")
        raise Killed

    return end_it


def _fit(trainer: h.Trainer, story: Story) -> None:
    batches = [torch.zeros(size, 1) for size in story.sizes]
    options: dict[str, Any] = {"epochs": story.epochs, "steps": story.steps}
    if story.sets is not None:
        sets = {name: [torch.zeros(1, 1)] * count for name, count in story.sets.items()}
        options["validation"] = sets[""] if list(sets) == [""] else sets
    trainer.fit(
        Scripted(story),
        batches if story.sized else Unsized(batches),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **options,
    )


def facts(requests: Sequence[h.Request], plugin: str) -> list[Asked]:
    """Return what is compared of a plugin's requests."""
    return [
        (each.verb, each.by, each.reason, each.epoch, each.batch, each.step, each.times, each.event)
        for each in requests
        if each.by == plugin
    ]


class Replays:
    """The replays of all recordings in a folder: a run that begins afresh has another file.

    Args:
        folder: where a story was lived.
    """

    def __init__(self, folder: Path) -> None:
        self.recordings = [read(path) for path in sorted((folder / "run").glob("*.recording"))]
        places = [
            (attempt.began, file, number)
            for file, recording in enumerate(self.recordings)
            for number, attempt in enumerate(recording.attempts, 1)
        ]
        self.places = [(file, number) for _, file, number in sorted(places)]

    def check(self, lived: Sequence[Lived], plugins: Callable[[], Sequence[Any]], names: Sequence[str]) -> None:
        """Assert that replayed plugins ask what they asked in the run, as far as the recordings go."""
        replays = [replay(recording, plugins()) for recording in self.recordings]
        assert len(lived) == len(self.places)
        for (file, number), attempt in zip(self.places, lived, strict=True):
            for name in names:
                _check(attempt, replays[file], number, name)

    def heard(self) -> list[tuple[Any, ...]]:
        """Return what a listener hears in the replays."""
        heard = []
        for recording in self.recordings:
            listener = Listener()
            replay(recording, [listener])
            heard += listener.heard
        return heard


def _check(attempt: Lived, replayed: Replayed, number: int, plugin: str) -> None:
    live_facts = facts(attempt.requests, plugin)
    own = facts([asking.request for asking in replayed.asked if asking.attempt == number], plugin)
    was_told = any(f"attempt {number}," in text for text in replayed.unheld.get(plugin, ()))
    if was_told and attempt.killed:  # the losses of the last batches died with the process
        live_facts = live_facts[: len(own)]
    assert own == live_facts, f"attempt {number}: {plugin}"


class Listener(h.Plugin):
    """Writes down every event with its fields, and what the run is like then."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def listen(self, run: h.Run, event: h.Event) -> None:
        progress, control = run.progress, run.control
        counters = {name: value for name, value in progress.state_dict().items() if name != "earlier_seconds"}
        loss = None if run.loss is None else str(float(run.loss.detach()))
        asked = (control.should_log, control.should_validate, control.should_save, control.should_stop)
        is_over = isinstance(event, h.RunFailed | h.RunClosed)  # where nobody tidied up
        self.heard.append(
            (
                event.name,
                {each.name: str(getattr(event, each.name)) for each in fields(event)},  # type: ignore[arg-type]
                counters,
                None if isinstance(event, UNTIMED) else progress.seconds,
                run.origin.steps,
                run.window,
                run.is_last_batch if run.batches_per_epoch else None,  # else not always known
                run.batches_per_epoch,
                run.phase,
                loss,
                asked if not is_over else None,
                (control.should_end_epoch, control.is_rolling_back),
                (control.skips_batch, control.drops_step) if not is_over else None,
                {name: str(value) for name, value in run.metrics.items()},
            )
        )


# Where the recorder is among the last to hear, and where events of a plugin's own may come amid a batch.
UNTIMED = (h.RunClosed, h.BatchStart, h.GradientsReady, h.StepEnd)
LISTENED: list[type[h.Event]] = [
    kind for kind in h.CATALOGUE if kind not in (h.Replay, h.PluginChanged, h.PluginFailed, h.CheckpointPruned)
]
for _kind in LISTENED:

    def _listen(self: Listener, run: h.Run, event: h.Event) -> None:
        self.listen(run, event)

    setattr(Listener, f"hear_{_kind.name}", h.on(_kind, lane=h.Lane.REPORT)(_listen))
