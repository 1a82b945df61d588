"""What a rehearsal has shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import TextWrapper

from ..system.extras import printable_lines
from .length import Prediction

WRAPPED = TextWrapper(80, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))


@dataclass(frozen=True, slots=True, repr=False)
class Rehearsal:
    """What would happen in a run, how long it would last and how large it would be; `print` shows it.

    Attributes:
        name: the run's name.
        problems: what would go wrong, in sentences; empty where all is well.
        warnings: what the short run warned of, some of which only a short run has.
        notes: what it noted, and what could not be put back.
        plan: what the run would do, as `run.plan()` says.
        prediction: how long it would last; rough, as each figure is measured once or twice.
        seconds: all of it; None where its length is not known.
        resume: what the resume was worth: `exact` and so on; empty where nothing saves.
        checkpoint_bytes: of one checkpoint; None where no plugin wrote one.
        bytes: of the checkpoints that would be there at once, with the one that is being written; None where that is
            not known.
        free_bytes: on the disk that they would be written to, before the run.
        gpu_bytes: the most that tensors took on the GPU; None on another device.
        redirected: where plugins would write, by their names; here they wrote to a temporary folder.
        unredirected: plugins that hold a path and have no `rehearse(folder)`: they wrote where they always do.
        left_out: plugins that took no part.
        events: the names of the events of the short run, in order.
        resumed_events: those of the run that resumed it.
    """

    name: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    plan: str
    prediction: Prediction
    resume: str
    checkpoint_bytes: int | None
    bytes: int | None
    free_bytes: int | None
    gpu_bytes: int | None
    redirected: dict[str, list[Path]]
    unredirected: tuple[str, ...]
    left_out: tuple[str, ...]
    events: tuple[str, ...]
    resumed_events: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def seconds(self) -> float | None:
        """How long the run would last; None where its length is not known."""
        return self.prediction.seconds

    def __repr__(self) -> str:
        state = "ok" if self.ok else f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        return f"<Rehearsal of {self.name!r}: {state}>"

    def __str__(self) -> str:
        lines = [f"rehearsed: {self._done()}", f"would take: {self._duration()}", f"would write: {self._size()}"]
        if self.gpu_bytes is not None:
            lines += [f"GPU memory: {_bytes(self.gpu_bytes)} at most"]
        lines += [f"left out: {', '.join(self.left_out)}"] * bool(self.left_out)
        lines += [f"not redirected: {', '.join(self.unredirected)}"] * bool(self.unredirected)
        lines += [*self.notes, *(f"WARNING: {warning}" for warning in self.warnings)]
        lines += [f"PROBLEM: {problem}" for problem in self.problems] or ["no problem was found"]
        return printable_lines("\n".join([f"rehearsal of {self.plan}", *map(WRAPPED.fill, lines)]))

    def _done(self) -> str:
        counts = [
            (self.events.count("step_end"), "step"),
            (self.events.count("log"), "log"),
            (self.events.count("validation_end"), "validation"),
            (self.events.count("save_point"), "save"),
        ]
        parts = [f"{number} {word}{'s' * (number != 1)}" for number, word in counts if number]
        return ", ".join([*parts, f"a resume ({self.resume})" if self.resume else "no resume, as nothing saves"])

    def _duration(self) -> str:
        each = self.prediction
        parts = [
            f"{_number(each.steps)} steps of {_time(each.step_seconds)}, the first {_time(each.first_step_seconds)}",
            *_several(each.validations, "validations", each.validation_seconds),
            *_several(each.saves, "saves", each.save_seconds),
        ]
        whole = "a time that is not known" if self.seconds is None else f"about {_time(self.seconds)}"
        return f"{whole}, roughly: {'; '.join(parts)}"

    def _size(self) -> str:
        if self.checkpoint_bytes is None:
            return "no checkpoints" if not self.redirected else f"to {self._places()}"
        most = "" if self.bytes is None else f", {_bytes(self.bytes)} at most"
        free = "" if self.free_bytes is None else f"; {_bytes(self.free_bytes)} are free"
        return f"checkpoints of {_bytes(self.checkpoint_bytes)}{most}{free}; to {self._places()}"

    def _places(self) -> str:
        return ", ".join(dict.fromkeys(str(path) for paths in self.redirected.values() for path in paths))


def _number(value: int | None) -> str:
    return "an unknown number of" if value is None else f"{value:,}"


def _several(number: int | None, what: str, seconds: float | None) -> list[str]:
    if number == 0:
        return []
    said = what.removesuffix("s") if number == 1 else what
    return [f"{_number(number)} {said}" + ("" if seconds is None else f" of {_time(seconds)}")]


def _time(seconds: float) -> str:
    for word, size in UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {word}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _bytes(size: int) -> str:
    value, units = float(size), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, _ = value / 1000, units.pop(0)
    return f"{value:.3g} {units[0]}"
