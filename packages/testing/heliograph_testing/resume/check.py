"""The check itself: the attempts, one after the other, each compared with an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from heliograph import Trainer
from heliograph.events import Position
from heliograph.spi import Difference, Fact, TrainerFactory, UsageError, capture, known_names, restore, seed_all

from .attempts import CheckedAttempt, SavedState, run_attempt
from .moments import KillPoint, Moment, choose_moments, find_moment, list_kill_points
from .report import InterruptedAttempt, ResumeCheck

Aside = frozenset[tuple[str, str]]
Found = tuple[Difference | None, Difference | None]  # the first difference that counts, and that of the random state
MAY_VARY = ("metrics", "means", "plugin")
WITHOUT_KILL = {
    "batch": "what is loaded depends on more than the seed: on os.urandom, the clock, an unseeded generator, or an "
    "object that two calls of make_trainer share",
    "order": "something depends on the clock, such as Every(seconds=...)",
}
OTHERS_WITHOUT_KILL = (
    "the task, a plugin or the model draws from an unseeded generator or depends on the clock, or a kernel is not "
    "deterministic: see torch.use_deterministic_algorithms"
)
AFTER_RESUME = {
    "batch": "what is loaded depends on more than the seed and the position: the data was built from draws that "
    "make_trainer does not seed, or the dataset has state of its own, such as a counter or a generator",
    "order": "a plugin that makes requests does not keep its state: give it state_dict and load_state_dict",
    "modules": "a plugin or the task changes gradients or weights by state that no checkpoint holds, or a kernel is "
    "not deterministic: see torch.use_deterministic_algorithms",
    "optimizers": "something changes the optimizer by state that no checkpoint holds",
    "schedulers": "the scheduler is stepped by state that no checkpoint holds, or its state_dict is not complete",
    "data": "the loader's state_dict does not restore its position",
}
OTHERS_AFTER_RESUME = (
    "the task or a plugin has state that no checkpoint holds: give it state_dict and load_state_dict; or the data have "
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
    """Do as `check_resume`, and raise if the interrupted run differs.

    Returns:
        The check, for its report.

    Raises:
        AssertionError: with the first difference and its likely causes.
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

    Trains twice without interruption, to see whether the program is deterministic; then once more, killed, and each
    time resumed by a new trainer from the newest saved state, until it ends. Each batch as it reaches the task, the
    random state, each loss, all metrics, and at each epoch's end weights, optimizer, scheduler, plugins and the rest of
    the state must be equal, bit for bit. A resumed attempt starts with other seeds, as another process would. Metrics
    and plugin states that differ between the two uninterrupted runs depend on the clock and are not compared, nor are
    the strings in plugin states, which are often files and dates, and plugins with `affects_training = False` and
    observers. In a test::

        def make_trainer():
            torch.manual_seed(0)
            task = Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
            return Trainer([RNGCapture()]), {"task": task, "train": loader(), "optimizer": adam, "epochs": 3}

        assert_resume_exact(make_trainer)

    Args:
        make_trainer: returns a trainer and the keywords of its `fit`, and creates everything new at every call. If it
            needs an argument, or has one called `folder`, that is a folder to write to: one for each uninterrupted run,
            and one for all attempts of the interrupted run.
        kill_at: where to kill: after a batch of the run (7: the seventh), at an event (`("validation_batch_end", 3)`:
            at its third emission, after all handlers), or several of these, for kills in a row. All count in the
            uninterrupted run. By default points are chosen: always the same, spread over the run and its stages.
        resumes: how many points to choose.
        save_every: batches between the saves that are requested; there is one at each epoch's end, too.
        ignore: names of plugins or metrics that are not compared.

    Returns:
        The result.

    Raises:
        UsageError: an argument is out of its range, `make_trainer` returns something else or the same objects twice, a
            kill point is never reached, the run is too short or has no limit, or it resumes by itself.
    """
    for name, value in {"resumes": resumes, "save_every": save_every}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name}= must be a whole number of at least 1, got {value!r}.")
    points = None if kill_at is None else list_kill_points(kill_at)
    before = capture()
    try:
        with TemporaryDirectory() as folder:
            check = _Check(TrainerFactory(make_trainer), Path(folder), save_every)
            return check.run(points, resumes, [ignore] if isinstance(ignore, str) else ignore)
    finally:
        restore(before)


class _Check:
    """The attempts of one check."""

    def __init__(self, make: TrainerFactory, folder: Path, save_every: int) -> None:
        self._make, self._folder, self._save_every = make, folder, save_every

    def run(self, points: Sequence[KillPoint] | None, resumes: int, ignore: Collection[str]) -> ResumeCheck:
        """Run all attempts, and return the result."""
        whole = self._attempt("whole")
        ignored = _ignored(ignore, whole)
        if points is None:
            kills = choose_moments(whole.moments, resumes)
        else:
            kills = [find_moment(each, whole.moments) for each in points]
        twin = self._attempt("again")
        varies = varying(whole.facts, twin.facts) - ignored
        names = "one uninterrupted run", "the other"
        first, draws = _compare(Difference.between(whole.facts, twin.facts, names=names, aside=ignored | varies))
        check = ResumeCheck(twin.position, twin.reasons)
        if first is not None:
            cause = WITHOUT_KILL.get(first.what, OTHERS_WITHOUT_KILL)
            return replace(check, is_deterministic=False, difference=first, draws=draws, causes=(cause,))
        check = replace(check, set_aside=tuple(sorted({_name(*each) for each in varies})))
        return self._interrupted(check, whole.facts, ignored | varies, twin.workers, kills)

    def _interrupted(
        self, check: ResumeCheck, whole: Sequence[Fact], aside: Aside, workers: Sequence[str], kills: Sequence[Moment]
    ) -> ResumeCheck:
        saved: SavedState | None = None
        for kill in (*kills, None):
            attempt = self._attempt("interrupted", number=len(check.attempts), origin=saved, kill=kill)
            expected = whole[attempt.origin.facts if attempt.origin else 0 :]
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
                    f"Attempt {len(check.attempts)} ({entry}) never reached {kill}: each kill point must be after the "
                    f"newest save before the former one."
                )
            saved = attempt.saved or saved
        return check

    def _attempt(
        self,
        folder: str,
        number: int = 0,
        *,
        origin: SavedState | None = None,
        kill: Moment | None = None,
    ) -> CheckedAttempt:
        seed_all(number if origin else 0)  # every start is seeded alike; a resume must not depend on the seed
        try:
            trainer, options = self._make(self._folder / folder)
            attempt = run_attempt(trainer, options, save_every=self._save_every, origin=origin, kill=kill)
        except Exception as error:
            if origin is not None:
                where = "epoch {}, batch {}, step {}".format(*origin.counters)
                error.add_note(f"heliograph: in attempt {number + 1} of a resume check, resumed at {where}")
            raise
        if attempt.resumed_by_itself:
            raise UsageError(
                "The run resumed from a checkpoint that existed before the check, so it is not uninterrupted. Let "
                "make_trainer take a folder, def make_trainer(folder), and write there: Checkpoint(folder, "
                "resume='auto'); or pass resume=None."
            )
        return attempt


def _ignored(names: Collection[str], whole: CheckedAttempt) -> Aside:
    plugins = {fact.what.removeprefix("plugin ") for fact in whole.facts if fact.what.startswith("plugin ")}
    metrics = {name for fact in whole.facts if fact.what == "metrics" for name in fact.leaves}
    for name in names:
        if name not in plugins | metrics:
            known = known_names(name, plugins | metrics)
            raise UsageError(f"ignore= names {name!r}, which is neither a plugin with a state nor a metric.{known}")
    return frozenset(("metrics", name) if name in metrics else (f"plugin {name}", "") for name in names)


def _compare(differences: Iterator[Difference]) -> Found:
    """Return the first difference that counts: one of the random state does not, but later facts may follow from it."""
    draws: Difference | None = None
    for difference in differences:
        if difference.what != "draws":
            return difference, draws
        draws = draws or difference
    return None, draws


def varying(one: Sequence[Fact], other: Sequence[Fact]) -> Aside:
    """Return (what, path) of the metrics and plugin states that differ between two runs."""
    differences = [each for each in Difference.between(one, other) if each.what.split()[0] in MAY_VARY]
    return frozenset((each.what, path) for each in differences for path in each.paths)


def _causes(difference: Difference, reasons: Sequence[str], workers: Sequence[str]) -> tuple[str, ...]:
    """Return the likely causes of a difference after a resume, the likeliest first."""
    causes = dict.fromkeys([*reasons, *(workers if difference.what == "batch" else ())])
    if difference.what.startswith("plugin ") and not causes:
        return (f"{difference.what} does not continue from what load_state_dict gives it",)
    return tuple(causes or [AFTER_RESUME.get(difference.what, OTHERS_AFTER_RESUME)])


def _name(what: str, path: str) -> str:
    return path if what == "metrics" else f"{what}{path and f' ({path})'}"
