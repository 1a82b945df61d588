"""The check itself: the legs, one after the other, and what they are compared with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from heliograph.core.data import rng
from heliograph.events.checks import known_names
from heliograph.events.guarantee import weaker
from heliograph.testing.resume import causes, moments
from heliograph.testing.resume.differences import Comparison, compare, varying
from heliograph.testing.resume.errors import UsageError
from heliograph.testing.resume.factory import Maker, MakeTrainer
from heliograph.testing.resume.legs import Leg, Saved, run_leg
from heliograph.testing.resume.moments import Moment, Position
from heliograph.testing.resume.report import InterruptedLeg, ResumeCheck

Aside = frozenset[tuple[str, str]]


def assert_resume_exact(
    make_trainer: MakeTrainer,
    *,
    kill_at: Position | Sequence[Position] | None = None,
    resumes: int = 3,
    save_every: int = 3,
    ignore: Collection[str] = (),
) -> ResumeCheck:
    """Do as `check_resume`, and raise where an interrupted run differs.

    Returns:
        The check, for its report.

    Raises:
        AssertionError: the first difference and what is likely behind it, in words.
    """
    check = check_resume(make_trainer, kill_at=kill_at, resumes=resumes, save_every=save_every, ignore=ignore)
    if not check.is_exact:
        raise AssertionError(str(check))
    return check


def check_resume(
    make_trainer: MakeTrainer,
    *,
    kill_at: Position | Sequence[Position] | None = None,
    resumes: int = 3,
    save_every: int = 3,
    ignore: Collection[str] = (),
) -> ResumeCheck:
    """Compare a run that is killed and resumed, again and again, with one that is left alone.

    Trains twice without interruption, to see whether the program repeats itself at all; then once more, killed, and
    resumed from the newest state that was saved until then, by a new trainer, until it ends. Each batch as it reaches
    the task, the random state, each loss, all metrics, and at each epoch's end weights, optimizer, scheduler, plugins
    and the rest of the state must be equal, bit for bit. A resumed leg begins with other seeds than the first, as
    another process would. Two uninterrupted runs tell what goes by the clock: metrics and plugin states that differ
    between them are not compared. Neither are the texts in plugin states, which name files and dates. In a test::

        def make_trainer():
            torch.manual_seed(0)
            task = Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
            return Trainer([RNGCapture()]), {"task": task, "train": loader(), "optimizer": adam, "epochs": 3}

        assert_resume_exact(make_trainer)

    Args:
        make_trainer: returns a trainer and the keywords of its `fit`, and makes everything anew at every call. If it
            takes an argument, that is a folder to write to: a new one for each uninterrupted run, and the same one for
            all legs of the interrupted run.
        kill_at: where to kill: after a batch of the run (7: the seventh), at an event (`("validation_batch_end", 3)`:
            at its third emission, behind all handlers), or several of these, for kills in a row. All count in the
            uninterrupted run. By default such places are chosen: always the same, spread over the run and its stages.
        resumes: how many places to choose.
        save_every: batches between the saves that are asked for; at each epoch's end there is one, too.
        ignore: names of plugins or metrics that are not compared.

    Returns:
        What was found.

    Raises:
        UsageError: an argument is out of its range, `make_trainer` returns something else or the same objects twice, a
            place to kill at never comes, the run is too short or without a certain end, or it resumes by itself.
    """
    for name, value in {"resumes": resumes, "save_every": save_every}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name}= must be a whole number of at least 1, got {value!r}.")
    positions = None if kill_at is None else moments.listed(kill_at)
    before = rng.capture()
    try:
        with TemporaryDirectory() as folder:
            check = _Check(Maker(make_trainer), Path(folder), save_every)
            return check.run(positions, resumes, [ignore] if isinstance(ignore, str) else ignore)
    finally:
        rng.restore(before)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What every leg is compared with."""

    whole: Leg
    aside: Aside
    workers: tuple[str, ...]

    def compared(self, leg: Leg) -> Comparison:
        """Compare a leg with the part of the uninterrupted run that it should repeat."""
        facts = self.whole.facts[leg.begun.facts if leg.begun else 0 :]
        names = "the uninterrupted run", "the interrupted one"
        return compare(facts, leg.facts, names=names, whole=not leg.killed, aside=self.aside)

    def causes(self, leg: Leg, found: Comparison) -> tuple[str, ...]:
        """Return what is likely behind a difference."""
        in_epoch = leg.begun is not None and leg.begun.place[1] > 0
        return causes.after_a_resume(
            found,
            reasons=leg.reasons,
            workers=self.workers,
            hear_again=leg.hear_epoch_start if in_epoch else (),
        )


class _Check:
    """The legs of one check."""

    def __init__(self, make: Maker, folder: Path, save_every: int) -> None:
        self._make, self._folder, self._save_every = make, folder, save_every

    def run(self, positions: Sequence[Position] | None, resumes: int, ignore: Collection[str]) -> ResumeCheck:
        """Run all legs; return what was found."""
        whole = self._leg("whole")
        ignored = _ignored(ignore, whole)
        if positions is None:
            kills = moments.chosen(whole.moments, resumes)
        else:
            kills = [moments.located(each, whole.moments) for each in positions]
        twin = self._leg("again")
        varies = varying(whole.facts, twin.facts) - ignored
        found = compare(whole.facts, twin.facts, names=("one uninterrupted run", "the other"), aside=ignored | varies)
        check = ResumeCheck(twin.guarantee, twin.reasons)
        if found.first is not None:
            cause = causes.without_a_kill(found.first)
            check = replace(check, is_deterministic=False, difference=found.first, draws=found.draws, causes=(cause,))
            return _lowered(check)
        check = replace(check, set_aside=tuple(sorted({_name(*each) for each in varies})))
        return self._interrupted(check, _Pattern(whole, ignored | varies, twin.workers), kills)

    def _interrupted(self, check: ResumeCheck, pattern: _Pattern, kills: Sequence[Moment]) -> ResumeCheck:
        saved: Saved | None = None
        for kill in (*kills, None):
            leg = self._leg("interrupted", number=len(check.legs), begun=saved, kill=kill)
            found = pattern.compared(leg)
            place = InterruptedLeg(saved.place if saved else None, kill if leg.killed else None)
            check = replace(
                check,
                legs=(*check.legs, place),
                batches=check.batches + found.batches,
                draws=check.draws or found.draws,
                difference=found.first,
            )
            reasons = tuple(dict.fromkeys((*check.reasons, *leg.reasons)))
            check = replace(check, guarantee=weaker(check.guarantee, leg.guarantee), reasons=reasons)
            if found.first is not None:
                return _lowered(replace(check, causes=pattern.causes(leg, found)))
            if kill is not None and not leg.killed:
                raise UsageError(
                    f"Leg {len(check.legs)} ({place}) never came to {kill}: where a run is killed next must lie "
                    f"behind the newest save before the former kill."
                )
            saved = leg.saved or saved
        return check

    def _leg(
        self,
        folder: str,
        number: int = 0,
        *,
        begun: Saved | None = None,
        kill: Moment | None = None,
    ) -> Leg:
        rng.seed_all(number if begun else 0)  # what begins afresh begins alike; what resumes must not rely on that
        try:
            trainer, options = self._make(self._folder / folder)
            leg = run_leg(trainer, options, save_every=self._save_every, begun=begun, kill=kill)
        except Exception as error:
            if begun is not None:
                place = "epoch {}, batch {}, step {}".format(*begun.place)
                error.add_note(f"heliograph: in leg {number + 1} of a resume check, resumed at {place}")
            raise
        if leg.foreign:
            raise UsageError(
                "The run resumed by itself, from a checkpoint that was there already, and so is not uninterrupted. "
                "Let make_trainer take a folder, def make_trainer(folder), and write there: "
                "Checkpoint(folder, resume='auto'); or pass resume=None."
            )
        return leg


def _ignored(names: Collection[str], whole: Leg) -> Aside:
    plugins = {fact.what.removeprefix("plugin ") for fact in whole.facts if fact.what.startswith("plugin ")}
    for name in names:
        if name not in plugins | whole.metrics:
            known = known_names(name, plugins | whole.metrics)
            raise UsageError(f"ignore= names {name!r}, which is no plugin with a state and no metric.{known}")
    return frozenset(("metrics", name) if name in whole.metrics else (f"plugin {name}", "") for name in names)


def _name(what: str, path: str) -> str:
    return path if what == "metrics" else f"{what}{path and f' ({path})'}"


def _lowered(check: ResumeCheck) -> ResumeCheck:
    """Return a check whose difference outweighs what the runs say of themselves."""
    though = "" if check.guarantee == "not exact" else f", though the run calls itself {check.guarantee!r}"
    reason = f"the check found a difference{though}"
    return replace(check, guarantee="not exact", reasons=(reason, *check.reasons))
