"""`check_resume`: compares the attempts of a killed and resumed run with an uninterrupted run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from heliograph import Lane, Run, Trainer, VerifyResume
from heliograph import events as ev
from heliograph.events import CATALOGUE, Position
from heliograph.spi import (
    Difference,
    Fact,
    Tracer,
    TrainerFactory,
    UsageError,
    capture,
    is_whole_number,
    known_names,
    restore,
    seed_all,
)

KillPoint = int | tuple[str, int]
Emission = tuple[str, int]  # an event, and its number in the uninterrupted run, from 1
STAGES = ("batch_end", "epoch_start", "validation_batch_end", "gradients_ready", "epoch_end", "batch_start")
AFTER_THE_END = ("run_failed", "run_closed")


def parse_kill_point(text: str) -> KillPoint:
    event, _, number = text.rpartition(":")
    if not number.isdecimal():
        raise UsageError(
            f"--kill-at must be a batch or an event, for example --kill-at 7 or --kill-at validation_batch_end:3, "
            f"got {text!r}."
        )
    return (event, int(number)) if event else int(number)


def list_kill_points(kill_at: KillPoint | list[KillPoint]) -> list[Emission]:
    points: list[Any] = kill_at if isinstance(kill_at, list) else [kill_at]
    named = [point if isinstance(point, tuple) else ("batch_end", point) for point in points]  # a number is a batch
    if not named or any(list(map(type, point)) != [str, int] for point in named):
        raise UsageError(
            f"kill_at= must be the number of a batch (7: after the seventh of the run), an event and the number of its "
            f"emission ('validation_batch_end', 3), or a list of these, got {kill_at!r}."
        )
    return named


def check_reached(points: Sequence[Emission], emissions: Mapping[str, int]) -> None:
    for event, number in points:
        if not 1 <= number <= emissions.get(event, 0):
            raise UsageError(
                f"kill_at={(event, number)!r} is never reached: the uninterrupted run has {emissions.get(event, 0)} "
                f"emissions of {event!r}, counted from 1.{known_names(event, emissions)}"
            )


def choose_kill_points(events: Sequence[str], count: int) -> list[Emission]:
    first = events.index("save_point") + 1 if "save_point" in events else len(events)
    last = max((index for index, event in enumerate(events) if event == "batch_end"), default=0) + 1
    ends = [first + (last - first) * part // count for part in range(count + 1)]
    if min(later - earlier for earlier, later in pairwise(ends)) < 1:
        raise UsageError(
            f"The run is too short for {count} kills after its first save: it has {events.count('batch_end')} batches. "
            f"Train longer, or lower resumes= or save_every=."
        )
    chosen, unused = [], [*STAGES]
    for start, end in pairwise(ends):
        middle = events[(start + end) // 2]
        stage = next((event for event in unused if event in events[start:end]), middle)
        unused = [event for event in unused if event != stage]
        candidates = [index for index in range(start, end) if events[index] == stage]
        chosen.append((stage, events[: candidates[len(candidates) // 2] + 1].count(stage)))
    return chosen


@dataclass(frozen=True, slots=True)
class InterruptedAttempt:
    """An attempt of the interrupted run.

    Attributes:
        resumed_at: finished epochs, batches of the epoch and steps; None if the attempt started from scratch.
        killed_at: the position and the event of the kill; None if the attempt ran to the end.
    """

    resumed_at: tuple[int, int, int] | None
    killed_at: str | None

    def __str__(self) -> str:
        begin = "from the start"
        if self.resumed_at is not None:
            begin = "resumed at epoch {}, batch {}, step {}".format(*self.resumed_at)
        return f"{begin}, {f'killed at {self.killed_at}' if self.killed_at else 'ran to the end'}"


@dataclass(frozen=True, slots=True)
class ResumeCheck:
    """The result of a resume check; `str` returns a report.

    Attributes:
        position: how the loader reaches its position, as in `result.resume`.
        reasons: reasons reported by the runs why a resume may differ.
        difference: the first difference; None if the runs are bitwise identical.
        causes: likely causes of the difference.
        is_deterministic: whether two uninterrupted runs are equal; if not, no run was killed.
        attempts: the attempts of the interrupted run, up to the first difference.
        batches: the number of batches in these attempts.
        draws: the first difference of the random state, even if nothing else differs.
        set_aside: the values that were not compared because they differ between uninterrupted runs.
    """

    position: Position
    reasons: tuple[str, ...]
    difference: Difference | None = None
    causes: tuple[str, ...] = ()
    is_deterministic: bool = True
    attempts: tuple[InterruptedAttempt, ...] = ()
    batches: int = 0
    draws: Difference | None = None
    set_aside: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the interrupted run equals the uninterrupted one."""
        return self.difference is None

    @property
    def kills(self) -> tuple[str, ...]:
        """The positions and events at which the run was killed."""
        return tuple(attempt.killed_at for attempt in self.attempts if attempt.killed_at is not None)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = len(self.attempts)
        if self.difference is None:
            yield f"exact: {self.batches} batches in {count} attempts equal an uninterrupted run"
        elif self.is_deterministic:
            yield f"NOT exact: attempt {count} differs from an uninterrupted run"
        else:
            yield "NOT deterministic: two uninterrupted runs differ, so a resume cannot be checked"
        yield from (f"  attempt {number}: {attempt}" for number, attempt in enumerate(self.attempts, 1))
        if self.draws is not None:
            yield f"{'without consequence:' if self.difference is None else 'first'} {self.draws}"
        if self.difference is not None:
            yield f"{'then' if self.draws else 'first'} {self.difference}"
        yield from (f"likely cause: {cause}" for cause in self.causes)
        yield f"position of the data: {self.position}"
        yield from (reason for reason in self.reasons if reason not in self.causes)
        if self.set_aside:
            yield f"not compared, differs even without a kill: {', '.join(self.set_aside)}"


BY = "the resume check"


class Killed(BaseException):
    pass


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state that an attempt saved; the default is the start of the run.

    Attributes:
        content: the bytes; empty at the start.
        facts: the number of facts of an uninterrupted run before this state.
        emissions: the emissions of each event before this state.
        counters: finished epochs, finished batches of the epoch, and steps.
        path: the newest checkpoint that the run itself had written, if any.
    """

    content: bytes = b""
    facts: int = 0
    emissions: Counter[str] = field(default_factory=Counter)
    counters: tuple[int, int, int] | None = None
    path: Path | None = None


START = SavedState()


class CheckedAttempt:
    """An attempt, which requests saves and is killed at an emission, after all other handlers.

    Attributes:
        facts: the facts to compare.
        events: the names of the emitted events, in order.
        emissions: the emissions of each event, with those before the state that it resumed.
        killed_at: the position and the event of the kill; None if it was not killed.
        saved: the newest state that it saved; before, the state that it resumed.
        position: how the loader reaches its position.
        reasons: reasons reported by the run why a resume may differ.
    """

    def __init__(self, save_every: int, origin: SavedState, kill: Emission | None) -> None:
        self._save_every, self._origin, self._kill = save_every, origin, kill
        self.facts: list[Fact] = []
        self.events: list[str] = []
        self.emissions = Counter(origin.emissions)
        self.killed_at: str | None = None
        self.saved = origin
        self.position: Position = "seeked"
        self.reasons: tuple[str, ...] = ()

    def run(self, trainer: Trainer, options: Mapping[str, Any]) -> None:
        bus = trainer.bus
        Tracer(self.facts.append).subscribe(bus)
        if self._kill is not None:
            bus.on(ev.SavePoint, self._save, lane=Lane.PERSIST)
        for event in dict.fromkeys([*CATALOGUE, *(signal.event for signal in bus.signals())]):
            bus.on(event, self._handle, lane=Lane.REPORT)
        try:
            trainer.fit(**{**options, "on_interrupt": "raise"})
        except BaseException as error:
            if not isinstance(error, Killed) and not isinstance(error.__cause__, Killed):
                raise
        if self.killed_at is not None:
            gc.collect()  # reference cycles keep a killed run and its worker processes

    def _handle(self, run: Run, event: ev.Event) -> None:
        match event:
            case ev.TrainStart() if self._origin.content:
                path = self._origin.path
                exists = path is not None and path.exists()  # it may have been pruned
                run.resume(torch.load(BytesIO(self._origin.content), weights_only=True), path if exists else None)
            case ev.CheckpointLoaded() if not self._origin.content and not self.facts:  # no rollback within the run
                raise UsageError(
                    "The run resumed from a checkpoint that existed before the check. Write to the folder of the "
                    "check: add a parameter `folder` for Checkpoint(folder, resume='auto'), or pass resume=None."
                )
            case ev.BatchEnd() if run.progress.batches % self._save_every == 0:
                run.control.request_save(f"every {self._save_every} batches", by=BY)
            case ev.EpochEnd():
                run.control.request_save("at the end of an epoch", by=BY)
            case ev.RunClosed():
                facts = run.data.resume_facts()
                self.position, self.reasons = facts.position, facts.sentences
        is_repeated = isinstance(event, ev.EpochStart) and event.resumed
        if event.name not in AFTER_THE_END and not is_repeated:
            self.events.append(event.name)
            self.emissions[event.name] += 1
            if self._kill == (event.name, self.emissions[event.name]):
                self.killed_at = f"epoch {run.progress.epoch}, batch {run.progress.batch}, in {event.name}"
                raise Killed

    def _save(self, run: Run, event: ev.Event) -> None:
        content = BytesIO()
        torch.save(run.state_dict(), content)
        counters = run.progress.epoch, run.progress.batch, run.progress.steps
        facts = self._origin.facts + len(self.facts)
        emissions = self.emissions + Counter([event.name])  # this one is counted after all handlers
        self.saved = SavedState(content.getvalue(), facts, emissions, counters, run.checkpoints.last)


Aside = frozenset[tuple[str, str]]  # (what, path) of facts
MAY_VARY = ("metrics", "means", "plugin")
CAUSES = {
    "batch": "the data depend on more than the seed and the position: on the clock, os.urandom, or draws that your "
    "function does not seed; worker_init_fn depends on the worker; or two runs share an object with state",
    "order": "a plugin makes requests that depend on the clock, such as Every(seconds=...), or on state that it does "
    "not save: add state_dict and load_state_dict",
}
KERNELS = "or a kernel is not deterministic: see torch.use_deterministic_algorithms"
WITHOUT_KILL = f"the task, a plugin or the model depends on an unseeded generator or the clock, {KERNELS}"
AFTER_RESUME = (
    f"the task or a plugin has state that is not in the checkpoint: add state_dict and load_state_dict; "
    f"or the data changed, {KERNELS}"
)


def assert_resume_exact(
    make_trainer: Callable[..., tuple[Trainer, Mapping[str, Any]]],
    *,
    kill_at: KillPoint | list[KillPoint] | None = None,
    resumes: int = 3,
    save_every: int = 3,
    ignore: Collection[str] = (),
) -> ResumeCheck:
    """Run `check_resume` and raise if the interrupted run differs.

    Args:
        make_trainer: see `check_resume`.
        kill_at: see `check_resume`.
        resumes: see `check_resume`.
        save_every: see `check_resume`.
        ignore: see `check_resume`.

    Returns:
        The check with its report.

    Raises:
        AssertionError: the runs differ; the message has the first difference and its likely causes.
    """
    check = check_resume(make_trainer, kill_at=kill_at, resumes=resumes, save_every=save_every, ignore=ignore)
    if not check.is_exact:
        raise AssertionError(str(check))
    return check


def check_resume(
    make_trainer: Callable[..., tuple[Trainer, Mapping[str, Any]]],
    *,
    kill_at: KillPoint | list[KillPoint] | None = None,
    resumes: int = 3,
    save_every: int = 3,
    ignore: Collection[str] = (),
) -> ResumeCheck:
    """Compare a run that is killed and resumed several times with an uninterrupted one.

    The program is trained twice without interruption, to test whether it is deterministic. Then it is trained again,
    killed, and each time resumed by a new trainer from the newest saved state. Everything is compared bit for bit: each
    batch as it reaches the task, the random state, each loss, all metrics, and at the end of each epoch the weights,
    optimizer, scheduler, plugins and the rest of the state. A resumed attempt starts with other seeds, like another
    process.

    Metrics and plugin states that differ between the two uninterrupted runs depend on the clock and are not compared.
    Strings in plugin states, plugins with `affects_training = False` and observers are not compared either. In a test::

        def make_trainer():
            torch.manual_seed(0)
            task = Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
            return Trainer([RNGCapture()]), {"task": task, "train": loader(), "optimizer": adam, "epochs": 3}

        assert_resume_exact(make_trainer)

    Args:
        make_trainer: returns a trainer and the keywords of its `fit`, all created by the call. If it has an argument
            that is required or named `folder`, it gets a folder to write to: one per uninterrupted run, and one for all
            attempts of the interrupted run.
        kill_at: a batch of the run (7: after the seventh), an emission of an event (`("validation_batch_end", 3)`: the
            third, after all handlers), or a list of these. All are counted in the uninterrupted run. By default points
            are chosen that are spread over the run and its stages, always the same.
        resumes: the number of points that are chosen.
        save_every: batches between requested saves; each epoch also ends with one.
        ignore: names of plugins or metrics that are not compared.

    Returns:
        The result.

    Raises:
        UsageError: an argument is out of range; `make_trainer` returns something else or the same objects twice; a kill
            point is not reached; the run is too short or has no limit; or the run resumes without the check.
    """
    for name, value in {"resumes": resumes, "save_every": save_every}.items():
        if not is_whole_number(value) or value < 1:
            raise UsageError(f"{name}= must be a whole number of at least 1, got {value!r}.")
    points = None if kill_at is None else list_kill_points(kill_at)
    before = capture()
    try:
        with TemporaryDirectory() as folder:
            check = _ResumeCheck(TrainerFactory(make_trainer), Path(folder), save_every)
            return check.run(points, resumes, [ignore] if isinstance(ignore, str) else ignore)
    finally:
        restore(before)


class _ResumeCheck:
    def __init__(self, make: TrainerFactory, folder: Path, save_every: int) -> None:
        self._make, self._folder, self._save_every = make, folder, save_every

    def run(self, points: list[Emission] | None, resumes: int, ignore: Collection[str]) -> ResumeCheck:
        reference = self._attempt("reference")
        ignored = _ignored(ignore, reference)
        kills = choose_kill_points(reference.events, resumes) if points is None else points
        check_reached(kills, reference.emissions)
        twin = self._attempt("again")
        varies = varying(reference.facts, twin.facts) - ignored
        names = "the first uninterrupted run", "the second"
        first, draws = _compare(Difference.between(reference.facts, twin.facts, names=names, aside=ignored | varies))
        check = ResumeCheck(twin.position, twin.reasons)
        if first is not None:
            causes = (CAUSES.get(first.what, WITHOUT_KILL),)
            return replace(check, is_deterministic=False, difference=first, draws=draws, causes=causes)
        check = replace(check, set_aside=tuple(sorted({_name(*fact) for fact in varies})))
        return self._interrupted(check, reference.facts, ignored | varies, kills)

    def _interrupted(
        self, check: ResumeCheck, reference: Sequence[Fact], aside: Aside, kills: Sequence[Emission]
    ) -> ResumeCheck:
        saved = START
        for kill in (*kills, None):
            attempt = self._attempt("interrupted", len(check.attempts), saved, kill)
            expected = reference[saved.facts :]
            if attempt.killed_at is not None:
                expected = expected[: len(attempt.facts)]
            first, draws = _compare(Difference.between(expected, attempt.facts, aside=aside))
            entry = InterruptedAttempt(saved.counters, attempt.killed_at)
            check = replace(
                check,
                attempts=(*check.attempts, entry),
                batches=check.batches + sum(fact.what == "loss" for fact in attempt.facts),
                draws=check.draws or draws,
                difference=first,
                position=max(check.position, attempt.position, key=get_args(Position).index),
                reasons=tuple(dict.fromkeys((*check.reasons, *attempt.reasons))),
            )
            if first is not None:
                return replace(check, causes=_causes(first, attempt.reasons))
            if kill is not None and attempt.killed_at is None:
                raise UsageError(
                    f"Attempt {len(check.attempts)} ({entry}) did not reach {kill!r}: each kill point must be after "
                    f"the last save before the previous kill point."
                )
            saved = attempt.saved
        for plugin in self._trainer.plugins:
            if VerifyResume in getattr(plugin, "brings", ()):  # it writes checkpoints
                steps = reference[-1].place[2]
                self._make.record_verified(plugin.folder, self._folder / "interrupted", self._run_name, steps)
        return check

    def _attempt(
        self, folder: str, number: int = 0, origin: SavedState = START, kill: Emission | None = None
    ) -> CheckedAttempt:
        seed_all(number if origin.content else 0)  # a resume must not depend on the seed
        attempt = CheckedAttempt(self._save_every, origin, kill)
        try:
            self._trainer, options = self._make(self._folder / folder)
            self._run_name = options.get("name") or "run"
            attempt.run(self._trainer, options)
        except Exception as error:
            if origin.content:
                error.add_note(f"heliograph: in attempt {number + 1} of a resume check, after a resume")
            raise
        return attempt


def _ignored(names: Collection[str], reference: CheckedAttempt) -> Aside:
    plugins = {fact.what.removeprefix("plugin ") for fact in reference.facts if fact.what.startswith("plugin ")}
    metrics = {name for fact in reference.facts if fact.what == "metrics" for name in fact.leaves}
    for name in names:
        if name not in plugins | metrics:
            hint = known_names(name, plugins | metrics)
            raise UsageError(f"ignore= contains {name!r}, which is neither a plugin with a state nor a metric.{hint}")
    return frozenset(("metrics", name) if name in metrics else (f"plugin {name}", "") for name in names)


def _compare(differences: Iterator[Difference]) -> tuple[Difference | None, Difference | None]:
    # The first difference, and an earlier one of the random state: it may have no consequence.
    draws: Difference | None = None
    for difference in differences:
        if difference.what != "draws":
            return difference, draws
        draws = draws or difference
    return None, draws


def varying(facts: Sequence[Fact], twin: Sequence[Fact]) -> Aside:
    # Metrics and plugin states that differ between two uninterrupted runs.
    differences = [
        difference for difference in Difference.between(facts, twin) if difference.what.split()[0] in MAY_VARY
    ]
    return frozenset((difference.what, path) for difference in differences for path in difference.paths)


def _causes(difference: Difference, reasons: Sequence[str]) -> tuple[str, ...]:
    if difference.what.startswith("plugin ") and not reasons:
        return (f"{difference.what} does not continue from the state that load_state_dict restores",)
    return tuple(reasons or [CAUSES.get(difference.what, AFTER_RESUME)])


def _name(what: str, path: str) -> str:
    return path if what == "metrics" else f"{what}{path and f' ({path})'}"
