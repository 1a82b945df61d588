"""The position of a run, as plain counters that are stored in checkpoints, and facts about a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from time import monotonic
from typing import Any, Literal, NamedTuple, Self, get_args


@dataclass(slots=True)
class Progress:
    """Counters of a run. Each is increased before the corresponding event is emitted.

    Attributes:
        epoch: finished epochs, and therefore the index of the current epoch.
        batch: micro-batches consumed in the current epoch.
        earlier_batches: micro-batches consumed in the finished epochs.
        steps: optimizer steps, without skipped ones.
        skipped_steps: windows whose step was skipped by a plugin or by the engine.
        skipped_batches: skipped micro-batches.
        samples: training samples, summed over all ranks.
        tokens: the counts of losses that are sums, summed over all ranks; updated at the end of a window.
        validations: finished validations.
        evaluated: batches of the current or last validation, test or prediction. After its end, this is the sum over
            all ranks.
        earlier_seconds: training time of the runs that this run resumes.
        streams: batches that this process has taken of each training stream, by name.
    """

    epoch: int = 0
    batch: int = 0
    earlier_batches: int = 0
    steps: int = 0
    skipped_steps: int = 0
    skipped_batches: int = 0
    samples: int = 0
    tokens: int = 0
    validations: int = 0
    evaluated: int = 0
    earlier_seconds: float = 0.0
    streams: dict[str, int] = field(default_factory=dict)
    _since: float = field(default_factory=monotonic, repr=False, compare=False)
    _agreed: float | None = field(default=None, repr=False, compare=False)

    @property
    def seconds(self) -> float:
        """Training time in seconds, including resumed runs.

        With several ranks, this is the time of the main rank at the last agreement.
        """
        return self.own_seconds if self._agreed is None else self._agreed

    @property
    def own_seconds(self) -> float:
        """Training time in seconds by the clock of this process, including resumed runs."""
        return self.earlier_seconds + monotonic() - self._since

    def set_seconds(self, seconds: float) -> None:
        """Use the time of another clock from now on."""
        self._agreed = seconds

    @property
    def batches(self) -> int:
        """Micro-batches consumed in total."""
        return self.earlier_batches + self.batch

    def epochs_done(self, batches: int | None) -> float | None:
        """Return the number of epochs done, including the fraction of the current one.

        Args:
            batches: the batches of an epoch; if None, the result is None.
        """
        return None if batches is None else self.epoch + min(1.0, self.batch / batches)

    def part_done(self, planned: int | None, *, skips: bool) -> float | None:
        """Return the fraction of the planned steps that is done, at most 1.

        Args:
            planned: the steps of the whole run; if None, the result is None.
            skips: count skipped steps too, for a run whose length is given in epochs.
        """
        return None if planned is None else min(1.0, (self.steps + skips * self.skipped_steps) / planned)

    def end_epoch(self) -> None:
        """Count a finished epoch."""
        self.earlier_batches += self.batch
        self.epoch, self.batch = self.epoch + 1, 0

    def copy(self) -> Self:
        """Return a copy whose clock keeps running."""
        return replace(self, streams=dict(self.streams))

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, with the training time until now."""
        names = [counter.name for counter in fields(self) if counter.name[0] != "_" and counter.name != "streams"]
        counters = {name: getattr(self, name) for name in names} | {"earlier_seconds": self.seconds}
        return counters | ({"streams": dict(self.streams)} if self.streams else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved counters.

        Raises:
            ValueError: a counter is missing, unknown or negative.
        """
        streams, expected = dict(state.get("streams", {})), Progress().state_dict().keys()
        counters = {name: value for name, value in state.items() if name != "streams"}
        if counters.keys() != expected or any(value < 0 for value in (*counters.values(), *streams.values())):
            raise ValueError(f"Progress needs counters of at least 0 for {sorted(expected)}, got {state}.")
        for name, value in counters.items():
            setattr(self, name, value)
        self.streams = streams
        self._since, self._agreed = monotonic(), None


@dataclass(slots=True)
class Skips:
    """Batches and steps skipped since the last optimizer step.

    Attributes:
        step: the number of optimizer steps so far.
        count: the number of skipped batches and steps.
        by_engine: how many of them the engine skipped because fp16 gradients were not finite.
    """

    step: int = 0
    count: int = 0
    by_engine: int = 0


UNITS = ("samples", "steps", "tokens")


class Rates:
    """Throughput since the rates were last read."""

    def __init__(self) -> None:
        self._since: tuple[float, tuple[int, ...]] | None = None

    def start(self, progress: Progress, seconds: float) -> None:
        """Start a measurement.

        Args:
            progress: the counters of the run.
            seconds: the time of the clock that is also passed to `read`.
        """
        self._since = seconds, tuple(getattr(progress, unit) for unit in UNITS)

    def read(self, progress: Progress, seconds: float) -> dict[str, float]:
        """Return samples, steps and tokens per second, as `samples_per_second` and so on.

        The rates are over all ranks, since the last call that returned any. Tokens are included if losses have counts.
        The result is empty if no measurement was started, or if there were no samples or no time since.
        """
        if self._since is None:
            self.start(progress, seconds)
            return {}
        before, counts = self._since
        if seconds <= before or progress.samples == counts[0]:
            return {}
        rates = {
            f"{unit}_per_second": (getattr(progress, unit) - count) / (seconds - before)
            for unit, count in zip(UNITS, counts, strict=True)
            if unit != "tokens" or progress.tokens
        }
        self.start(progress, seconds)
        return rates


Position = Literal["seeked", "replayed", "unknown"]
POSITIONS: tuple[Position, ...] = get_args(Position)


class ResumeFacts(NamedTuple):
    """How exactly a run was resumed.

    Attributes:
        untracked: path and type of state that no checkpoint contains and that may influence the training.
        differences: sentences, one for each difference from the state at the time of the save.
        position: how the data loader reached its position: `seeked`, `replayed` (it read the epoch again) or `unknown`.
    """

    untracked: Mapping[str, str]
    differences: tuple[str, ...]
    position: Position

    @property
    def sentences(self) -> tuple[str, ...]:
        """The untracked state and the differences, as sentences."""
        return (*describe_untracked(self.untracked), *self.differences)


def describe_untracked(untracked: Mapping[str, str]) -> tuple[str, ...]:
    """Return lines such as `untracked: task.reader (_csv.reader)`."""
    return tuple(f"untracked: {path} ({kind})" for path, kind in untracked.items())


def worst(first: Position, second: Position) -> Position:
    """Return the less certain of two positions."""
    return max(first, second, key=POSITIONS.index)


def verified(steps: int) -> str:
    return f"verified: {steps:,} repeated step{' is' if steps == 1 else 's are'} bitwise identical"
