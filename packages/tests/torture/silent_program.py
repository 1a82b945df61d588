"""A random small program for the law that nothing happens silently: what it asks for, decided by one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Literal, TypeVar

T = TypeVar("T")
Data = Literal["sized", "list", "unsized", "one-shot", "short"]
What = Literal["log", "validation", "save"]
Verb = Literal["end_epoch", "skip_batch", "skip_step", "stop", "save", "validation", "log", "raise", "listen"]
Poison = Literal["", "a batch", "gradients"]
Rate = Literal["step", "epoch", "plateau"]
Then = Literal["", "resume", "rerun", "renamed", "test", "test changed", "test another"]

IN_BATCH = ("BatchStart", "GradientsReady", "StepEnd", "BatchEnd")
IN_VALIDATION = ("ValidationStart", "ValidationBatchEnd", "ValidationEnd")
AT_BOUNDARY = ("EpochStart", "Log", "SavePoint", "ShouldStop", "EpochEnd")
AT_THE_ENDS = ("TrainStart", "TrainEnd", "RunClosed")
EVENTS = (*IN_BATCH, *IN_VALIDATION, *AT_BOUNDARY, *AT_THE_ENDS)
NAMES = ("generator", "discriminator")
MISSPELT = ("train/los", "train/nonsense_loss", "validation/los", "validation/nonsense")


@dataclass(frozen=True, slots=True)
class Timing:
    """A schedule.

    Attributes:
        what: what it asks for.
        kind: the filter, `Every` or `At`.
        counter: what the filter counts.
        counts: its numbers.
        at_start: as the schedule's argument.
        at_end: as the schedule's argument; None leaves it out.
    """

    what: What
    kind: Literal["Every", "At"]
    counter: str
    counts: tuple[int, ...]
    at_start: bool = False
    at_end: bool | None = None


@dataclass(frozen=True, slots=True)
class Deed:
    """What a plugin of the user's does at every n-th emission of an event, from the first on.

    Attributes:
        error: the type of what is raised, where it raises.
    """

    verb: Verb
    at: str
    every: int
    first: int
    is_observer: bool = False
    error: Literal["Planned", "StopIteration", "KeyError"] = "Planned"


@dataclass(frozen=True, slots=True)
class Keeps:
    """The options of a `Checkpoint`."""

    last: int | None = 1
    best: int = 0
    monitor: str | None = None
    load_best: Literal["weights", "everything"] | None = None
    metadata: str | None = None
    background: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """What is asked for. The names say what is what.

    Attributes:
        batches: of an epoch; of a one-shot stream, of all of it; of a short loader, what its length says.
        stops_early: the metric, the patience and the `min_delta` of an EarlyStopping.
        poison: where a NaN comes from: a batch, or the gradients of finite losses.
        decay: of an EMA.
        guard: the `max_skips` of a NaNGuard that skips.
        rate: when the learning rate changes.
        then: what is done after the training.
        reuses: whether the same trainer does that.
    """

    seed: int
    data: Data = "sized"
    batches: int = 4
    epochs: int | None = 3
    steps: int | None = None
    sets: tuple[str, ...] = ()
    poison: Poison = ""
    is_named: bool = False
    is_frozen: bool = False
    is_unused: bool = False
    precision: Literal["fp32", "fp16"] = "fp32"
    timings: tuple[Timing, ...] = ()
    keeps: Keeps | None = None
    stops_early: tuple[str, int, float] | None = None
    decay: float | None = None
    loads_average: bool = False
    accumulation: int = 1
    clipping: float | None = None
    guard: int | None = None
    rate: Rate | None = None
    plateau: str | None = None
    is_logged: bool = False
    is_captured: bool = False
    deeds: tuple[Deed, ...] = ()
    then: Then = ""
    reuses: bool = False

    @property
    def whole(self) -> int:
        """How many batches the loader yields in an epoch."""
        return max(1, self.batches - 1) if self.data == "short" else self.batches

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The names of the optimizers; a single one has the empty name."""
        return NAMES if self.is_named else ("",)

    @property
    def monitors(self) -> dict[str, str]:
        """Which metric each plugin watches."""
        found = {
            "EarlyStopping": self.stops_early and self.stops_early[0],
            "Checkpoint": self.keeps and self.keeps.monitor,
            "LearningRate": self.plateau,
        }
        return {name: metric for name, metric in found.items() if metric}

    def __str__(self) -> str:
        """Return what is not as usual, a line each."""
        usual = Program(self.seed)
        changed = [each.name for each in fields(self) if getattr(self, each.name) != getattr(usual, each.name)]
        return "\n".join([f"program {self.seed}:", *(f"  {name} = {getattr(self, name)!r}" for name in changed)])


def drawn(seed: int) -> Program:
    """Return the program of a seed."""
    random = Random(seed)
    program = _watched(random, _scheduled(random, _trained(random, _length(random, seed))))
    program = replace(program, deeds=(*program.deeds, *_deeds(random, program)))
    return _followed(random, program)


def at_random(random: Random, share: float) -> bool:
    """Return True in a share of all cases."""
    return random.random() < share


def _length(random: Random, seed: int) -> Program:
    data: Data = random.choices(("sized", "list", "unsized", "one-shot", "short"), (40, 20, 20, 6, 8))[0]
    program = Program(seed, data=data, batches=random.randint(2, 8))
    epochs, a_epoch = random.randint(1, 4), program.whole
    unit = random.choices(("epochs", "steps", "both", "a plugin"), (55, 28, 9, 8))[0]
    if unit == "a plugin":
        last = random.randint(1, epochs * a_epoch)
        stop = Deed("stop", "BatchEnd", 10_000, last)
        return replace(program, epochs=None, deeds=(stop,))
    steps = random.randint(1, epochs * a_epoch + 2) if unit != "epochs" else None
    return replace(program, epochs=None if unit == "steps" else epochs, steps=steps)


def _trained(random: Random, program: Program) -> Program:
    poison: Poison = random.choices(("", "a batch", "gradients"), (88, 8, 4))[0]
    precision: Literal["fp32", "fp16"] = "fp16" if poison and at_random(random, 0.15) else "fp32"
    guards = at_random(random, 0.7 if poison else 0.08)
    return replace(
        program,
        sets=random.choices(((), ("",), ("a", "b")), (40, 48, 12))[0],
        poison=poison,
        precision=precision,
        is_named=precision == "fp32" and at_random(random, 0.18),
        is_frozen=at_random(random, 0.1),
        is_unused=at_random(random, 0.06),
        accumulation=random.choices((1, 2, 3), (75, 15, 10))[0],
        clipping=random.choice((0.05, 1.0)) if at_random(random, 0.15) else None,
        guard=random.choice((2, 10, 10_000)) if guards else None,
        is_captured=at_random(random, 0.15),
    )


def _scheduled(random: Random, program: Program) -> Program:
    asked: list[What] = []
    if at_random(random, 0.6):
        asked.append("log")
    if program.sets and at_random(random, 0.97):
        asked.append("validation")
    saves = at_random(random, 0.5)
    if saves or at_random(random, 0.04):
        asked.append("save")
    return replace(
        program, timings=tuple(_timing(random, program, what) for what in asked), keeps=_keeps(random, saves)
    )


def _timing(random: Random, program: Program, what: What) -> Timing:
    counter = random.choices(("steps", "batches", "epochs", "samples"), (35, 15, 40, 10))[0]
    top = {"epochs": 2, "samples": 4 * program.whole}.get(counter, program.whole + 2)
    kind: Literal["Every", "At"] = "At" if at_random(random, 0.15) else "Every"
    counts = sorted(random.sample(range(1, top + 2), min(2, top + 1) if kind == "At" else 1))
    at_end = random.choices((None, True, False), (80, 15, 5))[0]
    return Timing(what, kind, counter, tuple(counts), at_random(random, 0.1), at_end)


def _keeps(random: Random, saves: bool) -> Keeps | None:
    if not saves and not at_random(random, 0.015):
        return None
    return Keeps(last=random.choice((1, 1, 2, None)), background=at_random(random, 0.08))


def _watched(random: Random, program: Program) -> Program:
    """Add what goes by metrics or by weights."""
    keeps, metric = program.keeps, _metric(random, program)
    if keeps is not None:
        best = metric is not None and at_random(random, 0.5)
        keeps = replace(
            keeps,
            best=random.choice((1, 1, 2)) if best else 0,
            monitor=metric if best else None,
            load_best=random.choice(("weights", "everything", None)) if best else None,
            metadata=_metadata(random, program),
        )
    decay = random.choice((0.5, 0.9)) if at_random(random, 0.2) else None
    program = replace(program, keeps=keeps, decay=decay, loads_average=decay is not None and at_random(random, 0.25))
    watched = _metric(random, program)
    if watched is not None and at_random(random, 0.25):
        program = replace(program, stops_early=(watched, random.randint(1, 3), random.choice((0.0, 10.0))))
    plateau = _metric(random, program)
    rates: tuple[Rate, ...] = ("step", "epoch", "plateau") if plateau else ("step", "epoch")
    rate: Rate | None = random.choice(rates) if at_random(random, 0.2) else None
    plateau = plateau if rate == "plateau" else None
    return replace(program, rate=rate, plateau=plateau, is_logged=at_random(random, 0.3))


def _metric(random: Random, program: Program) -> str | None:
    """Return the name of a metric: mostly one that is measured now and then; None where nothing ever is."""
    asked = {timing.what for timing in program.timings}
    trained = [f"train/{name}_loss" if name else "train/loss" for name in program.optimizers]
    validated = [f"validation/{name}/loss" if name else "validation/loss" for name in program.sets]
    names = [*(trained if "log" in asked else ()), *(validated * 2 if "validation" in asked else ())]
    if not names and not at_random(random, 0.05):
        return None
    chosen: str = random.choice(MISSPELT if at_random(random, 0.12) else names or trained)
    return chosen


def _metadata(random: Random, program: Program) -> str | None:
    if program.sets != ("",) or not at_random(random, 0.08):
        return None
    return random.choice(("a_{validation/loss:.3f}", "a_{validation/los:.3f}"))


def _deeds(random: Random, program: Program) -> list[Deed]:
    return [_deed(random, program) for _ in range(random.choices((0, 1, 2), (45, 40, 15))[0])]


def _deed(random: Random, program: Program) -> Deed:
    asked: tuple[Verb, ...] = ("end_epoch", "skip_batch", "skip_step", "stop", "save", "validation", "log", "raise", "listen")  # fmt: skip  # noqa: E501
    verb = random.choices(asked, (16, 6, 6, 7, 10, 8, 8, 14, 14))[0]
    if verb == "validation" and not program.sets:
        verb = "log"
    if verb == "save" and program.keeps is None and at_random(random, 0.7):
        verb = "log"
    every = random.choice((1, 2, 3, 5)) if verb != "stop" else random.randint(1, 9)
    first = random.randint(1, every)
    if verb == "skip_batch":
        return Deed(verb, "BatchStart", every, first)
    if verb == "skip_step":
        return Deed(verb, "GradientsReady", every, first)
    at = random.choice([name for name in EVENTS if program.sets or name not in IN_VALIDATION or at_random(random, 0.2)])
    if verb == "end_epoch" and at == "EpochStart":  # where it asks for every epoch, nothing can ever be trained
        every, first = 2, 1
    if verb != "raise":
        return Deed(verb, at, every, first)
    error: Literal["Planned", "StopIteration", "KeyError"] = random.choice(("Planned", "StopIteration", "KeyError"))
    return Deed(verb, at, every, first, is_observer=at_random(random, 0.6), error=error)


def _followed(random: Random, program: Program) -> Program:
    """Add what is done after the training."""
    choices: tuple[Then, ...] = ("", "rerun", "renamed", "resume", "test", "test changed", "test another")
    averages = 30 if program.decay else 3
    leaves_files = 8 if program.is_logged or program.keeps else 0
    resumes = 20 if program.keeps and (program.epochs or program.steps) else 0
    then = random.choices(choices, (60, leaves_files, leaves_files, resumes, averages, averages, averages))[0]
    return replace(program, then=then, reuses=then.startswith("test") or at_random(random, 0.5))


def without(deeds: Sequence[Deed], *verbs: Verb) -> tuple[Deed, ...]:
    """Return the deeds but for those of some verbs."""
    return tuple(each for each in deeds if each.verb not in verbs)
