"""What was asked for happens, or the result says what did not, or an error is raised: on random small programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from heliograph.packages.tests.torture.silent import Counts
from heliograph.packages.tests.torture.silent_attempts import Account, Place
from heliograph.packages.tests.torture.silent_law import KEYWORDS, is_said, violations
from heliograph.packages.tests.torture.silent_program import (
    Data,
    Deed,
    Keeps,
    Poison,
    Program,
    Then,
    Timing,
    Verb,
    drawn,
)
from heliograph.packages.tests.torture.silent_trial import Verdict, tried
from heliograph.packages.tests.torture.silent_witness import BATCHES, EMPTY, EndlessError, Mark, Notebook

SCRIPT = Path(__file__).parent / "torture/silent.py"
BLOCK = 100  # programs in one test


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", range(0, 20_000, BLOCK))
def test_nothing_is_silent_in_a_hundred_programs(first: int) -> None:
    broken = [verdict for seed in range(first, first + BLOCK) if (verdict := tried(drawn(seed))).violations]
    assert not broken, "\n".join(map(str, broken)) + f"\n{SCRIPT} --only {broken[0].program.seed} repeats the first"


def test_a_seed_is_a_program() -> None:
    programs = [drawn(seed) for seed in range(200)]
    assert programs == [drawn(seed) for seed in range(200)]
    assert len(set(programs)) == 200


@pytest.mark.parametrize(
    ("kind", "drawn_of"),
    [
        (Data, lambda program: [program.data]),
        (Poison, lambda program: [program.poison]),
        (Then, lambda program: [program.then]),
        (Verb, lambda program: [deed.verb for deed in program.deeds]),
    ],
)
def test_everything_is_drawn(kind: Any, drawn_of: Callable[[Program], list[str]]) -> None:
    assert {each for seed in range(1000) for each in drawn_of(drawn(seed))} == {*get_args(kind)}


# What the judge would notice: a training in which all went well, and one change to it for each kind of violation.

PROGRAM = Program(
    0,
    data="list",
    batches=3,
    epochs=2,
    sets=("",),
    timings=tuple(Timing(what, "Every", "epochs", (1,)) for what in ("log", "validation", "save")),
    keeps=Keeps(last=2, best=1, monitor="validation/loss", load_best="weights"),
    clipping=1.0,
    rate="step",
    is_logged=True,
)
LINES = ("log", "log", "validation_end", "validation_end", "checkpoint_saved", "checkpoint_saved", "run_closed")


def story(program: Program) -> list[Mark]:
    """Return what the witness sees of a program of full epochs; the first of them is the best, and is loaded."""
    marks, weights = [Mark("TrainStart")], 0
    for epoch in range(program.epochs or 0):
        marks.append(Mark("EpochStart", number=epoch))
        for number in range(program.batches):
            weights += 1
            happened = ("BatchStart", "trained", "GradientsReady", "stepped", "StepEnd", "BatchEnd", "ShouldStop")
            marks.append(Mark("read", number=number))
            marks += [Mark(what, weights=weights * (what == "stepped")) for what in happened]
        marks += [Mark("EpochEnd", number=epoch), Mark("Log")]
        marks.append(Mark("measured", name="Log", metrics={"train/loss": 5.0 - epoch}))
        marks += [Mark("ValidationStart"), Mark("validated"), Mark("validated"), Mark("ValidationEnd")]
        marks.append(Mark("measured", name="ValidationEnd", metrics={"validation/loss": 1.0 + epoch}))
        marks += [
            Mark("SavePoint", weights=weights),
            Mark("CheckpointSaved", name=f"{epoch}.pth", number=weights),
            Mark("ShouldStop"),
        ]
    return [*marks, Mark("TrainEnd"), Mark("exported", weights=3), Mark("RunClosed")]


ACCOUNT = Account(
    kind="training",
    marks=tuple(story(PROGRAM)),
    status="completed",
    best="0.pth",
    weights=3,
    stored={"0.pth": 3, "1.pth": 6},
    files={"0.pth": "a", "1.pth": "b"},
    lines=tuple(f'{{"event": "{name}"}}' for name in LINES),
    scheduler_steps={"": 6},
    largest_norm=0.5,
)
TESTED = Account(kind="test", status="completed", tested=0.5, given=0.5)

Change = Callable[[Program, Account], tuple[Program, Account]]


def given(**facts: Any) -> Change:
    """Return a change of the account."""
    return lambda program, account: (program, replace(account, **facts))


def wanted(**options: Any) -> Change:
    """Return a change of the program."""
    return lambda program, account: (replace(program, **options), account)


def both(*changes: Change) -> Change:
    """Return several changes."""

    def change(program: Program, account: Account) -> tuple[Program, Account]:
        for each in changes:
            program, account = each(program, account)
        return program, account

    return change


def without(*kinds: str, after: str = "TrainStart", times: int = 1000) -> Change:
    """Return a change that takes marks out, from the first of a kind on."""

    def change(program: Program, account: Account) -> tuple[Program, Account]:
        begin, left, kept = [mark.what for mark in account.marks].index(after), times, []
        for index, mark in enumerate(account.marks):
            is_out = index > begin and mark.what in kinds and left > 0
            left -= is_out
            kept += [] if is_out else [mark]
        return program, replace(account, marks=tuple(kept))

    return change


def until(kind: str, times: int = 1) -> Change:
    """Return a change after which the run ends when a kind of mark has come so often."""

    def change(program: Program, account: Account) -> tuple[Program, Account]:
        places = [index for index, mark in enumerate(account.marks) if mark.what == kind]
        marks = account.marks[: places[times - 1] + 1] + account.marks[-3:]
        return program, replace(account, marks=marks)

    return change


def added(*marks: Mark, after: str, times: int = 1) -> Change:
    """Return a change that adds marks after those of a kind, the first ones only."""

    def change(program: Program, account: Account) -> tuple[Program, Account]:
        found: list[Mark] = []
        for mark in account.marks:
            count = sum(each.what == after for each in found)
            found += [mark, *(marks if mark.what == after and count < times else ())]
        return program, replace(account, marks=tuple(found))

    return change


def does(verb: Verb, at: str = "BatchEnd", **options: Any) -> Change:
    """Return a change after which the program has a plugin that does something."""
    return wanted(deeds=(Deed(verb, at, 1, 1, **options),))


def longer(program: Program, account: Account) -> tuple[Program, Account]:
    """Return a training of twice as many epochs."""
    program = replace(program, epochs=4)
    return program, replace(account, marks=tuple(story(program)))


def unmeasured(program: Program, account: Account) -> tuple[Program, Account]:
    """Return a training in which no log had metrics."""
    return program, replace(account, marks=tuple(mark for mark in account.marks if mark.name != "Log"))


ALL_OF_BATCH = ("read", "BatchStart", "trained", "GradientsReady", "stepped", "StepEnd", "BatchEnd")
OF_VALIDATION = ("ValidationStart", "validated", "ValidationEnd")
CHANGES: Mapping[str, Change] = {
    "an epoch was cut": without(*ALL_OF_BATCH, after="EpochStart", times=7),
    "epochs are missing": until("CheckpointSaved"),
    "it does not end": given(is_endless=True, error="EndlessError: 450 batches were done"),
    "epochs are empty, and do not end": given(is_endless=True, error="EndlessError: 20 epochs in a row were empty"),
    "steps are missing": wanted(epochs=None, steps=7),
    "not one step": without("GradientsReady", "stepped", "StepEnd"),
    "other steps": without("stepped", times=1),
    "nothing was saved": both(without("SavePoint", "CheckpointSaved"), given(files={}, stored={}, best="")),
    "the last step was not saved": given(stored={"0.pth": 3, "1.pth": 5}),
    "saves without a Checkpoint": wanted(keeps=None),
    "no validation at the end": until("BatchEnd", 4),
    "a request was not served": without("Log", times=1),
    "tested with other weights": given(kind="test", tested=0.6, given=0.5),
    "not the average at the end": both(wanted(loads_average=True), given(off_average=0.1)),
    "there is no such metric": wanted(stops_early=("train/los", 1, 0.0)),
    "a metric was never measured": both(wanted(stops_early=("train/loss", 1, 0.0)), unmeasured),
    "no early stop": both(longer, wanted(stops_early=("train/loss", 1, 10.0))),
    "no best checkpoint": given(best=""),
    "not the best checkpoint": given(best="1.pth"),
    "the best came after TrainEnd": both(without("exported"), added(Mark("exported", weights=6), after="TrainEnd")),
    "the best was not loaded": given(weights=6),
    "a file of another run is gone": given(kind="rerun", files_before={"other.pth": "c"}),
    "lines of another run are gone": given(kind="rerun", lines_before=("a line",)),
    "lines of the log are missing": given(lines=ACCOUNT.lines[1:]),
    "a kept checkpoint is gone": given(files={"1.pth": "b"}),
    "a batch was read and dropped": both(wanted(data="one-shot", batches=7), added(Mark("read"), after="BatchEnd")),
    "data ended early": wanted(data="short", batches=4),
    "an event never came": both(does("listen", "Log"), without("Log")),
    "a validation set was never read": without(*OF_VALIDATION),
    "a parameter was never trained": wanted(is_unused=True),
    "an error was swallowed": both(does("raise"), added(Mark("raised", by="does_raise_0"), after="BatchEnd")),
    "an observer was switched off": both(
        does("raise", is_observer=True),
        added(Mark("raised", by="does_raise_0"), after="BatchEnd", times=3),
        given(plugin_errors={"does_raise_0": 3}),
    ),
    "a plateau was not looked for": both(wanted(rate="plateau", plateau="train/loss"), given(scheduler_steps={"": 0})),
    "the scheduler was stepped otherwise": given(scheduler_steps={"": 5}),
    "gradients were not clipped": given(largest_norm=1.1),
    "it continued after a stop": both(does("stop"), added(Mark("asked", name="stop"), after="BatchEnd")),
    "nobody asked for the stop": given(status="stopped"),
    "an error that is not for users": given(error="KeyError: 'm'"),
    "events are missing": without("RunClosed"),
    "a validation was not whole": without("validated", times=1),
}


def kinds(program: Program, account: Account) -> set[str]:
    """Return the kinds of what the judge finds."""
    return {violation.kind for violation in violations(program, (account,))}


def test_it_finds_nothing_where_all_went_well() -> None:
    assert kinds(PROGRAM, ACCOUNT) == kinds(PROGRAM, TESTED) == set()


def test_there_is_a_change_for_every_kind() -> None:
    assert CHANGES.keys() == KEYWORDS.keys()


@pytest.mark.parametrize("kind", CHANGES)
def test_the_judge_notices(kind: str) -> None:
    program, account = CHANGES[kind](PROGRAM, ACCOUNT)
    assert kind in kinds(program, account)
    assert kind in kinds(program, replace(account, said=("The moon is full.",)))
    for word in KEYWORDS[kind]:
        assert kind not in kinds(program, replace(account, said=(f"The {word.upper()} is missing.",)))


@pytest.mark.parametrize("kind", [kind for kind, words in KEYWORDS.items() if not words])
def test_some_things_no_warning_excuses(kind: str) -> None:
    assert not is_said(kind, ("Nothing happened: no step, no epoch, no checkpoint.",))


def test_a_newer_checkpoint_of_the_same_step_replaces_one() -> None:
    again = added(Mark("CheckpointSaved", name="end.pth", number=3), after="CheckpointSaved")
    program, account = both(again, given(files={"1.pth": "b", "end.pth": "c"}))(PROGRAM, ACCOUNT)
    assert "a kept checkpoint is gone" not in kinds(program, account)
    assert "a kept checkpoint is gone" in kinds(program, replace(account, files={"1.pth": "b"}))


def test_an_error_excuses_what_did_not_happen() -> None:
    program, account = CHANGES["nothing was saved"](PROGRAM, ACCOUNT)
    assert kinds(program, replace(account, error="ValueError: disk full", status="")) == set()


@pytest.mark.parametrize("at", ["EpochStart", "BatchStart", "BatchEnd", "ShouldStop"])  # of the same epoch
def test_an_epoch_may_be_cut_by_who_asks_while_it_runs(at: str) -> None:
    program, account = CHANGES["an epoch was cut"](PROGRAM, ACCOUNT)
    asked = added(Mark("asked", name="end_epoch"), after=at)
    assert "an epoch was cut" not in kinds(*asked(program, account))


@pytest.mark.parametrize("at", ["EpochEnd", "ValidationEnd", "SavePoint", "CheckpointSaved"])  # of the epoch before
def test_an_epoch_may_not_be_cut_by_who_asks_before_it_begins(at: str) -> None:
    cut = without(*ALL_OF_BATCH, after="SavePoint", times=7)
    asked = added(Mark("asked", name="end_epoch"), after=at)
    assert "an epoch was cut" in kinds(*both(cut, asked)(PROGRAM, ACCOUNT))


def test_what_a_resumed_run_does_counts_from_where_it_was_resumed() -> None:
    second = next(index for index, mark in enumerate(ACCOUNT.marks) if (mark.what, mark.number) == ("EpochStart", 1))
    marks = (Mark("TrainStart"), Mark("CheckpointLoaded", name="0.pth"), *ACCOUNT.marks[second:])
    account = replace(ACCOUNT, kind="resume", at=Place(epoch=1, batches=3, samples=12, steps=3), marks=marks)
    assert kinds(PROGRAM, account) == set()
    assert kinds(PROGRAM, replace(account, at=Place(epoch=1, batch=1, batches=4, steps=4))) == {"an epoch was cut"}


def test_a_run_that_trains_for_ever_is_ended() -> None:
    notebook = Notebook()
    for _ in range(BATCHES):
        notebook.end_batch()
    with pytest.raises(EndlessError, match=f"{BATCHES} batches"):
        notebook.end_batch()


def test_a_run_whose_epochs_are_empty_for_ever_is_ended() -> None:
    notebook = Notebook()
    for _ in range(EMPTY):
        notebook.begin_epoch()
    notebook.end_batch()
    for _ in range(EMPTY):
        notebook.begin_epoch()
    with pytest.raises(EndlessError, match=f"{EMPTY} epochs"):
        notebook.begin_epoch()


def test_verdicts_are_counted_by_kind() -> None:
    program, account = CHANGES["nothing was saved"](PROGRAM, ACCOUNT)
    counts = Counts()
    counts.add(Verdict(program, (account,), violations(program, (account,))))
    counts.add(Verdict(PROGRAM, (ACCOUNT,), ()))
    assert counts.broken["nothing was saved"] == [0]
    assert counts.ends == {"completed": 2}
    line = next(line for line in str(counts).splitlines() if "nothing was saved" in line)
    assert line.split() == ["nothing", "was", "saved", "1", "0"]


def test_warnings_where_the_judge_misses_nothing_are_counted() -> None:
    counts = Counts()
    counts.add(Verdict(PROGRAM, (replace(ACCOUNT, said=("The moon is full.",)),), ()))
    assert counts.unasked == {"The moon is full.": 1}


@pytest.mark.whole
def test_a_program_can_be_carried_out_by_its_seed() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--only", "3"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(str(drawn(3))), done.stdout + done.stderr
    assert "\n1 programs, " in done.stdout
