"""Where a run is, as plain data: stored, never re-derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from time import monotonic
from typing import Any, Self


@dataclass(slots=True)
class Progress:
    """Counters of finished things; each is increased before the event is emitted.

    Attributes:
        epoch: finished epochs, hence also the index of the current one.
        batch: micro-batches consumed in the current epoch.
        earlier_batches: micro-batches consumed in the finished epochs.
        steps: optimizer steps that really happened.
        skipped_steps: windows whose step was dropped, by a plugin or by the engine.
        skipped_batches: micro-batches that were skipped.
        samples: samples trained on, by all ranks together.
        tokens: what the losses that are sums were sums over, by all ranks together; counted when a window ends.
        validations: finished validations.
        evaluated: batches done in the running or last validation, test or prediction; on several ranks, when it has
            ended, by all.
        earlier_seconds: training time of the runs that this one resumes.
        streams: batches of each of several training streams that this process has taken, by name.
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
        """Training time so far, resumed runs included, in seconds; on several ranks the main rank's, as last agreed."""
        return self.own_seconds if self._agreed is None else self._agreed

    @property
    def own_seconds(self) -> float:
        """The same, by the clock of this process."""
        return self.earlier_seconds + monotonic() - self._since

    def set_seconds(self, seconds: float) -> None:
        """Use the time of another clock, until it is set again."""
        self._agreed = seconds

    @property
    def batches(self) -> int:
        """Micro-batches consumed in all."""
        return self.earlier_batches + self.batch

    def epochs_done(self, batches: int | None) -> float | None:
        """Return how many epochs are done, if an epoch has so many batches; None if that is unknown."""
        return None if batches is None else self.epoch + min(1.0, self.batch / batches)

    def part_done(self, planned: int | None, *, skips: bool) -> float | None:
        """Return which part of the planned steps is done, at most 1; None if these are unknown.

        Args:
            planned: the steps of the whole run.
            skips: whether a skipped step counts: in a run whose length is given in epochs.
        """
        return None if planned is None else min(1.0, (self.steps + skips * self.skipped_steps) / planned)

    def end_epoch(self) -> None:
        """Count an epoch that has ended."""
        self.earlier_batches += self.batch
        self.epoch, self.batch = self.epoch + 1, 0

    def copy(self) -> Self:
        """Return a copy; its clock runs."""
        return replace(self, streams=dict(self.streams))

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, with the seconds until now; those of the streams where there are several."""
        names = [each.name for each in fields(self) if each.name[0] != "_" and each.name != "streams"]
        counters = {name: getattr(self, name) for name in names} | {"earlier_seconds": self.seconds}
        return counters | ({"streams": dict(self.streams)} if self.streams else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved counters.

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
    """What was skipped since the last optimizer step.

    Attributes:
        step: the optimizer steps before.
        count: how many batches and steps.
        by_engine: how many of them by the engine: in fp16, gradients that are infinite or not numbers.
    """

    step: int = 0
    count: int = 0
    by_engine: int = 0
