"""What a tracker is given to write, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

SAVED = ("scalars", "text", "hyper_parameters")  # the kinds that a checkpoint holds where they are not written yet


@dataclass(frozen=True, slots=True)
class Page:
    """Where a run is shown.

    Attributes:
        name: the run's name.
        training_id: of which training the run is a part: the same in all its attempts.
        id: the page to continue, as `open` returned it; None for a new one.
        attempt: how many runs the page will have seen with this one: 1, and one more at each resume.
        resumed_at: the optimizer step at which the training was resumed; None where it begins, and outside of one.
    """

    name: str
    training_id: str
    id: str | None
    attempt: int
    resumed_at: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run was when something was logged.

    Attributes:
        step: optimizer steps.
        epoch: epochs that are done, such as 1.25; finished ones where the loader has no length.
        samples: training samples.
        seconds: seconds since the training began, those of former attempts included.
        attempt: that of the page.
        rollbacks: how often the training has gone back to an earlier state so far: the same steps come again.
    """

    step: int
    epoch: float
    samples: int
    seconds: float
    attempt: int
    rollbacks: int


@dataclass(frozen=True, slots=True)
class Record:
    """One thing to write.

    Attributes:
        kind: the method `write_<kind>` of the tracker; or `open`, `roll_back` or `finish`.
        arguments: what to call it with.
        size: the bytes of its arrays and texts.
    """

    kind: str
    arguments: tuple[Any, ...]
    size: int = 0

    @property
    def values(self) -> int:
        """How many values it brings to a page: the metrics of a row, and where it is."""
        return 1 + len(self.arguments[1]) if self.kind == "scalars" else 1

    def as_plain(self) -> list[Any]:
        """Return it as lists, dicts, numbers and strings."""
        return [self.kind, *(list(astuple(each)) if isinstance(each, Place) else each for each in self.arguments)]


def record_of(plain: list[Any]) -> Record:
    """Return the record that `as_plain` described."""
    kind, *arguments = plain
    return Record(kind, tuple(Place(*each) if isinstance(each, list) else each for each in arguments))


AXES: Final = tuple(field.name for field in fields(Place))
TAKEN: Final = frozenset((*AXES, "training"))  # beside what was logged, on one page or another


def free_name(kind: str, name: str) -> str:
    """Return the name to show something under: `metric/epoch` for a metric `epoch`, which a place has beside it."""
    return f"{kind}/{name}" if name in TAKEN else name


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as plain values: what is not a number, a string or a flag as its text."""
    return {
        str(name): value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in values.items()
    }
