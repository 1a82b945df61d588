"""Find the bottlenecks of a training in its measurements."""

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
    """A period of a training was measured. All ranks have the same event; times are in seconds, of the main rank.

    The main rank consumed `batches` in `seconds`, including the seconds in `validation` and `save`; `validations` and
    `saves` are their numbers. The parts of `sampled` batches were timed. The following are by rank: `batch`, the mean
    time of a batch; `load`, its wait for data; `forward`, its forward pass; `memory`, the bytes used by the process, 0
    if unknown; `device_memory`, the bytes of tensors on a GPU, 0 without one.
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
    def local(self) -> tuple[float, ...]:
        """By rank, the part of a batch without waits for other ranks: until the end of the forward pass."""
        return tuple(load + forward for load, forward in zip(self.load, self.forward, strict=True))

    @property
    def load_share(self) -> float:
        """The share of a batch in which the main rank waits for data."""
        return min(1.0, self.load[0] / self.batch[0]) if self.sampled and self.batch[0] > 0 else 0.0

    @property
    def useful(self) -> float:
        """The seconds of the main rank without validations, saves and waits for data."""
        return max(0.0, self.seconds - self.validation - self.save) * (1 - self.load_share)


def merged(periods: Sequence[Measured]) -> Measured:
    """Merge consecutive periods; the memory is the one of the last."""
    last = periods[-1]
    weights = [period.batches if period.sampled else 0 for period in periods]

    def mean(values: Iterable[float]) -> float:
        return float(sum(map(mul, values, weights))) / max(1, sum(weights))

    def by_rank(name: str) -> tuple[float, ...]:
        return tuple(map(mean, zip(*(getattr(period, name) for period in periods), strict=True)))

    def total(name: str) -> Any:
        return sum(getattr(period, name) for period in periods)

    return Measured(
        total("seconds"), total("batches"), total("sampled"), total("validation"), total("validations"),
        total("save"), total("saves"), by_rank("batch"), by_rank("load"), by_rank("forward"), last.memory,
        last.device_memory,
    )  # fmt: skip


Kind = Literal["input_bound", "straggler", "validation_bound", "save_bound", "growing_memory"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
# The thresholds at which a verdict begins to hold (at least) and ends (below).
LIMITS: Final[dict[Kind, tuple[float, float]]] = {
    "input_bound": (0.3, 0.2),  # of a batch
    "straggler": (1.3, 1.15),  # times the median of the other ranks
    "validation_bound": (0.3, 0.2),  # of the time
    "save_bound": (0.1, 0.05),  # of the time
    "growing_memory": (0.05, 0.01),  # of the memory in use before
}
MIN_SAMPLED = 10  # batches
MIN_TIMES = 2  # validations, or saves
MIN_SHARE = 0.1  # of a batch, by which a straggler is late
WARM_UP, PERIODS, RECENT = 2, 8, 2  # periods without a judgement of memory; to judge memory; to judge the rest
MIN_GROWTH = 64 * 2**20  # bytes
MOSTLY = 0.8  # of the periods, in which memory must have grown
UNSTEADY = 0.02  # the limit on growth in leaps: between the thresholds, so that it neither begins nor ends a verdict


class Finding(NamedTuple):
    """The value of one kind, see `LIMITS`, and a text with the evidence."""

    kind: Kind
    value: float
    text: str

    @property
    def holds(self) -> bool:
        return self.value >= LIMITS[self.kind][0]


def findings(periods: Sequence[Measured]) -> list[Finding]:
    """Judge all periods together; a kind without enough evidence is omitted."""
    if not periods:
        return []
    total = merged(periods)
    all_kinds = (_input(total), _straggler(total), _validation(total), _save(total), _growth(periods))
    return [finding for finding in all_kinds if finding is not None]


class BottleneckJudge:
    """Judge a training while it runs; return a verdict when it begins to hold and when it ends.

    Waits for data and stragglers vary from batch to batch: the latest two periods must agree. Validations and saves are
    rare: all periods are judged.
    """

    def __init__(self) -> None:
        self._periods: list[Measured] = []
        self._holding: set[Kind] = set()

    def add(self, period: Measured) -> list[Verdict]:
        """Return the verdicts that a new period changes."""
        self._periods.append(period)
        recent = [finding for period in self._periods[-RECENT:] for finding in findings([period])]
        overall = findings(self._periods)
        changed = list[Verdict]()
        for kind in KINDS:
            is_recent = kind in ("input_bound", "straggler")
            evidence = [finding for finding in (recent if is_recent else overall) if finding.kind == kind]
            if evidence and (not is_recent or len(evidence) == RECENT):
                changed += self._update(kind, evidence)
        return changed

    def _update(self, kind: Kind, evidence: Sequence[Finding]) -> list[Verdict]:
        on, off = LIMITS[kind]
        if kind not in self._holding and all(finding.value >= on for finding in evidence):
            self._holding.add(kind)
        elif kind in self._holding and all(finding.value < off for finding in evidence):
            self._holding.remove(kind)
        else:
            return []
        return [Verdict(kind, kind in self._holding, evidence[-1].value, evidence[-1].text)]


def _input(total: Measured) -> Finding | None:
    if total.sampled < MIN_SAMPLED or not total.batch[0]:
        return None
    part = f"{words.seconds(total.load[0])} of the {words.seconds(total.batch[0])} of a batch"
    return Finding("input_bound", total.load_share, f"waits for data take {part}, {words.share(total.load_share, 1)}")


def _straggler(total: Measured) -> Finding | None:
    if total.sampled < MIN_SAMPLED or len(total.local) < 2 or not total.batch[0]:
        return None
    local = list(total.local)
    rank = max(range(len(local)), key=local.__getitem__)
    slowest = local.pop(rank)
    typical = median(local)
    is_late = typical > 0 and slowest - typical > MIN_SHARE * max(total.batch)
    text = f"rank {rank} takes {words.seconds(slowest)} until the end of its forward pass"
    text += f", the others {words.seconds(typical)}: they wait for it in each step"
    return Finding("straggler", slowest / typical if is_late else 1.0, text)


def _validation(total: Measured) -> Finding | None:
    if total.validations < MIN_TIMES or not total.seconds:
        return None
    text = f"{words.count_things(total.validations, 'validation')} take {_part(total.validation, total.seconds)}"
    return Finding("validation_bound", total.validation / total.seconds, text)


def _save(total: Measured) -> Finding | None:
    if total.saves < MIN_TIMES or not total.seconds:
        return None
    count = words.count_things(total.saves, "save")
    text = f"the training waits for {count}, {_part(total.save, total.seconds)}"
    return Finding("save_bound", total.save / total.seconds, text)


def _growth(periods: Sequence[Measured]) -> Finding | None:
    """Judge the rank and the kind of memory that grow most."""
    latest = periods[WARM_UP:][-PERIODS:]
    if len(latest) < PERIODS:
        return None
    candidates = list[Finding]()
    for name, memory in (("memory", "the memory"), ("device_memory", "the GPU memory")):
        for rank, values in enumerate(zip(*(getattr(period, name) for period in latest), strict=True)):
            first, last = values[0], values[-1]
            rises = sum(after > before for before, after in pairwise(values))
            is_steady = rises >= MOSTLY * (PERIODS - 1) and last - first >= MIN_GROWTH
            text = f"{memory} of rank {rank} has grown from {_size(first)} to {_size(last)}"
            text += f" in {words.seconds(sum(period.seconds for period in latest))}, and was not freed"
            growth = last / first - 1 if first else 0.0
            candidates.append(Finding("growing_memory", growth if is_steady else min(growth, UNSTEADY), text))
    return max(candidates, key=lambda finding: finding.value)


def _part(seconds: float, total: float) -> str:
    return f"{words.seconds(seconds)} of {words.seconds(total)}, {words.share(seconds, total)}"


def _size(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
