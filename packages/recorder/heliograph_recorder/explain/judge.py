"""Judge where the time of a training goes, by what was measured of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import mul
from statistics import median
from typing import Any, Final, Literal, NamedTuple, get_args

from heliograph import Verdict
from heliograph.events import Event

from . import words


class Measured(Event):
    """A stretch of a training was measured; the same on all ranks. Times are in seconds, those of the main rank.

    `batches` were consumed in `seconds`, which include those in `validation` and in `save`; both are counted. The parts
    of `sampled` batches were timed. By rank: `batch`, the time of a batch; `load`, of that the wait for its data;
    `forward`, until the end of the forward pass; `memory`, the bytes that the process has in use, 0 where the system
    does not say; `device_memory`, those that tensors take on a GPU, 0 without one.
    """

    seconds: float
    batches: int
    sampled: int
    validation: float
    validations: int
    save: float
    saves: int
    batch: tuple[float, ...]
    load: tuple[float, ...]
    forward: tuple[float, ...]
    memory: tuple[int, ...]
    device_memory: tuple[int, ...]

    @property
    def own(self) -> tuple[float, ...]:
        return tuple(load + forward for load, forward in zip(self.load, self.forward, strict=True))

    @property
    def load_share(self) -> float:
        return min(1.0, self.load[0] / self.batch[0]) if self.sampled and self.batch[0] > 0 else 0.0

    @property
    def useful(self) -> float:
        return max(0.0, self.seconds - self.validation - self.save) * (1 - self.load_share)


def merged(stretches: Sequence[Measured]) -> Measured:
    last = stretches[-1]
    weights = [each.batches if each.sampled else 0 for each in stretches]

    def mean(values: Iterable[float]) -> float:
        return float(sum(map(mul, values, weights))) / max(1, sum(weights))

    def by_rank(name: str) -> tuple[float, ...]:
        return tuple(map(mean, zip(*(getattr(each, name) for each in stretches), strict=True)))

    def total(name: str) -> Any:
        return sum(getattr(each, name) for each in stretches)

    return Measured(
        total("seconds"), total("batches"), total("sampled"), total("validation"), total("validations"),
        total("save"), total("saves"), by_rank("batch"), by_rank("load"), by_rank("forward"), last.memory,
        last.device_memory,
    )  # fmt: skip


Kind = Literal["input_bound", "straggler", "validation_bound", "save_bound", "growing_memory"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
# From which value on a verdict holds, and below which it does so no longer: between them it stays as it is.
LIMITS: Final[dict[Kind, tuple[float, float]]] = {
    "input_bound": (0.3, 0.2),  # of a batch
    "straggler": (1.3, 1.15),  # times what the other ranks take
    "validation_bound": (0.3, 0.2),  # of the time
    "save_bound": (0.1, 0.05),  # of the time
    "growing_memory": (0.05, 0.01),  # of what was in use before
}
MIN_SAMPLED = 10  # batches
MIN_TIMES = 2  # validations, or saves
MIN_SHARE = 0.1  # of a batch, by which a straggler is late
FIRST_STRETCHES, STRETCHES, RECENT = 2, 8, 2  # those in which memory still settles; to see it grow; the latest
MIN_GROWTH = 64 * 2**20  # bytes
MOSTLY = 0.8  # of the stretches, in which memory must have grown
UNSTEADY = 0.02  # what growth counts at most that comes in leaps: it begins no verdict, and ends none


class Finding(NamedTuple):
    """What was found of one kind.

    Attributes:
        kind: which.
        value: a number for it, see `LIMITS`.
        text: the evidence, in words.
    """

    kind: Kind
    value: float
    text: str

    @property
    def holds(self) -> bool:
        return self.value >= LIMITS[self.kind][0]


def findings(stretches: Sequence[Measured]) -> list[Finding]:
    if not stretches:
        return []
    whole = merged(stretches)
    found = (_input(whole), _straggler(whole), _validation(whole), _save(whole), _growth(stretches))
    return [each for each in found if each is not None]


class Judge:
    """Judges a training while it runs: says once that a verdict holds, and once that it does so no longer.

    What changes from batch to batch, the wait for data and the ranks, is judged by the latest two stretches, which must
    agree; validations and saves, which are rare, by all of them.
    """

    def __init__(self) -> None:
        self._stretches: list[Measured] = []
        self._holding: set[Kind] = set()

    def add(self, stretch: Measured) -> list[Verdict]:
        self._stretches.append(stretch)
        recent = [findings([each]) for each in self._stretches[-RECENT:]]
        always = {each.kind: [each] for each in findings(self._stretches)}
        changed = list[Verdict]()
        for kind in KINDS:
            of_recent = [each for found in recent for each in found if each.kind == kind]
            found = of_recent if kind in ("input_bound", "straggler") else always.get(kind, [])
            if found and (found is not of_recent or len(found) == RECENT):
                changed += self._update(kind, found)
        return changed

    def _update(self, kind: Kind, found: Sequence[Finding]) -> list[Verdict]:
        on, off = LIMITS[kind]
        if kind not in self._holding and all(each.value >= on for each in found):
            self._holding.add(kind)
        elif kind in self._holding and all(each.value < off for each in found):
            self._holding.remove(kind)
        else:
            return []
        return [Verdict(kind, kind in self._holding, found[-1].value, found[-1].text)]


def _input(whole: Measured) -> Finding | None:
    if whole.sampled < MIN_SAMPLED or not whole.batch[0]:
        return None
    share = whole.load_share
    parts = f"{words.seconds(whole.load[0])} of the {words.seconds(whole.batch[0])} of a batch"
    return Finding("input_bound", share, f"waits for data take {parts}, {words.share(share, 1)}")


def _straggler(whole: Measured) -> Finding | None:
    if whole.sampled < MIN_SAMPLED or len(whole.own) < 2 or not whole.batch[0]:
        return None
    slowest = max(range(len(whole.own)), key=whole.own.__getitem__)
    others = median(own for rank, own in enumerate(whole.own) if rank != slowest)
    late = whole.own[slowest] - others
    value = whole.own[slowest] / others if others > 0 and late > MIN_SHARE * max(whole.batch) else 1.0
    own = f"rank {slowest} takes {words.seconds(whole.own[slowest])} until the end of its forward pass"
    return Finding("straggler", value, f"{own}, the others {words.seconds(others)}: they wait for it in each step")


def _validation(whole: Measured) -> Finding | None:
    if whole.validations < MIN_TIMES or not whole.seconds:
        return None
    share, count = whole.validation / whole.seconds, words.count_things(whole.validations, "validation")
    return Finding("validation_bound", share, f"{count} take {_part(whole.validation, whole.seconds)}")


def _save(whole: Measured) -> Finding | None:
    if whole.saves < MIN_TIMES or not whole.seconds:
        return None
    share, count = whole.save / whole.seconds, words.count_things(whole.saves, "save")
    return Finding("save_bound", share, f"the training waits for {count}, {_part(whole.save, whole.seconds)}")


def _growth(stretches: Sequence[Measured]) -> Finding | None:
    seen = stretches[FIRST_STRETCHES:][-STRETCHES:]
    if len(seen) < STRETCHES:
        return None
    found = list[Finding]()
    for name, what in (("memory", "the memory"), ("device_memory", "the GPU memory")):
        for rank, values in enumerate(zip(*(getattr(each, name) for each in seen), strict=True)):
            first, last = values[0], values[-1]
            rises = sum(later > former for former, later in pairwise(values))
            is_steady = rises >= MOSTLY * (STRETCHES - 1) and last - first >= MIN_GROWTH
            text = f"{what} of rank {rank} has grown from {_size(first)} to {_size(last)}"
            text += f" in {words.seconds(sum(each.seconds for each in seen))}, and was not freed"
            growth = last / first - 1 if first else 0.0
            found.append(Finding("growing_memory", growth if is_steady else min(growth, UNSTEADY), text))
    return max(found, key=lambda each: each.value)


def _part(seconds: float, whole: float) -> str:
    return f"{words.seconds(seconds)} of {words.seconds(whole)}, {words.share(seconds, whole)}"


def _size(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
