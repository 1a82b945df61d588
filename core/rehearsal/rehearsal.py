"""The rehearsal: a short run that does everything a long one does, and restores everything."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Unpack

import torch

from ...events import Bus, Event, Lane
from ...events import catalogue as ev
from ...plugins.filters import Filter
from ...plugins.plugin import Plugin
from .. import loop
from ..checkpoint.verified import record_verified
from ..data.batch_size import find_executable_batch_size
from ..data.loaders import samples_at_most
from ..engines.contract import LoopEngine
from ..host import hosted_by
from ..settings import FitOptions
from ..task import check_step
from ..trace import Difference, Tracer
from ..trainer import Trainer
from .objects import KeptObjects
from .report import STEPS, Planned, Rehearsal, Seen, plan_of, predict

BY = "the rehearsal"
TIMED = (ev.EpochStart, ev.BatchEnd, ev.ValidationStart, ev.ValidationEnd, ev.SavePoint, ev.ShouldStop)
AT_SAVE = "when it was saved"
# Depends on the clock, has no effect, or does not exist after a mere load.
IGNORED = frozenset((part, "") for part in ("metrics", "means", "draws", "at_save_point"))


def rehearse(
    trainer: Trainer, task: Any, train: Any, *, folder: str | Path | None = None, **options: Unpack[FitOptions]
) -> Rehearsal:
    """Run a short version of a training, and restore everything.

    The rehearsal makes two steps of each phase of the data, two batches of each validation set, a log, a save and the
    events of the end, with all plugins. Then a second run resumes from the save and is compared bit by bit. Filters
    such as `Every(epochs=10)` fire at the first occasion. Files go to a temporary folder, which is removed. Weights,
    gradients, modes, optimizers, plugins, datasets and random generators are restored afterwards, also after an error
    and after Ctrl-C. On several ranks, call it on each rank.

    If there is no problem, one line in `.verified.jsonl` beside the checkpoints remains: `result.resume` of a later
    resume quotes it.

    Args:
        trainer: the trainer with its plugins.
        task: see `Trainer.fit`.
        train: see `Trainer.fit`.
        folder: where to make the temporary folder; by default where Python makes them. Use the disk of the checkpoints
            to measure how long a save takes. Several machines need a folder that all of them see.
        **options: the other arguments of `Trainer.fit`.

    Returns:
        What would happen, how long it would last, how large it would be, and what would go wrong.

    Raises:
        ValueError: the data can be read only once. Errors of the training or of a plugin leave as they would leave
            `fit`, with a note that says where they happened.
    """
    with hosted_by(None):
        rehearsal = _rehearse(trainer, task, train, options, folder)
    steps = rehearsal.resumed_events.count("step_end")
    for name, folders in rehearsal.redirected.items() if rehearsal.ok and trainer.engine.is_main else ():
        if steps and keeps_states(trainer.plugins[name]):
            record_verified(folders[0], rehearsal.name, steps, "rehearse")
    return rehearsal


def find_batch_size(trainer: Trainer, task: Any, train: Any, *, largest: int, smallest: int = 1, **options: Any) -> int:
    """Find the largest batch size that fits into memory, without training.

    The batch size is halved until a rehearsal fits: two steps, two batches of a validation, a save. Everything is
    restored afterwards. On several ranks, call it on each rank. `find_executable_batch_size` starts the training
    itself again with half the batch instead.

    Args:
        trainer: the trainer with its plugins.
        task: see `Trainer.fit`.
        train: a dataset, or several in `Phases`.
        largest: the batch size to start with, in samples; at most the length of the dataset.
        smallest: the smallest batch size to try.
        **options: the other arguments of `Trainer.fit`; `loader_params` without the batch size. `epochs` and `steps`
            are optional.

    Raises:
        RuntimeError: the smallest batch does not fit.
        TypeError: the training data are batches already.
        ValueError: the sizes are not positive, or `smallest` is more than `largest`.
    """
    length = {"steps": 1_000_000} if options.get("epochs") is options.get("steps") is None else {}  # only two are made

    def attempt(size: int) -> None:
        params = {**(options.get("loader_params") or {}), "batch_size": size}
        with hosted_by(None):
            _rehearse(trainer, task, train, {**options, **length, "loader_params": params}, None)

    return find_executable_batch_size(attempt, samples_at_most(train, largest), smallest=smallest)[0]


def _rehearse(
    trainer: Trainer, task: Any, train: Any, options: Mapping[str, Any], folder: str | Path | None
) -> Rehearsal:
    check_step(task, "training_step")
    data = [train, options.get("validation")]
    refuse_iterators(data)
    leave = [plugin for plugin in trainer.plugins if not getattr(plugin, "rehearses", True)]
    with (
        restored_trainer(trainer, task, data, options, leave) as objects,
        temporary_folder(trainer.engine, folder) as place,
    ):
        unredirected = tuple(name for name in trainer.plugins.unredirected() if _has_path(trainer.plugins[name]))
        with placed("while the run was planned"):
            run = trainer.run(task, train, **options)
            try:
                planned = plan_of(run)
            finally:
                run.hooks.closing.close()
        arguments = task, train, {**options, **planned.short}
        whole = _go(trainer, arguments, objects, place, resumes=False)
        resumes = whole.facts and any(map(keeps_states, trainer.plugins))
        resumed = _go(trainer, arguments, objects, place, resumes=True) if resumes else None
        objects.restore()  # the forecast needs the original filters
        left_out = tuple(name for name in trainer.plugins.names() if trainer.plugins[name] in leave)
        return _report(trainer, planned, objects, place, whole, resumed, unredirected=unredirected, left_out=left_out)


@contextmanager
def restored_trainer(
    trainer: Trainer, task: Any, data: list[Any], options: Mapping[str, Any], leave: list[Any]
) -> Iterator[KeptObjects]:
    """Disable some plugins, and restore the trainer and the objects of a run when this context ends."""
    engine = trainer.engine
    ours = [trainer, getattr(engine, "precision", None)]  # the rest of the engine is in a process group: not copied
    with (
        engine.process(),
        trainer.plugins.disabled(*leave),
        KeptObjects([task, options, *trainer.plugins], data, ours, [engine, *leave]) as objects,
    ):
        yield objects


def complete(run: Any) -> Any:
    """Train, and return the result."""
    with run:
        loop.fit(run)
    return run.result_or_raise(exits=False)


def _go(
    trainer: Trainer, arguments: tuple[Any, Any, dict[str, Any]], objects: KeptObjects, place: Path, *, resumes: bool
) -> Seen:
    """Run a rehearsal from the start, or resumed from its first save; return its record."""
    objects.restore()
    plugins, name = trainer.plugins, "resumed" if resumes else "whole"
    targets = plugins.redirect(place / name)
    for condition in list(objects.found(Filter)):
        condition.shorten()
    logs, saves = "log" in plugins.declared("asks"), plugins.writes_saves()
    director = Director(place / "whole", place / "resumed", logs=logs, saves=saves, resumes=resumes)
    device, (task, train, options) = trainer.engine.device, arguments
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    director.subscribe(trainer.bus)
    few = STEPS * trainer.engine.world_size
    with placed(f"in the {name} run of a rehearsal"):
        run = trainer.run(task, train, **options)
        limits = {name: run.settings.limits.get(name) for name in run.data.validation_loaders}
        short = {name: min(limit, few) if isinstance(limit, int) else few for name, limit in limits.items()}
        run.settings, run.report.is_strict = replace(run.settings, limits=short), False  # warnings are reported
        seen = director.seen
        seen.result, seen.targets = complete(run), targets
    seen.gpu_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return seen


def _report(
    trainer: Trainer,
    planned: Planned,
    objects: KeptObjects,
    place: Path,
    whole: Seen,
    resumed: Seen | None,
    **names: tuple[str, ...],
) -> Rehearsal:
    plugins = {name: trainer.plugins[name] for name in trainer.plugins.names()}
    prediction = predict(planned, whole, plugins.values())
    count = _checkpoints_at_once(list(plugins.values()), prediction.saves)
    size = None if whole.bytes is None or count is None else whole.bytes * (count + 1)
    problems, free = [*_of_runs(whole, resumed)], list[int]()
    for name, path in ((name, path) for name, paths in whole.targets.items() for path in paths):
        space, reason = room(path)
        if reason:
            problems.append(f"plugin {name!r} could not write to {path}: {reason}.")
        elif keeps_states(plugins[name]):
            free.append(space)
    if size is not None and free and size > min(free):
        problems.append(f"the checkpoints would take {size:,} bytes, and {min(free):,} are free.")
    result = whole.result
    notes = [note for note in result.notes if str(place) not in note]  # those files are removed
    notes += [f"the position of {kind} objects is not restored" for kind in sorted(objects.iterators)]
    if objects.is_cut:
        notes.append("the data contain too many objects: changes in some of them are not restored")
    problems += [*(result.warnings if trainer.strict else ()), *objects.changed]
    return Rehearsal(
        name=planned.name,
        problems=_of_ranks(trainer.engine, problems),
        warnings=() if trainer.strict else result.warnings,
        notes=tuple(notes),
        plan=planned.text,
        prediction=prediction,
        resume="" if resumed is None else str(resumed.result.resume),
        checkpoint_bytes=whole.bytes,
        bytes=size,
        free_bytes=min(free, default=None),
        gpu_bytes=whole.gpu_bytes,
        redirected=whole.targets,
        events=tuple(whole.events),
        resumed_events=() if resumed is None else tuple(resumed.events),
        **names,
    )


def _of_runs(whole: Seen, resumed: Seen | None) -> Iterator[str]:
    result = whole.result
    if result.status == "stopped":
        yield f"plugin {result.stopped_by!r} stopped the short run: {result.reason}."
    for name, errors in result.plugin_errors.items():
        yield f"plugin {name!r} failed, though the run continued: {errors[0]}"
    if resumed is not None:
        difference: object = "no plugin resumed from the save"
        if resumed.facts:
            difference = next(Difference.between(whole.facts, resumed.facts, aside=IGNORED), None)
        if difference is not None:
            yield f"a resumed run does not equal an uninterrupted one: {difference} ({resumed.result.resume})."


def _checkpoints_at_once(plugins: list[Any], saves: int | None) -> int | None:
    numbers = [plugin.forecast({}).get("kept") for plugin in plugins if keeps_states(plugin)]
    if not numbers:
        return None
    limits = [saves if number is None else number if saves is None else min(number, saves) for number in numbers]
    return None if None in limits else sum(limit or 0 for limit in limits)


def _of_ranks(engine: LoopEngine, problems_here: list[str]) -> tuple[str, ...]:
    problems = dict.fromkeys(problems_here)
    for rank, texts in enumerate(engine.gather_objects(problems_here) if engine.world_size > 1 else []):
        problems |= dict.fromkeys(text if text in problems_here else f"On rank {rank}: {text}" for text in texts)
    return tuple(problems)


@contextmanager
def placed(where: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"heliograph: {where}; everything is restored")
        raise


def refuse_iterators(data: list[Any]) -> None:
    """Raise ValueError for data that can be read only once."""
    sets = [loader.values() if isinstance(loader, Mapping) else [loader] for loader in data]
    for loader in chain.from_iterable(sets):
        if isinstance(loader, Iterator):
            raise ValueError(
                f"{type(loader).__name__} can be read only once, so its position cannot be restored: pass an object "
                f"whose __iter__ starts again, such as a DataLoader or a list."
            )


@contextmanager
def temporary_folder(engine: LoopEngine, parent: str | Path | None) -> Iterator[Path]:
    if not engine.is_main:
        yield Path(engine.broadcast(None))
        return
    with TemporaryDirectory(prefix="heliograph-rehearsal-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(engine.broadcast(folder))


def keeps_states(plugin: Any) -> bool:
    """True for a plugin that can be redirected and writes checkpoints from which a run can resume."""
    can_be_redirected = isinstance(plugin, Plugin) and type(plugin).rehearse is not Plugin.rehearse
    is_resumable = not getattr(plugin, "weights_only", False)
    return can_be_redirected and is_resumable and "save" in {*plugin.needs, *plugin.asks}


def _has_path(plugin: Any) -> bool:
    return any(isinstance(value, Path) for value in vars(plugin).values())


def room(path: Path) -> tuple[int, str]:
    """Return the free bytes at a path, and why it cannot be written; the reason is empty if it can."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return 0, f"{place} is a file" if place != path.absolute() else ""
    reason = "" if os.access(place, os.W_OK | os.X_OK) else f"this process may not write to {place}"
    return shutil.disk_usage(place).free, reason


class Director:
    """Request a log, a validation and a save after the first step, and end each epoch after the second.

    Args:
        folder: where the plugins write.
        copied: where their files are copied after the first save, for the run that resumes from there.
        logs: whether a log is planned.
        saves: whether a save is planned.
        resumes: whether the run starts at the first save.
    """

    def __init__(self, folder: Path, copied: Path, *, logs: bool, saves: bool, resumes: bool) -> None:
        self._folder, self._copied, self._logs, self._saves = folder, copied, logs, saves
        self._resumes, self.seen = resumes, Seen()
        self._tracer = Tracer(self.seen.facts.append)
        self._is_staged = self._is_copied = resumes
        self._windows = int(resumes)
        self._began: dict[str, float] = {}  # the last emission of each event
        self._recording = 0.0  # seconds, which are excluded from the run's

    def subscribe(self, bus: Bus) -> None:
        """Connect all handlers; whoever restores the bus removes them."""
        for event in dict.fromkeys([*ev.CATALOGUE, *(signal.event for signal in bus.signals())]):
            bus.on(event, self.note, lane=Lane.MEASURE if event is ev.SavePoint else Lane.REPORT)

    def note(self, run: Any, event: Event) -> None:
        # records names, times, and the facts from the first save on
        self.seen.events.append(event.name)
        if isinstance(event, TIMED):
            self._measure(run, event)
        began = perf_counter()
        if self.seen.facts:
            self._tracer.record(run, event)
        elif self._is_staged and isinstance(event, ev.CheckpointLoaded if self._resumes else ev.SavePoint):
            self._tracer.state(run, AT_SAVE)
        match event:
            case ev.EpochStart(resumed=False):
                self._windows = 0
            case ev.BatchEnd() if not run.stepping.window:
                self._direct(run)
            case ev.ShouldStop() if self.seen.facts and not self._is_copied:
                self._copy_files(run)
            case ev.EpochEnd() if not run.data.is_last_phase:
                run.control.next_phase("each phase is rehearsed", by=BY)
        self._recording += perf_counter() - began

    def _measure(self, run: Any, event: Event) -> None:
        if run.engine.device.type == "cuda":
            torch.cuda.synchronize(run.engine.device)
        now, began = perf_counter() - self._recording, self._began
        if isinstance(event, ev.BatchEnd) and not run.stepping.window:
            self.seen.steps.append(now - max(began.get("epoch_start", 0.0), began.get("should_stop", 0.0)))
        elif isinstance(event, ev.ValidationEnd):
            self.seen.validations.append((now - began["validation_start"], run.progress.evaluated))
        elif isinstance(event, ev.ShouldStop) and "save_point" in began:
            self.seen.saves.append(now - began.pop("save_point"))
        began[event.name] = now

    def _copy_files(self, run: Any) -> None:
        self._is_copied = True
        run.hooks.settle()
        run.engine.barrier()
        if run.engine.is_main and self._folder.exists():  # a plugin wrote there
            self.seen.bytes = _size(run.checkpoints.last)
            shutil.copytree(self._folder, self._copied, copy_function=_link_or_copy)

    def _direct(self, run: Any) -> None:
        self._windows += 1
        if not self._is_staged:
            self._is_staged = True
            if self._logs:
                run.control.request_log("a log is planned", by=BY)
            if run.data.validation_sets:
                run.control.request_validation("a validation is planned", by=BY)
            if self._saves:
                run.control.request_save("a save is planned", by=BY)
        if self._windows >= STEPS:
            run.control.end_epoch(f"{STEPS} steps of each epoch are rehearsed", by=BY)


def _size(path: Path | None) -> int | None:
    # of a checkpoint with its other files
    if path is None:
        return None
    files = [*path.parent.glob(f"{path.stem}*"), *path.parent.glob(f"{path.stem}*/**/*")]
    return sum(file.stat().st_size for file in files if file.is_file())


def _link_or_copy(source: str, target: str) -> str:
    # only files that are never written again are linked
    path = Path(source)
    if path.suffix == ".pth" or ".shards" in path.parent.name:
        with suppress(OSError):  # not every disk has links
            Path(target).hardlink_to(path)
            return target
    return shutil.copy2(source, target)
