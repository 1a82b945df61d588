"""The rows of `result.log_history`: bounded, and small in a checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from ..system.plain_pickle import pack, unpack
from .means import added

LONGEST = 10_000  # rows: a few MB in memory, and about 9 bytes for each value in a checkpoint
Row = dict[str, float]


def add_row(run: Any, metrics: Mapping[str, float], *, by_the_clock: bool = False) -> None:
    """Add metrics to the rows of a run's result.

    Args:
        run: the run.
        metrics: by name.
        by_the_clock: whether they are timings of this process, which no checkpoint holds.
    """
    outcome, progress, length = run.report, run.progress, run.data.length
    if outcome.rows is None:
        outcome.rows = LogRows()
    epoch = progress.epoch + (min(1.0, progress.batch / length) if length else 0.0)
    outcome.rows.add(progress.steps, epoch, {} if by_the_clock else metrics)
    if by_the_clock:
        outcome.rows.paces[progress.steps] = dict(metrics)


class LogRows:
    """One row (`step`, `epoch` and metrics) for each optimizer step with logged or measured metrics.

    The newest 10,000 rows are kept. A checkpoint holds them as packed bytes.

    Attributes:
        rows: the oldest first.
        dropped: the number of dropped older rows.
        paces: the timings of a row, by step.
    """

    def __init__(self) -> None:
        self.rows: deque[Row] = deque()
        self.dropped = 0
        self.paces: dict[int, Row] = {}

    def add(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append({"step": step, "epoch": epoch})
        self.rows[-1].update(metrics)
        if len(self.rows) > LONGEST:
            self.paces.pop(int(self.rows.popleft()["step"]), None)
            self.dropped += 1

    def finish(self, run: Any) -> None:
        # At the end of a training that did not fail: reads what was not logged. A collective.
        run.means.totals = added(run.means.totals, run.means.sums())
        if self.dropped:
            run.note(f"log_history has {LONGEST:,} rows; {self.dropped:,} older rows were dropped: JsonlLog writes all")

    def as_results(self, run: Any) -> dict[str, Any]:
        totals = run.means.totals if run.settings.train else {}
        means = {f"train/{name}": value / weight for name, (value, weight) in totals.items() if weight}
        rows = [{**row, **self.paces.get(int(row["step"]), {}), **row} for row in self.rows]
        return {"log_history": rows, "means": means}

    def state_dict(self) -> dict[str, Any]:
        # Without timings, so that two equal runs save equal states.
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        values = [[float(row[name]) if name in row else None for name in names] for row in self.rows]
        return {"names": names, "values": pack(values), "dropped": self.dropped}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], previous: LogRows | None = None) -> Self:
        made = cls()
        made.dropped = state["dropped"]
        for values in unpack(state["values"]):
            row = {name: value for name, value in zip(state["names"], values, strict=True) if value is not None}
            made.rows.append(row | {"step": int(row["step"])})
        paces = {} if previous is None else previous.paces
        made.paces = {step: paces[step] for step in (int(row["step"]) for row in made.rows) if step in paces}
        return made
