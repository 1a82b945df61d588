"""A random program: what it consists of, all of it decided by one seed, and where its attempts are killed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil
from random import Random
from typing import Literal

from heliograph.packages.tests.torture.hidden import Hidden, Kind, kinds

DATA: tuple[Kind, ...] = (
    "map", "map", "map", "loader", "loader", "loader", "weighted", "subset", "seekable", "list", "phases", "torchdata",
    "foreign sampler", "iterable", "reader", "cursor",
)  # fmt: skip
EXACT: frozenset[Kind] = frozenset(
    ("map", "loader", "weighted", "subset", "seekable", "list", "phases", "torchdata")
)  # fmt: skip
OPTIMIZERS = ("SGD", "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta")
SCHEDULERS = {
    "StepLR": "epoch", "CosineAnnealingLR": "step", "OneCycleLR": "step", "SequentialLR": "step", "LambdaLR": "step",
    "CosineAnnealingWarmRestarts": "step", "ReduceLROnPlateau": "plateau", "ExponentialLR": "epoch",
}  # fmt: skip
IN_BATCH = ("BatchStart", "GradientsReady", "StepEnd", "BatchEnd")
IN_VALIDATION = ("ValidationStart", "ValidationBatchStart", "ValidationBatchEnd", "ValidationEnd")
AT_BOUNDARY = ("EpochStart", "Log", "SavePoint", "ShouldStop", "EpochEnd", "TrainEnd")
RECEIVED = (*IN_BATCH, *IN_VALIDATION, *AT_BOUNDARY)
OPERATIONS = (
    "create data.tmp", "write data.tmp", "sync data.tmp", "rename data.tmp",
    "create small.tmp", "write small.tmp", "rename small.tmp",
    "sync folder", "unlink data",
)  # fmt: skip
CHAIN = 3  # attempts that are killed, before the one that is let live
LATER = 5  # batches: an event that has not come so many after its time kills nothing; the batch's end does
REPEATED = 3  # batches that are done again at least, where state is out of everybody's sight
Way = Literal["SIGKILL", "_exit"]
Poison = Literal["skip", "roll back"]
POISONS: tuple[Poison, ...] = ("skip", "roll back")


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of an attempt.

    Attributes:
        at: an event's class, or an operation on files, such as `rename data.tmp`.
        batch: the first one once so many batches of the run are done.
        repeats: at least so many batches after the newest save.
        before: ahead of the event's handlers or the operation, instead of after.
        way: how the process ends.
    """

    at: str
    batch: int
    repeats: int
    before: bool
    way: Way

    def __str__(self) -> str:
        return f"{self.way} {'before' if self.before else 'after'} {self.at}, from batch {self.batch} on"


@dataclass(frozen=True, slots=True)
class Ask:
    """What a plugin asks for: at every n-th emission of an event, from the first on."""

    what: Literal["save", "validation", "log", "end_epoch"]
    at: str
    every: int
    first: int


@dataclass(frozen=True, slots=True)
class Program:
    """What is trained, with what, and how it is interrupted. The names say what is what."""

    seed: int
    hidden: tuple[str, ...] = ()
    data: Kind = "map"
    samples: int = 24
    batch_size: int = 4
    shuffled: bool = True
    per_sample: bool = False
    workers: int = 0
    persistent: bool = False
    epochs: int | None = 3
    steps: int | None = None
    dropout: float = 0.0
    norm: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    optimizer: str = "SGD"
    scheduler: str | None = None
    captured: bool = True
    accumulation: int = 1
    clipping: float | None = None
    ema: int | None = None
    validate: tuple[str, int] | None = None
    patience: int | None = None
    log: tuple[str, int] = ("steps", 2)
    save: tuple[str, int] = ("batches", 3)
    ends: bool = False
    keeps: tuple[int, int] = (1, 0)
    asks: tuple[Ask, ...] = ()
    draws: tuple[str, ...] = ()
    lane: str = "DECIDE"
    meddles: bool = False
    rules: tuple[str, ...] = ()
    recorded: bool = False
    poison: Poison | None = None
    kills: tuple[Kill, ...] = ()

    @property
    def batches(self) -> int:
        """How many batches the run has, unless something ends epochs or the run before."""
        a_epoch = ceil(self.samples / self.batch_size)
        return (self.epochs or ceil((self.steps or 1) * self.accumulation / a_epoch)) * a_epoch

    @property
    def is_exact(self) -> bool:
        """Whether it can be said to be exact, if nothing is hidden."""
        counts_unsaved = "SavePoint" in self.draws and self.lane in ("PERSIST", "REPORT")
        return (
            not counts_unsaved
            and self.captured
            and self.data in EXACT
            and not (self.data == "torchdata" and self.workers)
        )

    def __str__(self) -> str:
        """Return what is not as usual, a line each."""
        usual = Program(self.seed)
        changed = [each.name for each in fields(self) if getattr(self, each.name) != getattr(usual, each.name)]
        lines = [f"  {name} = {getattr(self, name)!r}" for name in changed if name != "kills"]
        return "\n".join([f"program {self.seed}:", *lines, *(f"  killed: {kill}" for kill in self.kills)])


def drawn(seed: int) -> Program:
    """Return the program of a seed."""
    random = Random(seed)
    hidden = _hidden(random)
    program = _training(random, _data(random, seed, hidden))
    program = _plugins(random, replace(program, hidden=tuple(each.name for each in hidden)))
    for each in hidden:
        program = replace(program, **each.wants)
    return replace(program, kills=_kills(random, program, beyond=any(each.beyond for each in hidden)))


def _hidden(random: Random) -> list[Hidden]:
    """Return what is hidden: nothing in a fourth of all, else mostly one thing; two that do not exclude each other."""
    count = random.choices((0, 1, 2), (5, 12, 3))[0]
    chosen = random.sample(list(kinds().values()), k=min(count, 1))
    if count == 2 and not chosen[0].beyond:
        one = chosen[0]
        others = [each for each in kinds().values() if not each.beyond and each.goes_with(one)]
        chosen.append(random.choice(others))
    return chosen


def _data(random: Random, seed: int, hidden: list[Hidden]) -> Program:
    kind = random.choice([kind for kind in DATA if all(kind in each.data for each in hidden)])
    batch_size = random.choice((2, 3, 4, 4, 6))
    epochs: int | None = random.choice((2, 3, 3, 4))
    samples = batch_size * random.randint(4, 7) + random.randrange(batch_size) * (random.random() < 0.4)
    steps = None
    if random.random() < 0.2:
        epochs, steps = None, random.randint(10, 22)
    workers = 2 if random.random() < 0.04 and kind in ("map", "loader", "weighted", "iterable") else 0
    return Program(
        seed=seed,
        data=kind,
        samples=samples,
        batch_size=batch_size,
        shuffled=random.random() < 0.7,
        per_sample=kind == "map" and random.random() < 0.3,
        workers=workers,
        persistent=workers > 0 and random.random() < 0.5,
        epochs=epochs,
        steps=steps,
    )


def _training(random: Random, program: Program) -> Program:
    scheduler = random.choice((None, *SCHEDULERS))
    validated = random.random() < 0.6
    return replace(
        program,
        dropout=random.choice((0.0, 0.2, 0.2)),
        norm=random.random() < 0.4,
        precision="bf16" if random.random() < 0.15 else "fp32",
        optimizer=random.choice(OPTIMIZERS),
        scheduler=scheduler,
        captured=random.random() < 0.96,
        accumulation=random.choice((1, 1, 1, 2, 3)),
        clipping=random.choice((None, None, 0.1, 1.0)),
        ema=random.choice((None, None, None, 1, 2)),
        validate=_interval(random) if validated else None,
    )


def _interval(random: Random) -> tuple[str, int]:
    counter = random.choice(("batches", "batches", "steps", "epochs", "samples"))
    return counter, {"epochs": 1, "samples": random.randint(6, 20)}.get(counter, random.randint(2, 7))


def _plugins(random: Random, program: Program) -> Program:
    asked = ["save", "save", "log", *(["validation"] if program.validate else [])]
    received = [name for name in RECEIVED if program.validate or name not in IN_VALIDATION]
    askable = [name for name in received if name not in ("SavePoint",)]
    asks = [
        Ask(random.choice(asked), random.choice(askable), every := random.randint(3, 8), random.randint(1, every))  # type: ignore[arg-type]
        for _ in range(random.choice((0, 0, 1, 2)))
    ]
    if random.random() < 0.1:
        asks.append(Ask("end_epoch", "BatchEnd", 11, 8))
    poison: Poison | None = random.choice(POISONS) if random.random() < 0.12 else None
    rolls_back = poison == "roll back"
    best = bool(program.validate) and random.random() < 0.3
    return replace(
        program,
        norm=program.norm and not poison,
        patience=random.randint(2, 6) if program.validate and random.random() < 0.3 else None,
        log=("steps", random.randint(1, 4)),
        save=_interval(random),
        ends=rolls_back or random.random() < 0.3,
        keeps=(random.choice((1, 1, 2)), int(best)),
        asks=tuple(asks),
        draws=tuple(random.sample(received, random.randint(1, 3))) if random.random() < 0.7 else (),
        lane=random.choice(("TRANSFORM", "MEASURE", "DECIDE", "PERSIST", "REPORT")),
        meddles=random.random() < 0.25,
        rules=_rules(random, program) if random.random() < 0.2 else (),
        recorded=random.random() < 0.1,
        poison=poison,
    )


def _rules(random: Random, program: Program) -> tuple[str, ...]:
    names = ["halve", "save", "slower"] + (["worse"] if program.validate else [])
    return tuple(random.sample(names, random.randint(1, 2)))


def _kills(random: Random, program: Program, *, beyond: bool) -> tuple[Kill, ...]:
    """Return kills that come one after the other, spread over the run."""
    batches = sorted(random.sample(range(1, max(program.batches - 1, CHAIN + 1)), CHAIN))
    return tuple(_kill(random, program, batch, beyond=beyond) for batch in batches)


def _kill(random: Random, program: Program, batch: int, *, beyond: bool) -> Kill:
    events = [name for name in RECEIVED if program.validate or name not in IN_VALIDATION]
    places = ["BatchEnd"] if beyond else random.choice((events, events, ["CheckpointSaved"], list(OPERATIONS)))
    return Kill(
        at=random.choice(places),
        batch=batch,
        repeats=REPEATED if beyond else random.choice((0, 0, 1, 2)),
        before=random.random() < 0.5,
        way=random.choice(("SIGKILL", "_exit")),
    )
