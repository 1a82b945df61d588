"""Faults: what happens, at which event, for how long."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from heliograph.events import CATALOGUE
from heliograph.spi import check_number, check_whole_number, known_names

# Emitted in every process that runs the training, or by plugins: their number is not a function of the training.
OF_A_PROCESS = frozenset(
    {
        "train_start",
        "checkpoint_loaded",
        "replay",
        "resume_verified",
        "checkpoint_saved",
        "checkpoint_pruned",
        "last_boundary",
        "train_end",
        "plugin_changed",
        "plugin_failed",
        "verdict",
        "run_failed",
        "run_closed",
    }
)
EVENTS = tuple(event for event in CATALOGUE if event.name not in OF_A_PROCESS)
NAMES = frozenset(event.name for event in EVENTS)
BACKWARD = ("backward_end", "gradients_ready")
DISK = ("full-disk", "slow-disk")


@dataclass(frozen=True, slots=True)
class Kind:
    """What faults of a kind have in common.

    Attributes:
        text: what happens, in words.
        at: the event where none is given.
        only: the events at which it can be; empty for any.
        changes_numbers: whether the training computes something else after it.
        ends: whether the process ends by it.
    """

    text: str
    at: str = "batch_end"
    only: tuple[str, ...] = ()
    changes_numbers: bool = False
    ends: bool = False


KINDS = {
    "kill": Kind("the process is killed by SIGKILL", ends=True),
    "hang": Kind("the process hangs", ends=True),
    "preempt": Kind("SIGTERM is sent to the process, as a cluster does before it takes the machine", ends=True),
    "lost-notice": Kind("a notice (SIGTERM) does not arrive, and two batches later SIGKILL comes", ends=True),
    "lost-request": Kind("what was requested to be saved at the next boundary is forgotten"),
    "slow": Kind("the rank sleeps"),
    "full-disk": Kind("operations on files fail: no space left on device", "save_point"),
    "slow-disk": Kind("operations on files are slow", "save_point"),
    "clock-jump": Kind("the clock of the system (`time.time`) is put forward or back"),
    "nan-loss": Kind(
        "a loss is NaN, and so are the gradients of it", "forward_end", ("forward_end",), changes_numbers=True
    ),
    "nan-gradient": Kind("a number of a gradient is NaN", "backward_end", BACKWARD, changes_numbers=True),
    "bit-in-gradient": Kind("a bit of a gradient is another one", "backward_end", BACKWARD, changes_numbers=True),
    "bit-in-weight": Kind("a bit of a weight is another one", "step_end", changes_numbers=True),
}
HARMLESS = tuple(name for name, kind in KINDS.items() if not kind.changes_numbers)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong once in a training, at an event.

    Args:
        kind: `kill`, `hang`, `preempt`, `lost-notice`, `lost-request`, `slow`, `full-disk`, `slow-disk`, `clock-jump`;
            or one that changes numbers: `nan-loss`, `nan-gradient`, `bit-in-gradient`, `bit-in-weight`.
        at: the name of the event, such as `batch_end`; by default one that fits the kind.
        count: at which emission of it in the training, counted from 1; a resumed run counts on from its checkpoint.
        rank: of which of several processes.
        operation: of `kill`, `full-disk` and `slow-disk`: begin with the so-many-th operation on files after the event
            (before its other handlers are called); 0 for a `kill` at the event itself, after its other handlers.
        times: of `full-disk` and `slow-disk`: how many operations in a row fail or are slow.
        seconds: how long `slow` and each operation of `slow-disk` take, or how far a `clock-jump` goes.

    Raises:
        ValueError: there is no such kind or event, they do not fit each other, or a number is out of its range.
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
            raise ValueError(f"There is no fault {self.kind!r}.{known_names(self.kind, KINDS)}")
        kind = KINDS[self.kind]
        object.__setattr__(self, "at", self.at or kind.at)
        if self.at not in NAMES:
            raise ValueError(f"No fault can be at {self.at!r}: it is not an event of the loop.{_known(self.at)}")
        if kind.only and self.at not in kind.only:
            raise ValueError(f"A fault {self.kind!r} can be at {' or '.join(kind.only)}, not at {self.at!r}.")
        check_whole_number("count", self.count, at_least=1)
        check_whole_number("rank", self.rank, at_least=0)
        check_whole_number("operation", self.operation, at_least=0)
        check_whole_number("times", self.times, at_least=1)
        check_number("seconds", self.seconds, of="seconds")
        if self.operation and self.kind != "kill" and self.kind not in DISK:
            raise ValueError(f"A fault {self.kind!r} is at an event, not at an operation on files: leave operation=0.")

    @property
    def is_at_operation(self) -> bool:
        """Whether it waits for an operation on files once its event has come."""
        return self.kind in DISK or self.operation > 0

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)

    def __str__(self) -> str:
        where = f"{self.kind} at {self.at} {self.count}"
        where += f", operation {max(1, self.operation)} on files" if self.is_at_operation else ""
        return where + (f", rank {self.rank}" if self.rank else "")


def _known(name: str) -> str:
    return known_names(name, NAMES)
