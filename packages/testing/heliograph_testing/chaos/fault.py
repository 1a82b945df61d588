"""Faults, plans of faults, and what became of each fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from heliograph.events import CATALOGUE
from heliograph.spi import check_number, check_whole_number, known_names

# The number of these emissions depends on the processes or plugins, not only on the training.
OF_A_PROCESS = (
    "train_start", "checkpoint_loaded", "replay", "resume_verified", "checkpoint_saved", "checkpoint_pruned",
    "last_boundary", "train_end", "plugin_changed", "plugin_failed", "verdict", "run_failed", "run_closed",
)  # fmt: skip
EVENTS = tuple(event for event in CATALOGUE if event.name not in OF_A_PROCESS)
NAMES = frozenset(event.name for event in EVENTS)
BACKWARD = ("backward_end", "gradients_ready")
DISK = ("full-disk", "slow-disk")


@dataclass(frozen=True, slots=True)
class FaultKind:
    """What faults of a kind have in common.

    Attributes:
        text: a description of the fault.
        at: the default event.
        only: the allowed events; empty allows all.
        changes_numbers: whether the training computes something else after it.
        ends: whether it ends the process.
    """

    text: str
    at: str = "batch_end"
    only: tuple[str, ...] = ()
    changes_numbers: bool = False
    ends: bool = False


KINDS = {
    "kill": FaultKind("the process is killed by SIGKILL", ends=True),
    "hang": FaultKind("the process hangs", ends=True),
    "preempt": FaultKind("SIGTERM is sent to the process, as at a preemption", ends=True),
    "slow": FaultKind("the rank sleeps"),
    "full-disk": FaultKind("operations on files fail: no space left on device", "save_point"),
    "slow-disk": FaultKind("operations on files are slow", "save_point"),
    "clock-jump": FaultKind("the system clock (`time.time`) jumps forward or back"),
    "nan-loss": FaultKind("a loss and its gradients are NaN", "forward_end", ("forward_end",), changes_numbers=True),
    "nan-gradient": FaultKind("a number of a gradient is NaN", "backward_end", BACKWARD, changes_numbers=True),
    "bit-in-gradient": FaultKind("a bit of a gradient is flipped", "backward_end", BACKWARD, changes_numbers=True),
    "bit-in-weight": FaultKind(
        "a bit of a weight is flipped", "step_end", ("step_end", "batch_end"), changes_numbers=True
    ),
}
HARMLESS = tuple(name for name, kind in KINDS.items() if not kind.changes_numbers)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that occurs once in a training, at an event.

    Args:
        kind: `kill`, `hang`, `preempt`, `slow`, `full-disk`, `slow-disk`, `clock-jump`; or one that changes numbers:
            `nan-loss`, `nan-gradient`, `bit-in-gradient`, `bit-in-weight`.
        at: the name of the event, for example `batch_end`; by default one that fits the kind.
        count: the number of the emission in the training, from 1; a resumed run continues to count.
        rank: the rank on which it occurs.
        operation: for `kill`, `full-disk` and `slow-disk`: the number of the file operation after the event at which
            the fault starts (the other handlers of the event run later); 0 is a `kill` at the event itself, after its
            other handlers.
        times: for `full-disk` and `slow-disk`: the number of consecutive operations that fail or are slow.
        seconds: the duration of `slow` and of each operation of `slow-disk`, or the size of a `clock-jump`.

    Raises:
        ValueError: the kind or the event does not exist, they cannot be combined, or a number is out of range.
    """

    kind: str
    at: str = ""
    count: int = 1
    rank: int = 0
    operation: int = 0
    times: int = 1
    seconds: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Unknown fault {self.kind!r}.{known_names(self.kind, KINDS)}")
        kind = KINDS[self.kind]
        object.__setattr__(self, "at", self.at or kind.at)
        if self.at not in NAMES:
            raise ValueError(
                f"A fault cannot occur at {self.at!r}, which is not an event of the loop.{known_names(self.at, NAMES)}"
            )
        if kind.only and self.at not in kind.only:
            raise ValueError(f"A fault {self.kind!r} can only occur at {' or '.join(kind.only)}, got {self.at!r}.")
        check_whole_number("count", self.count, at_least=1)
        check_whole_number("rank", self.rank, at_least=0)
        check_whole_number("operation", self.operation, at_least=0)
        check_whole_number("times", self.times, at_least=1)
        check_number("seconds", self.seconds, of="seconds")
        if self.operation and self.kind != "kill" and self.kind not in DISK:
            raise ValueError(f"A fault {self.kind!r} has no file operation: operation must be 0, got {self.operation}.")

    @property
    def is_at_operation(self) -> bool:
        return self.kind in DISK or self.operation > 0

    @property
    def changes_numbers(self) -> bool:
        return KINDS[self.kind].changes_numbers

    def __str__(self) -> str:
        where = f"{self.kind} at {self.at} {self.count}"
        where += f", operation {max(1, self.operation)} on files" if self.is_at_operation else ""
        return where + (f", rank {self.rank}" if self.rank else "")


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What became of a fault.

    Attributes:
        fault: the fault.
        where: its position in the training as text; empty if it did not act.
        text: its effect.
        batches: the finished batches before it.
        noticed_by: for a fault in numbers: the plugin that noticed it, `the run` for an error, or empty.
        answer: the request, warning or error of that plugin.
    """

    fault: Fault
    where: str = ""
    text: str = ""
    batches: int = 0
    noticed_by: str = ""
    answer: str = ""

    @property
    def is_silent(self) -> bool:
        return bool(self.where) and self.fault.changes_numbers and not self.noticed_by

    def __str__(self) -> str:
        if not self.where:
            return f"{self.fault}: did not act: its event or operation did not occur before the end of its process"
        text = f"{self.fault}: {self.where}: {self.text}"
        if not self.fault.changes_numbers:
            return text
        return f"{text}; " + (f"noticed by {self.noticed_by}: {self.answer}" if self.noticed_by else "not noticed")


OPERATIONS = 12  # file operations after the event of a fault, about as many as a save has
JUMPS = (-86400.0, -3600.0, -1.0, 3600.0, 86400.0)  # seconds
AT_SAVES = 3  # every third kill occurs during a save
TRIES = 20  # draws to find an emission without a fault: a second fault that ends the process could not act


def draw_faults(
    seed: int, number: int, counts: Mapping[str, int], kinds: Sequence[str], *, ranks: int = 1
) -> list[Fault]:
    """Return faults, spread over a training and its events; equal arguments return equal faults.

    Args:
        seed: the seed of all choices.
        number: the number of faults.
        counts: the number of emissions of each event in the training without faults, by name.
        kinds: the kinds of faults, drawn equally often.
        ranks: the number of ranks.

    Raises:
        ValueError: the training emitted no event at which a fault of some kind can occur.
    """
    random = Random(seed)
    faults: list[Fault] = []
    taken: set[tuple[str, int, int]] = set()
    for index in range(number):
        kind, saves = kinds[index % len(kinds)], index // len(kinds) % AT_SAVES == 0
        for _ in range(TRIES):
            fault = _draw(random, kind, counts, ranks, saves=saves)
            if (place := (fault.at, fault.count, fault.rank)) not in taken:
                break
        taken.add(place)
        faults.append(fault)
    random.shuffle(faults)
    return faults


def _draw(random: Random, kind: str, counts: Mapping[str, int], ranks: int, *, saves: bool) -> Fault:
    at_save = kind in DISK or (kind == "kill" and saves)
    allowed = KINDS[kind].only or sorted(counts)
    events = ["save_point"] if at_save and counts.get("save_point") else [name for name in allowed if counts.get(name)]
    if not events:
        raise ValueError(
            f"A fault {kind!r} can only occur at {', '.join(allowed)}, and the training has no such event."
        )
    event = random.choice(events)
    return Fault(
        kind,
        event,
        random.randint(1, max(1, counts[event] - at_save)),  # not at the last save
        rank=0 if at_save else random.randrange(ranks),  # the main rank writes
        operation=random.randint(1, OPERATIONS) if at_save else 0,
        times=random.choice((1, 2, 5)) if kind in DISK else 1,
        seconds=random.choice(JUMPS) if kind == "clock-jump" else 0.05,
    )
