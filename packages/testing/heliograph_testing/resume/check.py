"""`check_resume`: compares the attempts of a killed and resumed run with an uninterrupted run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from heliograph import Lane, Run, SavePoint, Streams, Trainer, VerifyResume
from heliograph.events import CATALOGUE, Event, Position
from heliograph.spi import (
    Difference,
    Fact,
    Tracer,
    TrainerFactory,
    UsageError,
    capture,
    known_names,
    record_verified,
    restore,
    seed_all,
)
from torch.utils.data import DataLoader

from .moments import AFTER_THE_END, KillPoint, Moment, MomentCounter, choose_moments, find_moment, list_kill_points
from .report import InterruptedAttempt, ResumeCheck


def worker_suspects(loader: Any) -> list[str]:
    if not isinstance(loader, DataLoader) or not loader.num_workers or loader.worker_init_fn is None:
        return []
    name = getattr(loader.worker_init_fn, "__qualname__", type(loader.worker_init_fn).__name__)
    return [
        f"worker_init_fn={name} may depend on the worker, and after a resume within an epoch other workers load the "
        f"batches: do the same in each worker"
    ]


BY = "the resume check"


class Killed(BaseException):
    pass


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state that an attempt saved.

    Attributes:
        content: the bytes.
        facts: the number of facts of an uninterrupted run before this state.
        counters: finished epochs, finished batches of the epoch, and steps.
        path: the newest checkpoint that the run itself had written, if any.
    """

    content: bytes
    facts: int
    counters: tuple[int, int, int]
    path: Path | None


@dataclass(slots=True)
class CheckedAttempt:
    """The outcome of an attempt.

    Attributes:
        origin: the state that it resumed, None if it started from scratch.
        facts: the facts to compare.
        moments: the moments at which it could be killed.
        killed: whether it was killed.
        resumed_by_itself: whether it resumed a checkpoint from outside the check.
        saved: the newest state that it saved.
        workers: reasons why the worker processes of the loader may differ.
        position: how the loader reaches its position.
        reasons: reasons reported by the run why a resume may differ.
    """

    origin: SavedState | None
    facts: list[Fact] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    killed: bool = False
    resumed_by_itself: bool = False
    saved: SavedState | None = None
    workers: tuple[str, ...] = ()
    position: Position = "seeked"
    reasons: tuple[str, ...] = ()

    @property
    def fact_count(self) -> int:
        return len(self.facts) + (self.origin.facts if self.origin else 0)


def run_attempt(
    trainer: Trainer,
    options: Mapping[str, Any],
    *,
    save_every: int,
    origin: SavedState | None = None,
    kill: Moment | None = None,
) -> CheckedAttempt:
    attempt = CheckedAttempt(origin)
    Tracer(attempt.facts.append).subscribe(trainer.bus)
    AttemptWatcher(attempt, trainer, save_every, kill).subscribe()
    try:
        trainer.fit(**{**options, "on_interrupt": "raise"})
    except BaseException as error:
        if not isinstance(error, Killed) and not isinstance(error.__cause__, Killed):
            raise
    if attempt.killed:
        gc.collect()  # reference cycles keep a killed run and its worker processes
    return attempt


class AttemptWatcher:
    """Requests saves, keeps the saved states, and kills an attempt at its moment, after all other handlers."""

    def __init__(self, attempt: CheckedAttempt, trainer: Trainer, save_every: int, kill: Moment | None) -> None:
        self._attempt, self._trainer, self._save_every, self._kill_at = attempt, trainer, save_every, kill
        self._counter = MomentCounter()

    def subscribe(self) -> None:
        bus = self._trainer.bus
        for event in dict.fromkeys([*CATALOGUE, *(signal.event for signal in bus.signals())]):
            bus.on(event, self.handle, lane=Lane.REPORT)
        bus.on(SavePoint, self.save, lane=Lane.PERSIST)

    def handle(self, run: Run, event: Event) -> None:
        react = getattr(self, f"_at_{event.name}", None)
        if react is not None:
            react(run, event)
        if event.name in AFTER_THE_END:
            return
        moment = self._counter.count(event, run.progress)
        self._attempt.moments.append(moment)
        if moment == self._kill_at:
            self._kill(run)

    def save(self, run: Run, event: SavePoint) -> None:
        attempt = self._attempt
        if self._kill_at is None:
            return
        content = BytesIO()
        torch.save(run.state_dict(), content)
        counters = run.progress.epoch, run.progress.batch, run.progress.steps
        attempt.saved = SavedState(content.getvalue(), attempt.fact_count, counters, run.checkpoints.last)

    def _kill(self, run: Run) -> None:
        self._attempt.killed = True
        self._note_facts(run)
        raise Killed

    def _note_facts(self, run: Run) -> None:
        facts = run.data.resume_facts()
        self._attempt.position, self._attempt.reasons = facts.position, facts.sentences

    def _at_train_start(self, run: Run, event: Event) -> None:
        origin = self._attempt.origin
        if origin is not None:
            path = origin.path if origin.path is not None and origin.path.exists() else None  # it may have been pruned
            run.resume(torch.load(BytesIO(origin.content), weights_only=True), path)

    def _at_checkpoint_loaded(self, run: Run, event: Event) -> None:
        if self._attempt.facts:
            return  # a plugin rolled back within the run
        if self._attempt.origin is None:
            self._attempt.resumed_by_itself = True
            self._kill(run)

    def _at_batch_end(self, run: Run, event: Event) -> None:
        if run.progress.batches % self._save_every == 0:
            run.control.request_save(f"every {self._save_every} batches", by=BY)

    def _at_epoch_end(self, run: Run, event: Event) -> None:
        run.control.request_save("an epoch's end", by=BY)

    def _at_run_closed(self, run: Run, event: Event) -> None:
        if self._attempt.killed:
            return
        self._note_facts(run)
        train = run.data.train_loader
        loaders = train.loaders.values() if isinstance(train, Streams) else [train]
        self._attempt.workers = tuple(suspect for loader in loaders for suspect in worker_suspects(loader))


Ignored = frozenset[tuple[str, str]]  # (what, path) of facts
Differences = tuple[Difference | None, Difference | None]  # the first one, and the first one of the random state
MAY_VARY = ("metrics", "means", "plugin")
WITHOUT_KILL = {
    "batch": "the data depend on more than the seed: os.urandom, the clock, an unseeded generator, or an object that "
    "two calls of make_trainer share",
    "order": "something depends on the clock, such as Every(seconds=...)",
}
DEFAULT_WITHOUT_KILL = (
    "the task, a plugin or the model draws from an unseeded generator or depends on the clock, or a kernel is not "
    "deterministic: see torch.use_deterministic_algorithms"
)
AFTER_RESUME = {
    "batch": "the data depend on more than the seed and the position: they were created with draws that make_trainer "
    "does not seed, or the dataset has state, such as a counter or a generator",
    "order": "a plugin that makes requests does not save its state: add state_dict and load_state_dict",
    "modules": "a plugin or the task changes gradients or weights depending on state that is not in the checkpoint, or "
    "a kernel is not deterministic: see torch.use_deterministic_algorithms",
    "optimizers": "something changes the optimizer depending on state that is not in the checkpoint",
    "schedulers": "the scheduler depends on state that is not in the checkpoint, or its state_dict is incomplete",
    "data": "the loader's state_dict does not restore its position",
}
DEFAULT_AFTER_RESUME = (
    "the task or a plugin has state that is not in the checkpoint: add state_dict and load_state_dict; or the data "
    "changed"
)


def assert_resume_exact(
    make_trainer: Callable[..., tuple[Trainer, Mapping[str, Any]]],
    *,
    kill_at: KillPoint | Sequence[KillPoint] | None = None,
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
    kill_at: KillPoint | Sequence[KillPoint] | None = None,
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
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
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

    def run(self, points: Sequence[KillPoint] | None, resumes: int, ignore: Collection[str]) -> ResumeCheck:
        reference = self._attempt("reference")
        ignored = _ignored(ignore, reference)
        if points is None:
            kills = choose_moments(reference.moments, resumes)
        else:
            kills = [find_moment(point, reference.moments) for point in points]
        twin = self._attempt("again")
        varies = varying(reference.facts, twin.facts) - ignored
        names = "the first uninterrupted run", "the second"
        first, draws = _compare(Difference.between(reference.facts, twin.facts, names=names, aside=ignored | varies))
        check = ResumeCheck(twin.position, twin.reasons)
        if first is not None:
            cause = WITHOUT_KILL.get(first.what, DEFAULT_WITHOUT_KILL)
            return replace(check, is_deterministic=False, difference=first, draws=draws, causes=(cause,))
        check = replace(check, set_aside=tuple(sorted({_name(*fact) for fact in varies})))
        return self._interrupted(check, reference.facts, ignored | varies, twin.workers, kills)

    def _interrupted(
        self,
        check: ResumeCheck,
        reference: Sequence[Fact],
        aside: Ignored,
        workers: Sequence[str],
        kills: Sequence[Moment],
    ) -> ResumeCheck:
        saved: SavedState | None = None
        for kill in (*kills, None):
            attempt = self._attempt("interrupted", number=len(check.attempts), origin=saved, kill=kill)
            expected = reference[attempt.origin.facts if attempt.origin else 0 :]
            if attempt.killed:
                expected = expected[: len(attempt.facts)]
            first, draws = _compare(Difference.between(expected, attempt.facts, aside=aside))
            entry = InterruptedAttempt(saved.counters if saved else None, kill if attempt.killed else None)
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
                return replace(check, causes=_causes(first, attempt.reasons, workers))
            if kill is not None and not attempt.killed:
                raise UsageError(
                    f"Attempt {len(check.attempts)} ({entry}) did not reach {kill}: each kill point must be after the "
                    f"last save before the previous kill point."
                )
            saved = attempt.saved or saved
        self._record(reference[-1].place[2])
        return check

    def _record(self, steps: int) -> None:
        # beside the checkpoints that the program usually writes: those of the check are removed
        usual, used = self._make.usual_folder, self._folder / "interrupted"
        for plugin in self._trainer.plugins:
            is_saver = VerifyResume in getattr(plugin, "brings", ())
            if usual is not None and is_saver and plugin.folder.is_relative_to(used):
                record_verified(usual / plugin.folder.relative_to(used), self._run_name, steps, "verify-resume")

    def _attempt(
        self,
        folder: str,
        number: int = 0,
        *,
        origin: SavedState | None = None,
        kill: Moment | None = None,
    ) -> CheckedAttempt:
        seed_all(number if origin else 0)  # a resume must not depend on the seed
        try:
            trainer, options = self._make(self._folder / folder)
            self._trainer, self._run_name = trainer, options.get("name") or "run"
            attempt = run_attempt(trainer, options, save_every=self._save_every, origin=origin, kill=kill)
        except Exception as error:
            if origin is not None:
                where = "epoch {}, batch {}, step {}".format(*origin.counters)
                error.add_note(f"heliograph: in attempt {number + 1} of a resume check, resumed at {where}")
            raise
        if attempt.resumed_by_itself:
            raise UsageError(
                "The run resumed from a checkpoint that existed before the check. Write to the folder of the check, "
                "def make_trainer(folder) with Checkpoint(folder, resume='auto'), or pass resume=None."
            )
        return attempt


def _ignored(names: Collection[str], reference: CheckedAttempt) -> Ignored:
    plugins = {fact.what.removeprefix("plugin ") for fact in reference.facts if fact.what.startswith("plugin ")}
    metrics = {name for fact in reference.facts if fact.what == "metrics" for name in fact.leaves}
    for name in names:
        if name not in plugins | metrics:
            hint = known_names(name, plugins | metrics)
            raise UsageError(f"ignore= contains {name!r}, which is neither a plugin with a state nor a metric.{hint}")
    return frozenset(("metrics", name) if name in metrics else (f"plugin {name}", "") for name in names)


def _compare(differences: Iterator[Difference]) -> Differences:
    # The random state may differ without consequence, so the search continues after it.
    draws: Difference | None = None
    for difference in differences:
        if difference.what != "draws":
            return difference, draws
        draws = draws or difference
    return None, draws


def varying(facts: Sequence[Fact], twin: Sequence[Fact]) -> Ignored:
    # Metrics and plugin states that differ between two uninterrupted runs.
    differences = [
        difference for difference in Difference.between(facts, twin) if difference.what.split()[0] in MAY_VARY
    ]
    return frozenset((difference.what, path) for difference in differences for path in difference.paths)


def _causes(difference: Difference, reasons: Sequence[str], workers: Sequence[str]) -> tuple[str, ...]:
    causes = dict.fromkeys([*reasons, *(workers if difference.what == "batch" else ())])
    if difference.what.startswith("plugin ") and not causes:
        return (f"{difference.what} does not continue from the state that load_state_dict restores",)
    return tuple(causes or [AFTER_RESUME.get(difference.what, DEFAULT_AFTER_RESUME)])


def _name(what: str, path: str) -> str:
    return path if what == "metrics" else f"{what}{path and f' ({path})'}"
