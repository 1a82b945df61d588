"""The law: all that was asked for happened, or the result says what did not, or an error was raised.

It is judged by what the witness of a program saw, never by what the framework counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, isnan

from heliograph.packages.tests.torture.silent_attempts import Account
from heliograph.packages.tests.torture.silent_parts import VALIDATION, name_of
from heliograph.packages.tests.torture.silent_program import Program, Timing
from heliograph.packages.tests.torture.silent_witness import Mark

CLOSE = 1e-5
FOR_USERS = (
    "ValueError", "TypeError", "RuntimeError", "FloatingPointError", "OSError", "FileNotFoundError", "TrainingError",
    "StrictError",
)  # fmt: skip
SERVED = {"log": "Log", "validation": "ValidationEnd", "save": "SavePoint"}
EXPECTED = (
    "BatchStart", "GradientsReady", "StepEnd", "BatchEnd", "Log", "ValidationStart", "ValidationBatchEnd",
    "ValidationEnd", "SavePoint", "EpochEnd",
)  # fmt: skip
SWITCHED_OFF = 3  # errors of an observer

# How a warning is recognised: for each kind of violation words of which one must be in it; without, nothing excuses it.
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "an epoch was cut": ("epoch",),
    "epochs are missing": ("epoch", "data", "loader", "stream"),
    "it does not end": (),
    "epochs are empty, and do not end": (),
    "steps are missing": ("step", "data", "loader", "stream"),
    "not one step": ("step",),
    "other steps": ("step",),
    "nothing was saved": ("checkpoint", "save"),
    "the last step was not saved": ("checkpoint", "save"),
    "saves without a Checkpoint": ("checkpoint", "save"),
    "no validation at the end": ("validat",),
    "a request was not served": ("request", "still due", "log", "validation", "save"),
    "tested with other weights": ("ema", "average"),
    "not the average at the end": ("ema", "average"),
    "there is no such metric": ("never", "monitor", "metric"),
    "a metric was never measured": ("never", "monitor", "metric", "no checkpoint was", "no checkpoint is"),
    "no early stop": ("monitor", "early"),
    "no best checkpoint": ("best", "monitor", "no checkpoint was written"),
    "not the best checkpoint": ("best",),
    "the best came after TrainEnd": ("best",),
    "the best was not loaded": ("best",),
    "a file of another run is gone": ("checkpoint", "file"),
    "lines of another run are gone": ("log",),
    "lines of the log are missing": ("log", "line"),
    "a kept checkpoint is gone": ("checkpoint",),
    "a batch was read and dropped": ("ahead", "batch"),
    "data ended early": ("data", "loader", "stream", "batches"),
    "an event never came": ("never",),
    "a validation set was never read": ("validation",),
    "a parameter was never trained": ("parameter", "gradient"),
    "an error was swallowed": (),
    "an observer was switched off": ("switched off", "observer", "disabled"),
    "a plateau was not looked for": ("plateau", "monitor", "learning rate", "learning_rate"),
    "the scheduler was stepped otherwise": ("no optimizer step", "schedul", "learning rate", "learning_rate"),
    "gradients were not clipped": ("clip",),
    "it continued after a stop": ("stop",),
    "nobody asked for the stop": ("the run ended early",),
    "an error that is not for users": (),
    "events are missing": (),
    "a validation was not whole": ("validation",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Violation:
    """What was asked for, did not happen, and was not said."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def is_said(kind: str, said: tuple[str, ...]) -> bool:
    """Return whether a warning excuses a kind of violation."""
    return any(word in each.lower() for each in said for word in KEYWORDS[kind])


def violations(program: Program, accounts: tuple[Account, ...]) -> tuple[Violation, ...]:
    """Return where the law was broken, a kind of each attempt once."""
    found: dict[tuple[int, str], Violation] = {}
    for number, account in enumerate(accounts):
        for kind, text in missing(program, account):
            if not is_said(kind, account.said):
                found.setdefault((number, kind), Violation(kind, f"{account.kind}: {text}"))
    return tuple(found.values())


def missing(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """Yield (kind, in words) of what was asked for and did not happen, said or not."""
    if account.is_endless:
        yield "epochs are empty, and do not end" if "empty" in account.error else "it does not end", account.error
        return
    claims: tuple[Claim, ...] = ALWAYS if account.error else (*ALWAYS, *IN_THE_END)
    if account.kind == "test":
        claims = (_tested, _errors)
    elif not account.error and account.at is None:
        claims = (*claims, *WHEN_FRESH)
    is_stopped = account.status == "stopped" and not account.happened("BatchEnd")
    for claim in () if is_stopped else claims:  # a run that is stopped before its first batch says so
        yield from claim(program, account)


# What holds however a run ends.


def _errors(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    raised = account.happened("raised")
    if account.error and not raised and account.error.partition(":")[0] not in FOR_USERS:
        yield "an error that is not for users", account.error
    observers = {name_of(deed, number) for number, deed in enumerate(program.deeds) if deed.is_observer}
    if not account.error and any(mark.by not in observers for mark in raised):
        yield "an error was swallowed", f"{raised[0].by} raised, and the run says {account.status}"
    for name, times in Counter(mark.by for mark in raised if mark.by in observers).items():
        if not account.error and not account.plugin_errors.get(name):
            yield "an error was swallowed", f"{name} raised, and the result does not list it"
        if not account.error and times >= SWITCHED_OFF:
            yield "an observer was switched off", f"{name} raised {times} times"


def _events(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    counts = Counter(mark.what for mark in account.marks)
    if counts["TrainStart"] and counts["RunClosed"] != 1:
        yield "events are missing", f"RunClosed came {counts['RunClosed']} times"
    if not account.error and (counts["TrainEnd"], counts["RunFailed"]) != (1, 0):
        yield "events are missing", f"TrainEnd came {counts['TrainEnd']} times, RunFailed {counts['RunFailed']} times"


def _others(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """Nothing of another run is gone."""
    if account.kind != "rerun":
        return
    for name, content in account.files_before.items():
        if account.files.get(name) != content:
            yield "a file of another run is gone", name
    lost = Counter(account.lines_before) - Counter(account.lines)
    if lost:
        yield "lines of another run are gone", f"{lost.total()} of {len(account.lines_before)}"


# What holds where a run says that it ended well.


def _epochs(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """No epoch is shorter than its data, unless somebody asked for that while it ran; none is left out."""
    epochs = epochs_of(account)
    read = 0
    for epoch in epochs:
        in_epoch = sum(mark.what == "read" for mark in epoch.marks)
        read += in_epoch
        is_whole = read == program.whole if program.data == "one-shot" else epoch.batches == program.whole
        may_be_due = account.at is not None and any(deed.verb == "end_epoch" for deed in program.deeds)
        was_due = may_be_due and epoch is epochs[0]  # the run before may have asked for it
        if epoch.is_ended and not is_whole and not epoch.is_cut and not was_due:
            text = f"epoch {epoch.number} had {epoch.batches} of {program.whole} batches, nobody asked for it"
            yield "an epoch was cut", text
        is_last = epoch is epochs[-1]  # then nobody needs the rest of the stream
        if epoch.is_ended and not is_last and program.data == "one-shot" and in_epoch > epoch.batches:
            yield "a batch was read and dropped", f"{in_epoch} were read in epoch {epoch.number}, {epoch.batches} done"
    if account.status != "completed" or program.epochs is None or _has_steps(program, account):
        return
    ended = [epoch.number for epoch in epochs if epoch.is_ended]
    first = account.at.epoch if account.at else 0
    if ended != list(range(first, program.epochs)):
        yield "epochs are missing", f"of {program.epochs} epochs {ended} ended"


def _has_steps(program: Program, account: Account) -> bool:
    return program.steps is not None and _steps_done(account) >= program.steps


def _steps_done(account: Account) -> int:
    return (account.at.steps if account.at else 0) + len(steps_of(account.marks))


def _steps(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    done, wanted = _steps_done(account), program.steps
    read = bool(account.happened("BatchEnd"))
    is_stopped = any((mark.what, mark.name) == ("asked", "stop") for mark in account.marks)
    if wanted is not None and account.status == "completed" and done != wanted:
        epochs = (account.at.epoch if account.at else 0) + sum(epoch.is_ended for epoch in epochs_of(account))
        if done > wanted or program.epochs is None or epochs < program.epochs:
            yield "steps are missing", f"{done} of {wanted} steps"
    if done == 0 and (read or (account.at is None and not is_stopped)):
        yield "not one step", f"in {len(account.happened('BatchEnd'))} batches"


def _stops(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """A stop ends the run at the next boundary; a run says `stopped` only if one was asked for."""
    asked = [index for index, mark in enumerate(account.marks) if (mark.what, mark.name) == ("asked", "stop")]
    early = early_stop(program, account)
    if asked and _batches_after(account, asked[0]) > program.accumulation:
        yield "it continued after a stop", f"{_batches_after(account, asked[0])} batches more"
    if early is not None and _batches_after(account, early) > program.accumulation:
        yield "no early stop", f"{_batches_after(account, early)} batches more"
    if account.status == "stopped" and not asked and program.stops_early is None:
        yield "nobody asked for the stop", account.status


def _batches_after(account: Account, index: int) -> int:
    return sum(mark.what == "BatchEnd" for mark in account.marks[index:])


def _requests(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """What plugins and schedules ask for happens at the next boundary."""
    marks = account.marks
    for index, verb in sorted([*asked_by_plugins(account), *asked_by_schedules(program, account)]):
        for mark in _until(marks, index, program.accumulation):
            if mark.what == SERVED[verb]:
                break
        else:
            where = marks[index].by or f"the schedule, at {marks[index].what}"
            yield "a request was not served", f"{verb}, asked for by {where}, mark {index} of {len(marks)}"


def _until(marks: tuple[Mark, ...], index: int, batches: int) -> Iterator[Mark]:
    """Yield what comes after a mark, until so many batches more are done."""
    for mark in marks[index + 1 :]:
        batches -= mark.what == "BatchEnd"
        if batches < 0:
            return
        yield mark


def _validations(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """Each validation reads every batch of every set."""
    read = Counter[str]()
    for mark in account.marks:
        if mark.what == "ValidationStart":
            read.clear()
        read[mark.name] += mark.what == "validated"
        if mark.what == "ValidationEnd" and any(read[name] != VALIDATION for name in program.sets):
            yield "a validation was not whole", str(dict(read))


def _saves(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """Where a run saves, its last step is on disk."""
    asked = bool(account.happened("SavePoint")) or any(verb == "save" for _, verb in asked_by_plugins(account))
    if program.keeps is None:
        may_write = any(deed.at == "SavePoint" for deed in program.deeds)
        if not may_write and (asked or any(timing.what == "save" for timing in program.timings)):
            yield "saves without a Checkpoint", f"{len(account.happened('SavePoint'))} save points"
        return
    stepped = account.happened("stepped")
    if not stepped:
        return
    if not set(account.files) - set(account.files_before) and account.at is None:
        yield "nothing was saved", f"after {len(stepped)} steps"
    elif stepped[-1].weights not in account.stored.values() and not _saves_no_end(program):
        yield "the last step was not saved", f"step {_steps_done(account)} is in none of {sorted(account.stored)}"


def _saves_no_end(program: Program) -> bool:
    return any(timing.what == "save" and timing.at_end is False for timing in program.timings)


def _kept(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """The newest checkpoints are on disk; of those of one step that follow each other, only the last."""
    if program.keeps is None:
        return
    saved = account.happened("CheckpointSaved")
    replaced = {mark.name for mark, newer in pairwise(saved) if mark.name != newer.name and mark.number == newer.number}
    names = [name for name in dict.fromkeys(mark.name for mark in reversed(saved)) if name not in replaced]
    for name in names[: program.keeps.last]:
        if name not in account.files:
            yield "a kept checkpoint is gone", name


def _validated_at_the_end(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """A validation every so many epochs is also done where a run ends within one."""
    wanted = ("validation", "Every", "epochs")
    timings = [each for each in program.timings if (each.what, each.kind, each.counter) == wanted]
    epochs = epochs_of(account)
    if (
        not timings
        or timings[0].at_end is False
        or not epochs
        or epochs[-1].is_ended
        or not account.happened("stepped")
    ):
        return
    last = {mark.what: index for index, mark in enumerate(account.marks)}
    if last.get("ValidationEnd", -1) < last.get("stepped", -1):
        yield "no validation at the end", f"the run ended within epoch {epochs[-1].number}"


def _monitors(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """What a plugin watches was measured; that a checkpoint is the best shows it for the run that was resumed."""
    has_best = account.at is not None and account.best in account.files_before
    known = {name for mark in account.happened("measured") for name in mark.metrics}
    for plugin, metric in program.monitors.items():
        is_known = metric in known or (has_best and plugin == "Checkpoint")
        if not is_known and account.happened("BatchEnd"):
            others = [name for name in known if name.startswith(metric.partition("/")[0]) and name.endswith("loss")]
            kind = "there is no such metric" if others else "a metric was never measured"
            yield kind, f"{plugin} watches {metric!r}, there is {sorted(known)}"


def _clipped(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    if program.clipping is not None and account.largest_norm > program.clipping * 1.001:
        yield "gradients were not clipped", f"{account.largest_norm} > {program.clipping}"


def _lines_written(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """What is logged is in the file."""
    if not program.is_logged or account.plugin_errors.get("jsonl_log") or not account.happened("EpochStart"):
        return
    new = Counter(account.lines) - Counter(account.lines_before)
    events = {"log": "Log", "validation_end": "ValidationEnd", "checkpoint_saved": "CheckpointSaved", "run_closed": "RunClosed"}  # fmt: skip  # noqa: E501
    for name, event in events.items():
        written = sum(times for line, times in new.items() if f'"event": "{name}"' in line)
        happened = len(account.happened(event))
        if written < happened:
            yield "lines of the log are missing", f"{written} of {happened} {name}"


# What holds where it was not resumed, too.


def _early_data(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    exhausted = [
        each for each in epochs_of(account) if each.is_ended and not each.is_cut and each.batches == program.whole
    ]
    if program.data == "short" and program.whole < program.batches and exhausted:
        yield "data ended early", f"after {program.whole} of {program.batches} batches"


def _listeners(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    seen = {mark.what for mark in account.marks}
    for number, deed in enumerate(program.deeds):
        if deed.at in EXPECTED and deed.at not in seen:
            yield "an event never came", f"{name_of(deed, number)} waits for {deed.at}"


def _sets(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    if program.sets and not account.happened("ValidationEnd"):
        yield "a validation set was never read", str(program.sets)


def _parameters(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    if program.is_unused and account.happened("stepped"):
        yield "a parameter was never trained", "unused"


def _step_counts(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """Every window of an epoch is stepped once, unless somebody skips."""
    if program.poison or any(deed.verb in ("skip_batch", "skip_step") for deed in program.deeds):
        return
    for epoch in epochs_of(account):
        steps, expected = len(steps_of(epoch.marks)), ceil(epoch.batches / program.accumulation)
        if steps != expected:
            yield "other steps", f"{steps} of {expected} in epoch {epoch.number}, of {epoch.batches} batches"


def _best(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """The best of what was saved where it was measured is known, is the best, and is loaded."""
    keeps = program.keeps
    if keeps is None or keeps.monitor is None:
        return
    values, monitor = judged(account.marks, keeps.monitor), keeps.monitor
    if not account.best:
        if account.happened("stepped"):
            yield "no best checkpoint", f"{len(values)} saves were measured by {keeps.monitor}"
        return
    weights = loaded = account.stored.get(account.best)
    if keeps.monitor.startswith("validation/"):  # measured on an average, where there is one
        loaded = account.averages.get(account.best, weights)
    if values and not any(isnan(value) for value, _ in values):
        ways = [(marks, by_weights) for marks in (account.marks, _training(account)) for by_weights in (False, True)]
        allowed = [best for marks, way in ways for best in best_of(judged(marks, monitor, by_weights=way))]
        if weights not in allowed:
            yield "not the best checkpoint", f"{account.best} is not that of {min(value for value, _ in values)}"
    exported = account.happened("exported")
    if keeps.load_best and exported and exported[0].weights != loaded:
        yield "the best came after TrainEnd", f"a handler of it finds other weights than those of {account.best}"
    if keeps.load_best and account.weights != loaded:
        yield "the best was not loaded", f"the task has other weights than {account.best}"


def _training(account: Account) -> tuple[Mark, ...]:
    """Return what happened before TrainEnd: what is measured later may be of the best weights, loaded back."""
    end = next((index for index, mark in enumerate(account.marks) if mark.what == "TrainEnd"), None)
    return account.marks[:end]


def _averaged(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    if program.loads_average and account.off_average is not None and account.off_average > CLOSE:
        yield "not the average at the end", f"the task is {account.off_average:g} off"


def _scheduled(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """A scheduler is stepped after each step, each epoch with steps, or each measurement with steps before it."""
    if program.keeps is not None and program.keeps.load_best == "everything":  # its state is that of another step
        return
    for name, times in account.scheduler_steps.items():
        expected = _scheduler_steps(program, account, name)
        if program.rate == "plateau" and times < expected:
            yield "a plateau was not looked for", f"{times} times, not {expected}, {name}"
        elif times != expected:
            yield "the scheduler was stepped otherwise", f"{times} times, not {expected}, {name}"
        elif times == 0:
            yield "the scheduler was stepped otherwise", f"never, {name}"


def _scheduler_steps(program: Program, account: Account, name: str) -> int:
    times, steps = 0, 0
    for mark in account.marks:
        is_step = mark.what == "stepped" and mark.name == name
        steps += is_step
        due = {
            "step": is_step,
            "epoch": mark.what == "EpochEnd",
            "plateau": mark.what == "measured" and program.plateau in mark.metrics,
        }[program.rate or "step"]
        if due and steps:
            times, steps = times + 1, 0
    return times


def _tested(program: Program, account: Account) -> Iterator[tuple[str, str]]:
    """A test is of the weights as they are given; of those that the training left, it may be of their average."""
    allowed = [account.given]
    if program.decay is not None and account.averaged is not None:
        allowed.append(account.averaged)
    if account.tested is None or isnan(account.tested) or any(isnan(each) for each in allowed):
        return
    close = CLOSE if program.precision == "fp32" else 0.01
    if all(abs(account.tested - each) > close * max(1.0, abs(each)) for each in allowed):
        yield "tested with other weights", f"{account.tested} instead of {account.given}"


Claim = Callable[[Program, Account], Iterator[tuple[str, str]]]
ALWAYS: tuple[Claim, ...] = (_errors, _events, _others)
IN_THE_END: tuple[Claim, ...] = (
    _epochs, _steps, _stops, _requests, _validations, _saves, _kept, _validated_at_the_end, _monitors, _clipped,
    _lines_written,
)  # fmt: skip
WHEN_FRESH: tuple[Claim, ...] = (
    _early_data, _listeners, _sets, _parameters, _step_counts, _best, _averaged, _scheduled,
)  # fmt: skip


# What can be read from the marks.


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch, as the witness saw it."""

    number: int
    batches: int
    is_ended: bool
    is_cut: bool
    marks: tuple[Mark, ...]


def epochs_of(account: Account) -> list[Epoch]:
    """Return the epochs of an attempt; a request between two of them is of neither, one before the first is of that."""
    marks = account.marks
    starts = [index for index, mark in enumerate(marks) if mark.what == "EpochStart"]
    found: list[Epoch] = []
    for start, end in pairwise([*starts, len(marks)]):
        inner = marks[start:end]
        ended = next((index for index, mark in enumerate(inner) if mark.what == "EpochEnd"), None)
        of_epoch = inner[:ended] if found else (*marks[:start], *inner[:ended])
        batches = sum(mark.what == "BatchEnd" for mark in of_epoch)
        if account.at is not None and not found:
            batches += account.at.batch
        is_cut = any((mark.what, mark.name) == ("asked", "end_epoch") for mark in of_epoch)
        found.append(Epoch(marks[start].number, batches, ended is not None, is_cut, inner))
    return found


def steps_of(marks: tuple[Mark, ...]) -> list[int]:
    """Return where the steps are; of several optimizers those between the ends of two batches are one."""
    found, is_new = [], True
    for index, mark in enumerate(marks):
        if mark.what == "stepped" and is_new:
            found.append(index)
            is_new = False
        elif mark.what == "BatchEnd":
            is_new = True
    return found


def asked_by_plugins(account: Account) -> list[tuple[int, str]]:
    """Return where plugins ask for what."""
    return [
        (index, mark.name) for index, mark in enumerate(account.marks) if mark.what == "asked" and mark.name in SERVED
    ]


def asked_by_schedules(program: Program, account: Account) -> list[tuple[int, str]]:
    """Return where schedules ask for what, by their rules."""
    return [(index, timing.what) for timing in program.timings for index in due(timing, account)]


def due(timing: Timing, account: Account) -> Iterator[int]:
    """Yield where a schedule asks."""
    at = account.at
    counts = {
        "batches": at.batches if at else 0,
        "steps": at.steps if at else 0,
        "samples": at.samples if at else 0,
        "epochs": at.epoch if at else 0,
    }
    steps, last_service = set(steps_of(account.marks)), at.batches if at else -1
    bound = _next(timing, counts[timing.counter])
    for index, mark in enumerate(account.marks):
        counts["steps"] += index in steps
        counts["batches"] += mark.what == "BatchEnd"
        counts["epochs"] += mark.what == "EpochEnd"
        counts["samples"] += mark.number if mark.what == "trained" else 0
        if mark.what == SERVED[timing.what]:
            last_service = counts["batches"]
        is_due = mark.what in ("BatchEnd", "EpochEnd") and counts[timing.counter] >= bound
        if is_due:
            bound = _next(timing, counts[timing.counter])
        if mark.what == "EpochStart" and timing.at_start:
            is_due = counts["batches"] == mark.number == 0 > last_service
        elif mark.what == "TrainEnd" and timing.at_end:
            is_due = counts["batches"] not in (0, last_service)
        if is_due:
            yield index


def _next(timing: Timing, count: int) -> float:
    if timing.kind == "Every":
        return (count // timing.counts[0] + 1) * timing.counts[0]
    return next((each for each in timing.counts if each > count), inf)


def early_stop(program: Program, account: Account) -> int | None:
    """Return where an EarlyStopping must ask for a stop, None where it need not or was resumed."""
    if program.stops_early is None or account.at is not None:
        return None
    metric, patience, min_delta = program.stops_early
    best, failed = inf, 0
    for index, mark in enumerate(account.marks):
        if mark.what != "measured" or metric not in mark.metrics:
            continue
        if mark.metrics[metric] < best - min_delta:
            best, failed = mark.metrics[metric], 0
        else:
            failed += 1
        if failed >= patience:
            return index
    return None


def best_of(values: list[tuple[float, int]]) -> list[int]:
    """Return the weights that have the smallest value."""
    best = min((value for value, _ in values), default=inf)
    return [weights for value, weights in values if value == best]


def judged(marks: tuple[Mark, ...], metric: str, *, by_weights: bool = False) -> list[tuple[float, int]]:
    """Return (value, weights) of each save that was measured, by the newest measurement at the same place.

    A place is a number of batches, or weights, which a skipped batch leaves as they are: either may be gone by.
    """
    saved: dict[int, int] = {}
    values: dict[int, float] = {}
    batches, weights = 0, 0
    for mark in marks:
        batches += mark.what == "BatchEnd"
        weights = mark.weights if mark.what in ("stepped", "SavePoint") else weights
        place = weights if by_weights else batches
        if mark.what == "SavePoint":
            saved[place] = mark.weights
        elif mark.what == "measured" and metric in mark.metrics:
            values[place] = mark.metrics[metric]
    return [(values[place], weights) for place, weights in saved.items() if place in values]
